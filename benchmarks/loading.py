"""Memory of loading a ViT-L/14 on a CPU, and the time of one image against its matrix products alone.

    python benchmarks/loading.py

Random weights are written in the released layout, as .pth and as .safetensors. A process of its own loads each file and
reads every weight once, so that what is mapped is counted; the peak of its resident memory above the start, by the
bytes of the weights, should be at most 1.2. Then one image of 224 px goes through the encoder, pooled vector included,
and through the same matrix products with nothing between them, in turns; the ratio should be at most 1.25.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import interleaved_best, peak_extra_bytes
from safetensors.torch import save_file
from torch import Tensor

from capi.models.encoder import Encoder
from capi.models.features import CapiEncoder
from capi.models.heads import LinearHead
from capi.models.predictor import CrossPredictor
from capi.zoo.released import load_released, to_released

Product = Callable[[], Tensor]
PROTOTYPES = 16384


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--prototypes", type=int, default=PROTOTYPES)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument(
        "--measure", type=Path, help="load this file and print the ratio; called by the benchmark itself"
    )
    arguments = parser.parse_args()
    if arguments.measure:
        print(memory_ratio(arguments.measure))
        return
    with tempfile.TemporaryDirectory() as folder:
        for path in write_files(arguments.width, arguments.depth, arguments.prototypes, Path(folder)):
            size = path.stat().st_size / 2**20
            print(f"loading {size:.0f} MiB of {path.suffix}: {measured(path):.2f} x the weights at most (asked: 1.2)")
        speed(load_released(path), arguments.size, arguments.rounds)


def write_files(width: int, depth: int, prototypes: int, folder: Path) -> list[Path]:
    """A model with random weights in the released layout, in both formats."""
    shape: dict[str, Any] = {"width": width, "heads": width // 64, "mlp_width": 4 * width}
    encoder = Encoder(**shape, depth=depth, patch_size=14, registers=16, positions="released")
    predictor = CrossPredictor(**shape, depth=max(depth // 2, 1), context_width=width, positions="released")
    model = CapiEncoder(
        encoder=encoder, predictor=predictor, head=LinearHead(width=width, outputs=prototypes)
    ).requires_grad_(False)
    state = to_released(model)
    torch.save(state, folder / "model.pth")
    save_file(state, folder / "model.safetensors")
    return [folder / "model.pth", folder / "model.safetensors"]


def measured(path: Path) -> float:
    """The ratio in a process that did nothing else."""
    command = [sys.executable, __file__, f"--measure={path}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - this file itself
    return float(done.stdout)


def memory_ratio(path: Path) -> float:
    """The most memory that loading took, by the bytes of the weights, each of which was read."""
    models: list[CapiEncoder] = []

    def load() -> None:
        models.append(load_released(path))
        # In pieces, so that nothing but the weights takes memory.
        assert all(bool(piece.isfinite().all()) for weight in models[0].parameters() for piece in weight.split(256))

    extra = peak_extra_bytes(load)
    return extra / sum(weight.numel() * weight.itemsize for weight in models[0].parameters())


def speed(model: CapiEncoder, size: int, rounds: int) -> None:
    images = torch.randn(1, 3, size, size)
    products = matrix_products(model, size)

    def only_products() -> None:
        for product in products:
            product()

    with torch.inference_mode():
        best = interleaved_best({"model": lambda: model(images), "products": only_products}, rounds)
    ratio = best["model"] / best["products"]
    print(
        f"one image of {size} px: {1000 * best['model']:.0f} ms, its matrix products alone "
        f"{1000 * best['products']:.0f} ms: {ratio:.2f} x (asked: 1.25), {torch.get_num_threads()} threads"
    )


def matrix_products(model: CapiEncoder, size: int) -> list[Product]:
    """Every product that an image needs, with the model's own weights, which must come from memory each time."""
    encoder, predictor = model.encoder, model.predictor
    assert isinstance(predictor, CrossPredictor)
    assert isinstance(encoder, Encoder)
    patches = (size // model.patch_size) ** 2
    tokens = patches + encoder.num_registers
    embedding = encoder.patch_embedding.weight.flatten(1)
    products = [_linear(patches, embedding)]
    for block in encoder.blocks:
        products += _block_products(block, tokens, tokens, encoder.head_width)
    return products + _block_products(predictor.blocks[0], patches, tokens, predictor.head_width)


def _block_products(block: torch.nn.Module, queries: int, keys: int, head_width: int) -> list[Product]:
    attention, mlp = block.get_submodule("attention"), block.get_submodule("mlp")

    def weight(module: torch.nn.Module, name: str) -> Tensor:
        return module.get_parameter(f"{name}.weight")

    heads = weight(attention, "query").shape[0] // head_width
    query, key = torch.randn(heads, queries, head_width), torch.randn(heads, keys, head_width)
    scores = torch.rand(heads, queries, keys)
    return [
        _linear(queries, weight(attention, "query")),
        _linear(keys, weight(attention, "key")),
        _linear(keys, weight(attention, "value")),
        lambda: torch.bmm(query, key.transpose(1, 2)),
        lambda: torch.bmm(scores, key),
        _linear(queries, weight(attention, "output")),
        _linear(queries, weight(mlp, "expand")),
        _linear(queries, weight(mlp, "contract")),
    ]


def _linear(rows: int, weight: Tensor) -> Product:
    inputs = torch.randn(rows, weight.shape[1])
    return lambda: F.linear(inputs, weight)


if __name__ == "__main__":
    main()
