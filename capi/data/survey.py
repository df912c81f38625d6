"""Reading every image once and saying what they are like: `capi data check`.

Counts, formats, sizes, channel statistics, images that cannot be read with the reason, copies, and how fast it went.
Copies are the same bytes. Images look alike when at most 4 of 64 bits differ that say where a tiny thumbnail grows
darker from left to right: that finds most images that were only saved or scaled again, and now and then two that merely
resemble each other.
"""

import hashlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console
from torch.utils.data import Dataset

from capi.data.crops import center_box
from capi.data.decoding import (
    BrokenImageError,
    ChannelsError,
    Decoded,
    Decoder,
    PillowPicture,
    error_reason,
    resize,
)
from capi.data.loader import made_ahead
from capi.data.locations import DataLocation, open_images
from capi.data.reader import ImageReader, read_bytes
from capi.data.sources import ImageSource, SizedSource, masks_warning
from capi.errors import CapiError, counted
from capi.runtime.devices import choose_workers
from capi.runtime.progress import TaskProgress, default_console
from capi.runtime.summary import Summary
from capi.types import IMAGENET, Statistics

PERCENTILES = (0, 5, 25, 50, 75, 95, 100)
# Images that a worker looks at before it reports, which are neighbours in the source.
_CHUNK = 32
# Bits of 64 in which images may differ that look alike, and the bits of a part: one of five parts then agrees.
_DIFFERING, _PART_BITS = 4, 13
# Images that an image is compared with in each part.
_COMPARED = 64
# Files that a suggestion compares.
_MOST_COMPARED = 100_000
# Groups of copies that are named one by one.
_NAMED = 20
# What is known of an image as whole numbers.
_NUMBERS = 8
# Masks: the share of pixels that equal their neighbor, the most values, the pixels that are looked at, and the share of
# all images that look so.
_IN_AREAS, _FEW_VALUES, _PIXELS_SEEN, _MASKS_SHARE = 0.8, 64, 2**16, 0.9


class _Seen(NamedTuple):
    """What was seen of some images: numbers of those that could be read, a row each, and reasons for the others."""

    asked: int
    numbers: npt.NDArray[np.int64]
    """Number of the image, bytes, width, height, both hashes, whether only the first of several frames is read, and
    whether its values are few and lie in areas."""
    moments: npt.NDArray[np.float64]
    """For each image the mean of each channel, of its square, its lowest and its highest value."""
    formats: Counter[str]
    broken: dict[str, str]
    others: dict[int, list[str]]
    """Names of those with other channels, by these."""
    failure: str | None = None


