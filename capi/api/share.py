"""The folder that others get of a run (weights, config, pictures, a model card), and the way to the Hub.

The folder is made to be read by strangers. So it names no place on the machine of whoever trained the model, and photos
of the training data are only in it when they are asked for. To the Hub: prepare the folder, make the repository, send
it; a dry run stops after the folder.
"""

import math
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import yaml
from PIL import Image

from capi.api.space import prepare_space
from capi.config.schema import Config
from capi.data.recorded import spaced
from capi.errors import CapiError, counted
from capi.evals.results import JSON, read_record
from capi.models.architecture import architecture_of
from capi.models.features import CapiEncoder
from capi.report.card import MARK, ModelCard, TrainingScore, as_markdown, plain, require_licence
from capi.report.costs import DEFAULT_COSTS, CostAssumptions
from capi.report.pages.data import Column, RunReport
from capi.report.pictures.painters import Drawn
from capi.report.pictures.sheets import Row, save_picture, sheet_of
from capi.report.run_report import gather
from capi.runtime.atomic import Output, atomic_folder, atomic_write, walk_folder
from capi.runtime.documents import read_text
from capi.runtime.image_files import open_image
from capi.runtime.privacy import hide_path, hide_paths, name_of_data
from capi.zoo.build import recorded_target
from capi.zoo.huggingface.files import write_files
from capi.zoo.run_folder import CONFIG, RunFolder, run_config
from capi.zoo.weights import WeightsName, load_run

CARD = "README.md"
CURVES, SNAPSHOTS = "curves.png", "snapshots.png"
_SNAPSHOT = re.compile(r"step_(\d+)_(\d+)\.png")
_STEPS_SHOWN, _IMAGES_SHOWN = 5, 4
Record = Mapping[str, Any]


def prepare_folder(
    run: Path,
    output: Output,
    *,
    name: str,
    licence: str,
    weights: WeightsName = "teacher",
    data_description: str = "",
    results: Sequence[Path] = (),
    photos: bool = False,
    costs: CostAssumptions = DEFAULT_COSTS,
) -> Path:
    """Write what a repository `name` (owner/name) would hold; the folder appears complete or not at all.

    `results` are folders of `capi evaluate` beside those within the run; `photos` shows training images beside what the
    encoder sees in them. `overwrite` replaces a folder that was written here before.
    """
    require_licence(licence)
    _check_place(output)
    out = output.path
    # What `capi evaluate` left in the run's own folder, and what is given.
    files = sorted(Path(entry.path) for _, entry in walk_folder(run, follow_links=False) if entry.name == JSON)
    within = (_readable(path.parent) for path in files)
    records = [*(record for record in within if record is not None), *_results_given(results)]
    report, config = gather(run, costs), run_config(RunFolder(run))
    encoder = load_run(run, weights)
    try:
        with atomic_folder(out.resolve()) as partial:
            write_files(encoder, partial, image_size=config.data.height_and_width)
            shared = hide_paths(config.model_dump(mode="json"))
            atomic_write(partial / CONFIG, yaml.safe_dump(shared, sort_keys=False))
            pictures = _write_pictures(RunFolder(run).pictures, partial, photos=photos)
            card = ModelCard(
                repo_id=name,
                licence=licence,
                data_description=data_description,
                results=records,
                pictures=pictures,
                **_facts_of_model(encoder, config),
                **_facts_of_run(run, report, config, weights),
            )
            atomic_write(partial / CARD, as_markdown(card))
    except OSError as error:
        raise CapiError(f"{out} cannot be written ({error.strerror or error}): give --out another place") from error
    return out


def _facts_of_model(encoder: CapiEncoder, config: Config) -> dict[str, Any]:
    return {
        "architecture": architecture_of(encoder),
        "parameters": sum(weight.numel() for weight in encoder.encoder.parameters()),
        "image_size": config.data.height_and_width,
    }


def _facts_of_run(run: Path, report: RunReport, config: Config, weights: str) -> dict[str, Any]:
    record = RunFolder(run).record()
    return {
        "target": recorded_target(record, config).description,
        "training": _training(report, config, weights),
        "data": _data(record),
        "origin": _origin(record, config),
        "training_scores": _training_scores(report.columns, weights),
        "alarms": [finding.sentence for finding in report.alarms],
        "cost": report.cost,
        "assumptions": report.assumptions,
        "provenance": _provenance(record),
    }


