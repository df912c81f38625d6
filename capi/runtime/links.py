"""Symbolic links: no file is written through one, and none leads out of a run folder."""

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
    for link in _links(root):
        target = os.path.realpath(link)
        if target != root and not target.startswith(root + os.sep):
            raise CapiError(
                f"{folder} holds a symbolic link that leads out of it ({os.path.relpath(link, root)}): expected all "
                "files of a run inside its folder; to keep it on another disk, move the run folder as a whole"
            )


def make_folder(path: Path, *, inside: Path) -> None:
    """Make a folder for results; one that a link places outside of `inside` is refused."""
    if not path.resolve().is_relative_to(inside.resolve()):
        raise CapiError(f"{path} leads out of {inside} through a symbolic link: remove the link")
    path.mkdir(parents=True, exist_ok=True)


def _links(folder: str) -> Iterator[str]:
    """All links below a folder. None is followed."""
    waiting = [folder]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        yield entry.path
                    elif entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except PermissionError:
            continue