@dataclass(repr=False)
class Survey(Summary):
    """What all images are like."""

    total: int
    looked_at: int = 0
    readable: int = 0
    broken: dict[str, str] = field(default_factory=dict)
    channels: int = 3
    """That were read."""
    other_channels: dict[int, list[str]] = field(default_factory=dict)
    """Names of images with other channels than those that were read, by these; they are broken too."""
    formats: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    animated: int = 0
    """Images with several frames (GIF, WebP, APNG, MPO), of which the first is read."""
    widths: dict[str, float] = field(default_factory=dict)
    """By percentile."""
    heights: dict[str, float] = field(default_factory=dict)
    mean: list[float] = field(default_factory=list)
    """Of each channel, in units of full scale, as data.mean takes it."""
    std: list[float] = field(default_factory=list)
    lowest: list[float] = field(default_factory=list)
    """Of each channel, as the mean; of pixels as they are decoded, a JPEG at the fraction that a thumbnail needs."""
    highest: list[float] = field(default_factory=list)
    copies: int = 0
    """Images that could go without losing one: the same bytes are there already."""
    copied: list[list[str]] = field(default_factory=list)
    """Names of copies, the first groups of them."""
    alike: int = 0
    """Images that look like another one, copies not counted."""
    looking_alike: list[list[str]] = field(default_factory=list)
    masks: str | None = None
    """A warning where some files look like masks of the others."""
    seconds: float = 0.0
    workers: int = 0
    fingerprint: str = ""

    @property
    def images_per_second(self) -> float:
        return self.looked_at / max(self.seconds, 1e-9)

    def summary(self) -> tuple[str, dict[str, str]]:
        some = "" if self.looked_at == self.total else f", of which {self.looked_at} were looked at"
        broken = _examples([f"{name} ({why})" for name, why in self.broken.items()])
        rows = {
            "images": f"{self.total}{some}; {self.readable} can be read, {len(self.broken)} cannot",
            "broken": f"{len(self.broken)}{broken}",
        }
        if warning := channels_warning(self.channels, self.readable, self.other_channels):
            rows["others"] = warning
        if self.masks:
            rows["masks"] = self.masks
        if self.animated:
            rows["frames"] = f"{self.animated} with several frames, of which the first is read"
        if self.readable:
            lowest, highest, mean, std = map(significant, (self.lowest, self.highest, self.mean, self.std))
            copies = _examples([" = ".join(group[:2]) for group in self.copied])
            alike = _examples([" ~ ".join(group[:2]) for group in self.looking_alike])
            rows |= {
                "formats": ", ".join(f"{kind} {count}" for kind, count in self.formats.items()),
                "bytes": f"{self.bytes / 1e6:.1f} MB, {self.bytes / self.readable / 1e3:.1f} kB an image",
                "widths": _percentiles_text(self.widths),
                "heights": _percentiles_text(self.heights),
                "channels": f"{len(self.mean)}, {lowest} to {highest} of full scale"
                + ("" if len(self.mean) == 3 else f": set model.channels={len(self.mean)}"),
                "mean, std": f"data.mean=[{mean}] data.std=[{std}]",
                **self._range,
                "copies": f"{self.copies} with the same bytes as another{copies}",
                "look alike": f"{self.alike} more{alike}",
            }
        rate = f"{self.images_per_second:.0f} images/s with {counted(self.workers, 'process')} ({self.seconds:.1f} s)"
        return "What the images are like", rows | {"speed": rate}

    @property
    def _range(self) -> dict[str, str]:
        """A warning where the images are far from the statistics of the recipes, which are those of ImageNet."""
        if len(self.mean) != len(IMAGENET.mean):
            highest = max(self.highest)
            low = f", and values end at {significant([highest])} of full scale" if highest < _LOW_RANGE else ""
            return {"range": f"the recipes' mean and std are of 3 channels{low}: use data.mean=auto data.std=auto"}
        warning = statistics_warning(Statistics(tuple(self.mean), tuple(self.std)), IMAGENET)
        return {"range": f"{warning} (the defaults are ImageNet's)"} if warning else {}

    def as_record(self) -> dict[str, Any]:
        """All of it, for a JSON file."""
        return asdict(self) | {"images_per_second": self.images_per_second}


def _examples(names: list[str]) -> str:
    return f": {'; '.join(names[:3])}{', ...' if len(names) > 3 else ''}" if names else ""


def _percentiles_text(percentiles: dict[str, float]) -> str:
    smallest, low, median, high, largest = (round(percentiles[share]) for share in ("0", "5", "50", "95", "100"))
    return f"{smallest} to {largest} pixels, median {median}, 90 % within {low} to {high}"


