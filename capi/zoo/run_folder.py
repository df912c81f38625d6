"""The folder of a run: what it holds, who may write into it, and what it was started with.

RUN/config.yaml        the whole config, every value written out
RUN/run.json           versions, data, and for each start the command line, the machine and the state of git
RUN/metrics.jsonl      losses, entropy, evaluations: one JSON object a line, which may come from anyone
RUN/checkpoints/       the state, from which the run can be resumed
RUN/tensorboard/       the metrics again
RUN/replay/            batches that gave a non-finite loss
RUN/pictures/          curves and PCA pictures
RUN/report.html        the report
"""

import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from capi.config.files import parse_config
from capi.config.schema import Config
from capi.errors import CapiError
from capi.runtime.atomic import atomic_write, is_partial, refuse_outside_links, remove_folder, remove_leftovers
from capi.runtime.documents import open_regular, parse_json, read_object, read_text
from capi.runtime.lock import locked
from capi.runtime.numerics import NUMERICS, changes_since
from capi.runtime.yaml_documents import parse_yaml

_LOG = logging.getLogger("capi")
FORMAT_VERSION = 1
CONFIG, RECORD = "config.yaml", "run.json"
_PACKAGES = ("capi", "torch", "numpy", "pillow")


class RunFolder:
    """A run on the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._links_checked = False

    @property
    def exists(self) -> bool:
        return (self.path / CONFIG).is_file()

    def wait_until_seen(self, seconds: float = 60.0) -> None:
        """After another process has made it. A network file system may tell what it knew before for a while."""
        end = time.monotonic() + seconds
        while not self.exists:
            if time.monotonic() > end:
                raise CapiError(
                    f"{self.path} is not the same folder for all processes: give --out on a file system that all "
                    "machines share"
                )
            time.sleep(0.2)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def pictures(self) -> Path:
        return self.path / "pictures"

    def _no_run(self, file: str) -> str:
        if not self.path.exists():
            return f"there is no folder {self.path}: give the folder of a run, the --out of capi pretrain"
        return f"{self.path} is no run: it has no {file}; expected the --out of capi pretrain"

    def refuse_outside_links(self) -> None:
        """A run may come from anyone: nothing is read or written through a link that leads out of it."""
        if not self._links_checked and any(os.path.lexists(self.path / name) for name in (CONFIG, RECORD)):
            refuse_outside_links(self.path)
            self._links_checked = True

    def config_text(self) -> str:
        self.refuse_outside_links()
        if not self.exists:
            raise CapiError(self._no_run(CONFIG))
        return read_text(self.path / CONFIG)

    def record(self, *, also_newer: bool = False) -> dict[str, Any]:
        """What run.json holds; a run of a newer version is refused, except where one only wants to look."""
        self.refuse_outside_links()
        if not os.path.lexists(self.path / RECORD):
            raise CapiError(self._no_run(RECORD))
        record = read_object(self.path / RECORD)
        version = record.get("format", 0)
        sections = [record.get(name, {}) for name in ("data", "init")] + [record.get("versions", {})]
        starts = record.get("starts", [])
        listed = isinstance(starts, list) and all(isinstance(start, dict) for start in starts)
        fits = listed and all(isinstance(section, dict) for section in sections)
        # Who only wants to look shows what there is.
        if not isinstance(version, int) or not (fits or also_newer):
            raise CapiError(f"{self.path / RECORD} is not what a run writes: restore it from a copy")
        if version > FORMAT_VERSION and not also_newer:
            raise CapiError(
                f"{self.path} was written by a newer capi (run format {version}, this one knows up to "
                f"{FORMAT_VERSION}): install that version"
            )
        return record

    def refuse_unless_free(self) -> None:
        """Refuse a folder that holds anything: only an empty or missing one may become a run."""
        if self.exists:
            raise CapiError(f"{self.path} holds a run already: --resume continues it, --overwrite starts again")
        if self.path.exists() and not self.path.is_dir():
            raise CapiError(f"{self.path} is a file: --out takes a folder")
        # A start that was killed while it made the folder leaves these.
        if self.path.is_dir() and any(name != RECORD and not is_partial(name) for name in os.listdir(self.path)):
            raise CapiError(f"{self.path} is not empty and holds no run: give --out another folder")

    def clear(self) -> None:
        """Remove a run; a folder that holds none is left alone."""
        if self.exists:
            self.record()
            remove_folder(self.path.resolve())

    def create(self, config_text: str, record: dict[str, Any]) -> None:
        try:
            # Where it is a link to another disk, its place there.
            place = self.path.resolve()
            place.mkdir(parents=True, exist_ok=True)
            # A run whose removal was interrupted lies beside it.
            remove_leftovers(place.parent)
            atomic_write(self.path / RECORD, json.dumps({"format": FORMAT_VERSION, **record}, indent=1))
            # Last, since its presence makes the folder a run.
            atomic_write(self.path / CONFIG, config_text)
        except OSError as error:
            raise CapiError(f"{self.path} cannot be written ({error.strerror}): give --out another folder") from error

    def note_extension(self, config_text: str, steps: int) -> None:
        """Write down that a run of so many steps gets more."""
        record = self.record()
        time_now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        record.setdefault("extensions", []).append({"from_steps": steps, "time": time_now})
        atomic_write(self.path / RECORD, json.dumps(record, indent=1))
        atomic_write(self.path / CONFIG, config_text)

    def note_start(self, step: int, device: str, processes: int = 1) -> None:
        """Add this start to those in run.json."""
        record = self.record()
        start = _this_start(step, device) | {"processes": processes}
        for before in record.setdefault("starts", [])[-1:]:
            for key in ("device", "machine", "versions"):
                if before[key] != start[key]:
                    _LOG.warning("%s was %s, is %s: last digits may differ", key, before[key], start[key])
        _warn_of_other_numerics(record, step)
        if step == 0:
            record["numerics"] = NUMERICS
        record["starts"].append(start)
        atomic_write(self.path / RECORD, json.dumps(record, indent=1))

    def locked(self) -> AbstractContextManager[None]:
        """Keep other processes from training the same run."""
        self.refuse_outside_links()
        return locked(
            self.path / ".lock", busy=f"{self.path} is being trained by another process: wait for it, or end it"
        )


def run_config(folder: RunFolder) -> Config:
    """The config that a run was started with."""
    folder.record()
    source = str(folder.path / CONFIG)
    return parse_config(parse_yaml(folder.config_text(), source), source=source)


def versions() -> dict[str, str]:
    """Versions of Python and of what the computation rests on."""
    releases = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            releases[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            releases[name] = "unknown"
    return releases


def _this_start(step: int, device: str) -> dict[str, Any]:
    # What was typed: `python -m capi` and the path of the script are the command capi too.
    program = Path(sys.argv[0])
    is_command = program.name == "capi" or program.parts[-2:] == ("capi", "__main__.py")
    return {
        "step": step,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": ["capi", *sys.argv[1:]] if is_command else list(sys.argv),
        "folder": str(Path.cwd()),
        "machine": _machine(device),
        "device": device,
        "versions": versions(),
        "numerics": NUMERICS,
        "git": _git_state(),
    }


def _warn_of_other_numerics(record: dict[str, Any], step: int) -> None:
    """Once: the next start compares itself with this one. A run that starts over has nothing to compare with."""
    last = record["starts"][-1] if record["starts"] else record
    before = last.get("numerics", 1)
    if step and before != NUMERICS:
        _LOG.warning("this run has numerics %s, this capi %s: %s", before, NUMERICS, changes_since(before))


def _machine(device: str) -> dict[str, Any]:
    machine = {"system": platform.platform(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if device.startswith("cuda") and torch.cuda.is_available():
        machine["accelerator"] = torch.cuda.get_device_name(device)
    return machine


def _git_state() -> dict[str, Any] | None:
    """Commit of the code and whether it was changed since, where it lies in a repository."""
    git = shutil.which("git")
    home = Path(__file__).parent
    if git is None:
        return None

    def ask(*arguments: str) -> str:
        # Looking must take no lock: one that is left behind, by a full disk for example, stops the owner's commits.
        done = subprocess.run(  # noqa: S603 - fixed arguments
            [git, "--no-optional-locks", "-C", str(home), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        return done.stdout.strip()

    try:
        return {"commit": ask("rev-parse", "HEAD"), "changed": bool(ask("status", "--porcelain", "."))}
    except (subprocess.SubprocessError, OSError):
        return None


FILE = "metrics.jsonl"
# Fields that depend on when and where a run was computed, not on what was computed.
WALL_CLOCK = ("seconds", "evaluation_seconds", "images_per_second", "mfu", "data_wait", "peak_memory")
# Bytes of a line, and keys of a record: far more than any run writes.
LONGEST_LINE, MOST_METRICS = 2**20, 2000
# Beyond this a browser cannot distinguish a step from the next one.
_LARGEST_STEP = 2**53


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records of a file; a last line that was cut off in the middle is left out."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CapiError(f"{path} cannot be read ({error.strerror or error})") from error
    with file:
        lines = iter(lambda: file.readline(LONGEST_LINE), b"")
        records = [record for line in lines if (record := parse_record(line)) is not None]
    return [
        {key: value for key, value in record.items() if isinstance(value, int | float | None)} for record in records
    ]


def parse_record(line: bytes) -> dict[str, Any] | None:
    """A record with a step, or None where a line holds none."""
    try:
        record = parse_json(line, "a line of metrics")
    except CapiError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < _LARGEST_STEP:
        return None
    return record if len(record) <= MOST_METRICS else None
