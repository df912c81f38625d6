r"""What is shared names no place on this machine: of a path only its last part is kept.

An absolute path holds the names of users and projects. Reports, cards, exports, results and feature files are made to
be read by others; run.json stays with the run and keeps whole paths.

Folders may have spaces, commas, quotes and line breaks in their names, so nothing says where a path in a sentence ends.
One rule holds for values and sentences alike: from where a path begins, everything up to the last slash or backslash of
the text is left out. That hides too much where two paths or a fraction stand in one sentence, and never too little.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from capi.errors import CapiError
from capi.runtime.yaml_documents import parse_yaml

# From the root, a home, the present folder or one above, a drive or a server; not within a word, a relative path, nor a
# fraction (1 / 2). An address names a machine, a bucket or a user too: only those of the Hub and of the web stay, and
# the web's only without a user.
_START = re.compile(
    r"""file:/
      | (?<![\w+.\-])(?!(?:hf|https?)://)[a-z][a-z0-9+.\-]*://
      | (?<![\w+.\-])[a-z]+://[^/\s@]*@
      | (?<![\w/\\])(?:~[\w.\-]*|\.{1,2})?[/\\](?![\s/])
      | (?<![\w/\\:])[/\\]{2,}(?!\s)
      | (?<![^\W\d_])[a-z]:[/\\](?!/)""",
    re.VERBOSE | re.IGNORECASE,
)
# Folders that hold homes: what lies in them is called like a user.
_HOMES = re.compile(r"[/\\](?:home|users)[/\\]$", re.IGNORECASE)
# What may follow a file or data set in `data`.
_OPTION = re.compile(r"(\?(?:images|column|split)=)")
_NAMELESS = "..."


def hide_path(text: str) -> str:
    """A value or a sentence in which a path is its last part alone, also behind an option (`t.csv?images=/home/x`)."""
    text = _without_home(text)
    if not _START.search(text):
        return text
    before, *options = _OPTION.split(text)
    if start := _START.search(before):
        before = before[: start.start()] + _last_part(before[start.start() :])
    return before + "".join(part if _OPTION.fullmatch(part) else _last_part(part) for part in options)


def name_of_data(place: str) -> str:
    """What images are called where others read it: last parts alone, also those of relative paths."""
    if "://" in place:
        return hide_path(place)
    parts = _OPTION.split(_without_home(place))
    return "".join(part if _OPTION.fullmatch(part) else _last_part(part) for part in parts)


def hide_paths(value: Any) -> Any:
    """Plain values, such as those of a config, in which every path is its last part alone."""
    if isinstance(value, Mapping):
        return {hide_paths(name): hide_paths(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [hide_paths(each) for each in value]
    return hide_path(value) if isinstance(value, str) else value


def hide_paths_of_yaml(text: str) -> str:
    """The values of a config as others may read them; comments are left out, as is a text that cannot be read."""
    try:
        values = parse_yaml(text, "the config")
    except CapiError:
        return "(not shown: it is not valid YAML)\n"
    return _as_yaml(hide_paths(values), flow=False)


def hide_paths_of_command(words: Sequence[Any]) -> str:
    """A command line as others may read it: `--out=/home/ann/run` becomes `--out=run`."""
    shown = []
    for word in map(str, words):
        option, equals, value = word.partition("=")
        try:
            structured = value.startswith(("[", "{"))
            values = hide_paths(parse_yaml(value, option)) if structured else None
            # A short option has its value right behind it: -o/home/ann/run.
            text = _as_yaml(values, flow=True).strip() if structured else re.sub(r"^-\w(?=[/\\~.])", r"\g<0> ", word)
            shown.append(hide_path(option) + equals + text if structured else hide_path(text))
        except CapiError:
            shown.append(hide_path(word))
    return " ".join(shown)


def _last_part(path: str) -> str:
    """What follows the last slash, unless that is nothing or may be the name of a user."""
    path = path.rstrip("/\\")
    end = max(path.rfind("/"), path.rfind("\\")) + 1
    user = Path(os.path.expanduser("~")).name
    nameless = not path[end:].strip() or _HOMES.search(path[:end])
    return _NAMELESS if nameless or (user and re.match(rf"{re.escape(user)}(?!\w)", path[end:])) else path[end:]


def _without_home(text: str) -> str:
    """The user's own home is ~; some accounts have the root for a home."""
    home = os.path.expanduser("~")
    return text if Path(home) == Path(Path(home).anchor) else re.sub(rf"{re.escape(home)}(?![\w.\-])", "~", text)


def _as_yaml(values: Any, *, flow: bool) -> str:
    # libyaml's writer where it is installed: about ten times as fast as the one in Python.
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.dump(
        values, Dumper=dumper, default_flow_style=flow, sort_keys=False, allow_unicode=True, width=2**31 - 1
    )
    return text