class _Chunks(Dataset[_Seen]):
    """Item i is what is seen of the i-th run of images."""

    def __init__(self, source: ImageSource, decoder: Decoder, chosen: list[int] | range) -> None:
        self.source, self.decoder, self.chosen = source, decoder, chosen

    def __len__(self) -> int:
        return len(range(0, len(self.chosen), _CHUNK))

    def __getitem__(self, item: int) -> _Seen:
        rows, moments, formats, broken = [], [], Counter[str](), {}
        others = dict[int, list[str]]()
        some = self.chosen[item * _CHUNK : (item + 1) * _CHUNK]
        for index in some:
            try:
                row, moment, kind = _look(self.source, self.decoder, index)
            except ChannelsError as error:
                broken[self.source.name(index)] = error.what
                others.setdefault(error.channels, []).append(self.source.name(index))
            except BrokenImageError as error:
                broken[self.source.name(index)] = str(error)
            except OSError as error:
                broken[self.source.name(index)] = error_reason(error)
            except CapiError as error:
                # As text, since an exception that crosses processes arrives as a traceback.
                nothing = np.empty((0, _NUMBERS), np.int64)
                return _Seen(len(some), nothing, np.empty(0), formats, broken, others, str(error))
            else:
                rows.append((index, *row))
                moments.append(moment)
                formats[kind] += 1
        numbers = np.array(rows, dtype=np.int64).reshape(-1, _NUMBERS)
        shape = (-1, 4, self.decoder.channels)
        return _Seen(len(some), numbers, np.array(moments, dtype=np.float64).reshape(shape), formats, broken, others)


def check_data(
    data: DataLocation,
    *,
    limit: int | None = None,
    channels: int | None = None,
    workers: int | None = None,
    console: Console | None = None,
) -> Survey:
    """Read all images once, or `limit` of them spread evenly, and say what they are like and which are broken.

    `channels` are by default those that the images have.
    """
    console = console or default_console()
    source = open_images(data, console)
    channels = usual_channels(source) if channels is None else channels
    processes = choose_workers(workers, None)
    return survey(source, Decoder(channels, reduced=True), workers=processes, limit=limit, console=console)


def usual_channels(source: ImageSource) -> int:
    """What most of some images have."""
    return most_common_channels(names_by_channels(source))


def most_common_channels(names: Mapping[int, Sequence[str]]) -> int:
    """The channels under which most names stand; 3 without any."""
    return max(names, key=lambda channels: len(names[channels]), default=3)


def names_by_channels(source: ImageSource) -> dict[int, list[str]]:
    """Names of some images by their channels; gray ones count as 3, since they can be read so."""
    reader, names = ImageReader(source, Decoder()), dict[int, list[str]]()
    for index in evenly(len(source), QUICK_SAMPLE):
        channels = 3
        try:
            reader.size(index)
        except ChannelsError as error:
            channels = error.channels
        except BrokenImageError:
            continue
        names.setdefault(channels, []).append(source.name(index))
    return names


def channels_warning(channels: int, readable: int, others: Mapping[int, Sequence[str]]) -> str | None:
    """One line where some images have other channels than those that are read; else None."""
    count = sum(map(len, others.values()))
    if not count:
        return None
    most = most_common_channels(others)
    has, them = ("has", "it") if count == 1 else ("have", "them")
    example, seen = f"{others[most][0]}: {most}", f"{readable + count:,} images that were looked at"
    text = f"{count:,} of {seen} {has} other than {channels} channels ({example})"
    if count > readable:
        return f"{text}: use model.channels={most} (capi data check: --channels {most})"
    return f"{text}: move {them} elsewhere, since a run with model.channels={channels} cannot read {them}"


def survey(
    source: ImageSource,
    decoder: Decoder,
    *,
    workers: int = 0,
    limit: int | None = None,
    console: Console | None = None,
) -> Survey:
    """Read all images once, or `limit` of them spread evenly, with so many processes beside this one."""
    chosen = range(len(source)) if limit is None else evenly(len(source), limit)
    chunks = _Chunks(source, decoder, chosen)
    result = Survey(len(source), workers=workers, fingerprint=source.fingerprint, masks=masks_warning(source))
    result.channels = decoder.channels
    begun, seen = time.perf_counter(), []
    try:
        with TaskProgress("looking at images", len(chosen), console) as progress:
            for some in _watched(chunks, workers, progress):
                seen.append(some)
    except KeyboardInterrupt:
        raise SurveyStopped(_summed_up(result, source, seen, time.perf_counter() - begun)) from None
    return _summed_up(result, source, seen, time.perf_counter() - begun)


