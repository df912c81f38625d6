"""How many calls lie between a command and the mathematics: a reader follows them one by one."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

import capi
from capi.models.features import PixelEncoder
from capi.train import loop
from tests.cli.conftest import RunHere, run_here
from tests.cli.tiny_runs import TREE
from tests.photos import noise_photos

__all__ = ["run_here"]
PACKAGE = str(Path(capi.__file__).parent)


def recorded(function: Callable[..., Any], command: str, chains: list[list[str]]) -> Callable[..., Any]:
    """The function, which notes who called it: the frames of the package after the one of the command."""

    def call(*arguments: Any, **options: Any) -> Any:
        frame, chain = sys._getframe(1), []
        while not (frame.f_code.co_name == command and Path(frame.f_code.co_filename).parent.name == "cli"):
            if frame.f_code.co_filename.startswith(PACKAGE):
                chain.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")
            assert frame.f_back is not None, chain
            frame = frame.f_back
        chains.append(chain[::-1])
        return function(*arguments, **options)

    return call


def test__five_frames_lie_between_pretrain_and_a_step(
    run_here: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains: list[list[str]] = []
    monkeypatch.setattr(loop, "train_step", recorded(loop.train_step, "pretrain", chains))
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TREE))
    words = ("--data", noise_photos(tmp_path / "images"), "--out", tmp_path / "run", "--device", "cpu")
    ran = run_here("pretrain", tmp_path / "tiny.yaml", *words)
    assert ran.code == 0, ran
    assert len(chains) == TREE["optimization"]["steps"]
    assert max(map(len, chains)) <= 5, chains[0]


@pytest.mark.parametrize(
    "protocol",
    [
        "folder/knn",
        "folder/linear",
        "folder/attentive",
        "folder/attentive schedule=paper",
        "masks/knn-segmentation",
        "masks/logistic-segmentation",
    ],
)
def test__seven_frames_lie_between_evaluate_and_the_encoder(
    run_here: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    chains: list[list[str]] = []
    monkeypatch.setattr(PixelEncoder, "forward", recorded(PixelEncoder.forward, "evaluate", chains))
    write_images(tmp_path, protocol.partition("/")[0])
    probe = [] if "segmentation" in protocol or "knn" in protocol else ["iterations=2", "batch_size=4", "workers=0"]
    data = [f"data={tmp_path}", "image_size=16", *probe]
    ran = run_here("evaluate", "pixels:4", *protocol.split(), *data, "--device", "cpu")
    assert ran.code == 0, ran
    assert chains
    assert max(map(len, chains)) <= 7, max(chains, key=len)


def write_images(folder: Path, layout: str) -> None:
    """Noise in two classes, or with masks of two labels."""
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        for number in range(4):
            photo = Image.fromarray(generator.integers(0, 255, (16, 16, 3), dtype=np.uint8))
            mask = Image.fromarray(generator.integers(0, 2, (16, 16), dtype=np.uint8))
            places = {folder / split / "ab"[number % 2] / f"{number}.png": photo}
            if layout == "masks":
                places = {folder / "images" / split / f"{number}.png": photo}
                places[folder / "masks" / split / f"{number}.png"] = mask
            for place, image in places.items():
                place.parent.mkdir(parents=True, exist_ok=True)
                image.save(place)
