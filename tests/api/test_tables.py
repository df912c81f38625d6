"""The paper's tables, each from end to end on tiny data with random weights."""

import json
import shutil
from pathlib import Path

import pytest

from capi.api.tables import _model_notes, chosen_rows, compare_table, weights_reason
from capi.config.experiments import table_named
from capi.config.paper import number_of
from capi.errors import CapiError
from capi.zoo.baselines.registry import BASELINES
from tests.conftest import REFERENCE
from tests.evals.datasets import layouts
from tests.zoo.baseline_checkpoints import original, random_model, save, small

COMMON = ["image_size=20", "verify_counts=false", "validation_share=0.25", "save_probe=false", "workers=0"]
PROBES = ["schedule=small", "iterations=2", "batch_size=8", "learning_rates=[0.001]", "weight_decays=[0.001]"]
SEGMENTATION = ["pictures=0", "neighbors=[1]", "distances=[cosine]", "strengths=[1.0]", "max_iterations=3"]


@pytest.fixture(scope="module")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every data set of the tables under its name; of ImageNet's further test sets all but A."""
    root = tmp_path_factory.mktemp("data")
    for name in ("imagenet", "inaturalist2021", "places205", "sun397", "ade20k", "voc", "cityscapes"):
        getattr(layouts, f"build_{name}")(root / name)
    for name in ("v2", "r", "sketch", "objectnet"):
        (root / f"imagenet-{name}").symlink_to(root / "imagenet" / name)
    (root / "imagenet-real.json").symlink_to(root / "imagenet" / "real.json")
    return root


