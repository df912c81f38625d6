"""Run folders for tests, written without training."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from capi.config.files import dump_config, load_config

START = {
    "step": 0,
    "time": "2025-01-01T10:00:00+0000",
    "command": ["capi", "demo", "--out", "<i>run</i>"],
    "folder": "/somewhere",
    "machine": {"system": "Linux", "cores": 2, "threads": 1},
    "device": "cpu",
    "versions": {"python": "3.11", "torch": "2.13"},
    "git": {"commit": "abc", "changed": False},
}


def record(step: int, **others: float | None) -> dict[str, Any]:
    """A healthy record, but for what is given."""
    return {
        "step": step,
        "student_loss": 5 / math.sqrt(step + 1),
        "clustering_loss": 9 / math.sqrt(step + 1),
        "target_entropy": 2.0,
        "prototype_use": 0.9,
        "seconds": step * 2.0,
        "images_per_second": 100.0,
        "learning_rate": 1e-3,
        "teacher_momentum": 0.99,
        "broken_images": 0.0,
        "position_share": 0.01,
        "position_information": 0.02,
        "effective_rank": 30.0,
        "prototype_perplexity": 0.6,
        "dead_prototypes": 0.1,
        "teacher_gap": 0.05,
        "student_gradient": 1.0,
        "clustering_gradient": 1.0,
        **others,
    }


def records(count: int = 12, every: int = 5, **others: float | None) -> list[dict[str, Any]]:
    """Healthy records with scores at both ends."""
    logged = [record(step, **others) for step in range(every, every * count + 1, every)]
    first = {"step": 0, "demo/knn/teacher": 0.2, "demo/knn/student": 0.2}
    return [first, *logged, {"step": every * count, "demo/knn/teacher": 0.6, "demo/knn/student": 0.5}]


def make_run(
    path: Path, metrics: Sequence[Mapping[str, Any]] | None = None, *, steps: int = 60, starts: Sequence[Any] = (START,)
) -> Path:
    """A run of the demo recipe; without metrics there is no such file."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(dump_config(load_config("demo", [f"optimization.steps={steps}"])))
    data = {"path": "<script>alert(1)</script>", "images": 675, "fingerprint": "f00d"}
    (path / "run.json").write_text(json.dumps({"format": 1, "seed": 0, "data": data, "starts": list(starts)}))
    if metrics is not None:
        append(path, *metrics)
    return path


def add_checkpoint(run: Path, step: int = 60) -> None:
    """What the doctor looks at; no weights."""
    checkpoint = run / "checkpoints" / f"step_{step:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"format": 2, "step": step}))


def append(run: Path, *metrics: Mapping[str, Any]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in metrics)


def add_pictures(run: Path, *, images: int = 2, steps: Sequence[int] = (0, 30, 60), prototypes: int = 3) -> None:
    """Pictures as a run leaves them."""
    random = np.random.default_rng(0)
    snapshots, strips = run / "pictures" / "snapshots", run / "pictures" / "prototypes"
    snapshots.mkdir(parents=True)
    strips.mkdir()
    for image in range(images):
        _noise(random, 48, 48).save(snapshots / f"photo_{image}.jpg")
        for step in steps:
            _noise(random, 6, 6).save(snapshots / f"step_{step:08d}_{image}.png")
    listed = [
        {"number": 7 * number, "share": 0.1 / (number + 1), "file": f"{number:05d}.png"} for number in range(prototypes)
    ]
    for strip in listed:
        _noise(random, 16, 128).save(strips / str(strip["file"]))
    index = {"images": 675, "note": "Patches of <b>675</b> images.", "prototypes": listed}
    (strips / "index.json").write_text(json.dumps(index))


def _noise(random: np.random.Generator, height: int, width: int) -> Image.Image:
    return Image.fromarray(random.integers(0, 255, (height, width, 3), dtype=np.uint8))