class SurveyStopped(KeyboardInterrupt):
    """Ctrl-C while images are looked at; `survey` is what was seen until then."""

    def __init__(self, survey: Survey) -> None:
        super().__init__()
        self.survey = survey


def _summed_up(result: Survey, source: ImageSource, seen: list[_Seen], seconds: float) -> Survey:
    result.looked_at, result.seconds = sum(some.asked for some in seen), seconds
    for some in seen:
        result.broken |= some.broken
        for channels, names in some.others.items():
            result.other_channels.setdefault(channels, []).extend(names)
    result.readable = sum(len(some.numbers) for some in seen)
    if result.readable:
        _sum_up(result, source, np.concatenate([some.numbers for some in seen]), seen)
    return result


def _watched(chunks: _Chunks, workers: int, progress: TaskProgress) -> Iterator[_Seen]:
    for some in made_ahead(chunks, range(len(chunks)), workers=min(workers, len(chunks))):
        if some.failure is not None:
            raise CapiError(some.failure)
        progress.advance(some.asked)
        yield some


def _sum_up(result: Survey, source: ImageSource, numbers: npt.NDArray[np.int64], seen: list[_Seen]) -> None:
    formats = sum((some.formats for some in seen), Counter[str]())
    result.formats = dict(formats.most_common())
    index, size, width, height, content, look, animated, areas = numbers.T
    result.bytes, result.animated = int(size.sum()), int(animated.sum())
    result.widths, result.heights = _percentiles(width), _percentiles(height)
    moments = np.concatenate([some.moments for some in seen])
    result.masks = result.masks or areas_warning(areas.astype(bool).tolist())
    mean, square = moments[:, :2].mean(axis=0)
    result.lowest, result.highest = moments[:, 2].min(axis=0).tolist(), moments[:, 3].max(axis=0).tolist()
    result.mean = mean.tolist()
    result.std = np.sqrt(np.maximum(square - mean**2, SMALLEST_STD**2)).tolist()
    result.copies, groups = _groups(content)
    result.copied = [[source.name(int(index[row])) for row in rows] for rows in groups]
    first = np.sort(np.unique(content, return_index=True)[1])
    result.alike, groups = _groups(_joined(look[first]))
    result.looking_alike = [[source.name(int(index[first[row]])) for row in rows] for rows in groups]


def count_copies(source: ImageSource) -> int:
    """Images with the bytes of another one; only those of equal size are read. 0 of many, or of unknown sizes."""
    if not isinstance(source, SizedSource) or len(source) > _MOST_COMPARED:
        return 0
    sizes = source.sizes().tolist()
    counts = Counter(sizes)
    twins = [number for number, size in enumerate(sizes) if counts[size] > 1]
    return len(twins) - len({hashlib.blake2b(read_bytes(source, number)).digest() for number in twins})


def _look(source: ImageSource, decoder: Decoder, index: int) -> tuple[tuple[int, ...], npt.NDArray[np.float64], str]:
    """Bytes, width, height, both hashes and whether it is animated; the moments of an image; its format."""
    content = read_bytes(source, index)
    picture = decoder.open(content)
    shape = picture.shape
    box = center_box((shape.height, shape.width), (THUMBNAIL, THUMBNAIL), 1.0)
    decoded, inside = picture.part(box, (THUMBNAIL, THUMBNAIL))
    channels, crop_first = decoder.channels, decoder.crop_first
    pixels = resize(decoded, inside, (THUMBNAIL, THUMBNAIL), channels, quick=decoder.reduced, crop_first=crop_first)
    pixels = pixels.astype(np.float64) / 255
    kind, animated = "TIFF", False
    if isinstance(picture, PillowPicture):
        kind = str(picture.image.format)
        animated = kind != "TIFF" and getattr(picture.image, "is_animated", False)
    digest = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)
    # The extremes of what is stored: a thumbnail's lie elsewhere, since its filter averages and overshoots.
    moments = np.stack([pixels.mean((1, 2)), (pixels**2).mean((1, 2)), *extremes(decoded, decoder.channels)])
    row = (len(content), shape.width, shape.height, digest, _look_hash(pixels.mean(0)), animated, has_areas(decoded))
    return row, moments, kind


