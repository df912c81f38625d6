"""Error, size and speed of an encoder as ONNX, in float32, float16 and int8, beside PyTorch.

    python benchmarks/onnx_export.py

The weights are those of an untrained recipe and the images are noise: that is enough for speed, and shows how rounding
grows through the depth of a network, but features of trained weights on photos may be shifted more or less. Times are
for one image, the best of several rounds in which all take turns.
"""

import argparse
import tempfile
from pathlib import Path
from typing import get_args

from capi.zoo.encoders import untrained
from capi.zoo.onnx import OnnxPrecision, compare_speed, write_onnx

COLUMNS = f"{'':14} {'MB':>7} {'ms':>8} {'PyTorch':>9}   {'cosine':>9} {'least':>9} {'largest':>9}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="vits16")
    parser.add_argument("--size", type=int, default=224, help="height and width of the image that is timed, in pixels")
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    encoder, precisions = untrained(arguments.recipe), get_args(OnnxPrecision)
    with tempfile.TemporaryDirectory() as folder:
        written = {name: write_onnx(encoder, Path(folder) / f"{name}.onnx", precision=name) for name in precisions}
        files = {name: export.path for name, export in written.items()}
        seconds = compare_speed(encoder, files, size=(arguments.size,) * 2, rounds=arguments.rounds)
    print(COLUMNS)
    print(f"{'PyTorch':14} {'':>7} {1000 * seconds['PyTorch']:8.1f}")
    for name, export in written.items():
        assert export.differences is not None
        difference, times = export.differences["feature_map"], seconds["PyTorch"] / seconds[name]
        print(
            f"{'ONNX ' + name:14} {export.size / 1e6:7.1f} {1000 * seconds[name]:8.1f} {times:7.2f} x   "
            f"{difference.cosine:9.6f} {difference.least_cosine:9.6f} {difference.relative:9.1e}"
        )


if __name__ == "__main__":
    main()
