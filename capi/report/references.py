"""Curves of finished healthy runs, shipped with the package, and where another run's curves lie against them.

A reference is made of several runs that differ in their seed alone. Of every metric it holds one value for each
twentieth of the run and each seed: the median of what was logged there. Healthy runs lie in a band: from the lowest
to the highest seed, widened on either side by the distance between the two, and by 2 % of the largest value at least,
since few seeds do not show how far healthy runs spread. A curve is outside when most of its last three values are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from capi.config.files import differences, parse_config
from capi.config.schema import Config
from capi.errors import CapiError
from capi.report.metrics_reader import MetricsReader
from capi.report.pages.data import Column
from capi.runtime.documents import parse_object
from capi.zoo.run_folder import FILE, WALL_CLOCK, RunFolder, run_config

FORMAT_VERSION = 1
POINTS = 20
_JUDGED = 3
_LEAST_WIDENING = 0.02
# Schedules follow from the config, times from the machine.
_NOT_COMPARED = (*WALL_CLOCK, "learning_rate", "teacher_momentum", "broken_images")
# What may differ between runs without their curves being others.
_FREE_KEYS = ("seed", "evaluations", "checkpoint", "run", "data.workers", "data.cache_mib", "data.broken_limit")
# What a user may try out on the same model and images, and see in the curves what it does.
_SETTINGS = ("masking", "clustering", "optimization")
Curve = list[float | None]


class Band(NamedTuple):
    """Where healthy values lie."""

    low: float
    high: float


@dataclass(frozen=True)
class CurveComparison:
    """The newest value of a metric beside the reference runs at the same share of the run."""

    metric: str
    share: float
    value: float
    seeds: Band
    band: Band
    outside: bool


@dataclass(frozen=True)
class Reference:
    """Curves of runs with one config: for each metric one curve a seed."""

    name: str
    config: Config
    fingerprint: str
    seeds: tuple[int, ...]
    curves: Mapping[str, Sequence[Curve]]

    def comparable(self, config: Config) -> bool:
        """Whether curves of a run with this config mean the same: the same model, crops and number of steps."""
        same_length = config.optimization.steps == self.config.optimization.steps
        return same_length and not differences(self.config, config, (*_FREE_KEYS, *_SETTINGS))

    def changes(self, config: Config) -> list[str]:
        """What a comparable run has set otherwise, which may be why its curves are others."""
        return differences(self.config, config, _FREE_KEYS)

    def compare(self, columns: Mapping[str, Column], config: Config) -> list[CurveComparison]:
        """Every metric that both have; scores only where they were measured in the same way."""
        same_scores = self.config.evaluations == config.evaluations
        comparisons = []
        for metric, curves in self.curves.items():
            if metric in columns and (same_scores or "/" not in metric):
                compared = compare(metric, curve_of(columns[metric], config.optimization.steps), curves)
                comparisons += [compared] if compared else []
        return comparisons

    def left_out(self) -> Iterator[CurveComparison]:
        """Each reference run compared with the others, at each share of the run: what is outside is a false alarm."""
        for metric, curves in self.curves.items():
            for curve in curves:
                others = [other for other in curves if other is not curve]
                for length in range(1, POINTS + 1):
                    if curve[length - 1] is not None and (comparison := compare(metric, curve[:length], others)):
                        yield comparison


def curve_of(column: Column, total_steps: int) -> Curve:
    """The median of each twentieth of the run; None where nothing was logged."""
    at = np.clip(np.ceil(column.steps * POINTS / total_steps).astype(np.int64) - 1, 0, POINTS - 1)
    values = [column.values[(at == number) & np.isfinite(column.values)] for number in range(POINTS)]
    return [float(np.median(numbers)) if len(numbers) else None for numbers in values]


def compare(metric: str, curve: Curve, references: Sequence[Curve]) -> CurveComparison | None:
    """The last values of a curve against the band; None where they have no point in common."""
    seeds: list[Band | None] = []
    for number in range(len(curve)):
        values = [value for reference in references if (value := reference[number]) is not None]
        seeds.append(Band(min(values), max(values)) if values else None)
    points = enumerate(zip(curve, seeds, strict=True))
    comparable = [(number, value, band) for number, (value, band) in points if value is not None and band is not None]
    if not comparable:
        return None
    judged = comparable[-_JUDGED:]
    beyond = sum(not (_widened(band).low <= value <= _widened(band).high) for _, value, band in judged)
    number, value, band = comparable[-1]
    return CurveComparison(metric, (number + 1) / POINTS, value, band, _widened(band), outside=2 * beyond > len(judged))


def reference_for(config: Config, fingerprint: object) -> Reference | None:
    """The reference that a run can be compared with, if the package has one."""
    for reference in shipped_references():
        if reference.fingerprint == fingerprint and reference.comparable(config):
            return reference
    return None


@cache
def shipped_references() -> list[Reference]:
    """All that come with the package."""
    folder = resources.files("capi.report") / "reference_curves"
    if not folder.is_dir():
        return []
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".json")), key=lambda file: file.name)
    return [parse_reference(file.read_text(encoding="utf-8"), file.name) for file in files]


def parse_reference(text: str, source: str) -> Reference:
    """A reference from the text of its file."""
    try:
        tree = parse_object(text, source)
        if tree["format"] > FORMAT_VERSION:
            raise CapiError(
                f"{source} has format {tree['format']}, this capi knows up to {FORMAT_VERSION}: install a newer capi"
            )
        return Reference(
            name=tree["name"],
            config=parse_config(tree["config"], source=source),
            fingerprint=tree["fingerprint"],
            seeds=tuple(tree["seeds"]),
            curves=tree["curves"],
        )
    except (KeyError, TypeError) as error:
        raise CapiError(
            f"{source} is no file of reference curves ({type(error).__name__}): install capi again"
        ) from error


def make_reference(runs: Sequence[Path], name: str) -> dict[str, Any]:
    """What the file of a reference holds, from finished runs that differ in their seed."""
    if len(runs) < 2:
        raise CapiError("a band needs two finished runs at least, with different seeds: give more runs")
    configs = [run_config(RunFolder(run)) for run in runs]
    prints = [RunFolder(run).record()["data"]["fingerprint"] for run in runs]
    _refuse_unlike(runs, configs, prints)
    curves = [_curves_of(run, config.optimization.steps) for run, config in zip(runs, configs, strict=True)]
    metrics = [metric for metric in curves[0] if all(metric in curve for curve in curves)]
    return {
        "format": FORMAT_VERSION,
        "name": name,
        "seeds": [config.seed for config in configs],
        "fingerprint": prints[0],
        "config": configs[0].model_dump(mode="json"),
        "curves": {
            metric: [[None if value is None else float(f"{value:.6g}") for value in curve[metric]] for curve in curves]
            for metric in metrics
        },
    }


def _refuse_unlike(runs: Sequence[Path], configs: Sequence[Config], prints: Sequence[str]) -> None:
    for run, config, fingerprint in zip(runs[1:], configs[1:], prints[1:], strict=True):
        changed = differences(configs[0], config, [key for key in _FREE_KEYS if key != "evaluations"])
        if changed:
            raise CapiError(f"{run} has another config than {runs[0]} ({'; '.join(changed)}): give runs of one config")
        if fingerprint != prints[0]:
            raise CapiError(f"{run} was trained on other images than {runs[0]}: give runs of the same images")
    if len({config.seed for config in configs}) < len(configs):
        raise CapiError("two of the runs have the same seed: give runs with different seeds")


def _curves_of(run: Path, total_steps: int) -> dict[str, Curve]:
    reader = MetricsReader(run / FILE, lambda _: None, lambda: None)
    reader.read()
    if reader.step != total_steps:
        raise CapiError(f"{run} is not finished (step {reader.step or 0} of {total_steps}): give finished runs")
    columns = reader.columns()
    return {key: curve_of(column, total_steps) for key, column in columns.items() if key not in _NOT_COMPARED}


def _widened(seeds: Band) -> Band:
    by = max(seeds.high - seeds.low, _LEAST_WIDENING * max(abs(seeds.low), abs(seeds.high)))
    return Band(seeds.low - by, seeds.high + by)
