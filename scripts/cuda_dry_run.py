"""The code for a GPU, run where there is none.

    scripts/cuda_dry_run.sh                            in a venv of its own, with a CUDA build of torch
    python scripts/cuda_dry_run.py --device standin    what any build can run, with backward passes

Three things are tried, and the exit code counts those that fail:

    devices    training, encoding, evaluations, PCA and the explorer on a pretended device (`pretend_device.py`), each
               compared with the CPU: a tensor left on the wrong device is an error. On `cuda` there are no gradients.
    kernels    every operation that was seen has a kernel in this build for that device (`cuda` alone)
    compile    what torch.compile writes for the clustering's balance and for a block, compiled for sm_80 and sm_90 by
               Triton, as far as that goes without a GPU (`cuda` alone; see `cuda_kernels.py`)
"""

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pretend_device import STAND_IN, pretending, stand_in
from torch import Tensor

import capi
from capi.config.files import load_config
from capi.models.features import CapiEncoder
from capi.report.draw import Prototypes
from capi.report.explorer.session import Explorer
from capi.report.pictures.pca import fit_components, pca_pictures
from capi.train.build import build_learner, mask_sampler
from capi.train.dry_run import _noise
from capi.train.step import Learner, train_step
from capi.types import MaskedBatch

CPU = torch.device("cpu")
SMALL = ["optimization.batch_size=8", "model.depth=2", "optimization.warmup_share=0"]
LEARNERS = {
    "as the paper trains": [],
    "standard Sinkhorn": ["clustering.sinkhorn=standard"],
    "a queue": ["clustering.queue=16"],
    "micro-batches": ["optimization.micro_batches=2"],
    "recomputed blocks": ["run.activation_checkpointing=full"],
    "Muon, clipped": ["optimization.optimizer=muon", "optimization.clip=1.0"],
    "several layers": ["target.layers=all", "target.normalize=instance"],
    "a head's average": ["target.kind=ema_head"],
    "features": ["target.kind=features"],
    "pixels": ["target.kind=pixels"],
    "self-attention": ["model.predictor.kind=self", "model.head=mlp"],
    "no predictor": ["model.predictor.kind=fused"],
    "learned positions": ["model.positions=learned"],
    "bfloat16": ["run.precision=bfloat16"],
}
PROTOCOLS = {
    "folder/knn": ["neighbors=[1,3]"],
    "folder/linear": ["iterations=12", "learning_rates=[1e-3,1e-2]", "weight_decays=[1e-3]", "batch_size=8"],
    "folder/attentive": ["iterations=12", "learning_rates=[1e-3,1e-2]", "weight_decays=[1e-3]", "batch_size=8"],
    "masks/knn-segmentation": ["neighbors=[1,3]", "pictures=0"],
    "masks/logistic-segmentation": ["strengths=[0.1,1.0]", "max_iterations=20", "pictures=0"],
}


def close(measured: Any, expected: Any, what: str) -> None:
    """Numbers of the pretended device are the CPU's, but for slices and kernels of another size."""
    measured, expected = (torch.as_tensor(value).float().cpu() for value in (measured, expected))
    torch.testing.assert_close(measured, expected, rtol=1e-3, atol=1e-4, msg=lambda said: f"{what}: {said}")


def trained(overrides: list[str], device: torch.device, *, gradients: bool) -> list[Tensor]:
    """The losses of two steps, or without gradients those of a first one."""
    config = load_config("demo", [*SMALL, *overrides])
    learner, batch = build_learner(config, device), _noise(config, device)
    batches = [batch] * config.optimization.micro_batches
    if not gradients:
        return losses(learner, batches)
    steps = [train_step(learner, batches, step) for step in range(2)]
    return [value for step in steps for value in (step.student_loss, step.target_loss)]


@torch.no_grad()
def losses(learner: Learner, batches: list[MaskedBatch]) -> list[Tensor]:
    """A step as far as a forward pass goes: targets, predictions, both losses, the teacher's update."""
    target = learner.target
    with learner.autocast():
        tokens = [target.tokens(learner.teacher, batch.images) for batch in batches]
    own, targets = target(tokens, [batch.predict_index for batch in batches], 0)
    values = [own]
    for batch, wanted in zip(batches, targets, strict=True):
        with learner.autocast():
            outputs = learner.student(batch.student_images, batch.visible_index, batch.predict_index)
        values.append(target.student_loss(outputs, wanted))
        values += target.summary(wanted).values()
    skipped = learner.guard(values[0] + values[1], 0)
    learner.teacher.follow(learner.student, 0.9, skipped)
    target.follow(skipped)
    return [value for value in values if value.ndim == 0]


def encoder_on(device: torch.device) -> CapiEncoder:
    """A small encoder with predictor and head, untrained."""
    return build_learner(load_config("demo", SMALL)).as_encoder().to(device)