def has_areas(decoded: Decoded) -> bool:
    """Whether an image is made of areas of few values, as masks are: most pixels equal their neighbor."""
    values = np.asarray(decoded)
    rows = values[:: math.ceil(values.shape[0] * values.shape[1] / _PIXELS_SEEN)]
    rows = rows.reshape(*rows.shape[:2], -1)
    if rows.shape[1] < 2 or (rows[:, 1:] == rows[:, :-1]).all(-1).mean() < _IN_AREAS:
        return False
    return all(len(np.unique(rows[..., channel])) <= _FEW_VALUES for channel in range(rows.shape[2]))


def areas_warning(areas: Sequence[bool]) -> str | None:
    """One line where nearly all images look like masks; else None."""
    if not areas or sum(areas) < _MASKS_SHARE * len(areas):
        return None
    return (
        f"{sum(areas):,} of {len(areas):,} images look like masks, areas of few values (as drawings may): give the "
        "photos that they belong to"
    )


def extremes(decoded: Decoded, channels: int) -> npt.NDArray[np.float64]:
    """The lowest and the highest value of each channel, in units of full scale."""
    if isinstance(decoded, np.ndarray):
        values = decoded.reshape(*decoded.shape[:2], -1)
        ends = np.stack([values.min((0, 1)), values.max((0, 1))])
    else:
        ends = np.reshape(np.array(decoded.getextrema()), (-1, 2)).T
    if ends.shape[1] != channels:
        # Gray values stand for all channels; of colors that are averaged, the extremes of any.
        ends = np.repeat(np.stack([ends[:1].min(1), ends[1:].max(1)]), channels, axis=1)
    return ends.astype(np.float64) / 255


def _look_hash(gray: npt.NDArray[np.float64]) -> int:
    """64 bits: whether each of 8 x 8 parts is brighter than the one to its right, around the edge."""
    side = THUMBNAIL // 8
    parts = gray.reshape(8, side, 8, side).mean((1, 3))
    bits = np.packbits(parts > np.roll(parts, -1, axis=1))
    return int.from_bytes(bits.tobytes(), "little", signed=True)


def _groups(keys: npt.NDArray[np.int64]) -> tuple[int, list[list[int]]]:
    """How many come again, and the rows of the first groups that do, in order."""
    order = np.argsort(keys, kind="stable")
    starts = np.concatenate([[0], np.flatnonzero(np.diff(keys[order])) + 1, [len(keys)]])
    lengths = np.diff(starts)
    several = np.flatnonzero(lengths > 1)
    first = several[np.argsort(order[starts[several]])][:_NAMED]
    return int((lengths - 1)[several].sum()), [order[starts[group] : starts[group + 1]].tolist() for group in first]


