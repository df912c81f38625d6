"""The demo: pretrain on the built-in photos, then say what was learnt, in numbers and pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from rich.console import Console

from capi.api.training import pretrain
from capi.config.files import load_config
from capi.config.schema import Config
from capi.config.trust import trusting
from capi.data.crops import Frame, normalize
from capi.data.sources import demo_photos
from capi.evals.classification import KnnClassification
from capi.evals.datasets import load_classification
from capi.evals.features import Encoding, encoded_batches
from capi.evals.images import StillBatches
from capi.evals.raw_pixels import raw_pixel_accuracies
from capi.evals.tasks import DataOptions
from capi.models.features import CapiEncoder
from capi.report.curves import series
from capi.report.pictures.painters import Drawn
from capi.report.pictures.pca import pca_pictures, photos_of
from capi.report.pictures.sheets import Row, save_picture, sheet_of
from capi.runtime.image_files import open_image
from capi.zoo import build as networks
from capi.zoo.encoders import open_capi_encoder, untrained
from capi.zoo.run_folder import FILE, RunFolder, read_metrics, run_config

RECIPE = "demo"
# Best for the trained encoder, the untrained one and raw pixels alike, when each training photo is left out in turn.
NEIGHBORS = 1
# The curve of a demo is the score that it ends with. The recipe has no evaluation: it serves any images.
EVALUATION = (
    "evaluations=[{benchmark: demo/knn, every_steps: 200, options: "
    f"{{tests: [test], neighbors: [{NEIGHBORS}], votes: [majority], features: [mean_patch]}}}}]"
)
# Photos shown, how much larger than in training their features are drawn, and nearest photos beside each.
_SHOWN, _ENLARGED, _NEAREST = 6, 4, 5


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
    start, trained = untrained(str(path)), open_capi_encoder(path, "teacher")
    protocol = _protocol(config, split)
    data = protocol.data
    pixels = raw_pixel_accuracies(data.train, data.tests[split], protocol.encoding, NEIGHBORS)
    best = max(pixels, key=lambda name: pixels[name])
    records = read_metrics(path / FILE)
    losses = series(records, "student_loss")[1]
    folder.pictures.mkdir(exist_ok=True)
    sheet, nearest = folder.pictures / "pca.png", folder.pictures / "nearest.png"
    save_picture(_draw(config, start, trained, split), sheet)
    save_picture(_draw_nearest(protocol, trained, split), nearest)
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
        pictures=[sheet, nearest, *(picture for picture in [folder.pictures / "curves.png"] if picture.exists())],
    )


def _last(records: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """The last value of a metric; None where the run has none of it."""
    values = series(records, key)[1]
    return values[-1] if values else None


def _protocol(config: Config, split: str) -> KnnClassification:
    return KnnClassification(
        load_classification("demo", None, DataOptions(tests=(split,))),
        Encoding(size=config.data.height_and_width, batch_size=64),
        neighbors=(NEIGHBORS,),
        votes=("majority",),
        features=("mean_patch",),
    )


@torch.inference_mode()
def _draw(config: Config, start: CapiEncoder, trained: CapiEncoder, split: str) -> Image.Image:
    """Photos of different categories beside their PCA pictures, before and after training."""
    photos = demo_photos(split)
    height, width = config.data.height_and_width
    frame = Frame((height * _ENLARGED, width * _ENLARGED), channels=config.model.channels)
    pixels = StillBatches(photos.images, frame, torch.tensor(_shown(photos.labels)), _SHOWN)[0].images
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


def _draw_nearest(protocol: KnnClassification, trained: CapiEncoder, split: str) -> Image.Image:
    """Test photos, and the training photos with the most similar mean patch, each above its category."""
    banks, encoding = (demo_photos("train"), demo_photos(split)), protocol.encoding
    batches = [encoded_batches(trained, bank.images, encoding) for bank in banks]
    vectors = [torch.cat([batch.features.feature_map.mean((1, 2)) for batch in each]) for each in batches]
    chosen = torch.tensor(_shown(banks[1].labels))
    cosines = F.normalize(vectors[1][chosen], dim=1) @ F.normalize(vectors[0], dim=1).T
    similarity, nearest = cosines.topk(_NEAREST)

    def drawn(which: int, number: int, cosine: float | None = None) -> Drawn:
        photo = open_image(banks[which].images.contents[number])
        category = banks[which].categories[banks[which].labels[number]]
        return Drawn(ImageOps.exif_transpose(photo), caption=category + ("" if cosine is None else f"\n{cosine:.2f}"))

    rows = [
        Row("", [drawn(1, query), *(drawn(0, *match) for match in zip(numbers, cosines, strict=True))])
        for query, numbers, cosines in zip(chosen.tolist(), nearest.tolist(), similarity.tolist(), strict=True)
    ]
    notes = ["By the cosine of their mean patch features. No category was used in training."]
    columns = [f"{split} photo", "nearest", *(f"{rank}." for rank in range(2, _NEAREST + 1))]
    return sheet_of("Nearest photos to the trained encoder", notes, columns, rows, side=120)


def _shown(labels: Sequence[int]) -> list[int]:
    """The first photo of each of some categories."""
    return [labels.index(label) for label in sorted(set(labels))][:_SHOWN]
