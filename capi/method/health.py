"""Measures of the health of a run while it trains, in a small share of the time of a step.

- Position leak: the share of the variance of the teacher's tokens that their position alone explains, and the mutual
  information between position and nearest prototype. Both are zero on average, exactly, where position says nothing:
  what chance alone would give is taken off.
- Prototype use: the perplexity of how often each prototype is a patch's nearest, and how many hardly ever are.
- Effective rank of the teacher's tokens, gap between student and teacher, norms of the gradients.

All of it is measured on a part of a batch, as far as the target has prototypes and is made from the teacher's tokens.
`HealthMonitor` is an `Observer` that one iteration lets look; what is well and what is not says `capi.train.health`.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from capi.method.student import Student
from capi.method.targets import Target
from capi.method.teacher import Teacher
from capi.runtime.sharding import whole
from capi.types import Float, Int, Reduction

# Images and positions of a batch that are looked at; prototypes distinguished for their mutual information with
# position: with more there would be no two patches of one prototype.
_IMAGES, _POSITIONS, _DISTINGUISHED = 64, 64, 256
# Logits that exist at a time, 16 MiB of them: the rest of an iteration keeps to bounded memory too.
_LOGITS = 2**22
# Shuffles that show what mutual information chance alone would give.
_SHUFFLES = 8
# Prototype use is that of the last patches, so many for each prototype, and unknown before there were this many.
_REMEMBERED, _ENOUGH = 20, 5
# A prototype is dead that was nearest to fewer patches than this share of what it would be if all were used alike.
_DEAD = 0.05


@runtime_checkable
class Observer(Protocol):
    """What an iteration lets look at it. Nothing that an observer does changes what is learnt."""

    def tokens(self, tokens: Sequence[Float[Tensor, "_ n d"]], target: Target) -> None:
        """What the targets of each micro-batch are made from, and what makes them."""
        ...

    def gradients(self, student: Student, teacher: Teacher, target: Target) -> None:
        """The networks with their gradients, before they are updated."""
        ...


@runtime_checkable
class Clustering(Protocol):
    """A target with prototypes of its own."""

    reduction: Reduction
    if TYPE_CHECKING:
        # Parameters and buffers, which `isinstance` does not see from Python 3.12 on.
        prototypes: Tensor
        bias: Tensor | None
        recent_use: Tensor
        """How many of the last patches each prototype was nearest to, kept here."""


class NoObserver:
    """Looks at nothing."""

    def tokens(self, tokens: Sequence[Float[Tensor, "_ n d"]], target: Target) -> None: ...

    def gradients(self, student: Student, teacher: Teacher, target: Target) -> None: ...


class HealthMonitor:
    """Measures an iteration that it is given to."""

    def __init__(self) -> None:
        self.measured: dict[str, Tensor | None] = {}

    @torch.no_grad()
    def tokens(self, tokens: Sequence[Float[Tensor, "_ n d"]], target: Target) -> None:
        if not target.reads_teacher:
            # Pixels and features of another encoder say nothing about the run.
            return
        seen = F.normalize(some_tokens(tokens).float(), dim=-1)
        self.measured |= {"position_share": position_share(seen), "effective_rank": effective_rank(seen.flatten(0, 1))}
        if hasattr(target, "recent_use"):
            self._prototypes(seen, cast(Clustering, target))

    def _prototypes(self, seen: Float[Tensor, "b n d"], clustering: Clustering) -> None:
        rows = seen.flatten(0, 1)
        nearest, of_few = nearest_prototypes(rows, clustering.prototypes, clustering.bias)
        # Counted over all processes, which must all do so, whatever their patches are.
        counts = nearest.bincount(minlength=len(clustering.prototypes)) * torch.isfinite(rows).all()
        clustering.recent_use.copy_(remember(clustering.recent_use, clustering.reduction.sum(counts.float())))
        self.measured |= {
            "position_information": position_information(of_few.view(seen.shape[:2])),
            "prototype_perplexity": perplexity(clustering.recent_use),
            "dead_prototypes": dead_share(clustering.recent_use),
        }

    @torch.no_grad()
    def gradients(self, student: Student, teacher: Teacher, target: Target) -> None:
        self.measured |= {
            "teacher_gap": relative_distance(student.parameters(), teacher.parameters()),
            "student_gradient": gradient_norm(student.parameters()),
        }
        if own := list(target.parameters()):
            self.measured[f"{target.name}_gradient"] = gradient_norm(own)

    def values(self) -> dict[str, float | None]:
        """What was measured last; None where there is not enough to go by."""
        return {name: None if value is None else float(value) for name, value in self.measured.items()}


def some_tokens(tokens: Sequence[Float[Tensor, "_ n d"]]) -> Float[Tensor, "b _ d"]:
    """Some positions, spread evenly, of some images, the same positions of each."""
    positions = tokens[0].shape[1]
    chosen = torch.linspace(0, positions - 1, min(_POSITIONS, positions), device=tokens[0].device).round().long()
    images, left = [], _IMAGES
    for part in tokens:
        images.append(part[:left, chosen])
        left -= len(images[-1])
    return torch.cat(images)


def nearest_prototypes(
    rows: Float[Tensor, "s d"], prototypes: Float[Tensor, "k d"], bias: Float[Tensor, " k"] | None
) -> tuple[Int[Tensor, " s"], Int[Tensor, " s"]]:
    """The nearest of all prototypes, and of the few that are distinguished for their position."""
    of_all, of_few = [], []
    for some in rows.split(max(_LOGITS // len(prototypes), 1)):
        logits = F.linear(some, prototypes, bias)
        of_all.append(logits.argmax(1))
        of_few.append(logits[:, :_DISTINGUISHED].argmax(1))
    return torch.cat(of_all), torch.cat(of_few)


def position_share(tokens: Float[Tensor, "b n d"]) -> Float[Tensor, ""] | None:
    """Share of the tokens' variance that position explains, less what it would seem to explain by chance.

    The mean token of a position varies even if position means nothing, by the variance within the position over the
    number of images. Deviations are taken from each image's own mean, which leaves patches of an image free to be
    alike: all that is assumed is that images are drawn independently. Below zero is chance. One image says nothing.
    """
    images = len(tokens)
    if images < 2:
        return None
    centerd = tokens - tokens.mean((0, 1))
    within_images = centerd - centerd.mean(1, keepdim=True)
    of_position = within_images.mean(0)
    rest = (within_images - of_position).square().sum()
    explained = images * of_position.square().sum() - rest / (images - 1)
    return explained / centerd.square().sum().clamp_min(torch.finfo(tokens.dtype).tiny)


def position_information(nearest: Int[Tensor, "b n"], shuffles: int = _SHUFFLES) -> Float[Tensor, ""] | None:
    """Mutual information in nat between a patch's position and its prototype, less what chance alone gives.

    Chance is the mean over shuffles of each image's patches. It is drawn from a fixed seed. One image says nothing.
    """
    if len(nearest) < 2:
        return None
    generator = torch.Generator().manual_seed(0)
    keys = torch.rand(shuffles, *nearest.shape, generator=generator).to(nearest.device)
    shuffled = nearest.expand(shuffles, -1, -1).gather(2, keys.argsort(2))
    by_chance = torch.stack([plain_information(tokens) for tokens in shuffled]).mean()
    return plain_information(nearest) - by_chance


def plain_information(nearest: Int[Tensor, "b n"]) -> Float[Tensor, ""]:
    """Mutual information in nat of position and prototype as counted, which chance makes too large."""
    positions = nearest.shape[1]
    prototypes, number = nearest.unique(return_inverse=True)
    # Cell (i, z) of the table of counts has number i * k + z.
    cell = torch.arange(positions, device=nearest.device) * len(prototypes) + number
    joint = cell.flatten().bincount(minlength=positions * len(prototypes)).view(positions, -1) / nearest.numel()
    entropies = torch.special.entr(joint).sum(), torch.special.entr(joint.sum(0)).sum()
    return entropies[1] + torch.tensor(float(positions), device=nearest.device).log() - entropies[0]


def effective_rank(rows: Float[Tensor, "s d"]) -> Float[Tensor, ""]:
    """How many directions the tokens vary along: the perplexity of their variances along principal axes."""
    centerd = (rows - rows.mean(0)).double() if rows.device.type != "mps" else rows - rows.mean(0)
    small = centerd.T @ centerd if len(rows) > rows.shape[1] else centerd @ centerd.T
    if not torch.isfinite(small).all():
        # Eigenvalues of such a matrix are refused with an exception; what the loss says of the batch comes later.
        return rows.new_full((), torch.nan)
    variances = torch.linalg.eigvalsh(small).clamp_min(0)
    return _perplexity(variances / variances.sum().clamp_min(torch.finfo(variances.dtype).tiny)).float()


def remember(recent: Float[Tensor, " k"], counts: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
    """Counts of the last patches: new ones are added, old ones fade."""
    fade = (1 - counts.sum() / (_REMEMBERED * len(recent))).clamp_min(0)
    return recent * fade + counts


def perplexity(recent: Float[Tensor, " k"]) -> Float[Tensor, ""] | None:
    """Share of the prototypes in use: as many as that, used alike, would be as hard to guess. None with few patches."""
    return _perplexity(recent / recent.sum()) / len(recent) if _is_enough(recent) else None


def dead_share(recent: Float[Tensor, " k"]) -> Float[Tensor, ""] | None:
    """Share of the prototypes that hardly any patch is nearest to. None with few patches."""
    return (recent < _DEAD * recent.mean()).float().mean() if _is_enough(recent) else None


def relative_distance(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> Float[Tensor, ""]:
    """Distance between two sets of weights over the length of the second."""
    second = list(theirs)
    gaps = torch._foreach_sub(list(ours), second)
    return whole(torch.nn.utils.get_total_norm(gaps)) / whole(torch.nn.utils.get_total_norm(second))


def gradient_norm(parameters: Iterable[Tensor]) -> Float[Tensor, ""]:
    """Length of all gradients together."""
    return whole(torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None]))


def _is_enough(recent: Float[Tensor, " k"]) -> bool:
    return bool(recent.sum() >= _ENOUGH * len(recent))


def _perplexity(shares: Float[Tensor, " m"]) -> Float[Tensor, ""]:
    return torch.special.entr(shares).sum().exp()
