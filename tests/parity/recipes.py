"""What three steps of a recipe make of tiny networks, and a file of it: `python -m tests.parity.recipes` writes it."""

import hashlib
import json
import math
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from capi.config.files import load_config
from capi.train.build import build_learner, masked_batch
from capi.train.step import train_step

FILE = Path(__file__).with_name("recipes.json")
# The paper's, and those that differ from them in size alone.
RECIPES = ("vitl14", "vitl16", "vitb14", "vits14", "vits16", "mini", "tiny4")
STEPS = 3


def tiny(recipe: str) -> list[str]:
    """Sizes that take no time; all else is the recipe's."""
    side = 8 * load_config(recipe).model.patch_size
    sizes = ["model.width=32", "model.depth=2", "model.heads=2", "clustering.prototypes=24", f"data.image_size={side}"]
    return [*sizes, "optimization.batch_size=4", f"optimization.steps={STEPS}", "run.precision=float32"]


def computed(recipe: str) -> dict[str, Any]:
    """The losses, how far each part moved, and a checksum of every bit of the weights."""
    config = load_config(recipe, tiny(recipe))
    learner = build_learner(config)
    parts = {"student": learner.student, "teacher": learner.teacher, "target": learner.target}
    before = {name: [each.detach().clone() for each in part.parameters()] for name, part in parts.items()}
    generator, losses = torch.Generator().manual_seed(0), []
    for step in range(STEPS):
        images = torch.randn(4, config.model.channels, *config.data.height_and_width, generator=generator)
        metrics = train_step(learner, [masked_batch(config, images, step)], step)
        losses.append([float(metrics.student_loss), float(metrics.target_loss)])
    digest, moved = hashlib.sha256(), {}
    for name, part in parts.items():
        after = [each.detach() for each in part.parameters()]
        moved[name] = math.hypot(*(float((b - a).norm()) for a, b in zip(before[name], after, strict=True)))
        for value in after:
            digest.update(value.contiguous().numpy().tobytes())
    return {"losses": losses, "moved": moved, "sha256": digest.hexdigest()}


def machine() -> dict[str, str]:
    """What the last bits depend on beside the code."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8").split("\n\n", maxsplit=1)[0] if info.exists() else platform.processor()
    facts = ("vendor_id", "cpu family", "model", "model name", "stepping")
    cpu = [line.split(":")[1].strip() for line in text.splitlines() if line.split("\t")[0] in facts]
    capability = torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "cpu": " ".join(cpu) or text, "capability": capability}


@contextmanager
def one_thread() -> Iterator[None]:
    """The order of sums depends on how many there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    with one_thread():
        contents = {"machine": machine(), "recipes": {recipe: computed(recipe) for recipe in RECIPES}}
    FILE.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
