"""A study: train and judge every row of a table with every seed; finished runs are reused, failed ones are a result.

OUT/configs/NAME.yaml       what a run is started with; `capi pretrain` takes it too
OUT/runs/NAME               a run, shared by all tables that have its row
OUT/scores/NAME             what its finished encoder scores
OUT/TABLE.html, .md, .json  the table, written again whenever a run is done

In this order: `find_data` (images and labels from one place), `plan_study` (the rows with every seed, and the encoders
that they are compared with), `gather` (the results, read from the folders), `ablate` (the runs).
"""

import json
import logging
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from capi.api.comparison import compare
from capi.api.training import pretrain
from capi.config.benchmarks import PROTOCOL_CONFIGS
from capi.config.experiments import (
    DEFAULT_RUN,
    Benchmarks,
    PlannedRow,
    PlannedTable,
    Scale,
    find_scale,
    plan_table,
)
from capi.config.files import (
    Overrides,
    differences,
    dump_config,
    load_benchmark,
    load_config,
    overridden,
    override_texts,
    protocols_with,
)
from capi.config.schema import Config, EvaluationConfig, Options
from capi.config.trust import trusting
from capi.data.locations import class_folders
from capi.data.sources import image_folder, image_names, read_csv
from capi.errors import CapiError, counted
from capi.evals.comparison_cells import BenchmarkColumn
from capi.report.ablation import (
    Point,
    RowOutcome,
    RunOutcome,
    TableOutcome,
    orderings_sentence,
    score_text,
    write_table,
)
from capi.report.comparison import NAME as COMPARISON
from capi.report.doctor import doctor
from capi.report.picture_files import read_emergence
from capi.report.run_report import REPORT, write_report
from capi.runtime.atomic import Output, atomic_write
from capi.runtime.devices import choose_device, count_cores
from capi.runtime.documents import read_object
from capi.runtime.privacy import hide_path, hide_paths
from capi.runtime.progress import default_console
from capi.runtime.protocol import Task
from capi.runtime.summary import Summary
from capi.train.build import check_components
from capi.train.cost.plan import planned_cost
from capi.zoo.run_folder import FILE, RunFolder, read_metrics

_LOG = logging.getLogger("capi")
LABELS = "labels.csv"
# Columns of a CSV that are taken for the class, in this order, where none is named.
_CLASS_COLUMNS = ("label", "class", "class_id")
_EXPECTED = (
    f"a folder with a {LABELS} (columns file, label or mask, and split), a CSV like it, a folder with a folder for "
    "each class, or with folders train and test (or val) of them, one with images/ and masks/, or demo"
)


@dataclass(frozen=True)
class StudyData:
    """Images to train on, and the data sets to judge by: name and options, by task."""

    images: str
    datasets: Mapping[Task, tuple[str, Options]]


def find_data(place: str, options: Sequence[str] = ()) -> StudyData:
    """What lies at a place. Without labels a study cannot say which row is better; an option may name their column."""
    path = Path(place)
    if place == "demo":
        return StudyData("demo", {"classification": ("demo", {})})
    if not path.exists():
        raise CapiError(f"there is no {path}: expected {_EXPECTED}")
    if path.suffix.lower() == ".csv":
        return _of_csv(path, options)
    if (path / LABELS).is_file():
        return _of_csv(path / LABELS, options)
    if (path / "masks").is_dir() and (path / "images").is_dir():
        images = next(folder for folder in (path / "images" / "train", path / "images") if folder.is_dir())
        return StudyData(str(images), {"segmentation": ("masks", {"data": str(path)})})
    if (path / "train").is_dir() and any((path / test).is_dir() for test in ("test", "val")):
        return StudyData(str(path / "train"), {"classification": ("folder", {"data": str(path)})})
    if path.is_dir() and any(image_names(path)) and class_folders(image_folder(path)) is not None:
        return StudyData(str(path), {"classification": ("folder", {"data": str(path)})})
    raise CapiError(f"{path} has no labels to judge the rows of a study by: expected {_EXPECTED}")


def _of_csv(path: Path, options: Sequence[str]) -> StudyData:
    columns, _ = read_csv(path)
    named = [option.partition("=")[2].strip() for option in options if option.partition("=")[0].strip() == "label"]
    given: dict[Task, tuple[str, Options]] = {}
    if "mask" in columns:
        given["segmentation"] = ("csv", {"data": str(path)})
    column = next((name for name in (*named, *_CLASS_COLUMNS) if name in columns), None)
    if column is not None:
        given["classification"] = ("csv", {"data": str(path), "label": column})
    if not given:
        expected = ", ".join((*named, *_CLASS_COLUMNS))
        raise CapiError(
            f"{path} has neither a column mask nor one of {expected}: add one to judge the rows by, or name one with "
            "--option label=COLUMN"
        )
    return StudyData(str(path), given)


