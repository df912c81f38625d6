"""What a frozen encoder gives for a user's images: features in a file, the most similar images, labels of a probe."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from capi.data.crops import image_size_of
from capi.data.locations import list_images
from capi.data.sources import ENDINGS, ImageSource, find_images
from capi.data.zips import ZipImages
from capi.errors import CapiError
from capi.evals import retrieval
from capi.evals.extraction import Extracted, extract_features
from capi.evals.feature_files import read_features
from capi.evals.features import Encoding
from capi.evals.fitted_probes import load_probe
from capi.evals.prediction import Prediction
from capi.evals.results import make_folder
from capi.evals.retrieval import Match
from capi.evals.team import executing, prepared
from capi.evals.tiles import stitch, tiling_of
from capi.report.pictures import matches
from capi.report.pictures.pca import large_map_picture
from capi.report.pictures.sheets import enlarged, save_picture
from capi.report.predictions import Predicted, write_predictions
from capi.runtime.atomic import Output
from capi.runtime.devices import choose_device, choose_workers
from capi.runtime.image_files import is_below
from capi.runtime.progress import EvaluationProgress, default_console
from capi.runtime.summary import Summary
from capi.types import Names, VisionEncoder, listed
from capi.zoo.encoders import open_encoder, open_noted_encoder
from capi.zoo.weights import WeightsName

_LOG = logging.getLogger("capi")
# The short side of a map's picture, where the map has fewer patches.
PICTURE_SIDE = 512
# Matches that a notebook shows.
_SHOWN_MATCHES = 20
PICTURE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp")


def extract(
    model: str | Path | VisionEncoder,
    data: str | Path,
    *,
    out: str | Path,
    kinds: str | Sequence[str] = ("mean_patch",),
    image_size: int | tuple[int, int] | None = None,
    whole: bool = False,
    dtype: str = "float32",
    batch_size: int = 32,
    split: str | None = None,
    label: str = "label",
    weights: WeightsName = "teacher",
    device: torch.device | str | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> Extracted:
    """Features of every image of a folder, a zip, a CSV or another source, with names and labels, in one file.

    The file is safetensors or parquet, as its ending says.
    `kinds` are among patch, mean_patch, pooled and register; `image_size` is by default the encoder's own. An
    extraction that was interrupted resumes.
    """
    asked = (image_size, image_size) if isinstance(image_size, int) else image_size
    named = {"model": str(model), "weights": weights} if isinstance(model, str | Path) else {}
    with executing(device, console) as run:
        with prepared(run.processes):
            encoder = open_encoder(model, weights=weights, device=run.device)
            listed = list_images(str(data), split, label)
        images, processes = len(listed.images) // run.processes.size, run.processes.count_on_machine()
        return extract_features(
            encoder,
            listed.images,
            Output(Path(out), overwrite=overwrite),
            encoding=Encoding(
                size=image_size_of(encoder) if asked is None else asked,
                batch_size=batch_size,
                workers=choose_workers(None, run.device, images=images, processes=processes),
                device=run.device,
                progress=run.progress,
            ),
            labels=listed.labels,
            kinds=[kinds] if isinstance(kinds, str) else kinds,
            whole=whole,
            about={**named, "data": str(data), "split": split},
            dtype=dtype,
            processes=run.processes,
        )


@dataclass(frozen=True, repr=False)
class Stitched(Summary):
    """The map of a large image: its file, its picture, its rows and columns."""

    path: Path
    picture: Path
    grid: tuple[int, int]
    resumed: bool = False
    """Whether it had been complete before."""

    def summary(self) -> tuple[str, dict[str, str]]:
        rows, columns = self.grid
        note = ", complete before" if self.resumed else ""
        return f"{self.path}: {rows} x {columns} patches{note}", {"picture": str(self.picture)}


class Matches(Summary, list[Match]):
    """The most similar images or patches, best first: a list. The image itself, or the patch itself, is left out."""

    left_out: Match | None = None
    """What was left out, where the file has it too."""

    def summary(self) -> tuple[str, dict[str, str]]:
        rows = {
            str(rank): f"{match.similarity:.4f}  {match.name}"
            + ("" if match.patch is None else f", patch {match.patch[0]}, {match.patch[1]}")
            + (f" ({match.label})" if match.label else "")
            for rank, match in enumerate(self[:_SHOWN_MATCHES], 1)
        }
        more = {"...": f"{len(self) - _SHOWN_MATCHES} more"} if len(self) > _SHOWN_MATCHES else {}
        return f"The {len(self)} most similar", rows | more


def extract_tiles(
    model: str | Path | VisionEncoder,
    data: str | Path,
    *,
    out: str | Path,
    tile: int,
    overlap: int | None = None,
    dtype: str = "float32",
    batch_size: int = 8,
    weights: WeightsName = "teacher",
    device: torch.device | str | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> list[Stitched]:
    """A feature map at full resolution of each large image: tiles that overlap, stitched, with a PCA picture beside.

    `data` is an image, or anything that `extract` takes; `out` a folder. Where tiles overlap (by default by an eighth)
    each patch comes from the tile in which it lies farther from the edge. What was interrupted resumes.
    """
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise CapiError(f"{folder} is a file: maps of tiles go to a folder, one file and one picture for each image")
    named = {"model": str(model), "weights": weights} if isinstance(model, str | Path) else {}
    done = []
    with executing(device, console) as run:
        with prepared(run.processes):
            if run.processes.size > 1:
                raise CapiError("tiles are encoded by one process: start the command without torchrun")
        encoder = open_encoder(model, weights=weights, device=run.device)
        tiling = tiling_of(encoder, tile, overlap)
        image = not Path(data).is_dir() and str(data).lower().endswith(ENDINGS)
        source = find_images([Path(data)]) if image else list_images(str(data)).images
        encoding = Encoding(batch_size=batch_size, device=run.device, progress=run.progress)
        for number in range(len(source)):
            path = folder / f"{source.name(number)}.safetensors"
            if not is_below(path, [folder]):
                raise CapiError(f"the image {source.name(number)!r} leads out of {folder}: rename it")
            grid, resumed = stitch(
                encoder,
                source,
                number,
                Output(path, overwrite),
                tiling=tiling,
                encoding=encoding,
                about={**named, "data": str(data)},
                dtype=dtype,
            )
            picture = folder / f"{source.name(number)}.pca.png"
            if overwrite or not resumed or not picture.exists():
                drawn = large_map_picture(read_features(path).array("patch")[0])
                save_picture(enlarged(drawn, PICTURE_SIDE), picture)
            done.append(Stitched(path, picture, grid, resumed))
    return done


def nearest(
    file: str | Path,
    image: str | Path,
    *,
    model: str | Path | VisionEncoder | None = None,
    count: int = 10,
    at: tuple[float, float] | None = None,
    kind: str | None = None,
    out: str | Path | None = None,
    images: str | Path | None = None,
    device: torch.device | str | None = None,
    overwrite: bool = False,
) -> Matches:
    """The images of a file of `extract` that are most similar to an image; with a point `at`, the patches.

    The image itself, where the file has it too, is left out; with `at` the patch itself.
    `model` is by default the one the file was made with; one that is Python, or that is not on this machine and not a
    published model either, must be given, since a file may come from anyone. With `out`, a contact sheet is written
    there. `images` is the folder of the file's images; it must be given where the file has only its name, since they
    were extracted by an absolute path.
    """
    chosen = choose_device(device)
    picture = None if out is None else _picture(Output(Path(out), overwrite))
    features = read_features(Path(file))
    about = features.facts.about
    weights: WeightsName = about.get("weights", "teacher")
    if model is not None:
        encoder = open_encoder(model, weights=weights, device=chosen)
    elif "model" in about:
        encoder = open_noted_encoder(about["model"], file, weights=weights, device=chosen)
    else:
        raise CapiError(f"{file} does not say which model made it: name the model")
    given = None if images is None else Path(images)
    nearest_images = retrieval.find_similar(
        features,
        encoder,
        Path(image),
        encoding=Encoding(device=chosen),
        # One more, in place of the image itself.
        count=count + 1,
        at=at,
        kind=kind,
        root=given,
    )
    similar = Matches([match for match in nearest_images if not match.itself][:count])
    similar.left_out = next((match for match in nearest_images if match.itself), None)
    if picture is not None:
        named = features.facts.root
        shown: ImageSource | Path | None = Path(named) if given is None and named is not None else given
        if about.get("data") == "demo" and given is None:
            shown = list_images("demo", about.get("split")).images
        elif isinstance(shown, Path) and shown.suffix.lower() == ".zip" and shown.is_file():
            shown = ZipImages([shown])
        elif isinstance(shown, Path) and not shown.is_dir():
            _LOG.warning("there is no folder %s with the images of %s: give it with --images", shown, file)
        sheet = matches.similarity_sheet(Path(image), similar, shown, framing=features.facts.framing, at=at)
        make_folder(picture.parent)
        save_picture(sheet, picture)
    return similar


def predict(
    model: str | Path | VisionEncoder,
    probe: str | Path,
    images: Names,
    *,
    out: str | Path,
    weights: WeightsName = "teacher",
    device: torch.device | str | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> Predicted:
    """Label images with a probe that an evaluation fitted: a CSV of classes, or masks and overlays."""
    chosen = choose_device(device)
    fitted = load_probe(Path(probe))
    encoder = open_encoder(model, weights=weights, device=chosen)
    source = find_images([Path(image) for image in listed(images)])
    with EvaluationProgress(console or default_console()) as progress:
        encoding = Encoding(device=chosen, workers=choose_workers(None, chosen, images=len(source)), progress=progress)
        return write_predictions(Prediction(encoder, fitted, source, encoding), Output(Path(out), overwrite))


def _picture(output: Output) -> Path:
    """A name that a picture may have; any other raises before the work, as does a file that would be replaced."""
    path = output.path
    if path.suffix.lower() not in PICTURE_ENDINGS or path.is_dir():
        raise CapiError(f"{path} cannot be a picture: give a file that ends in {', '.join(PICTURE_ENDINGS)}")
    output.check_file()
    return path
