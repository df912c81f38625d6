"""Documents that someone else made: one sentence that names the file, soon, whatever they hold."""

import os
import time
from pathlib import Path

import pytest

from capi.errors import CapiError
from capi.runtime.documents import parse_json, read_json, read_object, read_text
from capi.runtime.yaml_documents import parse_yaml, read_yaml


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000 + "]" * 100_000, "nested deeper than 64"),
        ('{"a":' * 65 + "1" + "}" * 65, "nested deeper than 64"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', 'the key "c" stands twice'),
        ("9" * 5000, "a number that is too long"),
        ('{"a": ', "line 1"),
        (b"\xff", "not UTF-8"),
    ],
)
def test__json_that_does_harm_is_refused_by_name(text: str | bytes, message: str) -> None:
    with pytest.raises(CapiError) as caught:
        parse_json(text, "own.json")
    assert message in str(caught.value)
    assert str(caught.value).startswith("own.json ")


def test__brackets_in_texts_are_not_depth_and_64_levels_are_read() -> None:
    assert parse_json('["' + '[{\\"' * 500 + '"]', "x") == ['[{"' * 500]
    assert parse_json("[" * 64 + "]" * 64, "x")


def test__repeated_keys_are_found_in_linear_time() -> None:
    keys = ",".join(f'"{number}": 1' for number in range(200_000))
    start = time.process_time()
    assert len(parse_json(f"{{{keys}}}", "x")) == 200_000
    with pytest.raises(CapiError, match="stands twice"):
        parse_json(f'{{{keys}, "7": 1}}', "x")
    with pytest.raises(CapiError, match="stands twice"):
        parse_yaml("\n".join([*(f"k{number}: 1" for number in range(9_000)), "k7: 1"]), "x")
    assert time.process_time() - start < 10


def test__a_text_that_does_not_end_is_refused_in_linear_time() -> None:
    """Each quote of it might begin a string, each of which would be followed to the end."""
    start = time.process_time()
    with pytest.raises(CapiError, match="not valid JSON"):
        parse_json("[" + "[]," * 64 + '"' + '\\"' * 200_000, "x")
    assert time.process_time() - start < 5


@pytest.mark.parametrize("text", ["null", "[]", "1", '"a"', "true"])
def test__an_object_is_asked_for_and_nothing_else_passes(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    read_json(tmp_path / "a.json")
    with pytest.raises(CapiError, match="expected an object"):
        read_object(tmp_path / "a.json")


def test__only_regular_files_of_bounded_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "large").write_bytes(b"x" * 101)
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "folder", "large", "zero", "missing", "a\0b", "n" * 300):
        with pytest.raises(CapiError, match="cannot be read"):
            read_text(tmp_path / name, limit=100)
    assert read_text(tmp_path / "large", limit=101) == "x" * 101


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &b [1]\nc: *b", "aliases and anchors"),
        ("a: !!python/object/apply:os.system [id]", "tags such as"),
        ("[" * 100_000, "nested deeper than 64"),
        ("- " * 100_000, "nested deeper than 64"),
        ("a: 1\na: 2", 'the key "a" stands twice'),
        ("a: " + "1:" * 200_000 + "1", "more than 400 digits"),
        ("? [1, 2]\n: 3", "a key must be a text or a number"),
        ("a: \ud800", "not valid YAML"),
        ("a: 2026-13-45", "not valid YAML"),
        ("# x\n" * 300_000, "which no config needs"),
    ],
)
def test__yaml_that_does_harm_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(CapiError) as caught:
        parse_yaml(text, "own.yaml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("own.yaml ")
    assert "\n" not in str(caught.value)


def test__plain_yaml_is_read_as_ever(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: 1e-3\nb: [1, 2.5, {c: null}]\nd: yes\ne: text\n")
    assert read_yaml(tmp_path / "a.yaml") == {"a": 0.001, "b": [1, 2.5, {"c": None}], "d": True, "e": "text"}
