"""Small tars and tables that the tests of this folder make for themselves."""

import gc
import io
import tarfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from tests.data.pictures import encoded


def plain(number: int, side: int = 12) -> bytes:
    """An image all of whose pixels are this number."""
    return encoded(np.full((side, side, 3), number, dtype=np.uint8), "PNG")


def write_tar(path: Path, members: dict[str, bytes], format: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format) as tar:
        for name, content in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
    return path


def write_shards(folder: Path, counts: list[int]) -> list[Path]:
    """Tars of so many plain images, whose pixels are their number through all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    paths, number = [], 0
    for shard, count in enumerate(counts):
        members: dict[str, bytes] = {}
        for _ in range(count):
            members |= {f"{number:04d}.png": plain(number), f"{number:04d}.cls": b"0"}
            number += 1
        paths.append(write_tar(folder / f"{shard:03d}.tar", members))
    return paths


def with_webdataset(urls: str | list[str]) -> list[dict[str, Any]]:
    """The samples that webdataset finds; it leaves its files to be closed whenever."""
    import webdataset

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        samples = list(webdataset.WebDataset(urls, shardshuffle=False))
        gc.collect()
    return samples
