"""What is shared names no place on this machine: of a path only its last part is kept.

An absolute path holds the names of users and projects. Reports, cards, exports, results and feature files are made to
be read by others; run.json stays with the run and keeps whole paths.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# From the root, from a home or from the present folder; not within an address (https://, hf://) or a relative path.
_PATH = re.compile(r"(?:file://|(?<![\w.\-/~\\]))(?:~[\w.\-]*|\.{1,2})?/(?!/)[^\s'\"`,;:()\[\]<>|=]+")


def hide_path(text: str) -> str:
    """The last part of a path; any other text stays as it is."""
    is_path = text.startswith(("/", "~", "./", "../")) or Path(text).is_absolute()
    return (Path(text).name or text) if is_path else text


def hide_path_of_model(name: str) -> str:
    """The name of a model without the place where it lies: `untrained:/home/ann/run` becomes `untrained:run`."""
    return hide_paths_within(hide_path(name))


def hide_paths(value: Any) -> Any:
    """Plain values in which every text that is a path is its last part alone."""
    if isinstance(value, Mapping):
        return {name: hide_paths(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [hide_paths(one) for one in value]
    return hide_path(value) if isinstance(value, str) else value


def hide_paths_within(text: str, *known: str | Path) -> str:
    """A sentence in which each path is its last part alone; `known` are paths that may hold spaces."""
    for place in known:
        if Path(place).is_absolute() and Path(place).name:
            text = text.replace(str(place), Path(place).name)
    text = text.replace(str(Path.home()), "~")
    return _PATH.sub(lambda found: hide_path(found[0].removeprefix("file://")), text)


def hide_paths_of_command(words: list[Any]) -> str:
    """A command line as others may read it: `--out=/home/ann/run` becomes `--out=run`."""
    shown = []
    for word in map(str, words):
        option, equals, value = word.partition("=")
        shown.append(hide_path(option) + equals + hide_paths_within(hide_path(value)))
    return " ".join(shown)
