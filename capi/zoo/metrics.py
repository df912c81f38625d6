"""Reading metrics.jsonl of a run: one JSON object a line, which may come from anyone."""

from pathlib import Path
from typing import Any

from capi.errors import CapiError
from capi.runtime.documents import open_regular, parse_json

FILE = "metrics.jsonl"
# Fields that depend on when and where a run was computed, not on what was computed.
WALL_CLOCK = ("seconds", "evaluation_seconds", "images_per_second")
# Bytes of a line, and keys of a record: far more than any run writes.
LONGEST_LINE, MOST_METRICS = 2**20, 2000
# Beyond this a step cannot be told apart from its neighbours in a browser.
_LARGEST_STEP = 2**53


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records of a file; a last line that was cut off in the middle is left out."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CapiError(f"{path} cannot be read ({error.strerror or error})") from error
    with file:
        lines = iter(lambda: file.readline(LONGEST_LINE), b"")
        records = [record for line in lines if (record := parse_record(line)) is not None]
    return [
        {key: value for key, value in record.items() if isinstance(value, int | float | None)} for record in records
    ]


def parse_record(line: bytes) -> dict[str, Any] | None:
    """A record with a step, or None where a line holds none."""
    try:
        record = parse_json(line, "a line of metrics")
    except CapiError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < _LARGEST_STEP:
        return None
    return record if len(record) <= MOST_METRICS else None