def _training(report: RunReport, config: Config, weights: str) -> str:
    total, batch = config.optimization.steps, config.optimization.batch_size
    done = report.state.step or 0
    steps = (
        counted(done, "step") if done >= total else f"{done:,} of {counted(total, 'step')}: the run was not finished"
    )
    whose = {"teacher": "the moving average of the trained weights", "student": "the weights as trained"}[weights]
    return f"Trained with batches of {counted(batch, 'image')} for {steps}. The weights are {whose} (the {weights})."


def _data(record: Record) -> str:
    data = _section(record.get("data"))
    places = [each["path"] for each in data.get("sources", ())] or [data.get("path", "an unknown place")]
    named = " and ".join(_place(str(place)) for place in places)
    return f"{data.get('images', 'an unknown number of')} images of {named}, without labels."


def _place(place: str) -> str:
    """Where images came from, without the path that leads there."""
    if place == "demo":
        return "the photos that come with `capi demo`"
    if place.startswith("hf://"):
        return f"the data set {plain(hide_path(place.removeprefix('hf://')))}"
    file = place.partition("?")[0].endswith((".tar", ".parquet", ".arrow", ".csv"))
    return f"{'files called' if file else 'a folder called'} {plain(name_of_data(place))}"


def _origin(record: Record, config: Config) -> str:
    """What it learnt from beside its images: weights that it started with, an encoder that made its targets."""
    notes = []
    started = record.get("init")
    if isinstance(started, Mapping):
        digest = str(started.get("sha256", "unknown"))[:16]
        notes.append(
            f"It started from the weights of {plain(hide_path(str(started.get('encoder'))))} (sha256 of the tensors "
            f"{plain(digest)}), not from fresh ones."
        )
    if config.target.frozen.encoder is not None:
        notes.append(f"Its targets are features of {plain(hide_path(str(config.target.frozen.encoder)))}.")
    return " ".join(notes)


def _training_scores(columns: Mapping[str, Column], weights: str) -> list[TrainingScore]:
    """The evaluations of a run are the metrics with a path for a name, which ends in whose weights were looked at."""
    scores = []
    for name, column in columns.items():
        benchmark, slash, whose = name.rpartition("/")
        if slash and whose == weights and len(column.values):
            first = column.values[0] if column.steps[0] == 0 else math.nan
            scores.append(TrainingScore(benchmark, _finite(first), _finite(column.values[-1]), int(column.steps[-1])))
    return scores


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _provenance(record: Record) -> list[tuple[str, str]]:
    """Seed, versions and device of the last start; no folders and no command, which name places."""
    starts = record.get("starts")
    last = _section(starts[-1]) if isinstance(starts, list) and starts else {}
    versions, git = _section(last.get("versions")), _section(last.get("git"))
    changed = ", with changes since" if git.get("changed") else ""
    facts = {
        "Seed": record.get("seed"),
        "Fingerprint of the data": _section(record.get("data")).get("fingerprint"),
        "Last start": last.get("time"),
        "Device": _section(last.get("machine")).get("accelerator") or last.get("device"),
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items()) or None,
        "Code": f"commit {git['commit']}{changed}" if "commit" in git else None,
    }
    return [(name, hide_path(str(value))) for name, value in facts.items() if value is not None]


def _section(value: object) -> Record:
    """A part of a record that should be one, and is empty where it is something else."""
    return value if isinstance(value, Mapping) else {}


def _results_given(folders: Sequence[Path]) -> Iterator[Record]:
    for folder in folders:
        record = _readable(folder.parent if folder.name == JSON else folder)
        if record is None:
            raise CapiError(f"{folder} holds no results of `capi evaluate`: give the folder that it wrote")
        yield record


def _readable(folder: Path) -> Record | None:
    """Results with all that a card tells of them."""
    record = read_record(folder)
    kinds = {"benchmark": str, "scores": dict, "deviations": list}
    if record is None or not all(isinstance(record.get(name), kind) for name, kind in kinds.items()):
        return None
    whole = all(isinstance(value, int | float) or value is None for value in record["scores"].values())
    return record if whole else None


