"""Features of a set of images to a file, in bounded memory; what was interrupted resumes where it stopped.

Until it is complete the file lies in a hidden folder beside its place (`.NAME.partial`), with `progress.json`, which
says what is being extracted and how many images are safely on the disk. The result of an interrupted extraction is
byte for byte that of an uninterrupted one.
"""

import errno
import hashlib
import itertools
import json
import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capi.data.sources import ImageSource
from capi.errors import CapiError, counted, nearest
from capi.evals.feature_files import (
    FEATURE_ENDINGS,
    FEATURE_KINDS,
    TYPES,
    FeatureFacts,
    Framing,
    begin_features,
    filling,
    must_have_parquet,
    read_features,
    write_parquet,
)
from capi.evals.features import EncodedBatch, Encoding, encoded_batches, vectors_of
from capi.evals.fitted_probes import encoder_facts
from capi.evals.team import follow_encoding, lead_encoding
from capi.runtime.atomic import Output, atomic_write, move_into_place, refuse_link
from capi.runtime.documents import read_object
from capi.runtime.lock import locked
from capi.runtime.processes import ALONE, Processes
from capi.runtime.summary import Summary
from capi.types import Features, VisionEncoder, statistics_of

_LOG = logging.getLogger("capi")
# At most so much work is lost where the process is killed.
SECONDS_BETWEEN_SAVES = 10.0
_VERSION = 1


@dataclass(frozen=True, repr=False)
class Extracted(Summary):
    """What was written, and how many of the images had been done before."""

    path: Path
    images: int
    shapes: dict[str, tuple[int, ...]]
    """The shape of one image's features, of each kind."""
    dtype: str
    size: tuple[int, int]
    resumed_at: int = 0

    def summary(self) -> tuple[str, dict[str, str]]:
        features = {kind: f"{' x '.join(map(str, shape))} an image" for kind, shape in self.shapes.items()}
        resumed = {"resumed": f"after {counted(self.resumed_at, 'image')}"} if self.resumed_at else {}
        size = " x ".join(map(str, self.size))
        return (
            f"{self.path}: features of {counted(self.images, 'image')} of {size} pixels in {self.dtype}",
            features | resumed,
        )


def extract_features(
    encoder: VisionEncoder,
    source: ImageSource,
    output: Output,
    *,
    encoding: Encoding,
    labels: Sequence[str] | None = None,
    kinds: Sequence[str] = ("mean_patch",),
    whole: bool = False,
    about: dict[str, Any] | None = None,
    dtype: str = "float32",
    processes: Processes = ALONE,
) -> Extracted:
    """Write features of every image to a file, as its ending says: .safetensors or .parquet.

    `whole` squeezes the whole image to the size instead of cutting out its middle. `about` is noted in the file. What
    an interrupted call left behind is resumed if it fits; `overwrite` replaces what does not, and the file.
    Of several `processes` each encodes a part of the batches; the main one writes them as they come.
    """
    fitted = replace(encoding.fitted(encoder.patch_size), image_cache=None)
    if fitted.size != encoding.size and processes.is_main:
        used, asked = (" x ".join(map(str, size)) for size in (fitted.size, encoding.size))
        _LOG.warning("images of %s pixels: the nearest to %s that patches of %s fill", used, asked, encoder.patch_size)
    # As it will be read again: paths become text, and tuples lists.
    noted = json.loads(json.dumps(about or {}, default=str))

    if not processes.is_main:
        extracted: Extracted = follow_encoding(processes, encoder, [source], fitted)
        return extracted
    with lead_encoding(processes, encoder, [source], fitted) as work:
        _check_request(source, labels, kinds, dtype)
        _check_place(output)
        job = ExtractionJob(encoder, source, labels, tuple(kinds), work.encoding, whole, noted, dtype)
        work.result = done = _extract(job, output)
    return done


def _extract(job: "ExtractionJob", output: Output) -> Extracted:
    labels, out = job.labels, output.path
    if _is_parquet(out):
        _check_text([*job.names, *(labels or ())])
    partial = Partial(out.with_name(f".{out.name}.partial"))
    with telling_disk_errors(out), partial.locked():
        resumed_at = partial.prepare(job.identity, output.overwrite)
        # Parquet is made from the complete file, so for a moment there are two.
        _fill(job, partial, resumed_at, copies=1 + _is_parquet(out))
        facts = _finish(partial, out)
    return Extracted(out, facts.images, facts.shapes, facts.dtype, facts.framing.size, resumed_at)


