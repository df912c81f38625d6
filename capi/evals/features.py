"""Features of many images by a frozen encoder: computed in batches, kept in memory or mapped to a file.

Vectors of an image are the mean of its patches, the encoder's pooled vector, or both in a row. Patches keep the order
of the feature map. What does not fit into `memory_bytes` goes to a file that the system pages in and out.
"""

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import Dataset

from capi.data.crops import Frame, normalize
from capi.data.sources import ImageSource
from capi.errors import CapiError, counted
from capi.evals.images import ReadBatch, StillBatches, read_in_order
from capi.evals.tasks import MaskSource
from capi.runtime.devices import float32_products
from capi.runtime.protocol import PAPER_SIZE, VectorKind
from capi.types import Features, Float, Int, VisionEncoder, statistics_of

# What is being done, how much of it is done, and how much there is.
OnProgress = Callable[[str, int, int], None]
# Pixels that are kept from one evaluation of a run to the next.
PIXEL_CACHE_BYTES = 2**30


def silent(_what: str, _done: int, _total: int) -> None:
    """The progress that nobody looks at."""


@dataclass(frozen=True)
class Encoding:
    """How an encoder is run over images. Only `size` matters to a score; the rest may change its last digits."""

    size: tuple[int, int] = PAPER_SIZE
    batch_size: int = 32
    workers: int = 0
    device: torch.device | str = "cpu"
    precision: torch.dtype = torch.float32
    folder: Path | None = None
    """Where features are mapped that do not fit into memory; without it they are always in memory."""
    memory_bytes: int = 4 * 2**30
    progress: OnProgress = silent
    image_cache: dict[object, tuple[StillBatches, list[ReadBatch]]] | None = None
    """Images that were read stay here, where the same ones are to be evaluated again."""
    team: "Team | None" = None
    """Other processes that encode a part of the batches."""

    def fitted(self, patch_size: int) -> "Encoding":
        """The same at the nearest size that patches fill."""
        height, width = (max(math.floor(side / patch_size + 0.5), 1) * patch_size for side in self.size)
        return replace(self, size=(height, width))


def frame_of(encoder: VisionEncoder, encoding: Encoding, *, whole: bool = False) -> Frame:
    """What of an image this encoder is shown: the middle, or the whole."""
    channels = len(statistics_of(encoder).mean)
    return Frame(encoding.size, None, channels) if whole else Frame(encoding.size, channels=channels)


@torch.inference_mode()
def encode(encoder: VisionEncoder, pixels: Tensor, encoding: Encoding, *, pooled: bool = False) -> Features:
    """Features of pixels from 0 to 255, in float32 on the device. A non-finite value is an error."""
    device = torch.device(encoding.device)
    mean, std = statistics_of(encoder)
    images = normalize(pixels, mean, std, device)
    with (
        float32_products("highest"),
        torch.autocast(device.type, encoding.precision, enabled=encoding.precision != torch.float32),
        _encoder_errors(encoder, len(images)),
    ):
        encoded = encoder(images, pooled=pooled)
    _check_features(encoded, len(images), encoder.width)
    _check_grid(encoded, (images.shape[2], images.shape[3]), encoder.patch_size)
    features = Features(
        None if encoded.pooled is None else encoded.pooled.float(),
        encoded.registers.float(),
        encoded.feature_map.float(),
    )
    for name, values in features._asdict().items():
        if values is not None and not torch.isfinite(values).all():
            raise CapiError(f"the encoder gives values that are no finite numbers (in {name}): its weights are broken")
    return features


@contextmanager
def _encoder_errors(encoder: VisionEncoder, images: int) -> Iterator[None]:
    """An encoder may be the user's own Python: what goes wrong in there raises without a traceback."""
    try:
        yield
    except CapiError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise CapiError(
                f"the memory ran out while encoding {counted(images, 'image')} at a time: lower encode_batch (of `capi "
                "extract`: --batch-size) or the size of the images, or take a smaller model"
            ) from error
        said = " ".join(f"{type(error).__name__}: {error}".split())
        name = type(encoder).__name__
        raise CapiError(f"the encoder {name} failed on images ({said}): `capi --traceback ...` shows where") from error


