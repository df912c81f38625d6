"""What a recipe costs on this machine: parameters, FLOP, memory, and the time of real iterations on random images."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from capi.method.masking import MaskSampler, PatchGrid
from capi.runtime.devices import peak_bytes
from capi.runtime.randomness import sample_keys
from capi.train.cost.flop import IterationFlop, iteration_flop
from capi.train.step import Learner, train_step
from capi.types import MaskedBatch


@dataclass(frozen=True)
class StepCost:
    """The cost of an iteration. `seconds` is the best of several; `peak_bytes` that of the process or the device."""

    batch_size: int
    encoder_parameters: int
    trained_parameters: int
    flop_an_image: IterationFlop
    seconds: float
    peak_bytes: int
    student_loss: float

    @property
    def images_per_second(self) -> float:
        return self.batch_size / self.seconds

    @property
    def flop_per_second(self) -> float:
        return sum(self.flop_an_image) * self.images_per_second


def random_batch(
    *,
    masks: MaskSampler,
    grid: PatchGrid,
    image_shape: tuple[int, int, int],
    batch_size: int,
    seed: int,
    device: torch.device,
) -> MaskedBatch:
    """Noise instead of photos, with real masks."""
    visible, predict = masks(grid, sample_keys(seed, 0, torch.arange(batch_size)))
    images = torch.randn(batch_size, *image_shape, generator=torch.Generator().manual_seed(seed))
    return MaskedBatch(images.to(device), visible.to(device), predict.to(device))


def measure_step(
    learner: Learner, batches: Sequence[MaskedBatch], patches: int, rounds: int, progress: Callable[[], None]
) -> StepCost:
    """Run one iteration to warm up and `rounds` more that are timed; `progress` is called after each."""
    first = batches[0]
    flop = iteration_flop(
        learner.student,
        learner.target,
        batch_size=len(first.images),
        patches=patches,
        visible=first.visible_index.shape[1],
        predicted=first.predict_index.shape[1],
    )
    batch_size = sum(len(batch.images) for batch in batches)
    flop = flop._replace(optimizer=learner.student_optimizer.flop() / batch_size)
    learner.target.pretend_full()
    best = float("inf")
    for step in range(rounds + 1):
        start = time.perf_counter()
        # Reading the loss waits for the device.
        loss = float(train_step(learner, batches, step).student_loss)
        if step:
            best = min(best, time.perf_counter() - start)
        progress()
    trained = (*learner.student.parameters(), *learner.target.parameters())
    return StepCost(
        batch_size=batch_size,
        encoder_parameters=sum(parameter.numel() for parameter in learner.student.encoder.parameters()),
        trained_parameters=sum(parameter.numel() for parameter in trained if parameter.requires_grad),
        flop_an_image=flop,
        seconds=best,
        peak_bytes=peak_bytes(first.images.device),
        student_loss=loss,
    )


def memory_of(device: torch.device) -> int:
    """All the memory there is: the accelerator's, or the machine's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
