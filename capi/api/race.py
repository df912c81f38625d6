"""The race: reach a fixed score on fixed photos at the least cost. Rules and records: benchmarks/speedrun/README.md."""

import hashlib
import json
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import capi
from capi.config.files import Overrides, dump_config, load_config, override_texts
from capi.config.schema import Config
from capi.config.trust import trusting
from capi.data.locations import open_images
from capi.errors import CapiError, nearest
from capi.evals.classification import KnnClassification
from capi.evals.datasets import load_classification
from capi.evals.features import Encoding
from capi.evals.tasks import ClassificationData, DataOptions
from capi.runtime.atomic import atomic_write
from capi.runtime.devices import choose_device
from capi.runtime.privacy import hide_path, hide_paths_of_command
from capi.runtime.summary import Summary
from capi.train import run
from capi.train.cost.plan import planned_cost
from capi.zoo.weights import load_run

RECORD = "speedrun.json"
# What costs time and teaches nothing.
_QUIET = ("evaluations=[]", "run.report=false", "run.snapshots=0", "run.loggers=[]")


@dataclass(frozen=True)
class Track:
    """Photos to learn from, photos to be scored on, and the score to reach: k-NN on the teacher's mean patch."""

    photos: str
    goal: float
    dataset: str
    options: DataOptions
    neighbors: int
    train_images: int
    test_images: int
    # Where the training photos lie below --data.
    train: str = "train"
    # None where the photos lie in a folder of one's own.
    fingerprint: str | None = None


TRACKS = {
    "groceries": Track(
        photos="the built-in photos",
        goal=0.54,
        dataset="demo",
        options=DataOptions(train="train", tests=("test",)),
        neighbors=1,
        train_images=675,
        test_images=661,
        fingerprint="7ef7cd07f91c5369",
    ),
    "imagenette": Track(
        photos="a folder with train/CLASS and val/CLASS, as Imagenette comes",
        goal=0.5,
        dataset="folder",
        options=DataOptions(train="train", tests=("val",)),
        neighbors=20,
        train_images=9469,
        test_images=3925,
    ),
    "cifar10": Track(
        photos="the folder cifar-10-batches-bin, the binary version of CIFAR-10",
        goal=0.5,
        dataset="cifar10",
        # Their numbers are those of the track.
        options=DataOptions(verify_counts=False),
        neighbors=20,
        train_images=50_000,
        test_images=10_000,
        train="",
    ),
}


class SpeedRecord(Summary, dict[str, Any]):
    """The record of a race: a dict, as it is written."""

    def summary(self) -> tuple[str, dict[str, str]]:
        reached = "reaches" if self["reached"] else "does not reach"
        return f"{self['track']}: {self['score']:.1%} {reached} the goal of {self['goal']:.0%}", {
            "cost": f"{self['cpu_seconds']:.1f} CPU seconds, {self['wall_seconds']:.1f} s, {self['flop']:.3g} FLOP",
            "recipe": " ".join((self["recipe"], *self["overrides"])),
            "images": f"{self['images_seen']} seen",
        }


def speedrun(
    track: str,
    recipe: str,
    overrides: Overrides = (),
    *,
    out: str | Path,
    data: str | Path | None = None,
    device: str | None = None,
    console: Console | None = None,
    **sections: Any,
) -> SpeedRecord | None:
    """Train a recipe on a track's photos, score it as the track says, write one record; None when interrupted.

    The cost is the CPU seconds of this process and its workers, from opening the photos to the last step, and the FLOP
    that the recipe requires.
    """
    if track not in TRACKS:
        raise CapiError(f'there is no track "{track}"{nearest(track, TRACKS)} (there are {", ".join(TRACKS)})')
    rules = TRACKS[track]
    texts = override_texts(overrides, sections)
    config = load_config(recipe, [*texts, *_QUIET])
    # The race begins with random weights and no other encoder.
    for key, given in (("init.encoder", config.init.encoder), ("target.frozen.encoder", config.target.frozen.encoder)):
        if given is not None:
            raise CapiError(
                f"{key}={given} brings in what another run learnt, but a race begins with random weights: leave it out"
            )
    root = _photos(track, rules, data)
    labeled = _labeled(track, rules, root)
    chosen = choose_device(device)
    cpu, clock = _cpu_seconds(), time.perf_counter()
    images = "demo" if root is None else root / rules.train
    source = open_images(images)
    if len(source) != rules.train_images or source.fingerprint != (rules.fingerprint or source.fingerprint):
        raise CapiError(
            f"the track {track} is trained on {rules.train_images} photos, and {images} holds {len(source)} or others: "
            f"give {rules.photos}"
        )
    with trusting(overrides=texts):
        done = run.pretrain(config, data=images, out=out, device=chosen, console=console)
        cpu, clock = _cpu_seconds() - cpu, time.perf_counter() - clock
        if not done.finished:
            return None
        cost = planned_cost(config)
    score = _score(config, rules, labeled, done.path, chosen)
    written = dump_config(config)
    record = SpeedRecord(
        {
            "track": track,
            "goal": rules.goal,
            "score": round(score, 4),
            "reached": score >= rules.goal,
            "cpu_seconds": round(cpu, 1),
            "wall_seconds": round(clock, 1),
            "flop": cost.flop,
            "images_seen": cost.images_seen,
            "seed": config.seed,
            "recipe": hide_path(recipe),
            "overrides": [hide_paths_of_command([text]) for text in texts],
            "config_sha256": hashlib.sha256(written.encode()).hexdigest(),
            "photos": source.fingerprint,
            "capi": capi.__version__,
            "torch": torch.__version__,
            "device": str(chosen),
            "machine": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "date": time.strftime("%Y-%m-%d"),
        }
    )
    atomic_write(done.path / RECORD, json.dumps(record, indent=1) + "\n")
    return record


def _photos(track: str, rules: Track, data: str | Path | None) -> Path | None:
    """The folder of a track's photos; None where they are built in."""
    if rules.dataset == "demo":
        if data is not None:
            raise CapiError(f"the track {track} has photos of its own: leave --data out")
        return None
    if data is None or not (Path(data) / rules.train).is_dir():
        raise CapiError(f"the track {track} needs --data, {rules.photos}, and {data} is none")
    return Path(data)


def _labeled(track: str, rules: Track, root: Path | None) -> ClassificationData:
    """What the score is made of, before anything is trained."""
    labeled = load_classification(rules.dataset, root, rules.options)
    ((split, test),) = labeled.tests.items()
    if len(test.images) != rules.test_images:
        raise CapiError(
            f"the track {track} is scored on {rules.test_images} photos, and {root} has {len(test.images)} in {split}: "
            f"give {rules.photos}"
        )
    return labeled


def _score(config: Config, rules: Track, labeled: ClassificationData, path: Path, device: torch.device) -> float:
    protocol = KnnClassification(
        labeled,
        Encoding(size=config.data.height_and_width, batch_size=64, device=device),
        neighbors=(rules.neighbors,),
        votes=("majority",),
        features=("mean_patch",),
    )
    return protocol.run(load_run(path).to(device)).main


def _cpu_seconds() -> float:
    """CPU seconds of this process and of its workers that have ended."""
    return sum(os.times()[:4])
