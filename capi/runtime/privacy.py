"""What is shared names no place on this machine: of a path only its last part is kept.

An absolute path holds the names of users and projects. Reports, cards, exports, results and feature files are made to
be read by others; run.json stays with the run and keeps whole paths.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# From the root, from a home or from the present folder; not within an address (hf://) or a relative path. Where
# an unquoted path ends nobody can know, since folders have spaces and commas in their names: all up to the last slash
# of the line belongs to it.
_PATH = re.compile(r"(?:file://|(?<![\w.\-/~\\]))(?:~[\w.\-]*|\.{1,2})?/(?![/\s])(?:[^\n]*/)?[^\n]*")
# Folders that hold homes: what lies in them is called like a user.
_HOMES = ("/home/", "/Users/")
# What may stand before a path in one value: `t.csv?images=` or `untrained:`.
_PREFIX = re.compile(r"(\?\w+=|^[\w-]{2,}:(?!//))")
_START = r"(?:[^'\"`\n,\[\]{}:=]*?\?\w+=|[\w-]{2,}:(?!//))?(?:file://|~|\.{0,2}/(?!/))"
# Values that may hold spaces: in quotes (YAML doubles a quote within), a whole line of YAML with the lines that it is
# folded into, and within the brackets of YAML. None goes back over what it has read: the time is linear.
_QUOTED = re.compile(rf"((?<!\w)(['\"`]))({_START}(?:(?!\2)[^\n]|\2(?=\w)|\2\2|\n[ \t]+)*+)")
_YAML_LINE = re.compile(
    rf"^([ \t-]*+(?:[\w.]+: ++)?)({_START}[^\n]*+(?:\n[ \t]++(?!- |#|[^\s:]+:(?:\s|$))[^\n]++)*+)$", re.MULTILINE
)
_YAML_COMMENT = re.compile(r"(?:^|(?<=\s))#[^\n]*", re.MULTILINE)
_YAML_FLOW = re.compile(rf"([\[{{,:=][ \t]*+)({_START}[^,\[\]{{}}\n]*+)")


def hide_path(text: str) -> str:
    """The last part of a path, also behind an option (`t.csv?images=/home/ann/x`); any other text stays as it is."""
    return "".join(_last_part(part) if _is_path(part) else part for part in _PREFIX.split(text))


def name_of_data(place: str) -> str:
    """What images are called where others read it: last parts alone, also those of relative paths."""
    if "://" in place:
        return hide_path(place)
    return "".join(part if _PREFIX.fullmatch(part) else _last_part(part) for part in _PREFIX.split(place))


def _is_path(text: str) -> bool:
    return text.startswith(("/", "~", "./", "../", "file://")) or Path(text).is_absolute()


def _last_part(text: str) -> str:
    path = Path(text.removeprefix("file://"))
    # The name of a home is that of its user.
    return "~" if path == Path(os.path.expanduser("~")) else path.name or text


def hide_path_of_model(name: str) -> str:
    """The name of a model without the place where it lies: `untrained:/home/ann/run` becomes `untrained:run`."""
    return hide_paths_within(hide_path(name))


def hide_paths(value: Any, *known: str | Path) -> Any:
    """Plain values in which every path is its last part alone; `known` as in `hide_paths_within`."""
    if isinstance(value, Mapping):
        return {hide_paths(name, *known): hide_paths(one, *known) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [hide_paths(one, *known) for one in value]
    return hide_paths_within(hide_path(value), *known) if isinstance(value, str) else value


def texts_of(value: Any) -> list[str]:
    """Every text within plain values, such as those of a config."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [text for one in value for text in texts_of(one)]
    return [value] if isinstance(value, str) else []


def hide_paths_within(text: str, *known: str | Path) -> str:
    """A sentence in which each path is its last part alone; `known` are paths that may hold spaces."""
    shown = _shown(known)
    for place in sorted(shown, key=len, reverse=True):
        text = text.replace(place, shown[place])
    text = _QUOTED.sub(lambda found: found[1] + hide_path(found[3]), text)
    return _PATH.sub(_leaf, text)


def _leaf(found: re.Match[str]) -> str:
    """What follows the last slash of a line; "..." where that is nothing or may be the name of a user."""
    folder, slash, leaf = found[0].rpartition("/")
    return "..." if f"{folder}{slash}".endswith(_HOMES) or not leaf.strip() else leaf


def _shown(known: Iterable[str | Path]) -> dict[str, str]:
    """What stands for each known path and for the home; files beside a CSV are named as the CSV names them."""
    shown = {os.path.expanduser("~"): "~"}
    for place in filter(_is_path, (part for each in known for part in _PREFIX.split(str(each)))):
        for path in (Path(place), Path(os.path.abspath(os.path.expanduser(place)))):
            shown[str(path)] = path.name
            if path.suffix.lower() == ".csv" and path.parent.name:
                shown[f"{path.parent}{os.sep}"] = ""
    # Some accounts have the root for a home.
    return {place: name for place, name in shown.items() if _is_path(place) and Path(place).name}


def hide_paths_of_yaml(text: str) -> str:
    """A config as others may read it. Its text is searched, not parsed: it may be broken, or made to be slow."""
    # First: a comment is prose, in which a colon or a comma ends no path.
    text = _YAML_COMMENT.sub(lambda found: hide_paths_within(found[0]), text)
    for values in (_YAML_LINE, _YAML_FLOW):
        text = values.sub(lambda found: found[1] + hide_path(found[2]), text)
    return hide_paths_within(text)


def hide_paths_of_command(words: list[Any]) -> str:
    """A command line as others may read it: `--out=/home/ann/run` becomes `--out=run`."""
    shown = []
    for word in map(str, words):
        option, equals, value = ("", "", word) if _is_path(word) else word.partition("=")
        shown.append(hide_path(option) + equals + hide_paths_of_yaml(hide_path(value)))
    return " ".join(shown)