def score_columns(
    data: StudyData, benchmarks: Benchmarks, options: list[str], image_size: Any
) -> list[BenchmarkColumn]:
    """The benchmarks of finished encoders that the labels allow."""
    return [
        BenchmarkColumn(name, load_benchmark(name, options={"image_size": image_size} | settings))
        for name, settings in _named(data, benchmarks, options)
    ]


def curve_evaluations(
    data: StudyData, benchmarks: Benchmarks, options: list[str], every_steps: int
) -> list[EvaluationConfig]:
    """The benchmarks on the way that the labels allow."""
    return [
        EvaluationConfig(benchmark=name, options=settings, every_steps=every_steps)
        for name, settings in _named(data, benchmarks, options)
    ]


def check_options(data: StudyData, benchmarks: Sequence[Benchmarks], options: list[str]) -> None:
    """An option that none of the benchmarks knows is an error."""
    protocols = [protocol for task in data.datasets for each in benchmarks for protocol in each.get(task, {})]
    for option in options:
        key = option.partition("=")[0].strip()
        if any(key in PROTOCOL_CONFIGS[protocol].model_fields for protocol in protocols):
            continue
        if owners := protocols_with(key, but=protocols):
            raise CapiError(f"--option {key} is an option of {owners}, which is not used here: leave it out")
        # No protocol has it: a benchmark's own message names the nearest key.
        load_benchmark(f"demo/{protocols[0]}", [option])


def _named(data: StudyData, benchmarks: Benchmarks, options: list[str]) -> list[tuple[str, Options]]:
    return [
        (f"{dataset}/{protocol}", _with_options(protocol, own | settings, options))
        for task, (dataset, own) in data.datasets.items()
        for protocol, settings in benchmarks.get(task, {}).items()
    ]


def _with_options(protocol: str, settings: Options, options: list[str]) -> Options:
    """A user's options go to each protocol that knows the key; the column of the class is none of segmentation's."""
    fields = set(PROTOCOL_CONFIGS[protocol].model_fields)
    if PROTOCOL_CONFIGS[protocol].task == "segmentation":
        fields.discard("label")
    return overridden(settings, [option for option in options if option.partition("=")[0].strip() in fields])


CONFIGS, RUNS, SCORES, FAILURE = "configs", "runs", "scores", "failure.json"
UNTRAINED, PIXELS = "untrained encoder", "raw pixels"


@dataclass(frozen=True)
class AblationJob:
    """One model of a study: a run to train and judge, or an encoder that is judged as it is."""

    name: str
    out: Path
    columns: Sequence[BenchmarkColumn]
    device: str
    data: str
    config: Config | None = None
    """Of a run."""
    model: str = ""
    """Of an encoder that is judged as it is."""
    overrides: tuple[str, ...] = ()
    """What changes the recipe, and may name Python code."""

    @property
    def run(self) -> Path:
        return self.out / RUNS / self.name

    @property
    def scores(self) -> Path:
        return self.out / SCORES / self.name

    @property
    def recipe(self) -> Path:
        return self.out / CONFIGS / f"{self.name}.yaml"


@dataclass(frozen=True)
class Study:
    """One table, planned."""

    table: PlannedTable
    out: Path
    seeds: int
    columns: Sequence[BenchmarkColumn]
    jobs: Sequence[AblationJob]
    baselines: Mapping[str, Sequence[str]]
    """What the rows are compared with, and the names of their jobs."""
    facts: Mapping[str, str]
    photos: bool = True
    """Whether the page may show the images that its pictures are of."""

    def runs_of(self, row: PlannedRow) -> list[str]:
        return [run_name(row.run, seed) for seed in range(self.seeds)]


def run_name(run: str, seed: int) -> str:
    """The folder of a run."""
    return f"{run}-seed{seed}"


