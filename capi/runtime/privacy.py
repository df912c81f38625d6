"""What is shared names no place on this machine: of a path only its last part is kept.

An absolute path holds the names of users and projects. Reports, cards, exports, results and feature files are made to
be read by others; run.json stays with the run and keeps whole paths.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# From the root, from a home or from the present folder; not within an address (https://, hf://) or a relative path.
_PATH = re.compile(r"(?:file://|(?<![\w.\-/~\\]))(?:~[\w.\-]*|\.{1,2})?/(?!/)[^\s'\"`,;:()\[\]<>|=]+")
# A line of YAML whose whole value is a path, which may hold spaces.
_YAML_PATH = re.compile(r"""^([ \t-]*(?:[\w.]+: +)?)(['"]?)((?:~|/|\.{1,2}/).*?)\2$""", re.MULTILINE)


def hide_path(text: str) -> str:
    """The last part of a path; any other text stays as it is."""
    if not (text.startswith(("/", "~", "./", "../")) or Path(text).is_absolute()):
        return text
    # The name of a home is that of its user.
    return "~" if Path(text) == Path(os.path.expanduser("~")) else Path(text).name or text


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
    shown = {str(place): Path(place).name for place in known} | {os.path.expanduser("~"): "~"}
    for place, name in shown.items():
        # Some accounts have the root for a home.
        if Path(place).is_absolute() and Path(place).name:
            text = text.replace(place, name)
    return _PATH.sub(lambda found: hide_path(found[0].removeprefix("file://")), text)


def hide_paths_of_yaml(text: str) -> str:
    """A config as others may read it. Its text is searched, not parsed: it may be broken, or made to be slow."""
    return hide_paths_within(_YAML_PATH.sub(lambda line: f"{line[1]}{line[2]}{hide_path(line[3])}{line[2]}", text))


def hide_paths_of_command(words: list[Any]) -> str:
    """A command line as others may read it: `--out=/home/ann/run` becomes `--out=run`."""
    shown = []
    for word in map(str, words):
        option, equals, value = word.partition("=")
        shown.append(hide_path(option) + equals + hide_paths_within(hide_path(value)))
    return " ".join(shown)
