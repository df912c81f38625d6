"""What a data set is like: mean and deviation of its channels, sizes, formats, and how many files are broken."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from capi.data.crops import centre_box
from capi.data.decoding import BrokenImageError
from capi.data.reader import Reader
from capi.errors import CapiError

SAMPLE = 512
THUMBNAIL = 64
# A constant channel would have a deviation of 0, and nothing can be divided by that.
SMALLEST_DEVIATION = 1e-3


@dataclass
class DataSummary:
    """What a sample of the images shows."""

    total: int
    looked_at: int = 0
    broken: dict[str, str] = field(default_factory=dict)
    smallest: tuple[int, int] = (0, 0)
    largest: tuple[int, int] = (0, 0)
    endings: dict[str, int] = field(default_factory=dict)
    mean: list[float] = field(default_factory=list)
    std: list[float] = field(default_factory=list)


def evenly(total: int, count: int) -> list[int]:
    """So many of range(total), spread evenly, which is the same for everyone."""
    return sorted({int(number) for number in np.linspace(0, total - 1, min(total, count))})


def summarize(reader: Reader, count: int = SAMPLE) -> DataSummary:
    """Look at images spread evenly over the source. Mean and deviation are in units of full scale."""
    source, shape = reader.source, (THUMBNAIL, THUMBNAIL)
    summary = DataSummary(total=len(source))
    sizes: list[tuple[int, int]] = []
    moments: list[np.ndarray] = []
    for index in evenly(len(source), count):
        summary.looked_at += 1
        try:
            size = reader.size(index)
            pixels = reader.crop(index, centre_box(size, shape, 1.0), shape).astype(np.float64) / 255
        except BrokenImageError as error:
            summary.broken[source.name(index)] = str(error)
            continue
        sizes.append(size)
        moments.append(np.stack([pixels.mean((1, 2)), (pixels**2).mean((1, 2))]))
    if not moments:
        name, reason = next(iter(summary.broken.items()))
        raise CapiError(f"none of {summary.looked_at} images could be read; {name}: {reason}")
    mean, square = np.mean(moments, axis=0)
    summary.mean = mean.tolist()
    summary.std = np.sqrt(np.maximum(square - mean**2, SMALLEST_DEVIATION**2)).tolist()
    summary.smallest = min(sizes, key=lambda size: size[0] * size[1])
    summary.largest = max(sizes, key=lambda size: size[0] * size[1])
    endings = Counter(source.name(index).rpartition(".")[2].lower() for index in evenly(len(source), count))
    summary.endings = dict(endings.most_common())
    return summary