def plan_study(
    table: str,
    overrides: Sequence[str] = (),
    *,
    data: str,
    out: Path,
    scale: str = "mini",
    seeds: int = 1,
    options: Sequence[str] = (),
    device: str = "cpu",
    photos: bool = True,
) -> Study:
    """Everything that will be run. Bad input raises here, before anything is written."""
    if seeds < 1:
        raise CapiError(f"--seeds {seeds} leaves nothing to run: expected at least 1")
    Output(out).check_no_file()
    sized, study_data = find_scale(scale), find_data(data, options)
    check_options(study_data, (sized.scores, sized.curves), list(options))
    planned = plan_table(table, sized, list(overrides))
    for row in planned.rows:
        check_components(row.config)
    columns = score_columns(study_data, sized.scores, list(options), planned.rows[0].config.data.image_size)
    base = next((row for row in planned.rows if row.run == DEFAULT_RUN), planned.rows[-1])

    def job(name: str, config: Config | None = None, model: str = "") -> AblationJob:
        return AblationJob(name, out, columns, device, study_data.images, config, model, tuple(overrides))

    runs = [
        job(run_name(row.run, seed), _run_config(row, seed, study_data, sized, list(options)))
        for seed in range(seeds)
        for row in planned.rows
    ]
    # Before the rest: what no encoder has learnt is judged in seconds, and bad labels raise at once.
    untrained = [
        job(f"untrained-seed{seed}", model=f"untrained:{out / CONFIGS / run_name(base.run, seed)}.yaml")
        for seed in range(seeds)
    ]
    pixels = job("pixels", model=f"pixels:{base.config.model.patch_size}")
    return Study(
        planned,
        out,
        seeds,
        columns,
        [pixels, *untrained, *runs],
        {UNTRAINED: [learner.name for learner in untrained], PIXELS: [pixels.name]},
        dict(_facts(base.config, study_data, scale, data, seeds)),
        photos,
    )


def _run_config(row: PlannedRow, seed: int, data: StudyData, scale: Scale, options: list[str]) -> Config:
    """A row with a seed, evaluated on the way, with pictures of its beginning and its end."""
    config = row.config
    every = max(config.optimization.known_steps // scale.curve_points, 1)
    return config.model_copy(
        update={
            "seed": config.seed + seed,
            "evaluations": curve_evaluations(data, scale.curves, options, every),
            # A report is written with the study, without a gallery of prototypes.
            "run": config.run.model_copy(update={"snapshots": 1, "report": False, "loggers": []}),
        }
    )


def _facts(config: Config, data: StudyData, scale: str, place: str, seeds: int) -> Iterator[tuple[str, str]]:
    optimization, (height, width) = config.optimization, config.data.height_and_width
    yield "data", f"{hide_path(place)}, trained on {hide_path(data.images)}"
    yield "scale", scale
    yield (
        "encoder",
        f"{counted(config.model.depth, 'block')} of width {config.model.width}, patches of {config.model.patch_size} "
        f"px, images of {height} x {width} px",
    )
    yield (
        "budget of a row",
        f"{counted(optimization.steps, 'step')} of {counted(optimization.batch_size, 'image')}: "
        f"{counted(optimization.steps * optimization.batch_size, 'image')}",
    )
    yield "seeds", str(seeds)


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


def outcome_of(job: AblationJob, *, photos: bool = True) -> RunOutcome:
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
        failure=hide_path(_failure(job.scores / FAILURE)),
        pictures=pictures if photos else [replace(picture, photo=None) for picture in pictures],
        report=f"{job.run.relative_to(job.out)}/{REPORT}" if (job.run / REPORT).exists() else None,
    )


