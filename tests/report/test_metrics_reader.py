import json
import math
from pathlib import Path
from typing import Any

import pytest

from capi.report.metrics_reader import MetricsReader
from capi.train.metrics import cut_after
from capi.zoo.run_folder import read_metrics
from tests.report.run_folders import append, records


class Witness:
    """Keeps what a reader shows, as the watchman of a report would."""

    def __init__(self, path: Path) -> None:
        self.seen: list[dict[str, Any]] = []
        self.reader = MetricsReader(path / "metrics.jsonl", self.seen.append, self.seen.clear)


@pytest.fixture
def witness(tmp_path: Path) -> Witness:
    return Witness(tmp_path)


def test__all_records_are_read_as_the_plain_reader_reads_them(witness: Witness, tmp_path: Path) -> None:
    append(tmp_path, *records())
    witness.reader.read()
    assert witness.seen == read_metrics(tmp_path / "metrics.jsonl")
    loss = witness.reader.columns()["student_loss"]
    assert list(zip(loss.steps.tolist(), loss.values.tolist(), strict=True)) == [
        (record["step"], record["student_loss"]) for record in records() if "student_loss" in record
    ]


def test__a_second_reading_takes_only_what_is_new(witness: Witness, tmp_path: Path) -> None:
    append(tmp_path, {"step": 1, "a": 1.0})
    assert witness.reader.read()
    assert not witness.reader.read()
    append(tmp_path, {"step": 2, "a": 2.0})
    assert witness.reader.read()
    assert [record["step"] for record in witness.seen] == [1, 2]


def test__a_half_written_line_is_taken_once_it_is_whole(witness: Witness, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a"')
    witness.reader.read()
    assert witness.reader.cut_off
    assert witness.reader.step == 1
    with path.open("a") as file:
        file.write(": 5.0}\n")
    witness.reader.read()
    assert not witness.reader.cut_off
    assert witness.reader.broken == 0
    assert witness.reader.columns()["a"].values.tolist() == [1.0, 5.0]


def test__a_whole_last_line_without_an_end_is_read_once(witness: Witness, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 1.0}')
    witness.reader.read()
    append(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 2, "a": 2.0}\n')
    witness.reader.read()
    assert witness.reader.columns()["a"].steps.tolist() == [1, 2]


def test__a_run_that_goes_back_is_read_again(witness: Witness, tmp_path: Path) -> None:
    append(tmp_path, *({"step": step, "a": float(step)} for step in range(1, 9)))
    witness.reader.read()
    cut_after(tmp_path / "metrics.jsonl", 3)
    append(tmp_path, *({"step": step, "a": -float(step)} for step in range(4, 12)))
    witness.reader.read()
    assert witness.reader.columns()["a"].values.tolist() == [1.0, 2.0, 3.0, *(-float(step) for step in range(4, 12))]
    assert [record["step"] for record in witness.seen] == list(range(1, 12))


def test__a_file_that_vanishes_is_forgotten(witness: Witness, tmp_path: Path) -> None:
    append(tmp_path, {"step": 1, "a": 1.0})
    witness.reader.read()
    (tmp_path / "metrics.jsonl").unlink()
    assert witness.reader.read()
    assert witness.reader.columns() == {}
    assert witness.seen == []


def test__nan_becomes_a_gap(witness: Witness, tmp_path: Path) -> None:
    lines = ['{"step": 1, "a": null}', '{"step": 2, "a": NaN}', '{"step": 3, "a": 1e999}', '{"step": 4, "a": 2}']
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, f'{{"step": 5, "a": {10**400}}}']) + "\n")
    witness.reader.read()
    values = witness.reader.columns()["a"].values.tolist()
    assert [math.isnan(value) for value in values] == [True, True, True, False, True]
    assert [record["a"] for record in witness.seen] == [None, None, None, 2.0, None]


@pytest.mark.parametrize(
    "line", [b"[1]", b"7", b"{}", b'{"step": "1"}', b'{"step": true}', b'{"step": -1}', b"\xff\xfe{"]
)
def test__lines_that_are_no_records_are_counted_and_left_out(witness: Witness, tmp_path: Path, line: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(line + b'\n{"step": 1, "a": 1.0}\n')
    witness.reader.read()
    assert witness.reader.broken == 1
    assert witness.reader.records == 1


def test__values_of_other_kinds_are_named(witness: Witness, tmp_path: Path) -> None:
    append(tmp_path, {"step": 1, "text": "<b>", "list": [1], "a": 1})
    witness.reader.read()
    assert witness.reader.not_numbers == {"text", "list"}
    assert set(witness.reader.columns()) == {"a"}


def test__steps_out_of_order_are_put_in_order(witness: Witness, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "a": step}) + "\n" for step in (3, 1, 2)))
    witness.reader.read()
    assert witness.reader.columns()["a"].values.tolist() == [1.0, 2.0, 3.0]
