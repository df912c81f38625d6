"""A fitted probe at work: labels with confidences as CSV, or a label for every pixel as pictures.

An image that cannot be read is listed in failed.csv with the reason; the others are labelled all the same.
"""

import csv
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from capi.data.decoding import Decoder
from capi.data.loader import made_ahead
from capi.data.sources import ENDINGS, image_folder
from capi.errors import CapiError
from capi.evals.features import Encoding, encode, frame_of
from capi.evals.fitted import Classifier, Judge, Segmenter
from capi.evals.images import ReadBatch, StillBatches
from capi.evals.probe_files import Probe
from capi.evals.results import make_folder
from capi.report.pictures.labels import label_image, legend, overlay
from capi.report.pictures.pca import photos_of
from capi.report.pictures.sheets import save_picture
from capi.runtime.atomic import atomic_open, remove
from capi.runtime.links import make_folder as make_folder_inside
from capi.runtime.privacy import hide_paths_within
from capi.types import VisionEncoder

LABELS, FAILED, CLASSES, LEGEND = "labels.csv", "failed.csv", "classes.csv", "legend.png"
MASKS, OVERLAYS = "labels", "overlays"


@dataclass(frozen=True)
class Predicted:
    """What was written where."""

    folder: Path
    images: int
    failed: dict[str, str]


class NamedFiles:
    """Files from several places, each under a name of its own within the output."""

    def __init__(self, files: Sequence[tuple[str, Path]]) -> None:
        self.files = list(files)

    def __len__(self) -> int:
        return len(self.files)

    def name(self, index: int) -> str:
        return self.files[index][0]

    def read(self, index: int) -> Path:
        return self.files[index][1]

    @property
    def fingerprint(self) -> str:
        return ""


def find_images(places: Sequence[Path]) -> NamedFiles:
    """The images that files and folders stand for. Where several folders are given, names begin with the folder's."""
    found: list[tuple[str, Path]] = []
    for place in places:
        if place.is_dir():
            inside = image_folder(place)
            prefix = f"{place.resolve().name}/" if len(places) > 1 else ""
            found += [(prefix + inside.name(number), place / inside.name(number)) for number in range(len(inside))]
        elif not place.exists():
            raise CapiError(f"there is no image or folder {place}")
        elif not place.name.lower().endswith(ENDINGS):
            raise CapiError(f"{place} is no image: expected a file that ends in {', '.join(ENDINGS)}, or a folder")
        else:
            found.append((place.name, place))
    counts = Counter(name for name, _ in found)
    twice = next((name for name, count in counts.items() if count > 1), None)
    if twice is not None:
        raise CapiError(f'two of the images are called "{twice}": label them one folder at a time')
    if not found:
        raise CapiError("there are no images to label: give files or folders")
    return NamedFiles(found)


def label_images(
    encoder: VisionEncoder,
    probe: Probe,
    images: Sequence[Path],
    out: Path,
    encoding: Encoding,
    *,
    overwrite: bool = False,
) -> Predicted:
    """Label images. `encoding` says how the encoder is run; the size of the images is the probe's own."""
    probe.refuse_other(encoder)
    source = find_images(images)
    if out.exists() and not out.is_dir():
        raise CapiError(f"{out} is a file: --out takes the name of a folder")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise CapiError(f"{out} is not empty: choose another --out, or write into it with --overwrite")
    make_folder(out)
    _clear(out, but=() if probe.segments else (LABELS,))
    failed: dict[str, str] = {}
    encoding = replace(encoding, size=probe.size)
    batches = _readable(encoder, probe, source, encoding, failed)
    model = probe.model
    if isinstance(model, Segmenter):
        done = _segment(encoder, probe, model, source, out, encoding, batches)
    else:
        done = _classify(encoder, probe, model, source, out, encoding, batches)
    if failed:
        told = ((name, hide_paths_within(reason)) for name, reason in failed.items())
        _write_rows(out / FAILED, ("file", "reason"), told)
    return Predicted(out, done, failed)


def _clear(out: Path, but: Collection[str]) -> None:
    """Remove what an earlier prediction left, so that none of it is taken for a part of this one."""
    for name in {LABELS, FAILED, CLASSES, LEGEND, MASKS, OVERLAYS} - set(but):
        remove(out / name)