def _write_pictures(pictures: Path, out: Path, *, photos: bool) -> list[tuple[str, str]]:
    """Curves and snapshots into the folder, as far as there are any; their names and captions."""
    written = []
    if (pictures / CURVES).is_file():
        shutil.copyfile(pictures / CURVES, out / CURVES)
        written.append((CURVES, "Losses and other measures over the training."))
    rows, steps = _snapshot_rows(pictures / "snapshots", photos=photos)
    if rows:
        heads = [*(["photo"] if photos else []), *(f"step {step:,}" for step in steps)]
        save_picture(sheet_of("What the encoder sees", [], heads, rows), out / SNAPSHOTS)
        written.append((SNAPSHOTS, "Principal components of the patch features as colours, of the same images each."))
    return written


def _snapshot_rows(folder: Path, *, photos: bool) -> tuple[list[Row], list[int]]:
    by_step: dict[int, dict[int, Path]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if match := _SNAPSHOT.fullmatch(path.name):
            by_step.setdefault(int(match[2]), {})[int(match[1])] = path
    every = sorted({step for pictures in by_step.values() for step in pictures})
    steps = [every[place] for place in spaced(len(every), _STEPS_SHOWN)]
    rows = []
    for image in sorted(by_step)[:_IMAGES_SHOWN]:
        cells = [_opened(folder / f"photo_{image}.jpg")] if photos else []
        rows.append(Row("", [*cells, *(_opened(by_step[image].get(step)) for step in steps)]))
    return rows, steps


def _opened(path: Path | None) -> Drawn | None:
    """A picture that the run drew; None where it is missing or broken."""
    if path is None:
        return None
    try:
        with open_image(path, ("PNG", "JPEG")) as picture:
            return Drawn(picture.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None


def _check_place(output: Output) -> None:
    """Refused before the work. Only what was written here before is replaced."""
    output.check_folder()
    out = output.path
    if out.is_dir() and any(out.iterdir()) and not _is_ours(out):
        raise CapiError(
            f"{out} holds something that `capi push` did not write and does not replace: choose another --out"
        )


def _is_ours(folder: Path) -> bool:
    try:
        return MARK in read_text(folder / CARD).splitlines()
    except CapiError:
        return False


FOLDER, SPACE = "hub", "space"
_PART = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")
_MESSAGE = "Upload a CAPI model"


@runtime_checkable
class Hub(Protocol):
    """What is used of huggingface_hub.HfApi."""

    def create_repo(
        self, repo_id: str, *, private: bool, exist_ok: bool, repo_type: str | None, space_sdk: str | None
    ) -> Any: ...

    def repo_info(self, repo_id: str, *, repo_type: str | None) -> Any: ...

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str, repo_type: str | None) -> Any: ...


@dataclass(frozen=True)
class Pushed:
    """The folder, what is in it, and where it went; `address` is None after a dry run."""

    folder: Path
    repo_id: str
    files: tuple[tuple[str, int], ...]
    """Names and bytes."""
    private: bool
    address: str | None
    kind: str = "repository"
    space: "Pushed | None" = None

    @property
    def lines(self) -> list[str]:
        """What is shown to people, line by line."""
        access = "private" if self.private else "public"
        listed = [
            f"  {name} ({size / 2**20:.1f} MiB)" if size >= 2**20 else f"  {name} ({size / 2**10:.1f} KiB)"
            for name, size in self.files
        ]
        more = [] if self.space is None else self.space.lines
        if self.address is not None:
            return [f"sent to {self.address} ({access}):", *listed, *more]
        if self.space is not None:
            more.append(f"try the Space here: python {self.space.folder / 'app.py'} {self.folder}")
        if self.kind == "repository":
            more.append("nothing was sent: look at README.md, then run the same command without --dry-run")
        return [f"wrote {self.folder}; to the {access} {self.kind} {self.repo_id} would be sent:", *listed, *more]


def push(
    run: str | Path,
    name: str,
    *,
    licence: str | None = None,
    data_description: str = "",
    results: Sequence[str | Path] = (),
    photos: bool = False,
    private: bool = False,
    token: str | None = None,
    dry_run: bool = False,
    out: str | Path | None = None,
    weights: WeightsName = "teacher",
    watts: float | None = None,
    carbon: float | None = None,
    overwrite: bool = False,
    space: bool = False,
    hub: Hub | None = None,
) -> Pushed:
    """Share a run on the Hugging Face Hub as `owner/name`: weights, config and a model card.

    `space` adds a Space of the same name that runs the explorer with the model, from RUN/space (or OUT-space).

    `dry_run` writes the folder and sends nothing. `results` are folders of `evaluate`, beside those within the run. The
    folder is written to `out`, by default RUN/hub, which is replaced each time. Without a `token` that of
    `hf auth login` or of HF_TOKEN is used. `hub` takes the place of huggingface_hub's own client.
    """
    require_repo_id(name)
    if licence is None:
        raise CapiError("a model that others may use needs a licence: --licence apache-2.0, or what its owner decides")
    require_licence(licence)
    run = Path(run)
    RunFolder(run).record()
    place = run / FOLDER if out is None else Path(out)
    space_place = run / SPACE if out is None else place.with_name(f"{place.name}-space")
    if space:
        _check_place(Output(space_place, overwrite or out is None))
    if not dry_run and hub is None:
        hub = open_hub(token)
    folder = prepare_folder(
        run,
        Output(place, overwrite or out is None),
        name=name,
        licence=licence,
        weights=weights,
        data_description=data_description,
        results=[Path(folder) for folder in results],
        photos=photos,
        costs=CostAssumptions(watts, carbon),
    )
    address = None if dry_run or hub is None else send(hub, folder, name, private=private)
    done = Pushed(folder, name, _sizes(folder), private, address)
    if not space:
        return done
    made = prepare_space(run, space_place, name=name, licence=licence, photos=photos)
    address = None if dry_run or hub is None else send(hub, made, name, private=private, space=True)
    return replace(done, space=Pushed(made, name, _sizes(made), private, address, "Space"))


def _sizes(folder: Path) -> tuple[tuple[str, int], ...]:
    """What lies in a folder, with all that is inside of each."""
    sizes = Counter[str]()
    for name, entry in walk_folder(folder, follow_links=False):
        sizes[name.partition("/")[0]] += entry.stat().st_size
    return tuple(sorted(sizes.items()))


def require_repo_id(repo_id: str) -> str:
    """`owner/name` as the Hub takes it."""
    parts = repo_id.split("/")
    good = len(parts) == 2 and all(_PART.fullmatch(part) for part in parts)
    if not good or "--" in repo_id or ".." in repo_id or repo_id.endswith(".git"):
        raise CapiError(
            f'"{repo_id}" cannot name a repository: expected owner/name of letters, digits, "-", "_" and ".", such as '
            "ana/capi-vits14"
        )
    return repo_id


def open_hub(token: str | None = None) -> Hub:
    """The client of huggingface_hub, once it is sure that it has a token."""
    try:
        from huggingface_hub import HfApi, get_token
    except ImportError as error:
        raise CapiError("capi push needs huggingface_hub: pip install 'capi[hub]' (--dry-run does without)") from error
    if not (token or get_token()):
        raise CapiError("there is no token for the Hub: log in with `hf auth login`, or set HF_TOKEN")
    client: Hub = HfApi(token=token)
    return client


def send(hub: Hub, folder: Path, repo_id: str, *, private: bool, space: bool = False) -> str:
    """Make the repository if it is not there, put the folder into it as one commit, and say where it is."""
    kind, sdk = ("space", "gradio") if space else (None, None)
    try:
        address = str(hub.create_repo(repo_id, private=private, exist_ok=True, repo_type=kind, space_sdk=sdk))
        # One that was there before stays as public as it was.
        if private and not hub.repo_info(repo_id, repo_type=kind).private:
            raise CapiError(f"{repo_id} is there already and is public: nothing was sent; choose another name")
        hub.upload_folder(repo_id=repo_id, folder_path=str(folder), commit_message=_MESSAGE, repo_type=kind)
    except CapiError:
        raise
    except Exception as error:
        raise CapiError(f"{_reason(error, repo_id)}; {folder} is ready for another try") from error
    return address


def _reason(error: Exception, repo_id: str) -> str:
    """What went wrong, in words of ours where the cause is a common one."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return "the Hub does not accept the token: log in with `hf auth login`"
    if status in {403, 404}:
        return f"this token may not write to {repo_id}: use one with the right to write, or another owner"
    # The library's own HTTP client has changed its name before.
    if isinstance(error, ConnectionError | TimeoutError) or type(error).__module__.startswith(("httpx", "requests")):
        return "the Hub cannot be reached: check the connection and that HF_HUB_OFFLINE is not set"
    said = " ".join(str(error).split())[:300] or "no reason given"
    return f"{repo_id} could not be sent ({type(error).__name__}: {said})"
