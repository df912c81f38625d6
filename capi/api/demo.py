"""The demo: pretrain on the built-in photos, then say what was learnt, in numbers and pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console

from capi.api.training import pretrain
from capi.config.files import load_config
from capi.config.schema import Config
from capi.config.trust import trusting
from capi.data.crops import Frame, normalize
from capi.data.sources import demo_photos
from capi.evals.classification import KnnClassification
from capi.evals.datasets import load_classification
from capi.evals.features import Encoding
from capi.evals.images import StillBatches
from capi.evals.raw_pixels import raw_pixel_accuracies
from capi.evals.tasks import DataOptions
from capi.models.features import CapiEncoder
from capi.report.pictures.curves import series
from capi.report.pictures.painters import Drawn
from capi.report.pictures.pca import pca_pictures, photos_of
from capi.report.pictures.sheets import Row, save_picture, sheet_of
from capi.zoo import build as networks
from capi.zoo.encoders import load_weights, untrained
from capi.zoo.run_folder import FILE, RunFolder, read_metrics, run_config

RECIPE = "demo"
# Best for the trained encoder, the untrained one and raw pixels alike, when each training photo is left out in turn.
NEIGHBOURS = 1
# The curve of a demo is the score that it ends with. The recipe has no evaluation: it serves any images.
EVALUATION = (
    "evaluations=[{benchmark: demo/knn, every_steps: 200, options: "
    f"{{tests: [test], neighbors: [{NEIGHBOURS}], votes: [majority], features: [mean_patch]}}}}]"
)
# Photos shown, and how much larger than in training the pictures are computed.
_SHOWN, _ENLARGED = 6, 4


@dataclass(frozen=True)
class DemoSummary:
    """What the demo ends with. Accuracies are of k-NN on photos that were never trained on."""

    run: Path
    split: str
    first_loss: float
    last_loss: float
    target_entropy: float | None
    prototype_use: float | None
    untrained: float
    trained: float
    pixels: float
    pixels_at: str
    pictures: list[Path]
    report: Path | None = None


def run_demo(
    out: str | Path,
    overrides: Sequence[str] = (),
    *,
    split: str = "test",
    resume: bool = False,
    overwrite: bool = False,
    device: str | None = None,
    console: Console | None = None,
) -> DemoSummary | None:
    """Pretrain the recipe `demo`, evaluated on photos it does not train on; None when it was interrupted."""
    config = load_config(RECIPE, [EVALUATION, *overrides])
    with trusting(overrides=overrides):
        done = pretrain(
            config, data="demo", out=out, resume=resume, overwrite=overwrite, device=device, console=console
        )
    return replace(summarize_run(done.path, split=split), report=done.report) if done.finished else None


def summarize_run(path: Path, *, split: str = "test") -> DemoSummary:
    """Score the encoder before and after training, and draw what it sees."""
    folder = RunFolder(path)
    config = run_config(folder)
    start, trained = untrained(str(path)), load_weights(path, "teacher")
    protocol = _protocol(config, split)
    data = protocol.data
    pixels = raw_pixel_accuracies(data.train, data.tests[split], protocol.encoding, NEIGHBOURS)
    best = max(pixels, key=lambda name: pixels[name])
    records = read_metrics(path / FILE)
    losses = series(records, "student_loss")[1]
    folder.pictures.mkdir(exist_ok=True)
    sheet = folder.pictures / "pca.png"
    save_picture(_draw(config, start, trained, split), sheet)
    return DemoSummary(
        run=path,
        split=split,
        first_loss=losses[0],
        last_loss=losses[-1],
        target_entropy=_last(records, "target_entropy"),
        prototype_use=_last(records, "prototype_use"),
        untrained=protocol.run(start).main,
        trained=protocol.run(trained).main,
        pixels=pixels[best],
        pixels_at=best,
        pictures=[sheet, *(picture for picture in [folder.pictures / "curves.png"] if picture.exists())],
    )


def _last(records: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """The last value of a metric; None where the run has none of it."""
    values = series(records, key)[1]
    return values[-1] if values else None


def _protocol(config: Config, split: str) -> KnnClassification:
    return KnnClassification(
        load_classification("demo", None, DataOptions(tests=(split,))),
        Encoding(size=config.data.height_and_width, batch_size=64),
        neighbors=(NEIGHBOURS,),
        votes=("majority",),
        features=("mean_patch",),
    )


@torch.inference_mode()
def _draw(config: Config, start: CapiEncoder, trained: CapiEncoder, split: str) -> Image.Image:
    """Photos of different categories beside their PCA pictures, before and after training."""
    photos = demo_photos(split)
    firsts = [photos.labels.index(label) for label in sorted(set(photos.labels))]
    height, width = config.data.height_and_width
    frame = Frame((height * _ENLARGED, width * _ENLARGED), channels=config.model.channels)
    pixels = StillBatches(photos.images, frame, torch.tensor(firsts[:_SHOWN]), _SHOWN)[0].images
    images = normalize(pixels, *networks.statistics(config))
    pictures = [
        photos_of(pixels),
        pca_pictures(start, images),
        pca_pictures(trained, images),
        pca_pictures(trained, images, joint=True),
    ]
    rows = [Row("", [Drawn(picture) for picture in row]) for row in zip(*pictures, strict=True)]
    notes = ["The first three principal components of the patch features as red, green and blue."]
    columns = ["photo", "untrained", "trained", "trained, jointly"]
    return sheet_of("Features before and after training", notes, columns, rows)
