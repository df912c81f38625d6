"""The demo in small: the same way, with a model and a schedule that take seconds."""

from pathlib import Path

import pytest
from PIL import Image

from capi.api.demo import run_demo
from capi.config.files import load_config
from capi.zoo.run_folder import FILE, read_metrics

SMALL = [
    "evaluations=[]",
    "model.width=16",
    "model.depth=1",
    "model.heads=1",
    "clustering.prototypes=8",
    "optimization.batch_size=8",
    "optimization.steps=3",
    "run.log_steps=1",
    "data.workers=0",
]


def test__the_demo_ends_with_numbers_and_pictures_and_resumed_with_the_same(tmp_path: Path) -> None:
    summary = run_demo(tmp_path / "run", SMALL, split="val", device="cpu")
    assert summary is not None
    assert run_demo(tmp_path / "run", SMALL, split="val", device="cpu", resume=True) == summary
    for accuracy in (summary.untrained, summary.trained, summary.pixels):
        # There are 57 photos to be right or wrong about.
        assert round(accuracy * 57, 6) == int(round(accuracy * 57, 6))
        assert 0.05 < accuracy < 0.9
    assert 0 < summary.prototype_use <= 1
    assert summary.first_loss != summary.last_loss
    for path, width in zip(summary.pictures, (600, 700, 1000), strict=True):
        with Image.open(path) as picture:
            assert picture.width > width
            # White paper alone would have one colour.
            assert len(picture.convert("RGB").getcolors(2**24)) > 50


@pytest.mark.thorough
def test__the_curve_of_a_demo_ends_with_the_score_it_ends_with(tmp_path: Path) -> None:
    summary = run_demo(tmp_path / "run", SMALL[1:], split="test", device="cpu")
    assert summary is not None
    scores = [
        record["demo/knn/teacher"] for record in read_metrics(tmp_path / "run" / FILE) if "demo/knn/teacher" in record
    ]
    assert scores[0] == pytest.approx(summary.untrained, abs=1e-9)
    assert scores[-1] == pytest.approx(summary.trained, abs=1e-9)


@pytest.mark.thorough
def test__the_encoder_before_training_needs_nothing_of_what_made_the_targets(tmp_path: Path) -> None:
    patch = load_config("demo").model.patch_size
    own = ["target.kind=frozen", f"target.frozen.encoder=pixels:{patch}"]
    summary = run_demo(tmp_path / "run", [*SMALL, *own], split="val", device="cpu")
    assert summary is not None
    assert 0.05 < summary.untrained < 0.9
    assert summary.prototype_use is None


def test__the_recipe_is_within_five_minutes_of_two_cores() -> None:
    """The run sees as many images as docs/measurements/small-data.md measured for five minutes."""
    optimization = load_config("demo").optimization
    assert optimization.batch_size * optimization.steps <= 110_000


@pytest.mark.parametrize("split", ["val", "test"])
def test__the_photos_it_classifies_were_not_trained_on(split: str) -> None:
    from capi.data.sources import demo_photos

    assert not set(demo_photos("train").images.contents) & set(demo_photos(split).images.contents)
