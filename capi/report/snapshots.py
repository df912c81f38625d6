"""How features emerge: PCA pictures of the same few images again and again while a run trains.

The components are those of all these images together at that step. So that colours do not jump from one snapshot to
the next, components are put in the order, and turned to the side, in which they go along best with the colours of the
snapshot before. That one is read from its pictures: a run that is resumed continues in the same colours, and a step
that is repeated gives the same picture. Nothing here draws random numbers or changes the networks.
"""

import itertools
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from capi.data.crops import center_box
from capi.data.decoding import Box
from capi.data.recorded import spaced
from capi.data.sources import ImageSource
from capi.errors import CapiError
from capi.evals.features import Encoding, encode
from capi.report.pictures.feature_maps import PictureFrame, SizedImages, picture_size
from capi.report.pictures.painters import Drawn
from capi.report.pictures.pca import as_colors, fit_components, photos_of
from capi.report.pictures.sheets import Row, save_picture, sheet_of
from capi.runtime.image_files import open_image
from capi.train.step import Learner
from capi.types import Float, Statistics
from capi.zoo.build import frozen

_LOG = logging.getLogger("capi")
_PHOTO_SIDE = 256
# Images that are tried, where some cannot be read, before a picture is given up.
_TRIES = 20
_PICTURE = re.compile(r"step_(\d{8,})_(\d+)\.png")


@dataclass(frozen=True)
class RunFrame(PictureFrame):
    """The middle of an image, as much as fits, in the aspect that a run trains with."""

    height_and_width: tuple[int, int] = (224, 224)

    @property
    def grid(self) -> tuple[int, int]:
        """Patches in rows and columns."""
        height, width = self.height_and_width
        return height // self.patch_size, width // self.patch_size

    def size(self, image_size: tuple[int, int]) -> tuple[int, int]:  # noqa: ARG002 - all images get the same
        height, width = self.height_and_width
        scale = 1.0 if self.shown is None else self.shown / min(height, width)
        return max(round(height * scale), 1), max(round(width * scale), 1)

    def box(self, image_size: tuple[int, int]) -> Box:
        return center_box(image_size, self.height_and_width, share=1.0)


def run_frame(size: tuple[int, int], patch_size: int) -> RunFrame:
    """What pictures show of an image, at the size of pictures."""
    height, width = picture_size(size, patch_size)
    return RunFrame(min(height, width), patch_size, height_and_width=(height, width))


