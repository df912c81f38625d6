"""The joint PCA of a thousand feature maps, streamed, against the plain way: all patches at once.

    python benchmarks/pca.py

The plain version concatenates all patches and takes torch's singular value decomposition of a random projection
(`torch.pca_lowrank`), the usual quick way in notebooks; it holds all patches in memory and is not exact.
"""

import argparse
from collections.abc import Sequence
from functools import partial

import torch
from measure import Work, interleaved_best, peak_extra_bytes
from torch import Tensor

from capi.report.pictures.pca import Components, PatchSummary
from capi.runtime.devices import keep_freed_memory


def feature_maps(images: int, patches: int, width: int) -> list[Tensor]:
    """Patches with a spectrum that falls, in few distinct copies: only the arithmetic counts."""
    generator = torch.Generator().manual_seed(0)
    scales = 1 / torch.arange(1, width + 1)
    kinds = [torch.randn(patches, width, generator=generator) * scales for _ in range(8)]
    return [kinds[number % len(kinds)] for number in range(images)]


def streamed(maps: Sequence[Tensor], batch: int = 32) -> Components:
    summary = PatchSummary()
    for start in range(0, len(maps), batch):
        summary.add(torch.cat(list(maps[start : start + batch])))
    return summary.components(3)


def plain(maps: Sequence[Tensor]) -> Tensor:
    torch.manual_seed(0)
    together = torch.cat(list(maps))
    _, _, directions = torch.pca_lowrank(together, q=8)
    return directions[:, :3]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (("images", 1000), ("patches", 576), ("width", 384), ("rounds", 2)):
        parser.add_argument(f"--{option}", type=int, default=default)
    arguments = parser.parse_args(words)
    keep_freed_memory()
    maps = feature_maps(arguments.images, arguments.patches, arguments.width)
    works: dict[str, Work] = {"streamed": partial(streamed, maps), "plain": partial(plain, maps)}
    agreement = (streamed(maps).directions.float() * plain(maps).T).sum(1).abs().min()
    memory = {name: peak_extra_bytes(work) for name, work in works.items()}
    seconds = interleaved_best(works, arguments.rounds)
    print(f"{arguments.images} images of {arguments.patches} patches of width {arguments.width}, 3 components")
    print(f"  directions agree to a cosine of at least {agreement:.4f}")
    for name in works:
        print(f"  {name:9} {seconds[name]:6.2f} s   {memory[name] / 2**20:6.0f} MiB more memory")


if __name__ == "__main__":
    main()
