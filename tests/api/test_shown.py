"""What calls from Python return fits a screen, in a terminal and in a notebook."""

from pathlib import Path

import pytest

import capi
from capi.api.features import Matches, Stitched
from capi.api.race import SpeedRecord
from capi.data.shard_writer import Packed
from capi.errors import CapiError
from capi.evals.extraction import Extracted
from capi.evals.retrieval import Match
from capi.report.predictions import Predicted
from capi.runtime.summary import Summary
from capi.train.selftest import CheckOutcome, SelfTest

MACHINE = {"capi": "1", "devices": 1, "device": "CPU", "cuda": None, "torch": "2", "python": "3"}
RECORD = {
    "track": "groceries", "score": 0.551, "reached": True, "goal": 0.54, "cpu_seconds": 300.0, "wall_seconds": 200.0,
    "flop": 1e14, "recipe": "small", "overrides": ["a.b=1"], "images_seen": 83200,
}  # fmt: skip
LONG = "a reason that is told at length, as errors of the system are, " * 10


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (Extracted(Path("f.safetensors"), 20, {"mean_patch": (384,)}, "float32", (64, 64), 5), "mean_patch"),
        (Predicted(Path("out"), 20, {"a.png": LONG}), "out: 20 labeled images"),
        (Packed(Path("p"), 2, 20, 10**6, 1, {"a.txt": LONG}), "data='p/{000000..000001}.tar'"),
        (Stitched(Path("m.safetensors"), Path("m.png"), (40, 60), True), "40 x 60 patches, complete before"),
        (Matches([Match(f"{number}.png", number, 0.5) for number in range(1000)]), "980 more"),
        (SpeedRecord(RECORD), "groceries: 55.1% reaches the goal of 54%"),
        (SelfTest(MACHINE, [CheckOutcome("exact", "failed", LONG, 1.0)]), "selftest FAILED on 1 x CPU"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Summary) else "",
)
def test__a_result_fits_a_screen(result: Summary, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = repr(result).splitlines()
    assert words in repr(result)
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 80
    assert "<li>" in result._repr_html_()


def test__results_that_were_lists_and_dicts_still_are() -> None:
    matches = Matches([Match("<b>.png", 0, 1.0)])
    assert [match.name for match in matches] == ["<b>.png"]
    assert "&lt;b&gt;" in matches._repr_html_()
    assert dict(SpeedRecord(RECORD)) == RECORD


def test__keywords_change_a_recipe_as_overrides_do(tmp_path: Path) -> None:
    plain = capi.plan("small", ["optimization.batch_size=32"], gpu="a100-80g")
    assert capi.plan("small", gpu="a100-80g", optimization={"batch_size": 32}).batch_size == plain.batch_size == 32
    for call in (
        lambda: capi.compare("pixels:4", "demo/knn", out=tmp_path, neighburs=[3]),
        lambda: capi.speedrun("groceries", "small", out=tmp_path, optimization={"stepz": 3}),
        lambda: capi.ablate("sinkhorn", data="demo", out=tmp_path, optimization={"stepz": 3}),
    ):
        with pytest.raises(CapiError, match=r"neighburs|stepz"):
            call()
