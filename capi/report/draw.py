"""What frozen features look like: PCA, components, clusters and atoms of images by several models, at several sizes.

Written are a PNG for each image and kind, a sheet for each kind, and a page that shows all. Any number of images needs
the memory of a few: one pass sums up all patches where pictures are to be comparable, another one draws.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from PIL import Image
from rich.console import Console
from torch import Tensor

from capi.config.schema import Config
from capi.data.sources import EncodedImages, ImageSource, demo_photos, find_images
from capi.errors import CapiError, counted, nearest
from capi.evals.comparison_cells import shared_names, short_names
from capi.evals.features import Encoding
from capi.evals.results import make_folder
from capi.report.pages.page import render
from capi.report.pictures.feature_maps import FeatureMaps, PictureFrame, none_readable, photos, picture_side
from capi.report.pictures.painters import PAINTERS, Drawn, Painter, PrototypeMaps
from capi.report.pictures.pca import PatchSummary, photos_of
from capi.report.pictures.sheets import DrawnModel, Photo, figure_of, save_picture, tiled
from capi.report.predictions import FAILED, write_failed
from capi.runtime.atomic import Output, atomic_write
from capi.runtime.atomic import make_folder as make_folder_inside
from capi.runtime.devices import choose_device
from capi.runtime.privacy import hide_paths
from capi.runtime.progress import EvaluationProgress
from capi.types import VisionEncoder
from capi.zoo.build import recorded_target
from capi.zoo.checkpoint_files import CheckpointFolder, StoredTensors
from capi.zoo.encoders import open_encoder
from capi.zoo.run_folder import RunFolder, run_config
from capi.zoo.weights import WeightsName

PICTURE_KINDS = (*PAINTERS, "prototypes")
DEFAULT_KINDS = ("pca", "components", "clusters")
PAGE = "index.html"
# Photos of the demo that stand in where no images are given, each of another category.
_BUILT_IN = 6
# Short sides of the pictures that are written, and how much there is on a sheet at most.
_SIDE, _SMALL_SIDE = 256, 128
_SHEET_IMAGES = 12


@dataclass(frozen=True)
class PictureLink:
    """A picture beside the page, by its path from there."""

    path: str
    caption: str
    wide: bool = False


@dataclass(frozen=True)
class SheetSection:
    """The sheet of one kind of picture, with what there is to know."""

    key: str
    title: str
    explanation: str
    sheet: str


@dataclass(frozen=True)
class ImageCard:
    """All pictures of one image."""

    name: str
    figures: Sequence[PictureLink]


@dataclass(frozen=True)
class Pictured:
    """What was written where, the page first; and why some images could not be drawn."""

    folder: Path
    files: list[Path]
    failed: dict[str, str]

    @property
    def page(self) -> Path:
        return self.folder / PAGE


@dataclass(frozen=True)
class Prototypes:
    """The prototypes of a run, which an exported encoder does not have."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass
class _Column:
    """One model at one resolution, and what it drew of the images that are on the sheets."""

    name: str
    encoder: VisionEncoder
    frame: PictureFrame
    folder: str
    painters: dict[str, Painter]
    shown: dict[str, dict[int, list[Drawn]]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.name}, {self.frame.side} px"

    def drawn(self, kind: str) -> DrawnModel:
        return DrawnModel(self.name, f"{self.frame.side} px", self.shown.get(kind, {}))


