"""What a study will run: one table's rows with every seed, and what they are compared with."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from capi.api.ablation_labels import StudyData, check_options, curve_evaluations, find_data, score_columns
from capi.config.ablations import DEFAULT_RUN, PlannedRow, PlannedTable, Scale, find_scale, plan_table
from capi.config.schema import Config
from capi.config.trust import trusted_code
from capi.errors import CapiError
from capi.evals.comparison_cells import Column
from capi.runtime.privacy import hide_path

CONFIGS, RUNS, SCORES, FAILURE = "configs", "runs", "scores", "failure.json"
UNTRAINED, PIXELS = "untrained encoder", "raw pixels"


@dataclass(frozen=True)
class Job:
    """One model of a study: a run to train and judge, or an encoder that is judged as it is."""

    name: str
    out: Path
    columns: Sequence[Column]
    device: str
    data: str
    config: Config | None = None
    """Of a run."""
    model: str = ""
    """Of an encoder that is judged as it is."""
    trust: frozenset[str] = frozenset()
    """Python code that the overrides name."""

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
    columns: Sequence[Column]
    jobs: Sequence[Job]
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
    """Everything that will be run. Bad input is told here, before anything is written."""
    if seeds < 1:
        raise CapiError(f"--seeds {seeds} leaves nothing to run: expected at least 1")
    if out.exists() and not out.is_dir():
        raise CapiError(f"{out} is a file: --out takes the name of a folder")
    sized, found = find_scale(scale), find_data(data, options)
    check_options(found, (sized.scores, sized.curves), list(options))
    planned = plan_table(table, sized, list(overrides))
    columns = score_columns(found, sized.scores, list(options), planned.rows[0].config.data.image_size)
    base = next((row for row in planned.rows if row.run == DEFAULT_RUN), planned.rows[-1])

    trust = trusted_code(overrides=overrides)

    def job(name: str, config: Config | None = None, model: str = "") -> Job:
        return Job(name, out, columns, device, found.images, config, model, trust)

    runs = [
        job(run_name(row.run, seed), _run_config(row, seed, found, sized, list(options)))
        for seed in range(seeds)
        for row in planned.rows
    ]
    # Before the rest: what no encoder has learnt is judged in seconds, and bad labels are told at once.
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
        {UNTRAINED: [one.name for one in untrained], PIXELS: [pixels.name]},
        dict(_facts(base.config, found, scale, data, seeds)),
        photos,
    )


def _run_config(row: PlannedRow, seed: int, data: StudyData, scale: Scale, options: list[str]) -> Config:
    """A row with a seed, evaluated on the way, with pictures of its beginning and its end."""
    config = row.config
    every = max(config.optimization.steps // scale.curve_points, 1)
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
        f"{config.model.depth} blocks of width {config.model.width}, patches of {config.model.patch_size} px, "
        f"images of {height} x {width} px",
    )
    yield (
        "budget of a row",
        f"{optimization.steps:,} steps of {optimization.batch_size} images: "
        f"{optimization.steps * optimization.batch_size:,} images",
    )
    yield "seeds", str(seeds)
