"""The race in small: models that take seconds, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from capi.api import race
from capi.errors import CapiError
from capi.zoo.run_folder import RunFolder, run_config
from tests.api.test_demo import SMALL
from tests.evals.datasets.layouts import build_binary


@pytest.fixture
def imagenette(tmp_path: Path) -> Path:
    """Bright and dark photos in class folders, six to train on and four to be scored on."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 3), ("val", 2)):
        for label, level in (("bright", 170), ("dark", 0)):
            folder = tmp_path / "photos" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(level, level + 60, (60, 64, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "photos"


def test__a_race_ends_with_a_record_of_its_score_and_its_cost(
    imagenette: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = replace(race.TRACKS["imagenette"], train_images=6, test_images=4, neighbors=1)
    monkeypatch.setitem(race.TRACKS, "imagenette", rules)
    out = tmp_path / "run"
    record = race.speedrun("imagenette", "small", SMALL, data=imagenette, out=out, device="cpu")
    assert record == json.loads((out / race.RECORD).read_text())
    # Any encoder tells bright from dark.
    assert (record["score"], record["reached"], record["goal"]) == (1.0, True, 0.5)
    assert (record["images_seen"], record["seed"]) == (24, 0)
    assert 0 < record["cpu_seconds"] < 600
    assert record["flop"] > 1e6
    assert run_config(RunFolder(out)).evaluations == []


def test__cifar_is_raced_on_from_its_binary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_binary(tmp_path, "cifar10")
    folder = tmp_path / "cifar-10-batches-bin"
    rules = race.TRACKS["cifar10"]
    assert (rules.train_images, rules.test_images, rules.neighbors, rules.goal) == (50_000, 10_000, 20, 0.5)
    with pytest.raises(CapiError, match=r"scored on 10000 photos, and .*cifar-10-batches-bin has 30 in test"):
        race.speedrun("cifar10", "small", SMALL, data=folder, out=tmp_path / "run", device="cpu")
    monkeypatch.setitem(race.TRACKS, "cifar10", replace(rules, test_images=30))
    with pytest.raises(CapiError, match=r"trained on 50000 photos, and .* holds 150 or others"):
        race.speedrun("cifar10", "small", SMALL, data=folder, out=tmp_path / "run", device="cpu")
    monkeypatch.setitem(race.TRACKS, "cifar10", replace(rules, train_images=150, test_images=30))
    record = race.speedrun("cifar10", "small", SMALL, data=folder, out=tmp_path / "run", device="cpu")
    assert record is not None
    # Each class has a color of its own, in 15 training photos of those 20 that vote.
    assert record["reached"]
    assert run_config(RunFolder(tmp_path / "run")).evaluations == []


def test__the_built_in_photos_are_those_of_the_track(tmp_path: Path) -> None:
    record = race.speedrun("groceries", "small", SMALL, out=tmp_path / "run", device="cpu")
    assert record is not None
    # 661 photos are right or wrong.
    assert round(record["score"] * 661) / 661 == pytest.approx(record["score"], abs=1e-4)
    assert record["reached"] == (record["score"] >= 0.54)


@pytest.mark.parametrize(
    ("track", "overrides", "message"),
    [
        ("grocery", [], r'no track "grocery"; did you mean "groceries"'),
        ("groceries", ["init.encoder=run"], r"init\.encoder=run brings in what another run learnt"),
        (
            "groceries",
            ["target.kind=frozen", "target.frozen.encoder=run"],
            r"target\.frozen\.encoder=run brings in what another run learnt",
        ),
        ("imagenette", [], r"needs `data`, a folder with train/CLASS and val/CLASS"),
        ("cifar10", [], r"needs `data`, the folder cifar-10-batches-bin"),
    ],
)
def test__what_is_no_race_is_refused(tmp_path: Path, track: str, overrides: list[str], message: str) -> None:
    with pytest.raises(CapiError, match=message):
        race.speedrun(track, "small", overrides, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test__other_photos_than_the_tracks_are_refused(
    imagenette: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CapiError, match=r"scored on 3925 photos, and .* has 4 in val"):
        race.speedrun("imagenette", "small", SMALL, data=imagenette, out=tmp_path / "run", device="cpu")
    monkeypatch.setitem(race.TRACKS, "imagenette", replace(race.TRACKS["imagenette"], test_images=4))
    with pytest.raises(CapiError, match=r"trained on 9469 photos, and .* holds 6 or others"):
        race.speedrun("imagenette", "small", SMALL, data=imagenette, out=tmp_path / "run", device="cpu")
    with pytest.raises(CapiError, match=r"has photos of its own: leave `data` out"):
        race.speedrun("groceries", "small", SMALL, data=imagenette, out=tmp_path / "run", device="cpu")
