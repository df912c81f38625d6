"""docs/ARCHITECTURE.md leads to files that are there."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
# Files by their ending wherever they stand, folders where they are set as code; not the files of a run
# or of a user.
_NAMED = re.compile(r"(?<![\w.*/])(?!config\.yaml|FILE\.py)[\w./-]+\.(?:py|yaml|svg)\b|(?<=`)[\w./-]+/(?=`)")


def missing(line: str) -> list[str]:
    """Names that are neither paths from the root or the package nor lie beside an earlier one of the line."""
    places, lost = [ROOT / "docs", ROOT, ROOT / "capi"], []
    for name in _NAMED.findall(line):
        path = next((place / name for place in places if (place / name).exists()), None)
        if path is None:
            lost.append(name)
        else:
            places += [path, path.parent]
    return lost


@pytest.mark.parametrize("number", [number for number, line in enumerate(TEXT.splitlines()) if _NAMED.search(line)])
def test__every_path_that_is_named_exists(number: int) -> None:
    assert missing(TEXT.splitlines()[number]) == []


def test__a_path_that_is_not_there_is_noticed() -> None:
    assert missing("`capi/train/step.py`, `loop.py`; `capi/zoo/nothing.py`, `evals/`, `nowhere/`") == [
        "capi/zoo/nothing.py",
        "nowhere/",
    ]


def test__every_room_is_described() -> None:
    rooms = {path.name for path in (ROOT / "capi").iterdir() if (path / "__init__.py").is_file()}
    described = set(re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", TEXT, re.MULTILINE))
    assert {name for names in described for name in re.findall(r"\w+", names)} == rooms


def test__the_picture_of_the_rooms_is_drawn_from_the_imports_as_they_are() -> None:
    spec = importlib.util.spec_from_file_location("layers", ROOT / "scripts" / "layers.py")
    assert spec is not None
    assert spec.loader is not None
    layers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(layers)
    drawn = (ROOT / "docs" / "pictures" / "layers.svg").read_text(encoding="utf-8")
    assert drawn == layers.draw(layers.edges()), "run `python scripts/layers.py --svg docs/pictures/layers.svg`"