def _joined(looks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """A number for each image that those which look alike share.

    Of five parts of the bits, one must agree where at most four bits differ: so only neighbours in the order of a part
    are compared, and of many with the same part each with the next ones.
    """
    bits = looks.view(np.uint64)
    copies = [
        pair
        for shift in range(0, 64, _PART_BITS)
        for pair in _close_pairs(bits, (bits >> np.uint64(shift)) & np.uint64(2**_PART_BITS - 1))
    ]
    groups = np.arange(len(looks))
    first, second = (np.concatenate([pair[side] for pair in copies] or [np.empty(0, np.int64)]) for side in (0, 1))
    while True:
        before = groups.copy()
        np.minimum.at(groups, first, groups[second])
        np.minimum.at(groups, second, groups[first])
        if (before == groups).all():
            return groups


def _close_pairs(
    bits: npt.NDArray[np.uint64], part: npt.NDArray[np.uint64]
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    order = np.argsort(part, kind="stable")
    for apart in range(1, min(_COMPARED, len(bits))):
        rows = np.flatnonzero(part[order[apart:]] == part[order[:-apart]])
        if not len(rows):
            return
        first, other = order[rows], order[rows + apart]
        differing = np.unpackbits((bits[first] ^ bits[other]).view(np.uint8).reshape(-1, 8), axis=1).sum(1)
        close = differing <= _DIFFERING
        yield first[close], other[close]


def _percentiles(values: npt.NDArray[np.int64]) -> dict[str, float]:
    values_at = np.percentile(values, PERCENTILES)
    return {str(share): float(value) for share, value in zip(PERCENTILES, values_at, strict=True)}


SAMPLE = 512
# A quick look: so many images, or as many as these seconds allow, but a few at least.
QUICK_SAMPLE, QUICK_SECONDS, _FEWEST = 64, 2.0, 8
THUMBNAIL = 64
# A constant channel would have a std of 0, and nothing can be divided by that. A step of 16 bits is 1.5e-5.
SMALLEST_STD = 1e-5
# Images are far from what they are normalized with where a mean is off by more than so many std, or a std by a factor.
_FAR_MEAN, _FAR_STD = 2.0, 4.0
# Images whose highest value is below this share of full scale use little of it, as cameras of 12 bits in 16.
_LOW_RANGE = 0.25


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
    """Numbers of range(total), spread evenly, the same for everyone."""
    return sorted({int(number) for number in np.linspace(0, total - 1, min(total, count))})


def significant(values: Sequence[float], digits: int = 3) -> str:
    """Numbers with so many significant digits and without an exponent: 0.00207."""
    written = (np.format_float_positional(value, digits, unique=False, fractional=False, trim="-") for value in values)
    return ",".join(written)


def statistics_warning(measured: Statistics, given: Statistics) -> str | None:
    """One line where images with the measured statistics are far from what they are normalized with; else None."""
    far = any(
        abs(mean - center) > _FAR_MEAN * scale or not 1 / _FAR_STD <= std / scale <= _FAR_STD
        for mean, std, center, scale in zip(*measured, *given, strict=True)
    )
    if not far:
        return None
    return (
        f"the images have mean {significant(measured.mean)} and std {significant(measured.std)}, far from "
        f"data.mean={significant(given.mean)} and data.std={significant(given.std)}: use data.mean=auto data.std=auto"
    )


def quick_statistics(reader: ImageReader) -> Statistics | None:
    """Mean and std of a few images, always the same ones; None where none of them can be read."""
    try:
        summary = summarize(reader, QUICK_SAMPLE, QUICK_SECONDS)
    except CapiError:
        return None
    return summary.statistics


def summarize(reader: ImageReader, count: int = SAMPLE, seconds: float = math.inf) -> DataSummary:
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
            pixels = reader.crop(index, center_box(size, shape, 1.0), shape).astype(np.float64) / 255
        except BrokenImageError as error:
            summary.broken[source.name(index)] = str(error)
            continue
        sizes.append(size)
        moments.append(np.stack([pixels.mean((1, 2)), (pixels**2).mean((1, 2))]))
    if not moments:
        name, reason = next(iter(summary.broken.items()))
        raise CapiError(f"{counted(summary.looked_at, 'image')} tried, and none could be read; {name}: {reason}")
    mean, square = np.mean(moments, axis=0)
    summary.mean = mean.tolist()
    summary.std = np.sqrt(np.maximum(square - mean**2, SMALLEST_STD**2)).tolist()
    summary.smallest = min(sizes, key=lambda size: size[0] * size[1])
    summary.largest = max(sizes, key=lambda size: size[0] * size[1])
    endings = Counter(source.name(index).rpartition(".")[2].lower() for index in chosen)
    summary.endings = dict(endings.most_common())
    return summary