def data_folders(root: Path) -> None:
    """Images of two colours, as class folders and with masks of their halves."""
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 12), ("test", 4)):
        for number in range(count):
            label = number % 2
            pixels = torch.randint(0, 128, (48, 48, 3), generator=generator, dtype=torch.uint8)
            pixels[:24, :, label] += 120
            pixels[24:, :, 1 - label] += 120
            mask = torch.full((48, 48), label, dtype=torch.uint8)
            mask[24:] = 1 - label
            for path, values in (
                (root / "folder" / split / f"class{label}" / f"{number}.png", pixels),
                (root / "masks" / "images" / split / f"{number}.png", pixels),
                (root / "masks" / "masks" / split / f"{number}.png", mask),
            ):
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(values.numpy()).save(path)


def scores(protocol: str, overrides: list[str], data: Path, device: torch.device) -> list[float]:
    """What an evaluation of that encoder gives."""
    given = [*overrides, f"data={data / protocol.partition('/')[0]}", "workers=0", "image_size=48"]
    measured = capi.evaluate(encoder_on(device), protocol, [*given, "save_probe=false"], device=device)
    return list(measured.outcome.scores.values())


def explored(photos: Path, device: torch.device) -> list[Tensor]:
    """What a page of the explorer shows, as numbers."""
    encoder, sampler = encoder_on(device), mask_sampler(load_config("demo"))
    target = build_learner(load_config("demo", SMALL)).target
    explorer = Explorer(
        encoder, [photos], prototypes=Prototypes(target.prototypes, target.bias), size=48, masks=sampler
    )
    explorer.collect()
    view = explorer.view(0)
    hidden = explorer.random_mask(view, "random", 0.5, 0)
    predicted = explorer.predict(view, hidden)
    alike = [place.image for place in explorer.similar(view, (1, 1), 3)]
    return [view.feature_map, explorer.nearest(view), torch.tensor(alike), predicted.probabilities, predicted.truth]


def pictured(device: torch.device) -> list[Tensor]:
    """The PCA of an encoder's features as colours, and of features that lie on the device."""
    encoder = encoder_on(device)
    images = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(0)).to(device)
    pictures = pca_pictures(encoder, images, joint=True)
    features = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    components = fit_components(features.to(device))
    return [*(torch.from_numpy(np.array(each)) for each in pictures), components.project(features.to(device)).abs()]


def cases(data: Path, *, gradients: bool) -> Iterator[tuple[str, Callable[[torch.device], Any]]]:
    """What is tried: its name, and what it gives on a device."""
    for name, overrides in LEARNERS.items():
        yield f"train: {name}", lambda device, them=overrides: trained(them, device, gradients=gradients)
    for protocol, overrides in PROTOCOLS.items():
        # A probe is trained with gradients.
        if gradients or protocol not in ("folder/linear", "folder/attentive"):
            yield f"evaluate: {protocol}", lambda device, p=protocol, o=overrides: scores(p, o, data, device)
    yield "PCA", pictured
    yield "explorer", lambda device: explored(data / "folder", device)


def try_devices(device: torch.device, only: str) -> tuple[int, set[Any]]:
    """How many cases fail, and the operations that were seen."""
    failed, seen, gradients = 0, set[Any](), device.type != "cuda"
    with tempfile.TemporaryDirectory() as folder:
        data_folders(Path(folder))
        for name, case in cases(Path(folder), gradients=gradients):
            if only not in name:
                continue
            begun = time.perf_counter()
            try:
                expected = case(CPU)
                with pretending(device) as mode, nullcontext() if gradients else torch.no_grad():
                    measured = case(device)
                for value, other in zip(measured, expected, strict=True):
                    close(value, other, name)
                seen |= mode.seen
                print(f"ok      {name} ({len(mode.seen)} operations, {time.perf_counter() - begun:.0f} s)", flush=True)
            except Exception as error:
                failed += 1
                print(f"FAILED  {name}: {where(error)}", flush=True)
    return failed, seen


def where(error: BaseException) -> str:
    """The error and the line of capi that it comes from."""
    frames = [frame for frame in traceback.extract_tb(deepest(error).__traceback__) if "/capi/" in frame.filename]
    said = " ".join(f"{type(deepest(error)).__name__}: {deepest(error)}".split())[:600]
    return f"{said} (" + ", ".join(f"{Path(f.filename).name}:{f.lineno} {f.line}" for f in frames[-2:]) + ")"


def deepest(error: BaseException) -> BaseException:
    """The error that others were made from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def try_kernels(seen: set[Any]) -> int:
    """The operations that this build has no CUDA kernel for, nor a formula of others."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = ("CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    missing = [func for func in seen if not any(has(func.name(), key) for key in keys)]
    for func in missing:
        print(f"FAILED  {func} has no CUDA kernel")
    print(f"{'FAILED' if missing else 'ok':7} {len(seen) - len(missing)} of {len(seen)} operations have a CUDA kernel")
    return len(missing)


def main() -> int:
    """How many of all things that are tried fail."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", STAND_IN), default="cuda")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, device {arguments.device}, which is pretended")
    device = stand_in() if arguments.device == STAND_IN else torch.device("cuda", 0)
    failed, seen = try_devices(device, arguments.only)
    if device.type == "cuda":
        failed += try_kernels(seen)
        if not arguments.only:
            from cuda_kernels import try_compiling

            failed += try_compiling()
    return failed


if __name__ == "__main__":
    sys.exit(main())