def is_out_of_memory(error: BaseException) -> bool:
    """What torch raises when the memory of a CPU runs out has no class of its own."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in said or "can't allocate memory" in said)


def _check_features(features: object, images: int, width: int) -> None:
    """An encoder of a user's own may not keep what it promises."""
    if not isinstance(features, Features):
        raise CapiError(
            f"the encoder gives a {type(features).__name__}: expected Features(pooled, registers, feature_map)"
        )
    shape = tuple(features.feature_map.shape)
    if len(shape) != 4 or (shape[0], shape[-1]) != (images, width):
        raise CapiError(
            f"the encoder gives a feature map of shape {shape}: expected ({images} images, rows, columns, {width}), "
            "the last being its width"
        )


def _check_grid(features: Features, size: tuple[int, int], patch_size: int) -> None:
    """Segmentation and the pictures rely on where a patch lies."""
    grid = tuple(features.feature_map.shape[1:3])
    expected = size[0] // patch_size, size[1] // patch_size
    if grid != expected:
        raise CapiError(
            f"the encoder gives a feature map of {grid[0]} x {grid[1]} patches for images of {size[0]} x {size[1]} "
            f"pixels, but its patch_size of {patch_size} makes {expected[0]} x {expected[1]}: correct one of them"
        )


@dataclass(frozen=True)
class EncodedBatch:
    """Features of a batch, with what was read."""

    read: ReadBatch
    features: Features


@dataclass(frozen=True)
class EncodingJob:
    """Batches to be read and encoded, and what of their features is wanted."""

    batches: Dataset[ReadBatch]
    count: int
    pooled: bool = False
    patches: bool = True
    """Without them the feature map is a single patch, the mean of all: vectors of images are the same."""
    registers: bool = True


@runtime_checkable
class Team(Protocol):
    """Processes that share the batches of a job. The features are those of one process, bit for bit."""

    def encoded(self, encoder: VisionEncoder, job: EncodingJob, encoding: Encoding) -> Iterator[EncodedBatch]:
        """All batches, in order."""
        ...


def encoded_batches(
    encoder: VisionEncoder,
    source: ImageSource,
    encoding: Encoding,
    *,
    what: str = "images",
    numbers: Int[Tensor, " s"] | None = None,
    masks: MaskSource | None = None,
    whole: bool = False,
    pooled: bool = False,
    patches: bool = True,
    registers: bool = True,
) -> Iterator[EncodedBatch]:
    """Features of a source's images (or of those with these numbers), batch by batch, in order.

    Where patches or registers are not needed, saying so spares other processes from sending them.
    """
    chosen = torch.arange(len(source)) if numbers is None else numbers
    batches = StillBatches(source, frame_of(encoder, encoding, whole=whole), chosen, encoding.batch_size, masks)
    done = 0
    encoding.progress(what, 0, len(chosen))
    for batch in encoded(encoder, EncodingJob(batches, len(batches), pooled, patches, registers), encoding):
        done += len(batch.read.numbers)
        encoding.progress(what, done, len(chosen))
        yield batch


def encoded(encoder: VisionEncoder, job: EncodingJob, encoding: Encoding) -> Iterator[EncodedBatch]:
    """All batches of a job, in order: by this process, or by a team."""
    if encoding.team is not None:
        return encoding.team.encoded(encoder, job, encoding)
    return encoded_here(encoder, job, range(job.count), encoding)


def encoded_here(encoder: VisionEncoder, job: EncodingJob, items: range, encoding: Encoding) -> Iterator[EncodedBatch]:
    """These batches of a job, by this process."""
    for read in _read(job.batches, items, encoding):
        features = encode(encoder, read.images, encoding, pooled=job.pooled)
        if not job.registers:
            features = features._replace(registers=features.registers[:, :0])
        if not job.patches:
            features = features._replace(feature_map=vectors_of(features, "mean_patch")[:, None, None])
        yield EncodedBatch(read, features)


