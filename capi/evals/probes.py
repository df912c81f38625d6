"""The probes that are trained by gradient, every setting of the grid at once.

Settings (g of them) differ in how they are trained, never in what they see. So their parameters are stacked, and one
computation serves all of them. The axes:

    g settings   b images   n tokens of an image   d width of a token   c classes
    h attention heads of a setting   q = g * h, the heads of all settings   w width of a head

Every setting starts from the same draw (ours): then settings differ in their numbers alone, and what a setting becomes
does not depend on the others in the grid.

Training probes of every setting at once: the paper's grid, its schedule, AdamW, and what comes out of it.

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
from capi.runtime.devices import float32_products
from capi.runtime.protocol import PAPER_DECAYS, PAPER_RATES
from capi.types import Float, Int, Reduction

LARGEST_HEAD_WIDTH = 64
INITIAL_STD = 0.02


def head_width(width: int) -> int:
    """The width of an attention head: 64, or the largest number below it that divides `width` (ours)."""
    return next(size for size in range(min(LARGEST_HEAD_WIDTH, width), 0, -1) if width % size == 0)


def attention_pooling(tokens: Float[Tensor, "b n d"], directions: Float[Tensor, "q d"]) -> Float[Tensor, "b q d"]:
    """The mean of an image's tokens for each direction, weighted by the softmax of their products with it.

    Tokens take no gradient, and autograd keeps nothing of n * q values but the weights.
    """
    scores = tokens.flatten(0, 1) @ directions.T
    weights = scores.unflatten(0, tokens.shape[:2]).softmax(dim=1)
    return weights.transpose(1, 2) @ tokens


class StackedLinear(nn.Module):
    """A linear map for each setting: truncated normal weights, biases 0."""

    def __init__(self, *, settings: int, inputs: int, outputs: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = _stacked_weights(settings, (outputs, inputs), generator)
        self.bias = nn.Parameter(torch.zeros(settings, outputs))

    def forward(self, x: Float[Tensor, "g b inputs"]) -> Float[Tensor, "g b outputs"]:
        return torch.baddbmm(self.bias[:, None], x, self.weight.transpose(1, 2))


class Probes(nn.Module):
    """What probes have in common: each parameter has the settings as its first axis, and all biases are called so."""

    def __init__(self, *, settings: int, width: int, classes: int, seed: int = 0) -> None:
        super().__init__()
        for name, value in (("settings", settings), ("width", width), ("classes", classes)):
            if value < 1:
                raise CapiError(f"probes need at least one of each, but {name} is {value}")
        self.settings, self.width, self.classes, self.seed = settings, width, classes, seed

    def select(self, index: int) -> "Probes":
        """A copy of one setting's probe."""
        chosen = type(self)(settings=1, width=self.width, classes=self.classes, seed=self.seed)
        chosen.load_state_dict({name: value[index, None] for name, value in self.state_dict().items()})
        return chosen.to(next(self.parameters()).device)

    def check_width(self, width: int) -> None:
        if width != self.width:
            raise CapiError(f"these probes are for features of width {self.width}, but got {width}: use their encoder")