def _readable(
    encoder: VisionEncoder, probe: Probe, source: NamedFiles, encoding: Encoding, failed: dict[str, str]
) -> Iterator[ReadBatch]:
    """Batches of images; those that cannot be read are noted and left out."""
    frame = frame_of(encoder, encoding, whole=probe.segments)
    batches = StillBatches(source, frame, torch.arange(len(source)), encoding.batch_size)
    done = 0
    for batch in made_ahead(batches, range(len(batches)), workers=encoding.workers):
        yield from [batch] if batch.failure is None else _one_by_one(batches, batch, failed)
        done += len(batch.numbers)
        encoding.progress("images", done, len(source))


def _one_by_one(batches: StillBatches, batch: ReadBatch, failed: dict[str, str]) -> Iterator[ReadBatch]:
    for number in batch.numbers:
        single = replace(batches, numbers=number[None], batch_size=1)[0]
        if single.failure is None:
            yield single
        else:
            failed[batches.source.name(int(number))] = single.failure


def _classify(
    encoder: VisionEncoder,
    probe: Probe,
    model: Classifier,
    source: NamedFiles,
    out: Path,
    encoding: Encoding,
    batches: Iterator[ReadBatch],
) -> int:
    """A row for each image: file, label, confidence."""
    judge = Judge(model)

    def rows() -> Iterator[tuple[str, str, str]]:
        for batch in batches:
            features = encode(encoder, batch.images, encoding, pooled=model.needs_pooled)
            for numbers, confidences in judge.add(batch.numbers, features):
                yield from _rows(numbers, confidences, source, probe)
        for numbers, confidences in judge.finish():
            yield from _rows(numbers, confidences, source, probe)

    return _write_rows(out / LABELS, ("file", "label", "confidence"), rows())


def _rows(numbers: Tensor, confidences: Tensor, source: NamedFiles, probe: Probe) -> Iterator[tuple[str, str, str]]:
    best = confidences.max(1)
    for number, confidence, label in zip(numbers.tolist(), best.values.tolist(), best.indices.tolist(), strict=True):
        yield source.name(number), probe.classes[label], f"{confidence:.4f}"


def _segment(
    encoder: VisionEncoder,
    probe: Probe,
    model: Segmenter,
    source: NamedFiles,
    out: Path,
    encoding: Encoding,
    batches: Iterator[ReadBatch],
) -> int:
    """For each image, at its own size: labels/NAME.png with the numbers, overlays/NAME.png to look at."""
    decoder, names, done = Decoder(), picture_names(source), 0
    known = dict(probe.classes)
    for batch in batches:
        features = encode(encoder, batch.images, encoding)
        for number, labels in zip(batch.numbers.tolist(), model.segment(features, encoding.size), strict=True):
            pixels = np.atleast_3d(decoder.open(source.read(number)).decode())
            photo = photos_of(torch.tensor(pixels).permute(2, 0, 1)[None])[0]
            full = Image.fromarray(labels.numpy().astype(np.int32)).resize(photo.size, Image.Resampling.NEAREST)
            values = np.asarray(full)
            drawn = {MASKS: label_image(values), OVERLAYS: overlay(photo, values, probe.ignored)}
            for folder, picture in drawn.items():
                path = out / folder / names[number]
                make_folder_inside(path.parent, inside=out)
                save_picture(picture, path)
            # Where ignored labels had a vote in the evaluation, they have one here.
            known |= {label: "ignored" for label in probe.ignored if (values == label).any()}
            done += 1
    save_picture(legend(known, 640, probe.ignored), out / LEGEND)
    _write_rows(out / CLASSES, ("label", "class"), sorted(known.items()))
    return done


def picture_names(source: NamedFiles) -> list[str]:
    """The names of the images with .png for their ending; where that makes two equal, all keep theirs before it."""
    names = [source.name(number) for number in range(len(source))]
    short = [str(PurePosixPath(name).with_suffix(".png")) for name in names]
    return short if len(set(short)) == len(names) else [f"{name}.png" for name in names]


def _write_rows(path: Path, head: Sequence[str], rows: Iterable[Sequence[object]]) -> int:
    """A CSV that is complete or not there; the number of rows."""
    count = 0
    # A file's name may hold bytes that are no UTF-8; they stay what they are.
    with atomic_open(path, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        for row in rows:
            writer.writerow(row)
            count += 1
    return count
