"""Drawing the masks of a batch at once against drawing them image by image.

python benchmarks/masking.py
"""

import argparse

import torch
from measure import interleaved_best

from capi.method.masking import MaskIndex, MaskSampler, PatchGrid
from capi.runtime.randomness import sample_keys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    grid, index = PatchGrid(14, 14), torch.arange(arguments.images)
    masks = MaskSampler(kind="inverse_block", ratio=0.65, roll=True, predict=7)

    def at_once() -> MaskIndex:
        return masks(grid, sample_keys(0, 0, index))

    def one_by_one() -> MaskIndex:
        drawn = [masks(grid, sample_keys(0, 0, index[number : number + 1])) for number in range(len(index))]
        return MaskIndex(torch.cat([each.visible for each in drawn]), torch.cat([each.predict for each in drawn]))

    assert all(torch.equal(ours, theirs) for ours, theirs in zip(at_once(), one_by_one(), strict=True))
    seconds = interleaved_best({"at once": at_once, "one by one": one_by_one}, arguments.rounds)
    for name, value in seconds.items():
        print(f"{name:10} {value * 1e3:8.2f} ms for {arguments.images} images of 14 x 14 patches")
    print(f"speed {seconds['one by one'] / seconds['at once']:.0f} x")


if __name__ == "__main__":
    main()
