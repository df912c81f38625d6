"""What a data set is like: mean and deviation of its channels, sizes, formats, and how many files are broken."""

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from capi.data.crops import centre_box
from capi.data.decoding import BrokenImageError
from capi.data.reader import Reader
from capi.errors import CapiError
from capi.types import Statistics

SAMPLE = 512
# A quick look: so many images, or as many as these seconds allow, but a few at least.
QUICK_SAMPLE, QUICK_SECONDS, _FEWEST = 64, 2.0, 8
THUMBNAIL = 64
# A constant channel would have a std of 0, and nothing can be divided by that. A step of 16 bits is 1.5e-5.
SMALLEST_DEVIATION = 1e-5
# Images are far from what they are normalized with where a mean is off by more than so many std, or a std by a factor.
_FAR_MEAN, _FAR_STD = 2.0, 4.0


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

    @property
    def statistics(self) -> Statistics:
        return Statistics(tuple(self.mean), tuple(self.std))


def evenly(total: int, count: int) -> list[int]:
    """So many of range(total), spread evenly, which is the same for everyone."""
    return sorted({int(number) for number in np.linspace(0, total - 1, min(total, count))})


def significant(values: Sequence[float], digits: int = 3) -> str:
    """Numbers with so many significant digits and without an exponent: 0.00207."""
    written = (np.format_float_positional(value, digits, unique=False, fractional=False, trim="-") for value in values)
    return ",".join(written)


def statistics_warning(measured: Statistics, given: Statistics) -> str | None:
    """One line where images with the measured statistics are far from what they are normalized with; else None."""
    far = any(
        abs(mean - centre) > _FAR_MEAN * scale or not 1 / _FAR_STD <= std / scale <= _FAR_STD
        for mean, std, centre, scale in zip(*measured, *given, strict=True)
    )
    if not far:
        return None
    return (
        f"the images have mean {significant(measured.mean)} and std {significant(measured.std)}, far from "
        f"data.mean={significant(given.mean)} and data.std={significant(given.std)}: use data.mean=auto data.std=auto"
    )


def quick_statistics(reader: Reader) -> Statistics | None:
    """Mean and std of a few images, always the same ones; None where none of them can be read."""
    try:
        summary = summarize(reader, QUICK_SAMPLE, QUICK_SECONDS)
    except CapiError:
        return None
    return summary.statistics


def summarize(reader: Reader, count: int = SAMPLE, seconds: float = math.inf) -> DataSummary:
    """Look at images spread evenly over the source, for so long. Mean and std are in units of full scale."""
    source, shape = reader.source, (THUMBNAIL, THUMBNAIL)
    chosen, end = evenly(len(source), count), time.monotonic() + seconds
    if seconds < math.inf:
        # So that those which are seen in time are spread over the source too.
        chosen = [chosen[place] for place in np.random.default_rng(0).permutation(len(chosen))]
    summary = DataSummary(total=len(source))
    sizes: list[tuple[int, int]] = []
    moments: list[np.ndarray] = []
    for index in chosen:
        if summary.looked_at >= _FEWEST and time.monotonic() > end:
            break
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
    endings = Counter(source.name(index).rpartition(".")[2].lower() for index in chosen)
    summary.endings = dict(endings.most_common())
    return summary
