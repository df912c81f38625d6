"""Atomic writes: a file or folder is as before or complete, also after an error, a kill or a power cut.

Content is written under a new random name in the same folder (`.NAME.HEX.partial`), flushed to the disk and renamed.
No symbolic link is followed: one under the random name is an error, one under the final name is replaced. The writer
holds a lock on what it writes. What a killed process left has no lock any more, and the next process that writes into
the folder removes it; where locks do not work, it does so after a day.

Four things have fixed names, since another process must find them: a download and an extraction that can resume
(`.NAME.partial`), a checkpoint to which all processes write (`.partial-STEP`), and locks (`.lock`). They are safe for
other reasons. A link under such a name is refused before anything is written, and files are opened with O_NOFOLLOW
(`refuse_link`, `open_nofollow`, `locked`). One process at a time fills them: it holds a lock, that of the run for its
checkpoints. What was left there counts only if it is of the same work: a download by the tag of the server, an
extraction by encoder, images and settings in its `progress.json`; a checkpoint never, its folder is made again.

Beside them, folders and their links: none is written through, none leads out of a run folder, and none repeats files.
"""

import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from filelock import lock_descriptor

from capi.errors import CapiError


@dataclass(frozen=True)
class Output:
    """Where something is written, and whether what lies there may be replaced. Checked before the work begins."""

    path: Path
    overwrite: bool = False

    def check_file(self) -> None:
        if self.path.is_dir():
            raise CapiError(f"{self.path} is a folder: --out takes the name of a file")
        if self.path.exists():
            self.check_replacing()

    def check_folder(self) -> None:
        self.check_no_file()
        if self.path.is_dir() and any(self.path.iterdir()) and not self.overwrite:
            raise CapiError(f"{self.path} is not empty: choose another --out, or give --overwrite")

    def check_no_file(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise CapiError(f"{self.path} is a file: --out takes the name of a folder")

    def check_replacing(self) -> None:
        if not self.overwrite:
            raise CapiError(f"{self.path} is there already: choose another --out, or replace it with --overwrite")


# Windows has neither of them.
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)


def open_nofollow(path: Path, mode: str, **options: Any) -> IO[Any]:
    """Open a file in place, to append, to resume or to lock; a link, a pipe or a device under its name is refused."""
    refuse_link(path)

    def opener(name: str, flags: int) -> int:
        # A pipe would block until someone reads it.
        return os.open(name, flags | NOFOLLOW | _NONBLOCK, 0o666)

    file: IO[Any] = open(path, mode, opener=opener, **options)  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CapiError(f"{path} is a pipe or a device: expected a regular file; remove it")
    return file


def refuse_link(path: Path) -> None:
    """A file or folder with a stable name, which a stranger's folder may hold as a link."""
    if path.is_symlink():
        raise CapiError(f"{path} is a symbolic link, expected a file or folder of its own: remove the link")


def refuse_outside_links(folder: Path) -> None:
    """All links in a run folder must stay inside it; the run folder itself may be a link."""
    root = os.path.realpath(folder)
    for name, entry in walk_folder(root, follow_links=False):
        target = os.path.realpath(entry.path) if entry.is_symlink() else root
        if target != root and not target.startswith(root + os.sep):
            raise CapiError(
                f"{folder} holds a symbolic link that leads out of it ({name}): expected all "
                "files of a run inside its folder; to keep it on another disk, move the run folder as a whole"
            )


def make_folder(path: Path, *, inside: Path) -> None:
    """Make a folder for results; one that a link places outside of `inside` is refused."""
    if not path.resolve().is_relative_to(inside.resolve()):
        raise CapiError(f"{path} leads out of {inside} through a symbolic link: remove the link")
    path.mkdir(parents=True, exist_ok=True)


