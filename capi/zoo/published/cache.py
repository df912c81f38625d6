"""Where the files of published models lie: the cache that torch.hub has too, `$TORCH_HOME/hub/checkpoints`.

A file that is there is used, whoever put it there. When it is first used its checksum is written beside it, in the
format of `sha256sum`; from then on it must agree. One process downloads while others wait for it.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.hub

from capi.errors import CapiError
from capi.runtime.atomic import atomic_write
from capi.runtime.lock import locked
from capi.zoo.published.downloads import Patience, Report, UnreachableError, download
from capi.zoo.published.registry import ReleasedModel

_LOG = logging.getLogger("capi")
_SECONDS_BETWEEN_LINES = 15


def cache_folder() -> Path:
    """Where torch.hub keeps checkpoints."""
    return Path(torch.hub.get_dir()) / "checkpoints"


def cached_file(model: ReleasedModel, *, patience: Patience = Patience()) -> Path:  # noqa: B008 - it cannot be changed
    """The file of a published model: from the cache, or else downloaded into it, with a progress bar."""
    target = cache_folder() / model.file
    if not target.is_file() or not _record(target).is_file():
        _make_ready(model, target, patience)
    _verify(target)
    return target


def _make_ready(model: ReleasedModel, target: Path, patience: Patience) -> None:
    """The file and its checksum, made by whoever comes first."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = target.with_name(f".{target.name}.lock")
        with locked(lock, waiting=f"another process is making {target}: waiting for it"):
            if not target.is_file():
                _download(model, target, patience)
            if not _record(target).is_file():
                atomic_write(_record(target), f"{_checksum(target)}  {target.name}\n")
    except OSError as error:
        # A cache that others keep may be used without being changed.
        if not target.is_file():
            raise CapiError(
                f"{target.parent} cannot be written ({error.strerror}): set TORCH_HOME to a folder that can"
            ) from error


def _download(model: ReleasedModel, target: Path, patience: Patience) -> None:
    """Checked before it gets its name, where an earlier file of this name left its checksum."""

    def check(arrived: Path) -> None:
        if _record(target).is_file() and not _agrees(arrived, target):
            raise CapiError(
                f"what was downloaded as {target.name} is not the file of before: if it was replaced by its "
                f"publisher, delete {_record(target)} and load it again"
            )

    try:
        with _shown(model.name) as report:
            download(model.address, target, patience=patience, report=report, check=check)
    except UnreachableError as error:
        raise CapiError(
            f"{model.name} is not on this machine, and {error}: put the file from there at {target}, and it is used"
        ) from error


def _verify(target: Path) -> None:
    if _record(target).is_file() and not _agrees(target, target):
        raise CapiError(
            f"{target} has changed since it was first used: delete it and {_record(target)}, then it is downloaded "
            "again"
        )


def _agrees(file: Path, target: Path) -> bool:
    """Whether a file has the checksum that stands beside the target."""
    words = _record(target).read_text(encoding="utf-8", errors="replace").split()
    return bool(words) and words[0] == _checksum(file)


def _record(target: Path) -> Path:
    return target.with_name(f"{target.name}.sha256")


def _checksum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@contextmanager
def _shown(name: str) -> Iterator[Report]:
    """A bar with the speed and the time left; where there is no terminal, or no rich, a line now and then."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Speed
    except ImportError:
        yield _lines(name)
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(name)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), Speed())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(name: str, clock: Callable[[], float] = time.monotonic) -> Report:
    last = clock()

    def report(done: int, total: int | None) -> None:
        nonlocal last
        if clock() - last > _SECONDS_BETWEEN_LINES:
            last = clock()
            _LOG.info("%s: %.0f of %s MiB", name, done / 2**20, "?" if total is None else f"{total / 2**20:.0f}")

    return report
