"""The metrics of a run as columns, read on where the last reading ended, also while the run writes them."""

import math
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from capi.errors import CapiError
from capi.report.pages.data import Column
from capi.runtime.documents import open_regular
from capi.zoo.run_folder import LONGEST_LINE, MOST_METRICS, parse_record

# Bytes read at a time.
_BLOCK = 2**24
# Bytes before the end of a reading by which the file is known again.
_TAIL = 512


class MetricsReader:
    """Follows a metrics file. Every whole record goes to `see`, with values that are numbers or None."""

    def __init__(self, path: Path, see: Callable[[dict[str, Any]], object], forget: Callable[[], None]) -> None:
        self.path, self.see, self.forget = path, see, forget
        self._begin()

    def _begin(self) -> None:
        self.step: int | None = None
        self.records = self.broken = 0
        self.cut_off = False
        self.not_numbers: set[str] = set()
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        self._offset, self._tail = 0, b""

    def read(self) -> bool:
        """Take in what is new; whether there was anything."""
        try:
            with open_regular(self.path) as file:
                # Whether this is the file that was read before: a run that goes back writes it again.
                file.seek(max(self._offset - len(self._tail), 0))
                if file.read(len(self._tail)) != self._tail:
                    self.forget()
                    self._begin()
                before = self.records, self.broken, self.cut_off
                file.seek(self._offset)
                self._read_lines(file)
        except (FileNotFoundError, NotADirectoryError):
            had_some = self.records > 0
            self.forget()
            self._begin()
            return had_some
        except OSError as error:
            raise CapiError(f"{self.path} cannot be read ({error.strerror or error})") from error
        return before != (self.records, self.broken, self.cut_off)

    def columns(self) -> dict[str, Column]:
        """Every metric, in the order of steps."""
        return {key: _column(steps, values) for key, (steps, values) in self._columns.items()}

    def _read_lines(self, file: Any) -> None:
        rest = b""
        while block := file.read(_BLOCK):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                self._take(line)
                self._advance(line + b"\n")
            if len(rest) > LONGEST_LINE:
                # Nothing that a run writes: what follows up to the next line is passed over too.
                self._advance(rest)
                rest = b""
        # A last line without an end may be half a record. It is taken once it is whole.
        self.cut_off = bool(rest.strip()) and parse_record(rest) is None
        if rest.strip() and not self.cut_off:
            self._take(rest)
            self._advance(rest)

    def _advance(self, line: bytes) -> None:
        self._offset += len(line)
        self._tail = (self._tail + line)[-_TAIL:]

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        record = parse_record(line)
        if record is None or len(self._columns) + len(record) > 2 * MOST_METRICS:
            self.broken += 1
            return
        self.records += 1
        step = self.step = record.pop("step")
        clean: dict[str, Any] = {"step": step}
        for key, value in record.items():
            number = value if type(value) is float else _as_number(value)
            if number is None:
                self.not_numbers.add(key)
                continue
            finite = math.isfinite(number)
            clean[key] = number if finite else None
            column = self._columns.get(key) or self._columns.setdefault(key, (array("q"), array("d")))
            column[0].append(step)
            column[1].append(number if finite else math.nan)
        self.see(clean)


def _as_number(value: Any) -> float | None:
    """What JSON holds as a float, NaN where it says that there is none; None where it is something else."""
    if value is None:
        return math.nan
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _column(steps: "array[int]", values: "array[float]") -> Column:
    at, numbers = np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64)
    if len(at) > 1 and (np.diff(at) < 0).any():
        order = np.argsort(at, kind="stable")
        at, numbers = at[order], numbers[order]
    return Column(at, numbers)
