"""The report of a run: what is drawn while it trains and when it ends, what its folder holds, and the page of it."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from capi.config.schema import Config
from capi.data.locations import DataLocation, open_images
from capi.data.recorded import RecordedImagesError, open_recorded
from capi.data.sources import ImageSource
from capi.errors import CapiError, counted
from capi.evals.classification import KnnClassification
from capi.evals.features import Encoding, OnProgress, silent
from capi.evals.raw_pixels import raw_pixel_accuracies
from capi.report.costs import DEFAULT_COSTS, CostAssumptions, cost_of, seconds_of_starts
from capi.report.doctor import RunReading
from capi.report.gallery_files import FOLDER, INDEX, NEIGHBORS, write_gallery, write_neighbors
from capi.report.pages.data import Column, PrototypeStrip, RunReport
from capi.report.pages.run import page, run_pieces
from capi.report.picture_files import PIXELS, read_emergence, read_neighbors, read_pixel_scores, read_prototypes
from capi.report.snapshots import Snapshots
from capi.runtime.atomic import atomic_write
from capi.runtime.devices import choose_device
from capi.runtime.lock import is_being_trained
from capi.runtime.privacy import hide_path, hide_paths_of_command, hide_paths_of_yaml
from capi.runtime.progress import EvaluationProgress
from capi.train.evaluations import build_evaluations
from capi.train.health import Finding
from capi.train.loop import Evaluation
from capi.zoo.build import recorded_loss, recorded_target, statistics
from capi.zoo.checkpoint_files import CheckpointFolder
from capi.zoo.run_folder import CONFIG, FILE, RECORD, RunFolder, run_config

_LOG = logging.getLogger("capi")
REPORT = "report.html"
_STARTS_SHOWN = 20


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


def write_report(
    run: Path,
    out: Path | None = None,
    costs: CostAssumptions = DEFAULT_COSTS,
    *,
    missing: str = "",
) -> Path:
    """Write the report of a run, as RUN/report.html or to `out`, and say where it is.

    `missing` says why there are no pictures of prototypes.
    """
    run_report = gather(run, costs)
    if missing and not run_report.prototypes:
        note = f'The prototypes are not drawn: {missing}. "capi explore RUN" shows them for any folder of images.'
        run_report = replace(run_report, prototypes_note=note)
    written = page(run_pieces(run_report))
    target = run / REPORT if out is None else out / REPORT if out.is_dir() else out
    try:
        atomic_write(target, written)
    except OSError as error:
        raise CapiError(f"{target} cannot be written ({error.strerror}): give --out another place") from error
    return target


def gather(run: Path, costs: CostAssumptions = DEFAULT_COSTS) -> RunReport:
    """Everything there is to show of a run."""
    return FollowedRun(run, costs).read()


class FollowedRun:
    """A run that is read again and again; metrics are read on from where the last reading ended."""

    def __init__(self, run: Path, costs: CostAssumptions = DEFAULT_COSTS, *, name: str | None = None) -> None:
        self.reading, self.name, self.costs = RunReading(run), name or run.resolve().name, costs
        self.folder = self.reading.folder
        with self._readable():
            self.reading.refresh()

    def stamp(self) -> tuple[Any, ...]:
        """Changes when anything changes that the report shows."""
        pictures = self.folder.pictures
        watched = (FILE, RECORD, CONFIG, self.folder.checkpoints.name)
        drawn = ("snapshots", "prototypes", "prototypes/index.json", "neighbours", PIXELS)
        return (
            *(_file_stamp(self.folder.path / name) for name in watched),
            *(_file_stamp(pictures / name) for name in drawn),
            is_being_trained(self.folder.path),
        )

    def read(self) -> RunReport:
        """The report as things stand."""
        with self._readable():
            return self._read()

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Files that cannot be read are an error that a person can act on."""
        try:
            yield
        except (OSError, UnicodeDecodeError) as error:
            raise CapiError(
                f"{self.folder.path} cannot be read as a run ({error}): restore it, or leave it out"
            ) from error

    def _read(self) -> RunReport:
        reading = self.reading
        reading.refresh()
        record, columns = reading.record, reading.columns
        emergence, emergence_note = read_emergence(self.folder.pictures / "snapshots")
        prototypes, prototypes_note = self._prototypes(record)
        clock = columns.get("seconds", Column(np.empty(0, np.int64), np.empty(0)))
        starts = _starts(record)
        began = [step if isinstance(step := each.get("step"), int) else 0 for each in starts]
        cost = cost_of(seconds_of_starts(clock, began), starts, self.costs)
        config = reading.config
        predicted = [("Predicts", hide_path(recorded_target(record, config).description))] if config else []
        return RunReport(
            name=self.name,
            state=reading.state,
            columns=columns,
            findings=[self._for_everyone(finding) for finding in reading.diagnosis().findings],
            past=tuple(reading.watchman.past),
            notes=self._notes(),
            emergence=emergence,
            emergence_note=emergence_note,
            neighbors=read_neighbors(self.folder.pictures / "neighbours"),
            pixels=read_pixel_scores(self.folder.pictures),
            prototypes=prototypes,
            prototypes_note=prototypes_note,
            loss=recorded_loss(record, config),
            cost=cost.facts,
            assumptions=cost.assumptions,
            config=hide_paths_of_yaml(self.folder.config_text()) if config else "(it does not fit)\n",
            provenance=predicted + provenance(record, self.folder.path),
        )

    def _for_everyone(self, finding: Finding) -> Finding:
        """A finding without paths of this machine; the command that resumes the run is full of them."""
        if finding.title == "State":
            return replace(finding, advice="The command that started it, with --resume, continues it.")
        text, advice = (hide_path(part) for part in (finding.text, finding.advice))
        return replace(finding, text=text, advice=advice)

    def _prototypes(self, record: Mapping[str, Any]) -> tuple[list[PrototypeStrip], str]:
        """The strips, and a note; only a clustering has prototypes to be drawn."""
        config = self.reading.config
        if config and not recorded_target(record, config).clusters:
            # A target of one's own is named by its file.
            kind = hide_path(config.target.kind)
            return [], f"Nothing is clustered in this run (target.kind={kind}): it has no prototypes."
        return read_prototypes(self.folder.pictures / "prototypes")

    def _notes(self) -> list[str]:
        """What the reader should know about the data."""
        reader, unreadable = self.reading.reader, self.reading.unreadable
        said = hide_path(unreadable)
        notes = [f"The config cannot be read, so health is not judged: {said}"] if unreadable else []
        if reader.broken:
            notes.append(f"Left out of {FILE}, since it is no record: {counted(reader.broken, 'line')}.")
        if reader.cut_off:
            notes.append(f"The last line of {FILE} is cut off and was left out.")
        if reader.not_numbers:
            notes.append(f"Not drawn, since they are not numbers: {', '.join(sorted(reader.not_numbers)[:10])}.")
        return notes


