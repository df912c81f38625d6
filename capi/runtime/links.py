"""Folders and their links: none is written through, none leads out of a run folder, and none repeats files."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from capi.errors import CapiError

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