def training_clock(records: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Seconds of training by step, evaluations not counted; the clock of a run starts again when it is resumed."""
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
                seconds = clock[max(logged for logged in clock if logged <= step)]
                name = key.removesuffix(_TEACHER)
                curves.setdefault(name, []).append(Point(step * batch_size, seconds, value))
    # A benchmark's further scores are called by its name and theirs; the first one is quoted.
    names = {name for name in curves if name.count("/") == 1}
    return {name: points for name, points in curves.items() if name in names}


def _health(run: Path) -> tuple[str, Sequence[str]]:
    try:
        diagnosis = doctor(run)
    except CapiError:
        return "", ()
    return diagnosis.sentence, [finding.title for finding in diagnosis.of("alarm")]


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


def _measures(jobs: Sequence[AblationJob]) -> dict[str, str]:
    values_by_name: dict[str, str] = {}
    for job in jobs:
        values_by_name |= {benchmark: values[0][0] for benchmark, values in _scores(job.scores).items()}
    return values_by_name


class InterruptionError(Exception):
    """Someone stopped the study; it resumes where it was."""


@dataclass(frozen=True, repr=False)
class Ablated(Summary):
    """A table of a study that is done: its page, and what it came to."""

    page: Path
    outcome: TableOutcome

    @property
    def sentence(self) -> str:
        """How many of the paper's orderings hold here."""
        return orderings_sentence(self.outcome)

    def summary(self) -> tuple[str, dict[str, str]]:
        table = self.outcome
        scores = {
            row.name: ", ".join(f"{column} {score_text(row.score(column))}" for column in table.columns)
            for row in table.everything
        }
        return f"{table.paper.title}: {self.sentence}", {**scores, "page": str(self.page)}


def ablate(
    table: str,
    overrides: Overrides = (),
    *,
    data: str | Path,
    out: str | Path,
    scale: str = "mini",
    seeds: int = 1,
    options: Overrides = (),
    device: torch.device | str | None = None,
    jobs: int = 1,
    photos: bool = True,
    console: Console | None = None,
    **sections: Any,
) -> Ablated | None:
    """Run all rows of one of the paper's tables in miniature, judge them, and write a page.

    `data` is a place with labels, or `demo`; `overrides` and further keywords change the recipe of all rows,
    `options` the benchmarks (text `key=value`, or dicts).
    With several `jobs` so many runs train at once, each in a process with its share of the processor's cores. Without
    `photos` the page shows features alone, not the images. None when it was interrupted; the same call resumes.
    """
    overrides = override_texts(overrides, sections)
    with trusting(overrides=overrides):
        chosen = str(choose_device(device))
        study = plan_study(
            table,
            overrides,
            data=str(data),
            out=Path(out),
            scale=scale,
            seeds=seeds,
            options=override_texts(options),
            device=chosen,
            photos=photos,
        )
        console = console or default_console() or Console(quiet=True)
        _write_recipes(study.jobs)
        try:
            for number, job in enumerate(_finished(study.jobs, jobs, console), 1):
                write_table(gather(study), study.out)
                console.print(f"{number} of {len(study.jobs)}: {job.name} is done", highlight=False)
        except (InterruptionError, KeyboardInterrupt):
            return None
        outcome = gather(study)
        return Ablated(write_table(outcome, study.out), outcome)


def _write_recipes(jobs: Sequence[AblationJob]) -> None:
    """The recipe of each run. Scores of other settings, which may be there, are no part of this study."""
    for job in jobs:
        if job.config is not None and job.recipe.exists() and job.run.exists():
            free = ("run", "checkpoint", "distributed", "evaluations", "data.workers", "data.cache_mib")
            changed = differences(load_config(str(job.recipe)), job.config, free)
            if changed:
                raise CapiError(
                    f"{job.recipe.parent.parent} holds {job.name} of this study with other settings "
                    f"({', '.join(changed[:3])}): choose another --out, or give the settings of before"
                )
    for job in jobs:
        if job.config is not None:
            job.recipe.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(job.recipe, dump_config(job.config))


def _finished(jobs: Sequence[AblationJob], at_once: int, console: Console) -> Iterator[AblationJob]:
    """Each job when it is done: one after another here, or several at once in processes of their own."""
    if at_once <= 1:
        for job in jobs:
            finish(job, console)
            yield job
        return
    threads = count_cores(at_once)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(at_once, context, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        waiting: dict[Future[None], AblationJob] = {pool.submit(_finish_unless_stopped, job): job for job in jobs}
        try:
            for future in as_completed(waiting):
                future.result()
                yield waiting[future]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class _Stopping:
    """Whether this process was asked to stop: jobs that wait in its queue are then not started."""

    asked = False


def _finish_unless_stopped(job: AblationJob) -> None:
    if _Stopping.asked:
        raise InterruptionError
    try:
        finish(job)
    except (InterruptionError, KeyboardInterrupt):
        _Stopping.asked = True
        raise InterruptionError from None


def finish(job: AblationJob, console: Console | None = None) -> None:
    """Train a run to its end, and judge it. A run that breaks off is noted as such; the study continues without it."""
    model = job.model
    with trusting(overrides=job.overrides):
        if job.config is not None:
            if not _train(job, console):
                return
            model = str(job.run)
            write_report(job.run)
        judged = compare(model, job.columns, out=job.scores, device=job.device)
    if judged.failed:
        raise CapiError(f"{job.name} could not be judged by {judged.failed[0].benchmark}: {judged.failed[0].reason}")


def _train(job: AblationJob, console: Console | None) -> bool:
    """Whether the run came to its end."""
    assert job.config is not None
    note = job.scores / FAILURE
    try:
        done = pretrain(job.config, data=job.data, out=job.run, resume=True, device=job.device, console=console)
    except CapiError as error:
        if not any(job.run.glob("checkpoints/*")):
            # It never began: the study is wrong, not the row.
            raise
        _LOG.warning("%s broke off: %s", job.name, error)
        note.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(note, json.dumps({"reason": str(error)}) + "\n")
        return False
    if not done.finished:
        raise InterruptionError
    note.unlink(missing_ok=True)
    return True
