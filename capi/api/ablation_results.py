"""What the runs of a study have come to, read from their folders."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from capi.api.ablation_plan import FAILURE, Job, Study
from capi.errors import CapiError
from capi.report.ablation.outcomes import Point, RowOutcome, RunOutcome, TableOutcome
from capi.report.comparison.page import NAME as COMPARISON
from capi.report.doctor import doctor
from capi.report.picture_files import read_emergence
from capi.report.run_report import REPORT
from capi.runtime.documents import read_object
from capi.runtime.privacy import hide_paths, hide_paths_within
from capi.train.cost.summary import planned_cost
from capi.zoo.metrics import FILE, read_metrics
from capi.zoo.run_folder import RunFolder

_TEACHER = "/teacher"


def gather(study: Study) -> TableOutcome:
    """The table as it stands; what has not been run yet is empty."""
    jobs = {job.name: job for job in study.jobs}
    rows = [
        RowOutcome(
            row.name,
            [outcome_of(jobs[name], photos=study.photos) for name in study.runs_of(row)],
            row.paper,
            planned_cost(row.config),
        )
        for row in study.table.rows
    ]
    baselines = [
        RowOutcome(title, [outcome_of(jobs[name]) for name in names]) for title, names in study.baselines.items()
    ]
    return TableOutcome(
        name=study.table.name,
        paper=study.table.paper,
        rows=rows,
        baselines=baselines,
        columns=[column.name for column in study.columns],
        measures=_measures(study.jobs),
        facts=study.facts,
        settings={column.name: hide_paths(column.config.model_dump(mode="json")) for column in study.columns},
    )


def outcome_of(job: Job, *, photos: bool = True) -> RunOutcome:
    """One model of a study."""
    scores = {name: values[0][1] for name, values in _scores(job.scores).items()}
    if job.config is None:
        return RunOutcome(job.name, scores)
    records = read_metrics(job.run / FILE)
    clock = training_clock(records)
    health, alarms = _health(job.run)
    folder = RunFolder(job.run)
    pictures = read_emergence(folder.pictures / "snapshots")[0] if folder.exists else []
    return RunOutcome(
        job.name,
        scores,
        curves=_curves(records, clock, job.config.optimization.batch_size),
        steps=max((record["step"] for record in records), default=0),
        total_steps=job.config.optimization.steps,
        seconds=max(clock.values(), default=None),
        health=health,
        alarms=alarms,
        failure=hide_paths_within(_failure(job.scores / FAILURE), job.out),
        pictures=pictures if photos else [replace(one, photo=None) for one in pictures],
        report=f"{job.run.relative_to(job.out)}/{REPORT}" if (job.run / REPORT).exists() else None,
    )


def training_clock(records: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Seconds of training by step, evaluations not counted; the clock of a run begins anew when it is resumed."""
    clock: dict[int, float] = {0: 0.0}
    before = last = 0.0
    for record in records:
        if record.get("seconds") is not None:
            now = record["seconds"] - record.get("evaluation_seconds", 0.0)
            if now < last:
                before += last
            last = now
            clock[record["step"]] = before + now
    return clock


def _curves(
    records: Sequence[Mapping[str, Any]], clock: Mapping[int, float], batch_size: int
) -> dict[str, list[Point]]:
    curves: dict[str, list[Point]] = {}
    for record in records:
        for key, value in record.items():
            if key.endswith(_TEACHER) and value is not None:
                step = record["step"]
                seconds = clock[max(known for known in clock if known <= step)]
                name = key.removesuffix(_TEACHER)
                curves.setdefault(name, []).append(Point(step * batch_size, seconds, value))
    # A benchmark's further scores are called by its name and theirs; the first one is quoted.
    names = {name for name in curves if name.count("/") == 1}
    return {name: points for name, points in curves.items() if name in names}


def _health(run: Path) -> tuple[str, Sequence[str]]:
    try:
        found = doctor(run)
    except CapiError:
        return "", ()
    return found.sentence, [remark.title for remark in found.of("alarm")]


def _failure(path: Path) -> str:
    try:
        return str(read_object(path)["reason"])
    except (CapiError, KeyError):
        return ""


def _scores(folder: Path) -> dict[str, list[tuple[str, float]]]:
    """The scores of each benchmark, the one to quote first."""
    try:
        cells = read_object(folder / f"{COMPARISON}.json")["cells"]
        done = [cell for cell in cells if cell.get("status") == "done"]
        return {cell["benchmark"]: list(cell["results"]["scores"].items()) for cell in done}
    except (CapiError, KeyError, TypeError, AttributeError):
        return {}


def _measures(jobs: Sequence[Job]) -> dict[str, str]:
    found: dict[str, str] = {}
    for job in jobs:
        found |= {benchmark: values[0][0] for benchmark, values in _scores(job.scores).items()}
    return found