def draw(
    models: Sequence[str | Path],
    images: Sequence[str | Path] = (),
    *,
    out: str | Path,
    sizes: Sequence[int] = (),
    kinds: Sequence[str] = DEFAULT_KINDS,
    joint: bool = False,
    whole: bool = False,
    weights: WeightsName = "teacher",
    device: torch.device | str | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> Pictured:
    """Pictures of what encoders see in images: PCA, single components, clusters, a dictionary; PNGs and a page.

    Without images, six photos of the demo are shown, which need the extra `demo`; without sizes, each encoder sees
    images at its own.
    """
    chosen = choose_device(device)
    models, images = ([each] if isinstance(each, str | Path) else each for each in (models, images))
    named = {str(model): open_encoder(model, weights=weights, device=chosen) for model in models}
    folders = {str(model): Path(model) for model in models if Path(model).is_dir()}
    prototypes = {name: load_prototypes(run) for name, run in folders.items()} if "prototypes" in kinds else None
    with EvaluationProgress(console) as progress:
        return picture(
            named,
            [Path(image) for image in images],
            Output(Path(out), overwrite),
            sizes=sizes,
            kinds=[kinds] if isinstance(kinds, str) else kinds,
            joint=joint,
            whole=whole,
            encoding=Encoding(device=chosen, batch_size=8, progress=progress),
            prototypes=prototypes,
        )


def picture(
    models: Mapping[str, VisionEncoder],
    images: Sequence[Path],
    output: Output,
    *,
    sizes: Sequence[int] = (),
    kinds: Sequence[str] = DEFAULT_KINDS,
    joint: bool = False,
    whole: bool = False,
    encoding: Encoding | None = None,
    prototypes: Mapping[str, Prototypes] | None = None,
) -> Pictured:
    """Draw images (files and folders; none: six built-in photos) by all models at all sizes.

    Without sizes each model has its own, of which the short side counts. `joint` fits components to all images
    together, `whole` shows images in their own aspect instead of the square in their middle. The kind "prototypes"
    draws the models that `prototypes` has an entry for.
    """
    encoding, prototypes = encoding or Encoding(), prototypes or {}
    _check_request(models, sizes, kinds, prototypes)
    source = find_images(images) if images else built_in_photos()
    output.check_folder()
    out = output.path
    columns = _columns(models, sizes, kinds, prototypes, joint=joint, whole=whole)
    make_folder(out)
    (out / FAILED).unlink(missing_ok=True)
    job = _Job(source, out, encoding, columns, tuple(dict.fromkeys(kinds)))
    job.draw_photos()
    for column in columns:
        job.draw_column(column)
    return job.finish()


def built_in_photos() -> EncodedImages:
    """Some photos of the demo, which the recipe `demo` does not train on."""
    try:
        photos = demo_photos("val")
    except CapiError as error:
        raise CapiError(f"{error}, or give images") from error
    firsts = [photos.labels.index(label) for label in sorted(set(photos.labels))][:_BUILT_IN]
    images = photos.images
    return EncodedImages([images.names[number] for number in firsts], [images.contents[number] for number in firsts])


def in_features(config: Config) -> bool:
    """Whether prototypes and the features of the encoder can be compared."""
    return (config.target.layers, config.target.normalize) == ("last", "none")


def load_prototypes(run: Path, *, any_layers: bool = False) -> Prototypes:
    """The prototypes of a run's newest checkpoint; only if asked for `any_layers` those that no features belong to."""
    folder = RunFolder(run)
    config = run_config(folder)
    if not recorded_target(folder.record(), config).clusters:
        raise CapiError(
            f"{run} has no prototypes: it was trained with target.kind={config.target.kind}; choose other pictures"
        )
    if not any_layers and not in_features(config):
        raise CapiError(
            f"the prototypes of {run} stand among averages of the teacher's layers (target.layers, target.normalize), "
            "not among its features: choose other pictures"
        )
    newest = CheckpointFolder(folder.checkpoints).newest
    with torch.device("meta"):
        wanted = {"clustering.prototypes": torch.empty(config.clustering.prototypes, config.model.width)}
        if config.clustering.bias:
            wanted["clustering.bias"] = torch.empty(config.clustering.prototypes)
    taken = StoredTensors(newest).take(wanted)
    return Prototypes(taken["clustering.prototypes"], taken.get("clustering.bias"))


def _check_request(
    models: Mapping[str, VisionEncoder],
    sizes: Sequence[int],
    kinds: Sequence[str],
    prototypes: Mapping[str, Prototypes],
) -> None:
    if not models:
        raise CapiError("there is no model to draw with: give at least one")
    if min(sizes, default=1) < 1:
        raise CapiError(f"sizes must be at least 1 pixel, but {list(sizes)} came: give such as 224")
    choice = f"choose from {', '.join(PICTURE_KINDS)}"
    if not kinds:
        raise CapiError(f"there is nothing to draw: {choice}")
    for kind in kinds:
        if kind not in PICTURE_KINDS:
            raise CapiError(
                f'there is no picture "{kind}"{nearest(kind, PICTURE_KINDS)}: choose from {", ".join(PICTURE_KINDS)}'
            )
    if "prototypes" in kinds and not prototypes.keys() & models.keys():
        raise CapiError("none of the models has prototypes to draw: give a run folder, or leave that kind out")
    for name in prototypes.keys() & models.keys():
        if prototypes[name].weight.shape[1] != models[name].width:
            width = prototypes[name].weight.shape[1]
            raise CapiError(
                f"{name} has width {models[name].width}, but its prototypes {width}: they are of another model"
            )


def _columns(
    models: Mapping[str, VisionEncoder],
    sizes: Sequence[int],
    kinds: Sequence[str],
    prototypes: Mapping[str, Prototypes],
    *,
    joint: bool,
    whole: bool,
) -> list[_Column]:
    """Models from left to right, each at all its sizes; sizes that patches round to the same one count once."""
    shared, columns = shared_names(list(models)), list[_Column]()
    shortened = short_names(list(shared.values()))
    names = {model: shortened[name] for model, name in shared.items()}
    for number, (model, encoder) in enumerate(models.items()):
        asked = sizes or [picture_side(encoder)]
        for side in dict.fromkeys(PictureFrame(size, encoder.patch_size).side for size in asked):
            painters = {kind: PAINTERS[kind](joint) for kind in kinds if kind in PAINTERS}
            if "prototypes" in kinds and model in prototypes:
                painters["prototypes"] = PrototypeMaps(prototypes[model].weight, prototypes[model].bias)
            name = re.sub(r"[^A-Za-z0-9._-]+", "-", names[model]).strip("-.")[-60:] or "model"
            folder = f"{number + 1}-{name}-{side}"
            columns.append(
                _Column(names[model], encoder, PictureFrame(side, encoder.patch_size, whole), folder, painters)
            )
    return columns


@dataclass
class _Job:
    """What is being drawn, and what of it is done."""

    source: ImageSource
    out: Path
    encoding: Encoding
    columns: list[_Column]
    kinds: tuple[str, ...]
    failed: dict[str, str] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    shown: dict[int, Photo] = field(default_factory=dict)
    figures: dict[int, list[PictureLink]] = field(default_factory=dict)

    def draw_photos(self) -> None:
        """What the first model is shown of each image."""
        first, workers = self.columns[0], self.encoding.workers
        drawn = photos(self.source, first.frame, first.encoder, side=_SIDE, workers=workers, failed=self.failed)
        for number, pixels in drawn:
            photo = photos_of(pixels[None])[0]
            self._save(photo, f"photos/{self.source.name(number)}.jpg", number, "photo")
            if len(self.shown) < _SHEET_IMAGES:
                self.shown[number] = Photo(self.source.name(number), photo)
            self.encoding.progress("photos", number + 1, len(self.source))
        if not self.figures:
            raise none_readable(self.failed)

    def draw_column(self, column: _Column) -> None:
        maps = FeatureMaps(column.encoder, self.source, column.frame, self.encoding, column.label, failed=self.failed)
        together = [painter for painter in column.painters.values() if painter.together]
        if together:
            summary = PatchSummary()
            for numbered in maps:
                summary.add(numbered.feature_map.flatten(0, 1))
            for painter in together if summary.seen else []:
                painter.fit(summary)
        for number, feature_map in maps:
            for kind, painter in column.painters.items():
                self._draw(column, kind, number, painter.draw(feature_map))

    def _draw(self, column: _Column, kind: str, number: int, drawn: list[Drawn]) -> None:
        caption = f"{column.painters[kind].title}: {column.label}"
        many = len(drawn) > 1
        tiles = tiled(drawn, _SMALL_SIDE if many else _SIDE)
        self._save(tiles, f"{kind}/{column.folder}/{self.source.name(number)}.png", number, caption, wide=many)
        if number in self.shown:
            column.shown.setdefault(kind, {})[number] = drawn

    def _save(self, image: Image.Image, name: str, number: int, caption: str, *, wide: bool = False) -> None:
        self._write(image, name)
        self.figures.setdefault(number, []).append(PictureLink(name, caption, wide))

    def _write(self, image: Image.Image, name: str) -> None:
        path = self.out / name
        make_folder_inside(path.parent, inside=self.out)
        # Squares of one colour become small at the quickest level already.
        save_picture(image, path, compress_level=1)
        self.files.append(path)

    def finish(self) -> Pictured:
        """The sheets, the page, and the list of what failed."""
        sections = []
        for kind in self.kinds:
            columns = [column for column in self.columns if kind in column.painters]
            painter = columns[0].painters[kind]
            drawn = [column.drawn(kind) for column in columns]
            self._write(figure_of(painter, self.shown, drawn, images=len(self.figures)), f"{kind}.png")
            sections.append(SheetSection(kind, painter.title, painter.explanation, f"{kind}.png"))
        cards = [ImageCard(self.source.name(number), figures) for number, figures in sorted(self.figures.items())]
        failed = hide_paths(self.failed)
        page = as_page(sections, cards, failed, self._facts())
        atomic_write(self.out / PAGE, page)
        if failed:
            write_failed(failed, self.out)
        return Pictured(self.out, [self.out / PAGE, *self.files], self.failed)

    def _facts(self) -> list[str]:
        models = ", ".join(dict.fromkeys(column.name for column in self.columns))
        sides = ", ".join(str(side) for side in sorted({column.frame.side for column in self.columns}))
        aspect = "in their own aspect" if self.columns[0].frame.whole else "the square in their middle"
        count = counted(len(self.figures), "image")
        return [f"{models} · {count}, {aspect} · short side of {sides} px"]


def as_page(
    sections: Sequence[SheetSection], cards: Sequence[ImageCard], failed: Mapping[str, str], facts: Sequence[str]
) -> str:
    """The page beside the pictures."""
    return render(
        "pictures.html",
        "What the features show",
        images="data: 'self' file:",
        sections=sections,
        cards=cards,
        failed=failed,
        facts=facts,
    )
