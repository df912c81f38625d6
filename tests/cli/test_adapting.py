"""The page about adapting works as it is written, from a file in DINOv2's layout and from a run of one's own."""

import re
import shlex
from pathlib import Path

import pytest
import torch

import capi
from capi.zoo.baselines.registry import BASELINES
from tests.cli.conftest import RunHere, assert_refused
from tests.cli.tiny_runs import train
from tests.photos import noise_photos
from tests.zoo.baseline_checkpoints import original, random_model

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "adapting.md").read_text(encoding="utf-8")
FEW = ["optimization.steps=1", "run.snapshots=0", "run.report=false"]


def commands(heading: str) -> list[list[str]]:
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    blocks = "\n".join(re.findall(r"```\n(.*?)```", section, re.DOTALL)).replace("\\\n", " ")
    return [shlex.split(line, comments=True)[1:] for line in blocks.splitlines() if line.startswith("capi ")]


@pytest.mark.thorough
def test__the_five_minutes_work_as_written(run_here: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    baseline, x = BASELINES["dinov2_reg_vits14"], torch.randn(1, 3, 56, 56)
    torch.save(original(baseline, random_model(baseline)), "dinov2_vits14_reg4_pretrain.pth")
    train(Path("older_run"), noise_photos(Path("photos")), Path("config.yaml"))
    adapt, export, compare, _, _, again = commands("Five minutes")
    # One step shows as much as twenty.
    for words in (adapt, export, compare, again):
        assert run_here(*words, *(FEW if words[0] == "adapt" else [])).code == 0
    before, after = capi.load("baseline:dinov2_reg_vits14=dinov2_vits14_reg4_pretrain.pth"), capi.load("trial")
    returned = capi.load("baseline:dinov2_reg_vits14=adapted.pth")
    torch.testing.assert_close(returned(x).feature_map, after(x).feature_map, atol=1e-5, rtol=1e-5)
    assert returned.state_dict().keys() == before.state_dict().keys()
    assert "adapted.pth" in Path("comparison/comparison.md").read_text()
    assert capi.load("newer_run").width == 32


def test__what_adapt_needs_is_reported(run_here: RunHere, tmp_path: Path) -> None:
    assert_refused(
        run_here("adapt", "capi_vitl14_lvd", "data.image_size=56"),
        "adapt needs --data, images to learn from, and --out",
    )
    assert_refused(
        run_here("adapt", tmp_path / "nothing", "--data", "demo", "--out", tmp_path / "run"), "there is no encoder"
    )
    assert_refused(run_here("adapt", "capi_vitl14_lvd", "optimization.stpes=3"), 'did you mean "optimization.steps"')
    assert_refused(run_here("adapt", "capi_vitl14_lvd", "--recipe", "adpt"), 'did you mean "adapt"')
    photos = noise_photos(tmp_path / "photos")
    assert_refused(
        run_here("adapt", photos, "--data", photos, "--out", tmp_path / "run"),
        "is a folder of images, and a model comes first, such as capi_vitl14_lvd: give the images with --data",
    )
    assert_refused(
        run_here("pretrain", "adapt", "--data", "demo", "--out", tmp_path / "run"), "has no meaning without weights"
    )


def test__few_images_get_a_batch_that_holds_none_twice(tmp_path: Path) -> None:
    photos = noise_photos(tmp_path / "photos", count=5)
    run = train(tmp_path / "run", photos, tmp_path / "config.yaml")
    few = [*FEW, "data.image_size=32", "data.workers=0", "clustering.prototypes=8", "run.loggers=[]"]
    for out, more, batch in (("fitting", [], 4), ("own", ["optimization.batch_size=6"], 6)):
        for _ in range(2):
            done = capi.adapt(run, [*few, *more], data=photos, out=tmp_path / out, device="cpu", resume=True)
        assert f"batch_size: {batch}\n" in (done.path / "config.yaml").read_text()


def test__a_published_encoder_is_planned_without_its_file(run_here: RunHere) -> None:
    ran = run_here("plan", "adapt", "--model", "baseline:dinov2_vitl14", "--gpu", "rtx4090", "--mfu", "0.4")
    assert ran.code == 0
    assert "304.4 M parameters" in ran.stdout