def walk_folder(folder: Path | str, *, follow_links: bool = True) -> Iterator[tuple[str, "os.DirEntry[str]"]]:
    """All files below a folder in no order, each with its name relative to it; hidden files and folders are left out.

    Without `follow_links` links are files and hidden ones are there too; folders that may not be read, or have gone
    meanwhile, are left out.
    """
    # Names put together as plain strings: several times faster than os.walk with relpath, on millions of files.
    waiting: list[tuple[str, str, frozenset[str]]] = [("", os.fspath(folder), frozenset())]
    while waiting:
        prefix, place, parents = waiting.pop()
        try:
            if follow_links:
                # A folder may lie in itself through a link, and its files would come again and again.
                parents |= {os.path.realpath(place)}
            with os.scandir(place) as entries:
                for entry in entries:
                    if follow_links and entry.name.startswith("."):
                        continue
                    if not entry.is_dir(follow_symlinks=follow_links):
                        yield prefix + entry.name, entry
                    elif not (entry.is_symlink() and os.path.realpath(entry.path) in parents):
                        waiting.append((f"{prefix}{entry.name}/", entry.path, parents))
        except OSError as error:
            # A folder of a run may go while it is walked, as old checkpoints do.
            if not follow_links and isinstance(error, PermissionError | FileNotFoundError):
                continue
            raise CapiError(
                f"{error.filename} cannot be read ({error.strerror}): give access to it, or move it away"
            ) from error


def is_regular(entry: "os.DirEntry[str]") -> bool:
    """Whether an entry of a folder may be read: a regular file, or a link to one; links that lead nowhere count."""
    if entry.is_file(follow_symlinks=False):
        return True
    if not entry.is_symlink():
        return False
    try:
        return stat.S_ISREG(entry.stat().st_mode)
    except OSError:
        return True


# The second form is that of earlier versions.
_PARTIAL = re.compile(r"\..*\.[0-9a-f]{16}\.partial|\.prototypes\.(partial|old)-\d+", re.DOTALL)
_LONGEST_NAME = 40
_WINDOWS = os.name == "nt"
_DAY = 24 * 60 * 60
_SECONDS_BETWEEN_LOOKS = 60
_NEW_FILE = os.O_CREAT | os.O_EXCL | os.O_RDWR | NOFOLLOW | getattr(os, "O_BINARY", 0)
# What a rename fails with where a folder, a file or a link has the name.
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
# When this process last looked for leftovers in a folder.
_LOOKED: dict[str, float] = {}


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write a whole file; text as UTF-8."""
    with atomic_open(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_open(path: Path, mode: str = "wb", *, sync: bool = True, **options: Any) -> Iterator[IO[Any]]:
    """An open file, which becomes `path` at the end, or is removed after an error.

    `sync=False` leaves the flush to the system, where there are many files that can be made again.
    """
    _remove_leftovers_sometimes(path.parent)
    partial, descriptor = _create(path)
    try:
        with open(descriptor, mode, **options) as file:
            yield file
            file.flush()
            if sync:
                os.fsync(descriptor)
            if not _WINDOWS:
                os.replace(partial, path)
        if _WINDOWS:  # It renames no file that is open.
            os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """The path of an empty file, for writers that take no open file; what they leave there becomes `path`."""
    with scratch_folder(path) as folder:
        partial = folder / path.name
        descriptor = os.open(partial, _NEW_FILE, 0o666)
        mode = os.fstat(descriptor).st_mode & 0o777
        os.close(descriptor)
        yield partial
        # safetensors puts a file in its place that only its owner may read.
        partial.chmod(mode)
        move_into_place(partial, path)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """An empty folder to fill. It replaces whatever is at `path`, or is removed after an error."""
    with scratch_folder(path) as folder:
        yield folder
        # On the disk before it has its name, so that a power cut leaves no empty files.
        for each in (*folder.rglob("*"), folder):
            _sync(each)
        _swap(folder, path)


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """An empty folder beside `path`, under a random name, for as long as it is needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers_sometimes(path.parent)
    folder, descriptor = _create_folder(path)
    try:
        yield folder
    finally:
        with suppress(OSError):
            remove(folder)
        if descriptor is not None:
            os.close(descriptor)


