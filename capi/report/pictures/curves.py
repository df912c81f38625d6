"""The curves of a run: losses, entropy, prototype use, and what the evaluations say."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from capi.errors import CapiError
from capi.method.targets import LossLabel
from capi.runtime.atomic import atomic_open
from capi.train.health import is_score, metric_of

_PANELS = ("student_loss", "clustering_loss", "target_entropy", "prototype_use", "learning_rate")


def series(records: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric, where it was written."""
    points = [(record["step"], record[key]) for record in records if record.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def draw_curves(records: Sequence[Mapping[str, Any]], path: Path, loss: LossLabel) -> None:
    """One panel for each kind of metric that the target has, into a PNG; `loss` names the student's."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise CapiError("curves need an extra: pip install 'capi[pictures]'") from error
    logged = {key for record in records for key in record}
    scores = sorted(filter(is_score, logged))
    metrics = [metric_of(key, loss) for key in _PANELS if key in logged] or [metric_of(key, loss) for key in _PANELS]
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
