"""JSON and text that is read back, with limits; YAML is in `yaml_documents.py`, since it needs more than torch brings.

A file that someone else made must not fill the memory or the stack, and has no repeated keys. Every error is a
`CapiError` that names the file. A file that is missing, a folder, a FIFO or too large is one too.
"""

import errno
import io
import json
import os
import re
import stat
from pathlib import Path
from typing import Any, NoReturn

from capi.errors import CapiError

# Bytes of a file. A config or a record has some thousands; the results of a segmentation some millions.
CONFIG_BYTES = 2**20
RECORD_BYTES = 64 * 2**20
# Lists of files and labels of published data sets: the annotations of iNaturalist 2021 are the largest, about 1 GB.
LIST_BYTES = 4 * 2**30
# Objects and lists within each other. What the package writes has less than ten.
DEEPEST = 64
# Threads of a process that read many files at a time and wait for a disk or a server.
READING_THREADS = 32
# A name or number of a file as it stands in a message.
_SHOWN = 60
# A string that does not end extends to the end of the text: no other beginning of one is tried, so the time is linear.
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)


class RepeatedKeyError(ValueError):
    """A key stands twice in one object."""


class UnfitFileError(OSError):
    """What stands under a name is not a regular file, or is larger than such files can be."""


def read_regular(path: Path, *, limit: int) -> bytes:
    """What a regular file holds, at most `limit` bytes."""
    with open_regular(path, limit=limit) as file:
        # Not up to the limit: the memory for all that is asked for is taken first.
        return file.read(os.fstat(file.fileno()).st_size)


def open_regular(path: Path, *, limit: int = 2**63) -> io.BufferedReader:
    """A regular file, opened to be read. Nothing waits, as it would for a FIFO."""
    try:
        # The flags are 0 where a system does not have them.
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except ValueError as error:
        raise UnfitFileError("a name that holds a NUL character") from error
    file = open(number, "rb")  # noqa: SIM115 - whoever asked closes it
    try:
        regular_size(os.fstat(number), limit)
    except OSError:
        file.close()
        raise
    return file


def regular_size(status: os.stat_result, limit: int) -> int:
    """The bytes of a regular file that has not too many."""
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "a folder, expected a file")
    if not stat.S_ISREG(status.st_mode):
        raise UnfitFileError("a pipe or device, expected a regular file")
    if status.st_size > limit:
        raise UnfitFileError(f"{status.st_size} bytes, where at most {limit} are read")
    return status.st_size


def read_text(path: Path, *, limit: int = CONFIG_BYTES) -> str:
    """A text in UTF-8, with or without a byte order mark."""
    try:
        return read_regular(path, limit=limit).decode("utf-8-sig")
    except OSError as error:
        raise CapiError(f"{path} cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise CapiError(f"{path} is not a text in UTF-8 (byte {error.start})") from error


def read_json(path: Path, *, limit: int = RECORD_BYTES) -> Any:
    """The value of a JSON file."""
    return parse_json(read_text(path, limit=limit), str(path))


def read_object(path: Path, *, limit: int = RECORD_BYTES) -> dict[str, Any]:
    """The object of a JSON file; any other value is an error."""
    return parse_object(read_text(path, limit=limit), str(path))


def parse_json(text: str | bytes, source: str) -> Any:
    """A JSON value: at most so deep, without repeated keys, in time and memory that grow with the text."""
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        refuse_deep(text, source)
        return json.loads(text, object_pairs_hook=_unique)
    except CapiError:
        raise
    except (ValueError, RecursionError) as error:
        # Numbers of thousands of digits are found by Python, after the grammar.
        raise CapiError(f"{source} is not valid JSON ({_reason(error)})") from error


def parse_object(text: str | bytes, source: str) -> dict[str, Any]:
    """The same where only an object will do."""
    value = parse_json(text, source)
    if not isinstance(value, dict):
        refuse_kind(value, source)
    return value


def refuse_kind(value: object, source: str) -> NoReturn:
    """Say that a document holds something else than keys and values."""
    names = {type(None): "null", list: "a list", str: "a text", bool: "true or false"}
    raise CapiError(f"{source} holds {names.get(type(value), 'a number')}, expected an object with keys and values")


def refuse_deep(text: str, source: str) -> None:
    """Count brackets outside of strings, where there are enough of them to matter."""
    if text.count("[") + text.count("{") <= DEEPEST:
        return
    depth = 0
    for bracket in _BRACKETS.finditer(text):
        sign = bracket[0]
        if sign in "[{":
            depth += 1
            if depth > DEEPEST:
                raise CapiError(f"{source} is nested deeper than {DEEPEST} levels: it is damaged, or made to do harm")
        elif sign in "]}":
            depth -= 1


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise RepeatedKeyError(f'the key "{key[:_SHOWN]}" stands twice')
            seen.add(key)
    return made


def _reason(error: Exception) -> str:
    """The reason without what the file holds, which may be long."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, line {error.lineno}"
    if isinstance(error, RepeatedKeyError):
        return str(error)
    return "a text that is not UTF-8" if isinstance(error, UnicodeDecodeError) else "a number that is too long"
