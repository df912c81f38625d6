"""Online clustering of the teacher's patch tokens: prototypes, balanced assignments, clustering loss.

The logits of a token are its products with the prototypes. Sinkhorn-Knopp turns them into assignments; the loss is
the cross-entropy between those and softmax(logits / T_prediction), and trains the prototypes alone. The assignments
of the patches that the student predicts are its targets. `plain.py` has the formulas, `walk.py` applies them in bounded
memory.

A batch may come in several micro-batches. They are balanced together, as one batch, and the targets of each are rebuilt
when its turn comes. Where batches are small, a queue of earlier tokens (`queue.py`) may be balanced together with them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from capi.method.clustering.precision import choose_products
from capi.method.clustering.queue import QueueShape, TokenQueue
from capi.method.clustering.walk import (
    ClusteredSlice,
    ClusteringSettings,
    Factors,
    SinkhornVariant,
    cluster,
    cluster_slice,
    plan_slices,
    rebuild,
)
from capi.method.losses import soft_cross_entropy
from capi.method.targets import (
    OF_THE_RUN,
    OF_THE_TEACHER,
    RunContext,
    Target,
    Targets,
    at_predicted,
)
from capi.method.teacher import Teacher
from capi.models.costs import ALWAYS, BFLOAT16, CLUSTERING, FLOAT32, STUDENT, Counts, MemoryPart, Workload
from capi.models.heads import Head
from capi.types import Float, Int, OneProcess, Reduction

# The plain formulas hold logits, assignments, probabilities, a product and a gradient at the least: in
# benchmarks/clustering.py they were measured at 5.1 to 7.1 arrays of b x n x k.
PLAIN_ARRAYS = 5
# Of what is used more than once, inductor stores what reads more than so many tensors, and computes the rest again.
# With its default of 4 it would compute the factors of Sinkhorn-Knopp again for each assignment, formula in formula,
# until it stores their products with the kernel. So it stores each factor, and computes the kernel again from logits
# and shift: 8.1 arrays of a slice's logits go through memory instead of 10.1 (`benchmarks/inductor.py`).
SLICE_OPTIONS = {"realize_reads_threshold": 2}


class OnlineClustering(Target):
    """The prototypes. Called with teacher tokens it gives targets, and a loss that trains the prototypes alone."""

    name = "clustering"
    loss_name, loss_unit = "Cross-entropy", "nat"
    description = "the clusters (CAPI, cluster and predict latent patches)"
    reads = ("clustering", "optimization.student_temperature")
    has_prototypes = clusters = True
    compiled: ClassVar = {"cluster_slice": SLICE_OPTIONS}
    measures = (
        *OF_THE_RUN,
        *OF_THE_TEACHER,
        "target_entropy",
        "prototype_perplexity",
        "dead_prototypes",
        "position_information",
        "clustering_gradient",
    )
    advice: ClassVar = {
        "target_entropy": (
            "Raise clustering.target_temperature, or lower clustering.learning_rate_multiplier.",
            "Train longer, lower clustering.target_temperature, or use fewer prototypes for so few images.",
        )
    }
    recent_use: Tensor

    def __init__(
        self,
        *,
        width: int,
        prototypes: int,
        bias: bool = True,
        settings: ClusteringSettings | None = None,
        student_temperature: float = 0.12,
        reduction: Reduction | None = None,
        queue: QueueShape | None = None,
        precision: str = "float32",
    ) -> None:
        super().__init__()
        self.settings, self.precision = settings or ClusteringSettings(), precision
        self.student_temperature = student_temperature
        self.reduction = reduction or OneProcess()
        self.prototypes = nn.Parameter(torch.randn(prototypes, width))
        self.bias = nn.Parameter(torch.zeros(prototypes)) if bias else None
        # How many of the last patches each prototype was nearest to, kept by `capi.method.health`. No part of what is
        # learnt, so that a state dict holds the prototypes alone; checkpoints keep it by name.
        self.register_buffer("recent_use", torch.zeros(prototypes), persistent=False)
        self.queue = None if queue is None else TokenQueue(queue, width)
        # Where a run is compiled, what came of it.
        self.cluster_slice: Callable[..., ClusteredSlice] = cluster_slice
        self._last_tokens: Sequence[Tensor] = ()

    @classmethod
    def build(
        cls,
        run: RunContext,
        teacher: Teacher,  # noqa: ARG003 - the contract
        *,
        prototypes: int,
        bias: bool,
        sinkhorn: SinkhornVariant,
        iterations: int,
        target_temperature: float,
        prediction_temperature: float,
        chunk_mib: int | None,
        queue: int,
        student_temperature: float,
        precision: str,
        **_: Any,
    ) -> "OnlineClustering":
        """What else its section has is for its optimizer. `queue` counts the images of earlier batches."""
        settings = ClusteringSettings(
            sinkhorn=sinkhorn,
            iterations=iterations,
            target_temperature=target_temperature,
            prediction_temperature=prediction_temperature,
            chunk_bytes=None if chunk_mib is None else chunk_mib * 2**20,
        )
        images, positions = (run.batch_size + queue) // run.processes, run.grid[0] * run.grid[1]
        # Refuses a budget that one position does not fit in.
        plan_slices(images, positions, prototypes, run.width, settings)
        shape = QueueShape(
            batches=queue // run.batch_size,
            images=run.batch_size // run.processes,
            positions=positions,
            micro_batches=run.micro_batches,
        )
        return cls(
            width=run.width,
            prototypes=prototypes,
            bias=bias,
            settings=settings,
            student_temperature=student_temperature,
            queue=shape if queue else None,
            precision=precision,
        )

    def prepare(self, device: torch.device, precision: torch.dtype) -> None:
        """Choose the precision of the products."""
        self.settings = replace(self.settings, precision=choose_products(self.precision, device, precision))

    def flop(self, counts: Counts, head: Head) -> int:  # noqa: ARG002 - the contract
        """Logits and a gradient; a queue's tokens have logits, so many batches of them for each batch."""
        products = 2 if self.queue is None else 2 + self.queue.shape.batches
        return 2 * products * counts.patches * self.prototypes.numel()

    def memory(self, counts: Counts, work: Workload, outputs: int) -> list[MemoryPart]:
        (prototypes, width), patches = self.prototypes.shape, counts.patches
        earlier = 0 if self.queue is None else self.queue.shape.batches
        balanced = work.images * (1 + earlier)
        if work.bounded:
            on = work.accelerator
            slices = plan_slices(balanced, patches, prototypes, width, self.settings, accelerator=on)
            samples, logits = (FLOAT32 * slices.positions * balanced * size for size in (width, prototypes))
            # The kernel, its product with log probabilities, and three vectors of prototypes for each position.
            balancing = FLOAT32 * slices.at_once * (balanced + work.images + 3) * prototypes
            # Before there are logits there are the tokens as gathered, normalized, and laid out position by position.
            rounded = BFLOAT16 * slices.positions * work.images * prototypes * self.settings.rounds_gradient
            walk = max(3 * samples, samples + logits + rounded + balancing)
        else:
            walk = PLAIN_ARRAYS * FLOAT32 * balanced * patches * prototypes
        factors = FLOAT32 * (2 * self.settings.groups(patches) * prototypes + balanced * patches)
        together = FLOAT32 * work.images * patches * width if work.micro_batches > 1 else 0
        return [
            MemoryPart("queue of earlier tokens", BFLOAT16 * earlier * work.images * patches * width, ALWAYS),
            MemoryPart("clustering's working memory", walk, CLUSTERING),
            MemoryPart("tokens of all micro-batches in one", together, CLUSTERING),
            MemoryPart("prototypes' gradient", 2 * FLOAT32 * self.prototypes.numel(), CLUSTERING),
            *(MemoryPart("factors that rebuild targets", factors, phase) for phase in (CLUSTERING, STUDENT)),
            *super().memory(counts, work, outputs),
        ]

    def pretend_full(self) -> None:
        if self.queue is not None:
            self.queue.pretend_full()

    @property
    def sharded_buffers(self) -> Mapping[str, int]:
        return {} if self.queue is None else {"queue.tokens": self.queue.blocks}

    def forward(
        self,
        tokens: Sequence[Float[Tensor, "_ n d"]],
        predict_index: Sequence[Int[Tensor, "_ p"]],
        step: int = 0,  # noqa: ARG002 - the contract
    ) -> Targets:
        # Several micro-batches are one batch to the Sinkhorn; a single one is not copied.
        together = tokens[0] if len(tokens) == 1 else torch.cat(list(tokens))
        # Sinkhorn amplifies rounding by 1 / T_target: always in float32, also under autocast.
        with torch.no_grad(), torch.autocast(together.device.type, enabled=False):
            earlier = None if self.queue is None else self.queue.earlier()
            absent = None if self.queue is None or earlier is None else self.queue.absent(len(earlier))
            clustered = cluster(
                together, self.prototypes, self.bias, self.settings, self.reduction, earlier, absent, self.cluster_slice
            )
        self._last_tokens = () if self.queue is None else tokens
        # The gradient came with the loss: a product with the parameters, less its own value, adds it and nothing else.
        product = (self.prototypes * clustered.prototype_gradient).sum()
        if self.bias is not None:
            product = product + (self.bias * clustered.bias_gradient).sum()
        loss = clustered.loss + (product - product.detach())
        return Targets(loss, self._rebuilt(tokens, predict_index, clustered.factors))

    def student_loss(self, outputs: Float[Tensor, "b p k"], targets: Float[Tensor, "b p k"]) -> Float[Tensor, ""]:
        return soft_cross_entropy(outputs, targets, temperature=self.student_temperature)

    def metrics(self, own_loss: Float[Tensor, ""], summary: Mapping[str, Tensor]) -> dict[str, Float[Tensor, ""]]:
        return {"clustering_loss": own_loss, **super().metrics(own_loss, summary)}

    def follow(self, skipped: Float[Tensor, ""] | None = None) -> None:
        """The batch enters the queue, where there is one."""
        if self.queue is not None and self._last_tokens:
            self.queue.enter(self._last_tokens, skipped)
        self._last_tokens = ()

    def _rebuilt(
        self, tokens: Sequence[Tensor], predict_index: Sequence[Tensor], factors: Factors
    ) -> Iterator[Float[Tensor, "_ p k"]]:
        """The targets of one micro-batch after the other, from the prototypes as they were clustered with."""
        first = 0
        for part, index in zip(tokens, predict_index, strict=True):
            with torch.no_grad(), torch.autocast(part.device.type, enabled=False):
                chosen = at_predicted(part, index)
                targets = rebuild(chosen, index, self.prototypes, self.bias, self.settings, factors, first)
            yield targets
            first += len(part)
