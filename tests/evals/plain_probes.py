"""Heads as one would write and train them one by one, and the small batches that the tests of probes share."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capi.evals.probes import (
    AttentiveProbes,
    LinearProbes,
    Probes,
    ProbeSchedule,
    ProbeSetting,
    ProbeTrainer,
)

WIDTH, CLASSES, IMAGES, TOKENS = 16, 5, 12, 7
SETTINGS = (ProbeSetting(1e-3, 0.5), ProbeSetting(1e-1, 5e-2), ProbeSetting(2e-2, 0.0))
SCHEDULE = ProbeSchedule(total_steps=8, warmup_steps=3, batch_size=IMAGES)
KINDS = [AttentiveProbes, LinearProbes]


class PlainAttention(nn.Module):
    """An attentive probe as one would write it: keys and values of every token."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.query = heads, nn.Parameter(torch.empty(WIDTH))
        self.key, self.value, self.classifier = (nn.Linear(WIDTH, size) for size in (WIDTH, WIDTH, CLASSES))

    def forward(self, tokens: Tensor) -> Tensor:
        query = self.query.view(1, self.heads, 1, -1).expand(len(tokens), -1, -1, -1)
        key, value = (layer(tokens).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.key, self.value))
        weights = (query @ key.transpose(2, 3) / math.sqrt(WIDTH // self.heads)).softmax(-1)
        return self.classifier((weights @ value).squeeze(2).flatten(1))


class PlainLinear(nn.Module):
    """A linear probe as one would write it."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, vectors: Tensor) -> Tensor:
        return self.classifier(vectors)


class OtherProcess:
    """The reduction of a process that is alone, which keeps what it was to share."""

    def __init__(self) -> None:
        self.shared: list[Tensor] = []

    def sum(self, value: Tensor) -> Tensor:
        self.shared.append(value.clone())
        return value

    def max(self, value: Tensor) -> Tensor:
        raise AssertionError("a step has no use for maxima")


class WithOther:
    """The reduction of a process that shares with one that went before."""

    def __init__(self, other: OtherProcess) -> None:
        self.shared = iter(other.shared)

    def sum(self, value: Tensor) -> Tensor:
        return value + next(self.shared)

    def max(self, value: Tensor) -> Tensor:
        raise AssertionError("a step has no use for maxima")


def batches(kind: type[Probes], steps: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shape = (IMAGES, TOKENS, WIDTH) if kind is AttentiveProbes else (IMAGES, WIDTH)
    for _ in range(steps):
        yield torch.randn(shape, generator=generator), torch.randint(CLASSES, (IMAGES,), generator=generator)


def new_probes(kind: type[Probes], settings: int = len(SETTINGS)) -> Probes:
    """Probes with two attention heads and larger weights than real ones, so that all parts matter within few steps."""
    probes = kind(settings=settings, width=WIDTH, classes=CLASSES, seed=3)
    if isinstance(probes, AttentiveProbes):
        probes.head_width = WIDTH // 2
    with torch.no_grad():
        for parameter in probes.parameters():
            parameter.mul_(10)
    return probes


def new_trainer(kind: type[Probes], settings: tuple[ProbeSetting, ...] = SETTINGS, **options: object) -> ProbeTrainer:
    return ProbeTrainer(new_probes(kind, len(settings)), settings, SCHEDULE, **options)


def trained(trainer: ProbeTrainer, steps: int = 8) -> Tensor:
    kind = type(trainer.probes)
    return torch.stack([trainer.step([batch], number) for number, batch in enumerate(batches(kind, steps))])


def trained_plainly(kind: type[Probes], setting: ProbeSetting, heads_in_mean: int = 1) -> tuple[nn.Module, list[float]]:
    """One head by itself, with torch's own layers and AdamW; its loss is one of several in a mean."""
    plain = PlainAttention(2) if kind is AttentiveProbes else PlainLinear()
    plain.load_state_dict({name: value[0] for name, value in new_probes(kind).state_dict().items()})
    groups: dict[float, list[Tensor]] = {setting.weight_decay: [], 0.0: []}
    for name, parameter in plain.named_parameters():
        groups[0.0 if name.endswith("bias") else setting.weight_decay].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": parameters, "weight_decay": decay} for decay, parameters in groups.items()],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    losses = []
    for number, (inputs, labels) in enumerate(batches(kind, 8)):
        for group in optimizer.param_groups:
            group["lr"] = rate_of_step(number, setting.learning_rate * IMAGES / 256)
        loss = F.cross_entropy(plain(inputs), labels)
        optimizer.zero_grad()
        (loss / heads_in_mean).backward()
        optimizer.step()
        losses.append(loss.item())
    return plain, losses


def rate_of_step(number: int, peak: float) -> float:
    """Three steps of warm-up, then five of a cosine."""
    return peak * [1 / 3, 2 / 3, 1, *(0.5 + 0.5 * math.cos(math.pi * part / 5) for part in range(5))][number]


def same_bits(left: nn.Module, right: nn.Module) -> bool:
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return all(torch.equal(first, second) for first, second in pairs)


def assert_close_states(left: nn.Module, right: nn.Module) -> None:
    torch.testing.assert_close(left.state_dict(), right.state_dict(), rtol=1e-5, atol=1e-5)