class Snapshots:
    """An `Evaluation` that scores nothing: it draws what the teacher sees of a few images into a folder."""

    def __init__(
        self,
        source: ImageSource,
        statistics: Statistics,
        size: tuple[int, int],
        folder: Path,
        every_steps: int,
        count: int = 6,
    ) -> None:
        self.source, self.statistics, self.size = source, statistics, size
        self.folder, self.every_steps, self.count = folder, every_steps, count
        self._images: list[Tensor] | None = None

    def run(self, learner: Learner, step: int) -> dict[str, float]:
        """Draw the teacher at this step. A failure is logged, and training continues."""
        try:
            self._draw(learner, step)
        except (CapiError, OSError) as error:
            _LOG.warning("the pictures of step %d could not be drawn: %s", step, error)
        return {}

    def _draw(self, learner: Learner, step: int) -> None:
        encoder = frozen(learner.teacher.average, self.statistics)
        if self._images is None:
            self._images = self._prepare(run_frame(self.size, encoder.patch_size))
        if not self._images:
            return
        maps = encode(encoder, torch.stack(self._images), Encoding(device=learner.device)).feature_map.cpu()
        patches = maps.flatten(0, 2)
        values = fit_components(patches).project(patches)
        self._forget_after(step)
        before = self._colors_before(step, tuple(maps.shape[:3]))
        colors = as_colors(values if before is None else matched(values, before)).view(*maps.shape[:3], 3)
        for number, picture in enumerate(colors.numpy()):
            save_picture(Image.fromarray(picture), picture_path(self.folder, step, number))

    def _prepare(self, frame: RunFrame) -> list[Tensor]:
        """Read the images, and leave them beside the pictures as people see them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        seen = SizedImages(self.source, frame, len(self.statistics.mean))
        images: list[Tensor] = []
        for number in _readable_numbers(seen, self.count):
            save_picture(photo_of(seen, number, _PHOTO_SIDE), photo_path(self.folder, len(images)))
            images.append(seen[number].pixels.float())
        if not images:
            _LOG.warning("no snapshots are drawn: none of the images that were tried can be read")
        return images

    def _forget_after(self, step: int) -> None:
        """Pictures of later steps are of a course that was given up when the run went back."""
        for later in snapshot_steps(self.folder):
            if later > step:
                for path in self.folder.glob(f"step_{later:08d}_*.png"):
                    path.unlink(missing_ok=True)

    def _colors_before(self, step: int, shape: tuple[int, ...]) -> Float[Tensor, "s 3"] | None:
        """The colours of the newest earlier snapshot that shows as many images of this size."""
        for earlier in reversed(snapshot_steps(self.folder)):
            paths = [picture_path(self.folder, earlier, number) for number in range(shape[0])]
            pictures = [_pixels(path) for path in paths if earlier < step]
            if pictures and all(picture is not None and picture.shape == (*shape[1:], 3) for picture in pictures):
                return torch.stack([picture for picture in pictures if picture is not None]).view(-1, 3).float()
        return None


def matched(values: Float[Tensor, "s 3"], before: Float[Tensor, "s 3"]) -> Float[Tensor, "s 3"]:
    """Components in the order and with the signs in which they go along with those before, the surest pair first."""
    correlations = _standardized(before).T @ _standardized(values)
    order, signs = torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=values.dtype)
    left = correlations.abs()
    for _ in range(3):
        place, component = divmod(int(left.argmax()), 3)
        order[place] = component
        signs[place] = -1 if correlations[place, component] < 0 else 1
        left[place, :] = left[:, component] = -1
    return values[:, order] * signs


def _standardized(values: Float[Tensor, "s m"]) -> Float[Tensor, "s m"]:
    """Around zero and of length one, in float64; what does not vary is zero."""
    centerd = values.double() - values.double().mean(0)
    return centerd / centerd.norm(dim=0).clamp_min(torch.finfo(torch.float64).tiny)


def snapshot_steps(folder: Path) -> list[int]:
    """The steps that a folder holds pictures of, ascending."""
    matches = (_PICTURE.fullmatch(path.name) for path in folder.glob("step_*.png"))
    return sorted({int(match[1]) for match in matches if match})


def picture_path(folder: Path, step: int, number: int) -> Path:
    """The picture of an image, numbered from 0, at a step: one pixel a patch."""
    return folder / f"step_{step:08d}_{number}.png"


def photo_path(folder: Path, number: int) -> Path:
    """The image itself, for people."""
    return folder / f"photo_{number}.jpg"


def snapshot_sheet(folder: Path, *, columns: int = 12, side: int = 96) -> Image.Image:
    """The photos and what became of them, from left to right; of many steps some, from the first to the last."""
    steps = snapshot_steps(folder)
    if not steps:
        raise CapiError(f"{folder} holds no snapshots: give the folder pictures/snapshots of a run that drew some")
    chosen = [steps[number] for number in spaced(len(steps), columns)]
    rows = []
    for number in itertools.count():
        paths = [photo_path(folder, number), *(picture_path(folder, step, number) for step in chosen)]
        pixels = map(_pixels, paths)
        cells = [None if each is None else Drawn(Image.fromarray(each.numpy())) for each in pixels]
        if not any(cells):
            break
        rows.append(Row(f"image {number + 1}", cells))
    notes = [
        "The first three principal components of the teacher's patch features as red, green and blue, fitted to all "
        "of these images together at each step."
    ]
    return sheet_of("Features over time", notes, ["photo", *(f"step {step}" for step in chosen)], rows, side=side)


def _readable_numbers(images: SizedImages, count: int) -> Iterator[int]:
    """The first image that can be read of each of `count` equal parts of the source."""
    total = len(images)
    parts = min(count, total)
    for part in range(parts):
        start, stop = part * total // parts, (part + 1) * total // parts
        tried = range(start, min(stop, start + _TRIES))
        yield from itertools.islice((number for number in tried if images[number].failure is None), 1)


def photo_of(images: SizedImages, number: int, side: int) -> Image.Image:
    """An image as people see it: of many channels the first three, of one channel the colours where it has some."""
    larger = replace(images, frame=replace(images.frame, shown=side))
    photo = replace(larger, channels=3)[number] if images.channels == 1 else larger[number]
    # What reads as grey may not read as colours.
    photo = larger[number] if photo.failure else photo
    if photo.failure:
        raise CapiError(f"{images.source.name(number)} cannot be read ({photo.failure}): repair it or take it out")
    return photos_of(photo.pixels[None])[0]


def _pixels(path: Path) -> Tensor | None:
    """The colours of a picture (rows, columns, 3); None where there is none, or none that can be read."""
    try:
        with open_image(path) as image:
            return torch.from_numpy(np.array(image.convert("RGB")))
    except (OSError, SyntaxError, ValueError):
        return None