def provenance(record: Mapping[str, Any], folder: Path) -> list[tuple[str, str]]:
    """Where a run comes from: its data, and each start with command, machine and versions. Paths are names alone."""
    data = record.get("data")
    about: Mapping[str, Any] = data if isinstance(data, Mapping) else {}
    starts = _starts(record)
    facts = [
        ("Folder", folder.resolve().name),
        ("Data", f"{about.get('images', 'unknown number of')} images of {_data_names(about)}"),
        ("Fingerprint of the data", str(about.get("fingerprint", "unknown"))),
        ("Seed", str(record.get("seed", "unknown"))),
    ]
    extensions = record.get("extensions")
    for each in extensions if isinstance(extensions, list) else ():
        if isinstance(each, Mapping):
            facts.append(("Extended", f"after step {each.get('from_steps')}, at the learning rate of that step"))
    if len(starts) > _STARTS_SHOWN:
        facts.append(("Starts", f"{len(starts)}, of which the last {_STARTS_SHOWN} follow"))
    first = max(len(starts) - _STARTS_SHOWN, 0)
    for number, start in enumerate(starts[first:], first + 1):
        facts += _start_facts(start, f"Start {number}" if len(starts) > 1 else "Start")
    return [(title, hide_path(text)) for title, text in facts]


def _data_names(facts: Mapping[str, Any]) -> str:
    sources = facts.get("sources")
    if isinstance(sources, list) and all(isinstance(source, Mapping) for source in sources):
        return ", ".join(hide_path(str(source.get("path"))) for source in sources)
    return hide_path(str(facts.get("path", "an unknown place")))


def _start_facts(start: Mapping[str, Any], title: str) -> list[tuple[str, str]]:
    command = start.get("command")
    words = hide_paths_of_command(command) if isinstance(command, list) else "unknown"
    machine, versions, git = (start.get(key) for key in ("machine", "versions", "git"))
    lines = [
        (title, f"{start.get('time', 'unknown time')}, at step {start.get('step', 'unknown')}"),
        ("Command", words),
        ("Machine", ", ".join([f"device {start.get('device', 'unknown')}", *_pairs(machine)])),
        ("Versions", ", ".join(_pairs(versions)) or "unknown"),
    ]
    if isinstance(git, Mapping):
        changed = ", with changes since" if git.get("changed") else ""
        lines.append(("Code", f"commit {git.get('commit', 'unknown')}{changed}"))
    return lines


def _pairs(values: object) -> list[str]:
    return [f"{key} {value}" for key, value in values.items()] if isinstance(values, Mapping) else []


def _starts(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    starts = record.get("starts", [])
    return [start for start in starts if isinstance(start, Mapping)] if isinstance(starts, list) else []


def _file_stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
