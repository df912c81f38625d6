import random
import time

import pytest
import yaml

from capi.runtime.privacy import hide_path, hide_paths, hide_paths_of_command, hide_paths_of_yaml, name_of_data


def test__paths_are_shortened_and_names_are_not() -> None:
    assert hide_paths({"a": ["/x/y/z", 3, "folder/knn"], "b": {"c": "~/z"}}) == {
        "a": ["z", 3, "folder/knn"],
        "b": {"c": "z"},
    }
    assert hide_path("/") == "..."
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
        ("cannot open '/data/ann' smith/x' at all", "cannot open 'x' at all"),
        ("/data/ann\nsmith/x is lost", "x is lost"),
        ("/home/ann smith is full", "..."),
        ("/data/ann smith/photos/", "photos"),
        ("key:/home/ann/x", "key:x"),
        ("file:///home/ann/x", "x"),
        ("FILE:/home/ann/x", "x"),
        ("of //srv/ann/x", "of x"),
        ("no C:\\Users\\ann smith\\x.png: look", "no x.png: look"),
        ("no 'c:/work/ann smith/x.png'", "no 'x.png'"),
        ("C:\\Users\\ann smith is full", "..."),
        ("of \\\\server\\ann smith\\x.png", "of x.png"),
        ("of 'C:\\\\Users\\\\ann\\\\x.png'", "of 'x.png'"),
        ("no ..\\ann smith\\x.png", "no x.png"),
        ("untrained:C:\\runs of ann\\run", "untrained:run"),
        ("no smb://server/ann smith/photos", "no photos"),
        ("sftp://ann@server/x and s3://bucket/private/x.tar", "x.tar"),
        ("https://ann:password@server/private/x.png", "x.png"),
        ("see https://a.b/c/d and hf://owner/name", "see https://a.b/c/d and hf://owner/name"),
        ("photos/a/b and/or 1 / 2 or 1/2", "photos/a/b and/or 1 / 2 or 1/2"),
    ],
)
def test__paths_and_addresses_in_a_sentence_are_shortened_and_those_of_the_web_are_not(text: str, shown: str) -> None:
    assert hide_path(text) == shown
    assert hide_path(shown) == shown


def test__no_folder_of_a_path_is_left_however_it_is_called_and_wherever_it_stands() -> None:
    generator = random.Random(0)  # noqa: S311
    pieces = [" ", "'", '"', "\n", ", ", ": ", "' ", "(", ")", "=", "#", "{", "]", "`", "?", "a", "ß", "\\", "%"]
    for _ in range(3000):
        folders = ["secret".join(generator.choices(pieces, k=3)) for _ in range(generator.randint(1, 3))]
        start, slash = generator.choice([("/", "/"), ("~/", "/"), ("../", "/"), ("C:\\", "\\"), ("\\\\", "\\")])
        path = f"{start}x{slash.join(folders)}{slash}leaf"
        for text in (path, f"cannot read {path}: lost", f"no '{path}'", f"data={path}", f"a (at {path!r}) is lost"):
            for shown in (hide_path(text), hide_paths([{text: text}]), hide_paths_of_command([text])):
                assert "secret" not in str(shown), (text, shown)
                assert "leaf" in str(shown)
        document = yaml.safe_dump({"data": path, "list": [{"of": f"see {path}"}]})
        assert "secret" not in hide_paths_of_yaml(document), document


def test__names_of_users_are_no_last_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/srv/people/ann smith")
    assert hide_path("/srv/people/ann smith/run is lost") == "run is lost"
    assert hide_path("/srv/people/ann smith") == "~"
    assert hide_path("/srv/people/ann smith-2/run") == "run"
    assert hide_path("no /scratch/ann smith: look") == "no ..."
    assert hide_path("/scratch/ann smith/") == "..."
    assert hide_path("/home/bob") == "..."
    monkeypatch.setenv("HOME", "/")
    assert hide_path("see https://a.b/c and /x/y") == "see https://a.b/c and y"


def test__hiding_takes_linear_time() -> None:
    start = time.process_time()
    for text in ("/a " * 200_000, "~a " * 200_000, "~" * 400_000, "'/a" * 200_000, "?a=" * 200_000):
        hide_path(text)
        hide_paths_of_command([text, "=", f"a=[{text}"])
    hide_paths_of_yaml("a: [" + "/a b, " * 100_000 + "]")
    assert time.process_time() - start < 10


def test__a_command_keeps_its_options() -> None:
    words = ["/venv/bin/capi", "pretrain", "tiny4", "--data", "/of ann/photos", "--out=/x/run", "init.encoder=/x y/z"]
    assert hide_paths_of_command(words) == "capi pretrain tiny4 --data photos --out=run init.encoder=z"
    words = ["--data=t.csv?images=/x/ann smith/img", 'e=[{data: "/x/ann smith/i", more: /x/ann smith/j, k: 8}]']
    assert hide_paths_of_command(words) == "--data=t.csv?images=img e=[{data: i, more: j, k: 8}]"
    words = ["-o/of ann/run", "-v", "from /of ann/run", "a=[/of ann/x", "optimization.rate=1e-3"]
    assert hide_paths_of_command(words) == "-o run -v from run a=[x optimization.rate=1e-3"


def test__a_config_keeps_its_values_and_loses_its_comments() -> None:
    text = "# of /data/ann\ndata:\n  mean: 0.5  # ann\n  rate: 0.001\nfrom:\n- /of ann/photos\n- data: '/a b/it''s'\n"
    shown = "data:\n  mean: 0.5\n  rate: 0.001\nfrom:\n- photos\n- data: it's\n"
    assert hide_paths_of_yaml(text) == shown
    assert hide_paths_of_yaml(shown) == shown
    assert hide_paths_of_yaml("data: /x/ann smith/secret\n  project/img\nseed: 1\n") == "data: img\nseed: 1\n"


def test__of_a_config_that_cannot_be_read_nothing_is_shown() -> None:
    for text in ("a: [/of ann/x", "a: &b /of ann/x", "a: 1\na: /of ann/x", "[" * 100):
        assert hide_paths_of_yaml(text) == "(not shown: it is not valid YAML)\n"


def test__data_behind_an_option_is_hidden_too() -> None:
    assert hide_path("t.csv?images=/x/ann smith/a b/img") == "t.csv?images=img"
    assert hide_path("/of ann/t.csv?images=../ann smith/img") == "t.csv?images=img"
    assert hide_path("/of ann/t.csv?images=secret/img") == "t.csv?images=img"
    assert name_of_data("a b/t.csv?images=../ann smith/img") == "t.csv?images=img"
    assert hide_path("untrained:/x/ann smith/run") == "untrained:run"