def _read(batches: Dataset[ReadBatch], items: range, encoding: Encoding) -> Iterator[ReadBatch]:
    """The batches, read from the files or from the cache."""
    if encoding.image_cache is None or not isinstance(batches, StillBatches):
        yield from read_in_order(batches, items, workers=encoding.workers)
        return
    chosen = tuple(batches.numbers.tolist())
    key = (id(batches.source), id(batches.masks), batches.frame, chosen, batches.batch_size, items)
    if key not in encoding.image_cache:
        read = read_in_order(batches, items, workers=encoding.workers)
        if (
            _bytes_of(batches) + sum(_bytes_of(others) for others, _ in encoding.image_cache.values())
            > PIXEL_CACHE_BYTES
        ):
            yield from read
            return
        # The batches hold on to their source, whose id no other one can get then.
        encoding.image_cache[key] = batches, list(read)
    yield from encoding.image_cache[key][1]


def _bytes_of(batches: StillBatches) -> int:
    """What the images and masks of all batches take in memory."""
    height, width = batches.frame.size
    return len(batches.numbers) * height * width * (batches.frame.channels + 4 * (batches.masks is not None))


def vectors_of(features: Features, kind: VectorKind) -> Float[Tensor, "b d"]:
    """One vector for each image."""
    mean = features.feature_map.flatten(1, 2).mean(1)
    if kind == "mean_patch":
        return mean
    if features.pooled is None:
        raise CapiError(f'this encoder gives no pooled vector, which the feature "{kind}" needs: use mean_patch')
    return features.pooled if kind == "pooled" else torch.cat([mean, features.pooled], 1)


def image_vectors(
    encoder: VisionEncoder, source: ImageSource, encoding: Encoding, kinds: Sequence[VectorKind], what: str
) -> dict[VectorKind, Float[Tensor, "_ _"]]:
    """One vector of each kind for every image of a source, on the CPU."""
    rows = {kind: FeatureRows(len(source), encoding, f"vectors_{kind}") for kind in kinds}
    pooled = any(kind != "mean_patch" for kind in kinds)
    for batch in encoded_batches(encoder, source, encoding, what=what, pooled=pooled, patches=False, registers=False):
        for kind in kinds:
            rows[kind].append(vectors_of(batch.features, kind))
    return {kind: each.filled for kind, each in rows.items()}


@dataclass
class FeatureRows:
    """Rows of numbers that are appended one batch after the other, up to a number known before."""

    capacity: int
    encoding: Encoding
    name: str
    values: Tensor | None = field(default=None, init=False)
    used: int = field(default=0, init=False)

    def append(self, rows: Tensor) -> None:
        if self.values is None:
            self.values = allocate((self.capacity, *rows.shape[1:]), rows.dtype, self.encoding, self.name)
        self.values[self.used : self.used + len(rows)] = rows.cpu()
        self.used += len(rows)

    @property
    def filled(self) -> Tensor:
        return torch.empty(0) if self.values is None else self.values[: self.used]


def allocate(shape: tuple[int, ...], dtype: torch.dtype, encoding: Encoding, name: str) -> Tensor:
    """Room for features: in memory, or in a file where that would be too much."""
    size = math.prod(shape)
    if encoding.folder is None or size * dtype.itemsize <= encoding.memory_bytes:
        return torch.empty(shape, dtype=dtype)
    encoding.folder.mkdir(parents=True, exist_ok=True)
    # The file grows as it is filled, and a full disk would end the process without a word.
    free, needed = shutil.disk_usage(encoding.folder).free, size * dtype.itemsize
    if free < needed:
        raise CapiError(
            f"features need {needed / 2**30:.1f} GiB in {encoding.folder}, where {free / 2**30:.1f} GiB are free: make "
            "room, or take fewer images with limit_train"
        )
    return torch.from_file(str(encoding.folder / f"{name}.bin"), shared=True, size=size, dtype=dtype).view(shape)