def encoder_description(encoder: VisionEncoder) -> dict[str, Any]:
    """What tells an encoder from another one, also where neither has weights."""
    mean, std = statistics_of(encoder)
    return encoder_facts(encoder) | {"class": type(encoder).__name__, "statistics": [list(mean), list(std)]}


@dataclass(frozen=True)
class ExtractionJob:
    """What is to be extracted from what."""

    encoder: VisionEncoder
    source: ImageSource
    labels: Sequence[str] | None
    kinds: tuple[str, ...]
    encoding: Encoding
    whole: bool
    about: dict[str, Any]
    dtype: str

    @cached_property
    def names(self) -> list[str]:
        return [self.source.name(number) for number in range(len(self.source))]

    @cached_property
    def root(self) -> Path | None:
        root = getattr(self.source, "root", None)
        return root if isinstance(root, Path) else None

    @cached_property
    def encoder_facts(self) -> dict[str, Any]:
        return encoder_description(self.encoder)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """All that the features depend on: features of another one cannot be resumed."""
        has_fingerprint = bool(self.encoder_facts["fingerprint"])
        images = json.dumps([self.names, None if self.labels is None else list(self.labels)])
        return {
            # Without a fingerprint, what the caller says of the model has to do.
            "encoder": self.encoder_facts | ({} if has_fingerprint else {"about": self.about}),
            "data": [
                None if self.root is None else str(self.root.resolve()),
                self.source.fingerprint,
                hashlib.sha256(images.encode()).hexdigest(),
            ],
            "kinds": list(self.kinds),
            "size": list(self.encoding.size),
            "framing": "whole" if self.whole else "middle",
            "precision": str(self.encoding.precision).removeprefix("torch."),
            "dtype": self.dtype,
        }

    def batches(self, first: int) -> Iterator[EncodedBatch]:
        """Features of the images from this one on; progress counts all of them."""

        def progress(what: str, done: int, _total: int) -> None:
            self.encoding.progress(what, first + done, len(self.source))

        return encoded_batches(
            self.encoder,
            self.source,
            replace(self.encoding, progress=progress),
            what="extracting",
            numbers=torch.arange(first, len(self.source)),
            whole=self.whole,
            pooled="pooled" in self.kinds,
            patches="patch" in self.kinds,
            registers="register" in self.kinds,
        )

    def facts(self, features: Features) -> FeatureFacts:
        """The description of the file, with shapes as these features have them."""
        rows, columns = (side // self.encoder.patch_size for side in self.encoding.size)
        channels = len(statistics_of(self.encoder).mean)
        return FeatureFacts(
            images=len(self.source),
            shapes={kind: tuple(features_of(features, kind).shape[1:]) for kind in self.kinds},
            dtype=self.dtype,
            framing=Framing(self.encoding.size, (rows, columns), self.whole, channels),
            encoder=self.encoder_facts,
            root=None if self.root is None else str(self.root),
            classes=None if self.labels is None else sorted(set(self.labels)),
            about=self.about | {"precision": self.identity["precision"]},
        )


def features_of(features: Features, kind: str) -> Tensor:
    """One kind of features, images first."""
    if kind == "patch":
        return features.feature_map
    if kind == "register":
        if features.registers.shape[1] == 0:
            raise CapiError('this encoder has no registers: extract "patch" or "mean_patch" features')
        return features.registers
    return vectors_of(features, "pooled" if kind == "pooled" else "mean_patch")


class Partial:
    """The folder of an extraction that is under way."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.features, self.progress = path / "features.safetensors", path / "progress.json"
        self.identity: dict[str, Any] = {}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from extracting to the same file."""
        # Its name is stable, so that an extraction can resume.
        refuse_link(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        with locked(self.path / ".lock", busy=f"{self.path} is being filled by another process: wait for it"):
            try:
                yield
            finally:
                if not self.features.exists():
                    shutil.rmtree(self.path, ignore_errors=True)

    def prepare(self, identity: dict[str, Any], overwrite: bool) -> int:
        """How many images are done already; what does not belong here is an error, or removed."""
        self.identity = identity
        if self.features.is_file() and self.progress.is_file():
            recorded = self._recorded()
            reason = "it is damaged" if recorded is None else difference(recorded["identity"], identity)
            if recorded is not None and reason is None:
                return int(recorded["done"])
            if not overwrite:
                raise CapiError(
                    f"{self.path} holds an unfinished extraction that cannot be resumed, since {reason}: extract "
                    "with overwrite, or remove that folder"
                )
        self.features.unlink(missing_ok=True)
        self.progress.unlink(missing_ok=True)
        return 0

    def save(self, done: int) -> None:
        """Note that so many images are on the disk."""
        atomic_write(self.progress, json.dumps({"version": _VERSION, "done": done, "identity": self.identity}))

    def _recorded(self) -> dict[str, Any] | None:
        """What is known of the work that was done; None where that is of no use."""
        try:
            read_features(self.features)
            record = read_object(self.progress)
            usable = record["version"] == _VERSION and record["done"] >= 0 and isinstance(record["identity"], dict)
        except (ValueError, KeyError, TypeError):
            return None
        return record if usable else None


def difference(started: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    """What keeps an extraction from being resumed, in words."""
    if started.get("encoder") != wanted["encoder"]:
        return "it is of another encoder"
    if started.get("data") != wanted["data"]:
        return "it is of other images"
    for key, value in wanted.items():
        if started.get(key) != value:
            return f"its {key} is {_plain(started.get(key))}, not {_plain(value)}"
    return None


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _fill(job: ExtractionJob, partial: Partial, done: int, copies: int) -> None:
    """Encode the images that are not done yet."""
    if done >= len(job.source):
        return
    batches = job.batches(done)
    first = next(batches)
    if done == 0:
        facts = job.facts(first.features)
        must_have_room(partial.path, facts, copies)
        begin_features(partial.features, facts, job.names, job.labels)
    with filling(partial.features) as writer:
        saved = time.monotonic()
        try:
            for batch in itertools.chain([first], batches):
                writer.write(done, {kind: features_of(batch.features, kind) for kind in job.kinds})
                done += len(batch.read.numbers)
                if time.monotonic() - saved >= SECONDS_BETWEEN_SAVES:
                    writer.flush()
                    partial.save(done)
                    saved = time.monotonic()
        finally:
            # Also where it is interrupted, so that nothing is lost.
            writer.flush()
            partial.save(done)


def _finish(partial: Partial, out: Path) -> FeatureFacts:
    """Put the complete file in its place and clear up."""
    features = read_features(partial.features)
    complete = partial.features
    if _is_parquet(out):
        complete = partial.path / "features.parquet"
        write_parquet(features, complete)
    move_into_place(complete, out)
    shutil.rmtree(partial.path)
    return features.facts


def must_have_room(folder: Path, facts: FeatureFacts, copies: int) -> None:
    """Better now than after hours."""
    needed, free = copies * facts.images * facts.image_bytes, shutil.disk_usage(folder).free
    if needed > free:
        raise CapiError(
            f"the features need {needed / 1e9:.1f} GB, but the disk of {folder.parent} has {free / 1e9:.1f} GB left: "
            "make room, or extract fewer kinds, at a smaller size or as float16"
        )


@contextmanager
def telling_disk_errors(out: Path) -> Iterator[None]:
    """What goes wrong on the disk, as an error that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            advice = "make room and give the same command again, which resumes where this one stopped"
        else:
            advice = "choose another place"
        raise CapiError(f"{out} cannot be written ({error.strerror or error}): {advice}") from error


def _check_request(source: ImageSource, labels: Sequence[str] | None, kinds: Sequence[str], dtype: str) -> None:
    if len(source) == 0:
        raise CapiError("there are no images to extract features of")
    if labels is not None and len(labels) != len(source):
        raise CapiError(f"{len(labels)} labels do not fit {len(source)} images: give one for each")
    if dtype not in TYPES:
        raise CapiError(f'features are stored as {" or ".join(TYPES)}, not "{dtype}"{nearest(dtype, TYPES)}')
    for kind in kinds:
        if kind not in FEATURE_KINDS:
            raise CapiError(
                f'there are no "{kind}" features, but {", ".join(FEATURE_KINDS)}{nearest(kind, FEATURE_KINDS)}'
            )
    if not kinds or len(set(kinds)) < len(kinds):
        raise CapiError(f"name each kind of features once, and at least one of {', '.join(FEATURE_KINDS)}")


def _check_place(output: Output) -> None:
    out = output.path
    if out.suffix.lower() not in FEATURE_ENDINGS:
        raise CapiError(
            f"{out.name} ends in neither {' nor '.join(FEATURE_ENDINGS)}, which is how the format is chosen"
        )
    if _is_parquet(out):
        must_have_parquet()
    output.check_file()


def _check_text(texts: Sequence[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise CapiError(
                f"{text!r} is no valid text, which parquet asks for: rename it, or use safetensors"
            ) from error


def _is_parquet(out: Path) -> bool:
    return out.suffix.lower() == ".parquet"