class LinearProbes(Probes):
    """A linear classifier of one vector for each image."""

    def __init__(self, *, settings: int, width: int, classes: int, seed: int = 0) -> None:
        super().__init__(settings=settings, width=width, classes=classes, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        self.classifier = StackedLinear(settings=settings, inputs=width, outputs=classes, generator=generator)

    def forward(self, vectors: Float[Tensor, "b d"]) -> Float[Tensor, "g b c"]:
        self.check_width(vectors.shape[-1])
        # All settings see the same vectors, so one product with all rows of all classifiers is enough.
        logits = F.linear(vectors, self.classifier.weight.flatten(0, 1), self.classifier.bias.flatten())
        return logits.unflatten(1, (self.settings, self.classes)).transpose(0, 1)


class AttentiveProbes(Probes):
    """One learned query attends to the tokens of an image; a linear classifier reads what it gathers.

    Keys and values of all tokens are never formed. With a single query, q.(W_k x + b_k) = (W_k^T q).x plus a number
    that the softmax takes away again, and the weights of the softmax sum to one, so W_v and its bias may come after
    pooling: 4 * h * d operations for each token instead of 4 * d^2. The key's bias therefore never matters; it is
    kept, at 0 and without a gradient, because it is one of the head's 2 d^2 + (3 + c) d + c parameters.
    """

    def __init__(self, *, settings: int, width: int, classes: int, seed: int = 0) -> None:
        super().__init__(settings=settings, width=width, classes=classes, seed=seed)
        self.head_width = head_width(width)
        generator = torch.Generator().manual_seed(seed)
        self.query = _stacked_weights(settings, (width,), generator)
        self.key = StackedLinear(settings=settings, inputs=width, outputs=width, generator=generator)
        self.value = StackedLinear(settings=settings, inputs=width, outputs=width, generator=generator)
        self.classifier = StackedLinear(settings=settings, inputs=width, outputs=classes, generator=generator)

    def forward(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "g b c"]:
        self.check_width(tokens.shape[-1])
        return self.classifier(self._values(attention_pooling(tokens, self._directions())))

    def _directions(self) -> Float[Tensor, "q d"]:
        """W_k^T q of each head, scaled as attention scores are."""
        query = self.query.view(-1, 1, self.head_width) / math.sqrt(self.head_width)
        return (query @ self._by_head(self.key.weight)).squeeze(1)

    def _values(self, pooled: Float[Tensor, "b q d"]) -> Float[Tensor, "g b d"]:
        """The values that each head gathered, heads of a setting side by side."""
        # (q b d) @ (q d w), where q counts the heads of one setting after those of another.
        by_head = torch.bmm(pooled.transpose(0, 1), self._by_head(self.value.weight).transpose(1, 2))
        return by_head.unflatten(0, (self.settings, -1)).transpose(1, 2).flatten(2) + self.value.bias[:, None]

    def _by_head(self, weight: Float[Tensor, "g d d"]) -> Float[Tensor, "q w d"]:
        return weight.view(-1, self.head_width, self.width)


def _stacked_weights(settings: int, shape: tuple[int, ...], generator: torch.Generator) -> nn.Parameter:
    drawn = nn.init.trunc_normal_(torch.empty(shape), std=INITIAL_STD, generator=generator)
    return nn.Parameter(drawn.repeat(settings, *(1 for _ in shape)))


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
    # Rows (g b, c): all images of the first setting, then those of the next.
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
    loss is not finite is marked in `failed_`, its parameters become NaN, and the others continue; when all have
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
        # What torch's AdamW is given: each setting's own part of a stacked parameter, in the same memory.
        self.views = {
            name: [nn.Parameter(part) for part in parameter.detach().unbind()]
            for name, parameter in probes.named_parameters()
        }
        eps = EPS * heads_in_mean
        self.optimizer = AdamW(_groups(self.views, self.settings), lr=0.0, betas=BETAS, eps=eps, fused=True)
        self.failed_ = torch.zeros(probes.settings, dtype=torch.bool, device=self.device)
        self._forget()

    @float32_products("highest")
    def accumulate(self, inputs: Tensor, labels: Int[Tensor, " b"]) -> None:
        """Add the gradient of a part of the batch, whatever its size."""
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.probes.classes:
            raise CapiError(
                f"labels must lie between 0 and {self.probes.classes - 1}, but go from {labels.min()} to {labels.max()}"
            )
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
    """Train to the end of the schedule. `batches` gives the parts of each step; `on_step` gets every step's losses.

    Data that ends before the schedule does is an error, data beyond it is left.
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
@float32_products("highest")
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
            sums = loss_sums(logits, labels.to(logits.device)).cpu().double()
            losses[name] += sums.masked_fill(broken, torch.nan)
    if images == 0:
        raise CapiError("there are no images to score: the split is empty")
    return {name: Judged(right[name] / images, losses[name] / images) for name in probes}


def best_setting(judgement: Judged) -> int:
    """The setting with the highest accuracy; of several the one with the lowest loss, and of those the first.

    Few held-out images leave many settings with the same accuracy, heads that hardly learnt among them (ours).
    """
    accuracy = judgement.accuracy.nan_to_num(nan=-math.inf)
    if accuracy.isinf().all():
        count = len(accuracy)
        raise CapiError(f"none of the {count} settings has a score: all of them gave values that are not finite")
    return int(judgement.loss.masked_fill(accuracy < accuracy.max(), math.inf).argmin())


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
