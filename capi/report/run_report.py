"""A run folder gathered into a report, and the report written beside the run."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from capi.errors import CapiError, counted
from capi.report.costs import DEFAULT_COSTS, CostAssumptions, cost_of, seconds_of_starts
from capi.report.doctor import RunReading
from capi.report.pages.data import Column, PrototypeStrip, RunReport
from capi.report.pages.run import page, run_pieces
from capi.report.picture_files import PIXELS, read_emergence, read_neighbors, read_pixel_scores, read_prototypes
from capi.runtime.atomic import atomic_write
from capi.runtime.lock import is_being_trained
from capi.runtime.privacy import hide_path, hide_paths_of_command, hide_paths_of_yaml
from capi.train.health import Finding
from capi.zoo.build import recorded_loss, recorded_target
from capi.zoo.run_folder import CONFIG, FILE, RECORD

REPORT = "report.html"
_STARTS_SHOWN = 20


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
        """Without paths of this machine; the command that resumes the run is full of them."""
        if finding.title == "State":
            return replace(finding, advice="The command that started it, with --resume, goes on.")
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
