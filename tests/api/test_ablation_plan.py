from pathlib import Path

import pytest

from capi.api.ablation import PIXELS, UNTRAINED, plan_study
from capi.errors import CapiError
from tests.api.studies import SMALL, labeled_photos


def test__every_row_has_every_seed_and_baselines_come_first(tmp_path: Path) -> None:
    data = labeled_photos(tmp_path / "data")
    study = plan_study("sinkhorn", SMALL, data=str(data), out=tmp_path / "out", scale="smoke", seeds=2)
    runs = ["sinkhorn-standard-seed0", "default-seed0", "sinkhorn-standard-seed1", "default-seed1"]
    assert [job.name for job in study.jobs] == ["pixels", "untrained-seed0", "untrained-seed1", *runs]
    assert study.baselines == {UNTRAINED: ["untrained-seed0", "untrained-seed1"], PIXELS: ["pixels"]}
    assert [study.runs_of(row) for row in study.table.rows] == [[runs[0], runs[2]], [runs[1], runs[3]]]
    by_name = {job.name: job for job in study.jobs}
    assert by_name["pixels"].model == "pixels:4"
    assert by_name["untrained-seed1"].model == f"untrained:{tmp_path}/out/configs/default-seed1.yaml"
    assert [by_name[name].config.seed for name in runs] == [0, 0, 1, 1]
    assert not (tmp_path / "out").exists()


def test__runs_are_evaluated_on_the_way_and_keep_two_pictures(tmp_path: Path) -> None:
    data = labeled_photos(tmp_path / "data")
    study = plan_study("sinkhorn", SMALL, data=str(data), out=tmp_path / "out", scale="smoke")
    config = study.jobs[-1].config
    assert [(evaluation.benchmark, evaluation.every_steps) for evaluation in config.evaluations] == [
        ("csv/knn-segmentation", 2),
        ("csv/knn", 2),
    ]
    assert (config.run.snapshots, config.run.report) == (1, False)
    assert "16 images" in study.facts["budget of a row"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": 0}, "`seeds` 0 leaves nothing to run"),
        ({"scale": "smok"}, 'did you mean "smoke"'),
        ({"table": "sinkhron"}, 'did you mean "sinkhorn"'),
        ({"overrides": ["model.depht=2"]}, "model.depth"),
        ({"data": "nowhere"}, "there is no nowhere"),
    ],
)
def test__bad_input_is_reported_before_anything_is_written(tmp_path: Path, changes: dict, message: str) -> None:
    labeled_photos(tmp_path / "data")
    given = {
        "table": "sinkhorn",
        "overrides": SMALL,
        "data": str(tmp_path / "data"),
        "scale": "smoke",
        "seeds": 1,
    } | changes
    with pytest.raises(CapiError, match=message):
        plan_study(given.pop("table"), given.pop("overrides"), out=tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test__out_must_not_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(CapiError, match="is a file"):
        plan_study("sinkhorn", data="demo", out=file)