def move_into_place(partial: Path, path: Path) -> None:
    """Flush a complete file of the same file system to the disk and give it its name."""
    _sync(partial)
    os.replace(partial, path)


def remove(path: Path) -> None:
    """Remove a file, a folder or a link, if it is there; what a link leads to stays."""
    if path.is_dir() and not path.is_symlink():
        # Another process may be removing it too: what is gone already is no error.
        while path.exists():
            with suppress(FileNotFoundError):
                shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_folder(path: Path) -> None:
    """Remove a folder under another name, so that a removal that is interrupted leaves no half of it."""
    with scratch_folder(path) as folder:
        path.rename(folder / path.name)


def _partial_name(path: Path) -> Path:
    """A new random name beside a path."""
    return path.with_name(f".{path.name[:_LONGEST_NAME]}.{secrets.token_hex(8)}.partial")


def is_partial(name: str) -> bool:
    """Whether a file or folder of this name is one that was not completed."""
    return _PARTIAL.fullmatch(name) is not None


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left in a folder."""
    _LOOKED[os.path.abspath(folder)] = time.monotonic()
    # What cannot be listed or removed is no reason to write nothing.
    with suppress(OSError):
        leftovers = [folder / name for name in os.listdir(folder) if is_partial(name)]
        for path in leftovers:
            with suppress(OSError):
                if _is_abandoned(path):
                    remove(path)


def _remove_leftovers_sometimes(folder: Path) -> None:
    """Remove leftovers at most once a minute, since a folder may hold very many files."""
    looked = _LOOKED.get(os.path.abspath(folder))
    if looked is None or time.monotonic() - looked > _SECONDS_BETWEEN_LOOKS:
        remove_leftovers(folder)


def _is_abandoned(path: Path) -> bool:
    """Whether no process holds the lock. Where that cannot be known, age decides."""
    old = time.time() - os.lstat(path).st_mtime > _DAY
    try:
        # Windows opens no folders.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | NOFOLLOW)
    except OSError:
        return old
    try:
        return lock_descriptor(descriptor, blocking=False)
    except OSError:
        return old
    finally:
        os.close(descriptor)


def _create(path: Path) -> tuple[Path, int]:
    """A new file that this process holds the lock of."""
    while True:
        partial = _partial_name(path)
        descriptor = os.open(partial, _NEW_FILE, 0o666)
        if _hold(descriptor, partial):
            return partial, descriptor
        os.close(descriptor)


def _create_folder(path: Path) -> tuple[Path, int | None]:
    """The same for a folder; without a descriptor where folders cannot be opened."""
    while True:
        folder = _partial_name(path)
        folder.mkdir()
        if _WINDOWS:  # It opens no folders.
            return folder, None
        descriptor = os.open(folder, os.O_RDONLY | NOFOLLOW)
        if _hold(descriptor, folder):
            return folder, descriptor
        os.close(descriptor)


def _hold(descriptor: int, path: Path) -> bool:
    """Lock what was just made; False if another process took it for a leftover before that."""
    with suppress(OSError):
        lock_descriptor(descriptor, blocking=False)
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _swap(folder: Path, path: Path) -> None:
    """Give a folder its name in place of what has it; other processes may be doing the same."""
    replaced: Path | None = None
    for attempts_left in reversed(range(100)):
        try:
            folder.rename(path)
            break
        except OSError as error:
            if error.errno not in _TAKEN or not attempts_left:
                if replaced is not None:
                    replaced.rename(path)
                raise
        if replaced is not None:
            remove(replaced)
        replaced = _partial_name(path)
        try:
            path.rename(replaced)
        except FileNotFoundError:
            replaced = None
    if replaced is not None:
        remove(replaced)


def _sync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":  # Windows opens no folders.
        return
    descriptor = os.open(path, os.O_RDONLY | NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
