"""What a run leaves to be seen: pictures while it goes on, a gallery of its prototypes and a report when it ends."""

import importlib.util
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from capi.config.schema import Config
from capi.data.locations import DataLocation, open_images
from capi.data.recorded import RecordedImagesError, open_recorded
from capi.data.sources import ImageSource
from capi.errors import CapiError
from capi.evals.classification import KnnClassification
from capi.evals.features import Encoding, OnProgress, silent
from capi.evals.raw_pixels import raw_pixel_accuracies
from capi.method.targets import LossLabel
from capi.report.costs import CostAssumptions
from capi.report.galleries import FOLDER, INDEX, NEIGHBORS, write_gallery, write_neighbors
from capi.report.picture_files import PIXELS
from capi.report.run_report import write_report
from capi.report.snapshots import Snapshots
from capi.runtime.atomic import atomic_open, atomic_write
from capi.runtime.devices import choose_device
from capi.runtime.progress import EvaluationProgress
from capi.train.evaluations import build_evaluations
from capi.train.health import METRICS, is_score, metric_of
from capi.train.loop import Evaluation
from capi.zoo.build import recorded_loss, recorded_target, statistics
from capi.zoo.checkpoint_files import CheckpointFolder
from capi.zoo.run_folder import FILE, RunFolder, read_metrics, run_config

_LOG = logging.getLogger("capi")


def pictures_over_time(config: Config, source: ImageSource, folder: RunFolder) -> Sequence[Evaluation]:
    """The snapshots that a config asks for: before the first step, after the last, and evenly in between."""
    if not config.run.snapshots:
        return []
    every = -(-config.optimization.steps // config.run.snapshots)
    size = config.data.height_and_width
    return [Snapshots(source, statistics(config), size, folder.pictures / "snapshots", every)]


def conclude(run: Path, data: DataLocation, *, finished: bool, device: torch.device) -> Path | None:
    """The report of a run that has ended. What fails here is logged and does no harm to the run."""
    try:
        if finished:
            write_pixel_scores(run, device)
            draw_gallery(run, partial(open_images, data), device=device)
        return write_report(run)
    except (CapiError, OSError, RuntimeError, MemoryError) as error:
        _LOG.warning("the report could not be written (%s): the run is complete; try `capi report %s`", error, run)
        return None


def write_pixel_scores(run: Path, device: torch.device) -> None:
    """What raw pixels score in the k-NN evaluations of a run, best of some sizes and distances, beside its pictures."""
    folder = RunFolder(run)
    scores = {}
    for evaluation in build_evaluations(run_config(folder), device):
        protocol = evaluation.protocol
        if isinstance(protocol, KnnClassification):
            test = next(iter(protocol.data.tests.values()))
            accuracies = raw_pixel_accuracies(protocol.data.train, test, protocol.encoding, protocol.neighbors[0])
            scores[evaluation.name] = max(accuracies.values())
    if scores:
        folder.pictures.mkdir(exist_ok=True)
        atomic_write(folder.pictures / PIXELS, json.dumps(scores))


def draw_curves(run: Path) -> None:
    """Draw the metrics of a run into its pictures, where matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        _LOG.info("curves are drawn where matplotlib is installed: pip install 'capi[pictures]'")
        return
    folder = RunFolder(run)
    folder.pictures.mkdir(exist_ok=True)
    loss = recorded_loss(folder.record(), run_config(folder))
    plot_metrics(read_metrics(run / FILE), folder.pictures / "curves.png", loss)


def draw_gallery(
    run: Path, images: Callable[[], ImageSource], *, device: torch.device, progress: OnProgress = silent
) -> str:
    """Draw nearest images, and prototypes where the run has any. Returns why its own images cannot be shown, if so."""
    try:
        if _clusters(RunFolder(run)):
            write_gallery(run, images(), encoding=Encoding(device=device, progress=progress))
        write_neighbors(run, images(), encoding=Encoding(device=device, progress=progress))
    except CapiError as error:
        _LOG.warning("prototypes and nearest images could not be drawn: %s", error)
        return str(error) if isinstance(error, RecordedImagesError) else ""
    return ""


def _clusters(folder: RunFolder) -> bool:
    return recorded_target(folder.record(), run_config(folder)).clusters


def _is_drawn(folder: RunFolder) -> bool:
    """Whether a run has all the pictures that are drawn at its end, or none can be drawn of it."""
    try:
        wanted = (NEIGHBORS, FOLDER) if _clusters(folder) else (NEIGHBORS,)
    except CapiError:
        return True
    return all((folder.pictures / name / INDEX).exists() for name in wanted)


def report(
    run: str | Path,
    out: str | Path | None = None,
    *,
    watts: float | None = None,
    carbon: float | None = None,
    device: torch.device | str | None = None,
    console: Console | None = None,
) -> Path:
    """One HTML file about a run that opens anywhere, by default report.html in its folder.

    `watts` of the device and `carbon` in kg of CO2 equivalent a kWh replace what the report would assume. The gallery
    is drawn if there is none yet and a checkpoint to draw it from.
    """
    folder, missing, costs = RunFolder(Path(run)), "", CostAssumptions(watts, carbon)
    chosen = choose_device(device)
    record = folder.record(also_newer=True)
    if not _is_drawn(folder) and CheckpointFolder(folder.checkpoints).steps():
        with EvaluationProgress(console) as progress:
            missing = draw_gallery(folder.path, partial(open_recorded, record), device=chosen, progress=progress)
    return write_report(folder.path, None if out is None else Path(out), costs, missing=missing)


def series(records: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric, where it was written."""
    points = [(record["step"], record[key]) for record in records if record.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def plot_metrics(records: Sequence[Mapping[str, Any]], path: Path, loss: LossLabel) -> None:
    """One panel for each kind of metric that the target has, into a PNG; `loss` names the student's."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise CapiError("curves need an extra: pip install 'capi[pictures]'") from error
    logged = {key for record in records for key in record}
    scores = sorted(filter(is_score, logged))
    plotted = [metric_of(metric.key, loss) for metric in METRICS if metric.plotted]
    metrics = [metric for metric in plotted if metric.key in logged] or plotted
    titles = {metric.key: metric.title for metric in metrics} | {"student_loss": f"{loss.name} of the student"}
    panels = [(titles[each.key] + (f" ({each.unit})" if each.unit else ""), [each.key]) for each in metrics]
    panels += [("Evaluations", scores)] if scores else []
    rows = -(-len(panels) // 3)
    figure = Figure(figsize=(12, 3.2 * rows), layout="constrained")
    axes = figure.subplots(rows, 3).flatten()
    for (title, keys), axis in zip(panels, axes, strict=False):
        for key in keys:
            steps, values = series(records, key)
            axis.plot(steps, values, label=key, linewidth=1.2, marker="o" if len(steps) < 12 else None, markersize=3)
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("step")
        axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axis.grid(alpha=0.3)
        # The title says which metric it is, unless it is that of all scores.
        if keys[0] in scores:
            axis.legend(fontsize=8)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    with atomic_open(path) as file:
        figure.savefig(file, dpi=110, format="png")
