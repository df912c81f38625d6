"""Predictions of a probe on disk: labels as CSV, masks and overlays as pictures; and those of an evaluation, drawn.

Labels of pixels as pictures: a colour for each label, laid over the photo, with a legend.
"""

import colorsys
import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from capi.data.crops import Frame
from capi.data.decoding import Decoder
from capi.data.sources import ImageSource
from capi.errors import CapiError, counted
from capi.evals.features import Encoding
from capi.evals.images import StillBatches
from capi.evals.prediction import Prediction
from capi.evals.results import Outcome, make_folder
from capi.evals.tasks import SegmentationData
from capi.report.pictures.painters import Drawn
from capi.report.pictures.pca import photos_of
from capi.report.pictures.sheets import Row, save_picture, sheet_of, stacked, swatches
from capi.runtime.atomic import Output, atomic_open, remove
from capi.runtime.atomic import make_folder as make_folder_inside
from capi.runtime.privacy import hide_paths
from capi.runtime.summary import Summary

LABELS, FAILED, CLASSES, LEGEND = "labels.csv", "failed.csv", "classes.csv", "legend.png"
MASKS, OVERLAYS = "labels", "overlays"
# Predictions of small images are drawn larger, by a whole factor.
_SHOWN_HEIGHT = 256


@dataclass(frozen=True, repr=False)
class Predicted(Summary):
    """What was written where."""

    folder: Path
    images: int
    failed: dict[str, str]

    def summary(self) -> tuple[str, dict[str, str]]:
        rows = {}
        if self.failed:
            name, reason = next(iter(self.failed.items()))
            rows["failed"] = f"{len(self.failed)} that cannot be read, such as {name} ({reason}): see {FAILED}"
        return f"{self.folder}: {counted(self.images, 'labeled image')}", rows


def write_predictions(prediction: Prediction, output: Output) -> Predicted:
    """Label all images: a row of a CSV, or a mask and an overlay for each; failed.csv lists what cannot be read."""
    output.check_folder()
    out = output.path
    make_folder(out)
    segments = prediction.probe.segments
    # What an earlier prediction left must not be taken for a part of this one; the table is replaced when it is whole.
    for name in {LABELS, FAILED, CLASSES, LEGEND, MASKS, OVERLAYS} - (set() if segments else {LABELS}):
        remove(out / name)
    done = _write_masks(prediction, out) if segments else _write_labels(prediction, out)
    if prediction.failed:
        write_failed(hide_paths(prediction.failed), out)
    return Predicted(out, done, prediction.failed)


def write_failed(failed: Mapping[str, str], out: Path) -> None:
    """List the images that could not be read, each with the reason."""
    _write_rows(out / FAILED, ("file", "reason"), failed.items())


def _write_labels(prediction: Prediction, out: Path) -> int:
    """A row for each image: file, label, confidence."""
    source, classes = prediction.source, prediction.probe.classes
    rows = (
        (source.name(number), classes[label], f"{confidence:.4f}") for number, label, confidence in prediction.labels()
    )
    return _write_rows(out / LABELS, ("file", "label", "confidence"), rows)


def _write_masks(prediction: Prediction, out: Path) -> int:
    """Write labels/NAME.png with the numbers and overlays/NAME.png to look at, for each image at its own size."""
    source, probe = prediction.source, prediction.probe
    decoder, names, done = Decoder(), picture_names(source), 0
    classes = dict(probe.classes)
    for number, labels in prediction.masks():
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
        classes |= {label: "ignored" for label in probe.ignored if (values == label).any()}
        done += 1
    save_picture(legend(classes, 640, probe.ignored), out / LEGEND)
    _write_rows(out / CLASSES, ("label", "class"), sorted(classes.items()))
    return done


def picture_names(source: ImageSource) -> list[str]:
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


def draw_predictions(outcome: Outcome, data: SegmentationData, encoding: Encoding, folder: Path) -> None:
    """Photo, truth and prediction side by side, with a legend of what occurs."""
    folder.mkdir(parents=True, exist_ok=True)
    ignored = sorted(data.ignored)
    for picture in outcome.pictures:
        frame, number = Frame(encoding.size, share=None), torch.tensor([picture.number])
        pixels = StillBatches(data.test.images, frame, number, 1, data.test.masks)[0].images[0]
        photo = photos_of(pixels[None])[0]
        enlarged = max(_SHOWN_HEIGHT // photo.height, 1)
        photo = photo.resize((photo.width * enlarged, photo.height * enlarged), Image.Resampling.BICUBIC)
        truth, prediction = (
            labels.numpy().repeat(enlarged, 0).repeat(enlarged, 1) for labels in (picture.truth, picture.prediction)
        )
        pictures = [photo, overlay(photo, truth, ignored), overlay(photo, prediction, ignored)]
        row = Row("", [Drawn(drawn) for drawn in pictures])
        sheet = sheet_of("", (), ("photo", "truth", "prediction"), [row], side=max(photo.size))
        present = {int(label) for label in np.union1d(truth, prediction)}
        names = {label: data.classes[label] for label in sorted(present & set(data.classes))}
        path = folder / f"{picture.number:05d}_{Path(picture.name).stem}.png"
        save_picture(stacked([sheet, legend(names, sheet.width)]), path)


LabelImage = npt.NDArray[np.integer]
# Steps of the golden angle never come back to a hue that is taken.
_GOLDEN = (math.sqrt(5) - 1) / 2
_IGNORED = (255, 255, 255)


def color_of(label: int) -> tuple[int, int, int]:
    """The colour of a label, the same everywhere; neighbours differ in hue, and every third in brightness."""
    if label == 0:
        return 70, 70, 80
    hue, level = (label * _GOLDEN) % 1.0, (0.95, 0.75, 0.6)[label % 3]
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.75, level)
    return round(red * 255), round(green * 255), round(blue * 255)


def colored(labels: LabelImage, ignored: Sequence[int] = ()) -> Image.Image:
    """Every pixel in the colour of its label; ignored ones are white."""
    values = np.unique(labels)
    palette = np.array([_IGNORED if value in ignored else color_of(int(value)) for value in values], dtype=np.uint8)
    return Image.fromarray(palette[np.searchsorted(values, labels)])


def overlay(photo: Image.Image, labels: LabelImage, ignored: Sequence[int] = (), strength: float = 0.55) -> Image.Image:
    """Colours over the photo."""
    return Image.blend(photo.convert("RGB"), colored(labels, ignored), strength)


def label_image(labels: LabelImage) -> Image.Image:
    """Labels as they are, in an image that other programs read: a palette up to 255, 16 bits beyond."""
    strange = labels[(labels < 0) | (labels > 65535)]
    if strange.size:
        raise CapiError(f"the label {strange[0]} cannot be written: a label image holds numbers from 0 to 65535")
    if labels.max(initial=0) > 255:
        return Image.fromarray(labels.astype(np.uint16))
    image = Image.fromarray(labels.astype(np.uint8), mode="P")
    image.putpalette([value for label in range(256) for value in color_of(label)])
    return image


def legend(names: Mapping[int, str], width: int, ignored: Sequence[int] = ()) -> Image.Image:
    """The colour and the name of each label."""
    entries = sorted(names.items())
    return swatches([(_IGNORED if label in ignored else color_of(label), name) for label, name in entries], width)
