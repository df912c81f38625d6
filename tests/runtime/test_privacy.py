import time
from pathlib import Path

import pytest

from capi.runtime.privacy import (
    hide_path,
    hide_paths,
    hide_paths_of_command,
    hide_paths_of_yaml,
    hide_paths_within,
    name_of_data,
)


def test__paths_are_shortened_and_names_are_not() -> None:
    assert hide_paths({"a": ["/x/y/z", 3, "folder/knn"], "b": {"c": "~/z"}}) == {
        "a": ["z", 3, "folder/knn"],
        "b": {"c": "z"},
    }
    assert hide_path("/") == "/"
    assert hide_path("owner/name") == "owner/name"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/ann/x.yaml cannot be read", "x.yaml cannot be read"),
        ("no file '/home/ann/x.png': look", "no file 'x.png': look"),
        ("there is no ../ann/photos, or ~ann/photos", "there is no photos"),
        ("no /data/ann smith/a (old), b/x y.png here", "no x y.png here"),
        ("/srv/ann smith/photos cannot be read: see /a b/c", "c"),
        ("cannot open '/data/o'brien, a/x' at all", "cannot open 'x' at all"),
        ("/home/ann smith is full", "..."),
        ("/data/ann smith/photos/", "..."),
        ("key:/home/ann/x", "key:x"),
        ("file:///home/ann/x", "x"),
        ("see https://a.b/c/d and hf://owner/name", "see https://a.b/c/d and hf://owner/name"),
        ("photos/a/b and/or 1 / 2", "photos/a/b and/or 1 / 2"),
    ],
)
def test__paths_in_a_sentence_are_shortened_and_addresses_are_not(text: str, shown: str) -> None:
    assert hide_paths_within(text) == shown


def test__a_comment_of_a_config_hides_the_whole_path() -> None:
    text = "seed: 1  # from: /data/ann, of smith/photos\n# was /data/ann smith/run: better\n"
    assert hide_paths_of_yaml(text) == "seed: 1  # from: photos\n# was run: better\n"


def test__texts_within_values_are_searched_too() -> None:
    values = {"note": "of /data/ann smith/run", "/data/ann smith/key": 1, "lines": ["/data/ann smith/x is lost"]}
    assert hide_paths(values) == {"note": "of run", "key": 1, "lines": ["x is lost"]}


def test__hiding_takes_linear_time() -> None:
    begun = time.process_time()
    for text in ("/a " * 200_000, "~a " * 200_000, "'/a" * 200_000, "# /a b\n" * 100_000):
        hide_paths_of_yaml(text)
    assert time.process_time() - begun < 5


def test__known_paths_may_hold_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann smith")
    assert hide_paths_within("/data/of ann/run is lost", Path("/data/of ann/run")) == "run is lost"
    assert hide_paths_within("/home/ann smith/run is lost") == "run is lost"
    assert hide_path("/home/ann smith/") == "~"
    monkeypatch.setenv("HOME", "/")
    assert hide_paths_within("see https://a.b/c and /x/y") == "see https://a.b/c and y"


def test__a_command_keeps_its_options() -> None:
    words = ["/venv/bin/capi", "pretrain", "tiny4", "--data", "/of ann/photos", "--out=/x/run", "init.encoder=/x y/z"]
    assert hide_paths_of_command(words) == "capi pretrain tiny4 --data photos --out=run init.encoder=z"


def test__a_config_keeps_its_form() -> None:
    text = "data:\n  mean: 0.5\n- /of ann/photos\n- options:\n    data: '/of ann/it''s'\n  flow: {a: /x/y, b: [~/z]}\n"
    shown = "data:\n  mean: 0.5\n- photos\n- options:\n    data: 'it''s'\n  flow: {a: y, b: [z]}\n"
    assert hide_paths_of_yaml(text) == shown


def test__a_value_with_spaces_is_one_path() -> None:
    assert hide_path("t.csv?images=/x/ann smith/a b/img") == "t.csv?images=img"
    assert name_of_data("a b/t.csv?images=../ann smith/img") == "t.csv?images=img"
    assert hide_path("untrained:/x/ann smith/run") == "untrained:run"
    assert hide_paths_within("no '/x/ann smith/img' here") == "no 'img' here"
    assert hide_paths_within("/x/ann smith/o.png is lost", "/x/ann smith/t.csv") == "o.png is lost"
    words = ["--data=t.csv?images=/x/ann smith/img", 'e=[{data: "/x/ann smith/i", more: /x/ann smith/j, k: 8}]']
    assert hide_paths_of_command(words) == '--data=t.csv?images=img e=[{data: "i", more: j, k: 8}]'
    assert hide_paths_of_yaml("data: /x/ann smith/secret\n  project/img\nseed: 1\n") == "data: img\nseed: 1\n"
