"""Curves of a run's metrics as a picture, for a README or a model card; the report draws its own."""

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from capi.errors import CapiError
from capi.method.targets import LossLabel
from capi.runtime.atomic import atomic_open
from capi.train.health import METRICS, is_score, metric_of
from capi.zoo.build import recorded_loss
from capi.zoo.run_folder import FILE, RunFolder, read_metrics, run_config

_LOG = logging.getLogger("capi")


def draw_curves(run: Path) -> None:
    """Draw the metrics of a run into its pictures, where matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        _LOG.info("curves are drawn where matplotlib is installed: pip install 'capi[pictures]'")
        return
    folder = RunFolder(run)
    folder.pictures.mkdir(exist_ok=True)
    loss = recorded_loss(folder.record(), run_config(folder))
    plot_metrics(read_metrics(run / FILE), folder.pictures / "curves.png", loss)


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