@pytest.fixture(autouse=True)
def _tiny_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Baselines of tiny sizes with random weights in a folder, and a published model that is a tiny one."""
    folder = tmp_path / "weights"
    folder.mkdir()
    for name in ("dino_vitb16", "msn_vitl16", "mae_vitl16", "beit_vitl16", "ijepa_vith14_in1k", "ijepa_vith16_448"):
        monkeypatch.setitem(BASELINES, name, small(name))
        save(original(BASELINES[name], random_model(BASELINES[name])), folder / f"{name}.pth")
    monkeypatch.setenv("CAPI_BASELINES", str(folder))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    cache = tmp_path / "torch" / "hub" / "checkpoints"
    cache.mkdir(parents=True)
    shutil.copy(REFERENCE / "student.pth", cache / "capi_vitl14_lvd.pth")


@pytest.mark.parametrize(
    ("name", "models", "options", "cells"),
    [
        ("main", ["msn_vitl16", "capi_vitl14_lvd"], PROBES, 2 * 7),
        ("dense", ["beit_vitl16"], SEGMENTATION, 6),
        ("high-res", [], PROBES, 3 * 2),
        pytest.param(*("global", [], [*PROBES, "neighbors=[1]", "votes=[majority]"], 2 * 4), marks=pytest.mark.long),
        ("pooling", [], PROBES, 4 * 6),
        pytest.param("standardization", ["mae_vitl16"], SEGMENTATION, 2 * 6, marks=pytest.mark.long),
    ],
)
def test__each_table_runs_from_end_to_end(
    name: str, models: list[str], options: list[str], cells: int, data_root: Path, tmp_path: Path
) -> None:
    done = compare_table(name, models, COMMON + options, out=tmp_path / "out", data_root=data_root)
    assert [cell.reason for cell in done.failed] == []
    table_written = json.loads((tmp_path / "out" / "comparison.json").read_text())["table"]
    table = table_named(name)
    assert table_written["label"] == number_of(table.label)
    scores = [score for row in table_written["rows"] for score in row["ours"] if score is not None]
    # ImageNet-A alone is not there.
    assert len(scores) == cells
    reasons = {reason for row in table_written["rows"] for reason in row["missing"] if reason}
    assert reasons <= {f"no data: expected {data_root / 'imagenet-a'}"}
    assert all(0 <= score <= 100 for score in scores)
    printed = {tuple(row.scores) for row in table.rows}
    assert all(tuple(row["paper"]) in printed for row in table_written["rows"])


def test__a_model_stands_beside_the_numbers_of_a_public_board(tmp_path: Path) -> None:
    layouts.build_imagenette(tmp_path / "imagenette")
    options = ["verify_counts=false", "validation_share=0.25", "save_probe=false", "workers=0", "neighbors=[3]"]
    done = compare_table(
        "imagenette", REFERENCE / "student.pth", [*options, "image_size=20"], out=tmp_path / "out", data_root=tmp_path
    )
    assert [cell.reason for cell in done.failed] == []
    *board, own = json.loads((tmp_path / "out" / "comparison.json").read_text())["table"]["rows"]
    assert {row["row"][0]: row["paper"] for row in board}["MAE"] == [61.0]
    assert {row["model"] for row in board} == {None}
    assert own["paper"] == [None]
    assert 0 <= own["ours"][0] <= 100
    assert "number of Lightly&#39;s board (2023)" in (tmp_path / "out" / "comparison.html").read_text()
    assert "number of Lightly's board (2023) in brackets" in (tmp_path / "out" / "comparison.md").read_text()
    with pytest.raises(CapiError, match=r"nobody has the weights of its rows: name the MODEL\.\.\. to compare"):
        compare_table("imagenette", [], options, out=tmp_path / "none", data_root=tmp_path)


def test__what_is_missing_is_said_in_its_cells_and_the_others_are_computed(data_root: Path, tmp_path: Path) -> None:
    root = tmp_path / "some"
    root.mkdir()
    (root / "sun397").symlink_to(data_root / "sun397")
    done = compare_table(
        "main", ["dino_vitb16", "aim_600m"], [*COMMON, *PROBES], out=tmp_path / "out", data_root=root, paper=False
    )
    table = json.loads((tmp_path / "out" / "comparison.json").read_text())["table"]
    dino, aim = table["rows"]
    assert dino["ours"][:7] == [None] * 7
    assert dino["ours"][7] is not None
    assert dino["missing"][0] == "no data: expected imagenet"
    assert aim["missing"][7].startswith("the weights of aim_600m are not on this machine: put aim_600m_2bimgs_")
    page = (tmp_path / "out" / "comparison.html").read_text()
    assert "Table 2" in page
    assert "no data: expected" in page
    assert "79.0" not in page
    assert "licence of the weights: Apache-2.0" in (tmp_path / "out" / "comparison.md").read_text()
    assert done.licence("baseline:dino_vitb16") == "Apache-2.0"
    assert "Apache-2.0" in (tmp_path / "out" / "comparison.csv").read_text()


def test__a_model_of_ones_own_gets_the_rows_that_capi_has() -> None:
    (row,) = chosen_rows(table_named("main"), ["runs/mine"])
    assert row.cells == ["runs/mine", "", ""]
    assert row.scores == [None] * 8
    rows = chosen_rows(table_named("pooling"), ["runs/mine"])
    assert [row.cells[0] for row in rows][:2] == ["runs/mine: avg pooling", "runs/mine: pooled"]
    assert [row.protocol for row in rows] == [None, None, None, "attentive"]


def test__a_place_of_weights_belongs_to_the_row_of_its_baseline() -> None:
    (row,) = chosen_rows(table_named("dense"), ["baseline:mae_vitl16=/there/mae.pth"])
    assert row.model == "baseline:mae_vitl16=/there/mae.pth"
    assert row.scores[0] == 21.5


def test__another_network_of_a_checkpoint_is_said_and_has_no_note_of_the_usual_one() -> None:
    (row,) = chosen_rows(table_named("high-res"), ["ijepa_vith14_in1k@encoder"])
    assert (row.model, row.cells[0]) == ("baseline:ijepa_vith14_in1k@encoder", "I-JEPA-H (encoder)")
    (row,) = chosen_rows(table_named("high-res"), ["ijepa_vith14_in1k+antialias@encoder"])
    assert row.cells[0] == "I-JEPA-H (antialias, encoder)"
    assert _model_notes([row]) == []
    (usual,) = chosen_rows(table_named("high-res"), ["ijepa_vith14_in1k"])
    assert "target encoder" in _model_notes([usual])[0]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("dino_vitb1", 'there is no model "dino_vitb1".*did you mean "dino_vitb16"'),
        ("baseline:nosuch", "nosuch"),
        ("baseline:dino_vitb16@decoder", 'no part "decoder"'),
        ("mae_vitl16@encoder", 'no part "encoder"'),
    ],
)
def test__what_can_be_no_model_is_reported_before_anything_is_run(model: str, message: str) -> None:
    with pytest.raises(CapiError, match=message):
        chosen_rows(table_named("main"), [model])


def test__weights_are_looked_for_without_being_read(tmp_path: Path) -> None:
    assert weights_reason("baseline:mae_vitl16") == ""
    assert weights_reason("capi_vitl14_lvd") == ""
    assert weights_reason("capi_vitl14_in1k").startswith("the weights of capi_vitl14_in1k are not on this machine")
    with pytest.raises(CapiError, match="is no folder: `data_root`"):
        compare_table("main", out=tmp_path / "out", data_root=tmp_path / "nothing")
