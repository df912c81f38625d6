"""Training probes of every setting at once: the paper's grid, its schedule, AdamW, and what comes out of it.

The total batch may come in parts (as many images as the encoder takes at a time, or one part for each process): a step
is the same however it is divided. Several kinds of probes may learn from one pass over the data, since computing the
features is what costs.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from capi.errors import CapiError
from capi.evals.probes import Probes
from capi.runtime.protocol import PAPER_DECAYS, PAPER_RATES
from capi.types import Float, Int, Reduction

BETAS = (0.9, 0.95)
EPS = 1e-8
# The released evaluation takes one mean over the losses of all heads that it trains at once, which are so many.
RELEASED_HEADS = 120
# Learning rates are stated for this total batch and grow in proportion to it.
REFERENCE_BATCH_SIZE = 256

# What each kind of probe looks at, by the probe's name, and the classes of the images.
Part = tuple[Mapping[str, Tensor], Tensor]


@dataclass(frozen=True)
class ProbeSetting:
    """How one head is trained; the learning rate is the peak, for a total batch of 256."""

    learning_rate: float
    weight_decay: float


PAPER_GRID = tuple(ProbeSetting(rate, decay) for decay in PAPER_DECAYS for rate in PAPER_RATES)


@dataclass(frozen=True)
class ProbeSchedule:
    """How long probes train, and at how many images a step, counted over the whole job. The defaults are the paper's.

    A linear warm-up, then a cosine that reaches 0 where step `total_steps` would be, and stays there. The paper does
    not say where the warm-up begins: ours is at peak * (step + 1) / warmup_steps, so no step is lost to a rate of 0.
    """

    total_steps: int = 12500
    warmup_steps: int = 1250
    batch_size: int = 1024

    def __post_init__(self) -> None:
        if self.total_steps < 1 or self.batch_size < 1:
            raise CapiError(
                "probes need at least one step of at least one image, but got "
                f"{self.total_steps} steps of {self.batch_size} images"
            )
        if not 0 <= self.warmup_steps <= self.total_steps:
            raise CapiError(f"a warm-up of {self.warmup_steps} steps does not fit into {self.total_steps} steps")

    def learning_rate(self, step: int, *, peak: float) -> float:
        """The rate at a step; `peak` is that of a total batch of 256."""
        scaled = peak * self.batch_size / REFERENCE_BATCH_SIZE
        step = min(step, self.total_steps)
        if step < self.warmup_steps:
            return scaled * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(self.total_steps - self.warmup_steps, 1)
        return scaled * 0.5 * (1 + math.cos(math.pi * progress))


def loss_sums(logits: Float[Tensor, "g b c"], labels: Int[Tensor, " b"]) -> Float[Tensor, " g"]:
    """The cross-entropy of each setting, summed over the images."""
    settings = len(logits)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.repeat(settings), reduction="none")
    return losses.unflatten(0, (settings, -1)).sum(1)


def probe_logits(probes: Probes, inputs: Tensor) -> Float[Tensor, "g b c"]:
    """Logits in float32 of features of any type, on any device."""
    inputs = inputs.detach().to(next(probes.parameters()).device, torch.float32)
    if inputs.is_inference() and torch.is_grad_enabled():
        # Autograd refuses to keep tensors that were made in inference mode.
        inputs = inputs.clone()
    logits: Tensor = probes(inputs)
    return logits


class ProbeTrainer:
    """Trains the probes of all settings, each with a rate and a weight decay of its own.

    A step is `accumulate` for each part of the batch and then `update`. Settings cannot disturb each other: one whose
    loss is no finite number is marked in `failed_`, its parameters become nan, and the others go on; when all have
    failed, that is an error. Move the probes to their device first. With a `reduction`, every process accumulates its
    share of the batch, and all of them take the same step.

    A loss that is the mean over n heads divides the gradient g of each by n. AdamW's step is then m / (sqrt(v) + n eps)
    in the moments of g: only its eps is felt. So `heads_in_mean` heads are n times the eps, whatever is trained here.
    """

    def __init__(
        self,
        probes: Probes,
        settings: Sequence[ProbeSetting],
        schedule: ProbeSchedule,
        *,
        reduction: Reduction | None = None,
        heads_in_mean: int = 1,
    ) -> None:
        if len(settings) != probes.settings:
            raise CapiError(f"these probes have {probes.settings} settings, but {len(settings)} were given to train")
        self.probes, self.settings, self.schedule = probes, tuple(settings), schedule
        self.reduction = reduction
        self.device = next(probes.parameters()).device
        self.views = {name: _views(parameter) for name, parameter in probes.named_parameters()}
        eps = EPS * heads_in_mean
        self.optimizer = AdamW(_groups(self.views, self.settings), lr=0.0, betas=BETAS, eps=eps, fused=True)
        self.failed_ = torch.zeros(probes.settings, dtype=torch.bool, device=self.device)
        self._forget()

    def accumulate(self, inputs: Tensor, labels: Int[Tensor, " b"]) -> None:
        """Add the gradient of a part of the batch, whatever its size."""
        _check_labels(labels, self.probes.classes)
        with torch.enable_grad():
            losses = loss_sums(probe_logits(self.probes, inputs), labels.to(self.device))
            (losses / self.schedule.batch_size).sum().backward()
        self._losses += losses.detach()
        self._images += len(labels)

    @torch.no_grad()
    def update(self, step: int) -> Float[Tensor, " g"]:
        """Let AdamW take its step; the mean loss of each setting over the batch, nan for those that failed."""
        losses = self._finished_batch(step)
        self._hand_out_gradients()
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.learning_rate(step, peak=group["peak"])
        self.optimizer.step()
        self._forget()
        self._note_failures(losses, step)
        return losses.masked_fill(self.failed_, torch.nan)

    def step(self, parts: Iterable[tuple[Tensor, Tensor]], number: int) -> Float[Tensor, " g"]:
        """One step over all parts of a batch."""
        for inputs, labels in parts:
            self.accumulate(inputs, labels)
        return self.update(number)

    def _finished_batch(self, step: int) -> Float[Tensor, " g"]:
        """The mean losses; leaves the gradients of those means in the probes."""
        images, losses = self._images, self._losses
        if self.reduction is not None:
            images = int(self.reduction.sum(torch.tensor(images, device=self.device)))
            losses = self.reduction.sum(losses)
            for parameter, gradient in _gradients(self.probes):
                parameter.grad = self.reduction.sum(gradient)
        if images == 0:
            raise CapiError(f"step {step} has no images to learn from: give at least one part of a batch")
        if images != self.schedule.batch_size:
            # Gradients were divided by the size that was planned.
            for _, gradient in _gradients(self.probes):
                gradient.mul_(self.schedule.batch_size / images)
        return losses / images

    def _hand_out_gradients(self) -> None:
        for name, parameter in self.probes.named_parameters():
            gradients = [None] * self.probes.settings if parameter.grad is None else parameter.grad.unbind()
            for view, gradient in zip(self.views[name], gradients, strict=True):
                view.grad = gradient

    def _forget(self) -> None:
        """Start a batch."""
        self.probes.zero_grad(set_to_none=True)
        self.optimizer.zero_grad(set_to_none=True)
        self._images, self._losses = 0, torch.zeros(self.probes.settings, device=self.device)

    def _note_failures(self, losses: Float[Tensor, " g"], step: int) -> None:
        fresh = ~losses.isfinite() & ~self.failed_
        if not fresh.any():
            return
        self.failed_ |= fresh
        # What an infinite loss leaves behind may still be finite: no score may come from it.
        for parameter in self.probes.parameters():
            parameter[fresh] = torch.nan
        if self.failed_.all():
            raise CapiError(
                f"at step {step} no setting is left whose loss is a finite number ({len(self.settings)} were tried): "
                "look for values that are not finite in the features, or lower the learning rates"
            )


def train_step(trainers: Mapping[str, ProbeTrainer], parts: Iterable[Part], number: int) -> dict[str, Tensor]:
    """One step of several kinds of probes over the same parts; the losses by name."""
    for inputs, labels in parts:
        for name, trainer in trainers.items():
            trainer.accumulate(inputs[name], labels)
    return {name: trainer.update(number) for name, trainer in trainers.items()}


def train_probes(
    trainers: Mapping[str, ProbeTrainer],
    batches: Iterable[Iterable[Part]],
    *,
    on_step: Callable[[int, dict[str, Tensor]], None] | None = None,
) -> None:
    """Train to the end of the schedule. `batches` gives the parts of each step; `on_step` is told every step's losses.

    Data that ends before the schedule does is an error, data that would go on is left.
    """
    lengths = sorted({trainer.schedule.total_steps for trainer in trainers.values()})
    if len(lengths) != 1:
        raise CapiError(f"probes that learn from one pass need schedules of one length, but these have {lengths}")
    done = 0
    for number, parts in zip(range(lengths[0]), batches, strict=False):
        losses = train_step(trainers, parts, number)
        done += 1
        if on_step is not None:
            on_step(number, losses)
    if done < lengths[0]:
        raise CapiError(f"the data ended after {done} of {lengths[0]} steps: repeat it or shorten the schedule")


class Judged(NamedTuple):
    """The share of right answers and the mean loss of each setting; nan where it gave values that are not finite."""

    accuracy: Float[Tensor, " g"]
    loss: Float[Tensor, " g"]


@torch.no_grad()
def judged(probes: Mapping[str, Probes], parts: Iterable[Part]) -> dict[str, Judged]:
    """How each setting does on these images, by probe; equal logits choose the lowest class."""
    right = {name: torch.zeros(each.settings, dtype=torch.float64) for name, each in probes.items()}
    losses = {name: torch.zeros(each.settings, dtype=torch.float64) for name, each in probes.items()}
    images = 0
    for inputs, labels in parts:
        images += len(labels)
        for name, each in probes.items():
            logits = probe_logits(each, inputs[name])
            # On the CPU before they become float64, which Apple's GPUs do not have.
            correct = (logits.argmax(2) == labels.to(logits.device)).sum(1).cpu().double()
            broken = (~logits.isfinite().all(2).all(1)).cpu()
            right[name] += correct.masked_fill(broken, torch.nan)
            found = loss_sums(logits, labels.to(logits.device)).cpu().double()
            losses[name] += found.masked_fill(broken, torch.nan)
    if images == 0:
        raise CapiError("there are no images to score: the split is empty")
    return {name: Judged(right[name] / images, losses[name] / images) for name in probes}


def best_setting(found: Judged) -> int:
    """The setting with the highest accuracy; of several the one with the lowest loss, and of those the first.

    Few held-out images leave many settings with the same accuracy, heads that hardly learnt among them (ours).
    """
    accuracy = found.accuracy.nan_to_num(nan=-math.inf)
    if accuracy.isinf().all():
        count = len(accuracy)
        raise CapiError(f"none of the {count} settings has a score: all of them gave values that are not finite")
    return int(found.loss.masked_fill(accuracy < accuracy.max(), math.inf).argmin())


def _views(parameter: nn.Parameter) -> list[nn.Parameter]:
    """What torch's AdamW is given: each setting's own part of a stacked parameter, in the same memory."""
    return [nn.Parameter(part) for part in parameter.detach().unbind()]


def _groups(views: Mapping[str, list[nn.Parameter]], settings: Sequence[ProbeSetting]) -> list[dict[str, Any]]:
    """One group of parameters for each rate and decay: biases are not decayed, all else is."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parts in views.items():
        for setting, part in zip(settings, parts, strict=True):
            decay = 0.0 if name.endswith("bias") else setting.weight_decay
            groups.setdefault((setting.learning_rate, decay), []).append(part)
    return [{"params": parts, "peak": peak, "weight_decay": decay} for (peak, decay), parts in groups.items()]


def _gradients(probes: Probes) -> list[tuple[nn.Parameter, Tensor]]:
    return [(parameter, parameter.grad) for parameter in probes.parameters() if parameter.grad is not None]


def _check_labels(labels: Int[Tensor, " b"], classes: int) -> None:
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise CapiError(f"labels must lie between 0 and {classes - 1}, but go from {labels.min()} to {labels.max()}")
