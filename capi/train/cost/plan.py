"""A whole run on some GPUs, planned on paper: memory, what fits, hours, energy, and what each saving is worth.

Nothing is trained, no memory is taken for weights, and nothing is fitted to the cost that the paper reports for its own
run; `against_paper` says how far off the plan is.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from capi.config.files import Overrides, Recipe, as_config, differences, load_config, override_texts
from capi.config.schema import Config
from capi.config.trust import trusting
from capi.errors import CapiError, counted
from capi.method.masking import PatchGrid
from capi.models.costs import Counts, blocks_of
from capi.runtime.summary import Summary
from capi.train.build import build_learner, mask_sampler
from capi.train.compilation import wants_compiling
from capi.train.cost.flop import TRAINING, IterationFlop, iteration_flop
from capi.train.cost.hardware import CARBON_INTENSITY, Gpu, find_gpu
from capi.train.cost.memory import MemoryPlan, Planned, Saving
from capi.zoo.build import target_class


@dataclass(frozen=True)
class Assumptions:
    """What a plan cannot know. None chooses `mfu` by width, compiling and where the peak comes from."""

    # The share of the peak that required FLOP reach; see `assumed_mfu`.
    mfu: float | None = None
    # Power of the whole data centre over that of its computers: what Google publishes for its own, 1.10.
    pue: float = 1.1
    # kgCO2eq a kWh, the world's average.
    carbon_intensity: float = CARBON_INTENSITY
    # The share of a GPU's memory that tensors can have; the rest goes to its context, communication and fragments.
    usable: float = 0.9


# Of the speed of a measured product the steps of docs/measurements/performance.md reach 58 to 75 %.
MFU_OF_MEASURED = 0.6
# Of a data sheet, by width: few and small products leave a GPU waiting for the next kernel, and compiling most of all
# helps there. 384: a ViT-S with 224 px on an H100 trains at 4.6 to 6.6 % and compiled at 16 to 22 % (NVIDIA, benchmarks
# of nvSubquadratic). 1024 and more: large transformers were trained at 21 to 46 % (GPT-3 21.3, MT-NLG 30.2, Gopher
# 32.5, PaLM, which is compiled, 46.2: table 3 of the PaLM paper). Of a wide model without compiling no measurement was
# found: 0.35 is assumed, the middle of those.
_NARROW, _WIDE = 384, 1024
MFU_COMPILED, MFU_EAGER = (0.22, 0.45), (0.06, 0.35)


def assumed_mfu(gpu: Gpu, width: int, *, compiled: bool) -> float:
    """The share of the peak that a model of this width reaches, between the published ones linear in log(width)."""
    if gpu.measured:
        return MFU_OF_MEASURED
    narrow, wide = MFU_COMPILED if compiled else MFU_EAGER
    share = math.log(width / _NARROW) / math.log(_WIDE / _NARROW)
    return narrow + (wide - narrow) * min(max(share, 0.0), 1.0)


class Effort(NamedTuple):
    """What a whole run takes. Energy is not known where the power is not."""

    seconds_a_step: float
    hours: float
    gpu_hours: float
    kwh: float | None
    kg_co2: float | None


class Variant(NamedTuple):
    """The plan with one saving changed."""

    name: str
    saving: Saving
    memory: MemoryPlan
    largest_images: int


class Accumulation(NamedTuple):
    """How the recipe's batch is reached: in so many micro-batches, or not at all; and the largest batch that can be."""

    micro_batches: int | None
    largest_batch: int


class PlanComparison(NamedTuple):
    """A number of the plan beside the one that was measured."""

    name: str
    planned: float
    measured: float

    @property
    def error(self) -> float:
        return self.planned / self.measured - 1


@dataclass(frozen=True, repr=False)
class RunPlan(Summary):
    """Everything that `capi plan` says of a recipe on some GPUs."""

    gpu: Gpu
    gpus: int
    assumptions: Assumptions
    saving: Saving
    batch_size: int
    encoder_parameters: int
    trained_parameters: int
    flop_an_image: IterationFlop
    images_seen: int
    memory: MemoryPlan
    usable_memory: float
    largest_images: int
    accumulation: Accumulation
    variants: list[Variant]
    effort: Effort
    mfu: float

    def summary(self) -> tuple[str, dict[str, str]]:
        effort, gib = self.effort, 2**30
        power = "" if effort.kwh is None else f", {effort.kwh:,.1f} kWh"
        return f"A plan for {self.gpus} x {self.gpu.title}: nothing was run", {
            "trained": f"{self.trained_parameters / 1e6:.1f} M parameters, "
            f"{self.encoder_parameters / 1e6:.1f} M of them in the encoder",
            "required": f"{sum(self.flop_an_image) / 1e9:.1f} GFLOP an image, {self.images_seen:.3g} images seen",
            "time": f"{effort.hours:,.2f} h, {effort.seconds_a_step:.3g} s a step at {self.mfu:.0%} of the peak{power}",
            "memory": f"{self.memory.peak / gib:.2f} GiB at its peak of {self.usable_memory / gib:.2f} GiB",
            "fits": f"{'yes' if self.fits else 'no'}, a GPU has room for {counted(self.largest_images, 'image')}",
        }

    @property
    def images_a_gpu(self) -> int:
        return self.batch_size // self.gpus

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.usable_memory


def plan(
    recipe: Recipe,
    overrides: Overrides = (),
    *,
    gpu: str = "this",
    gpus: int = 1,
    assumptions: Assumptions | None = None,
    **sections: Any,
) -> RunPlan:
    """What a run would need on so many GPUs, without running anything: memory part by part, what fits, hours, energy.

    `gpu` is a name that `capi plan --gpu list` gives, or `this` for the machine at hand. `assumptions` holds what no
    plan can know: the share of the peak that is reached, and what power costs. `overrides` and further keywords change
    the recipe: `optimization={"steps": 100}`.
    """
    overrides = override_texts(overrides, sections)
    with trusting(overrides=overrides):
        return plan_run(as_config(recipe, overrides), find_gpu(gpu), gpus, assumptions=assumptions)


def plan_run(
    config: Config,
    gpu: Gpu,
    gpus: int = 1,
    *,
    assumptions: Assumptions | None = None,
    saving: Saving | None = None,
) -> RunPlan:
    """The plan of a config on so many GPUs; `saving` in place of what the config says."""
    chosen, saving = assumptions or Assumptions(), saving or saving_of(config, gpu, gpus)
    _refuse_uneven(config, gpus, saving)
    planned, usable = networks(config, gpu), gpu.memory * chosen.usable
    batch = config.optimization.batch_size
    each = batch // gpus
    flop = flop_of(planned, each // saving.micro_batches)
    compiled = wants_compiling(config.run.compile, torch.device("cuda"))
    mfu = chosen.mfu or assumed_mfu(gpu, config.model.width, compiled=compiled)
    return RunPlan(
        gpu=gpu,
        gpus=gpus,
        assumptions=chosen,
        saving=saving,
        batch_size=batch,
        encoder_parameters=planned.encoder_parameters,
        trained_parameters=planned.trained_parameters,
        flop_an_image=flop,
        images_seen=batch * config.optimization.steps,
        memory=planned.memory(each, saving),
        usable_memory=usable,
        largest_images=largest_images(planned, saving, usable),
        accumulation=accumulation(planned, saving, each, gpus, usable),
        variants=[
            Variant(name, other, planned.memory(each, other), largest_images(planned, other, usable))
            for name, other in variants(saving, gpu, gpus).items()
        ],
        effort=effort(planned, flop, gpu, gpus, saving, chosen, mfu),
        mfu=mfu,
    )


def saving_of(config: Config, gpu: Gpu, gpus: int) -> Saving:
    """How a config saves memory."""
    shards = config.distributed.shards or gpus
    if gpus % shards:
        raise CapiError(f"distributed.shards is {shards}, which does not divide {counted(gpus, 'GPU')}: set a divisor")
    return Saving(
        shards=shards,
        replicas=gpus // shards,
        checkpointing=config.run.activation_checkpointing,
        mixed_precision=gpu.precision(config.run.precision) == "bfloat16",
        micro_batches=config.optimization.micro_batches,
    )


def networks(config: Config, gpu: Gpu | None = None) -> Planned:
    """The networks of a config without memory for weights, and its tokens; without a GPU for any accelerator."""
    if target_class(config).wants_encoder:
        raise CapiError(
            "what a frozen encoder costs is not known before it is opened: try the recipe with `capi pretrain --check`"
        )
    visible, _, predicted = mask_sampler(config).counts(PatchGrid(*config.grid))
    # On the meta device tensors have shapes and no values, so that the largest model is built in a moment.
    with torch.device("meta"):
        learner = build_learner(config, "meta")
    counts = Counts(learner.student.encoder.num_registers, PatchGrid(*config.grid).size, visible, predicted)
    return Planned(config, learner, counts, accelerator=gpu is None or gpu.accelerator)


def flop_of(planned: Planned, images: int) -> IterationFlop:
    """FLOP of one image, where so many are computed together."""
    flop = iteration_flop(
        planned.learner.student,
        planned.learner.target,
        batch_size=max(images, 1),
        patches=planned.counts.patches,
        visible=planned.counts.visible,
        predicted=planned.counts.predicted,
    )
    return flop._replace(optimizer=planned.learner.student_optimizer.flop() / planned.config.optimization.batch_size)


def _refuse_uneven(config: Config, gpus: int, saving: Saving) -> None:
    batch = config.optimization.batch_size
    if gpus < 1 or batch % (gpus * saving.micro_batches):
        raise CapiError(
            f"a batch of {counted(batch, 'image')} cannot be divided among {counted(gpus, 'GPU')} in "
            f"{counted(saving.micro_batches, 'equal micro-batch')} each: change --gpus, optimization.batch_size or "
            f"optimization.micro_batches"
        )


def variants(saving: Saving, gpu: Gpu, gpus: int) -> dict[str, Saving]:
    """The saving as it is, then with each one turned on or off."""
    savings = {"as planned": saving}
    if gpus > 1:
        savings["replicated on every GPU"] = replace(saving, shards=1, replicas=gpus)
        savings[f"sharded over {gpus} GPUs"] = replace(saving, shards=gpus, replicas=1)
    for mode, name in (
        ("off", "activations kept"),
        ("selective", "activations of products alone kept"),
        ("full", "activations recomputed"),
    ):
        savings[name] = replace(saving, checkpointing=mode)  # type: ignore[arg-type]
    if gpu.bfloat16 is not None:
        savings["bfloat16"] = replace(saving, mixed_precision=True)
    savings["float32"] = replace(saving, mixed_precision=False)
    savings["in one piece"] = replace(saving, micro_batches=1)
    savings[f"{2 * saving.micro_batches} micro-batches"] = replace(saving, micro_batches=2 * saving.micro_batches)
    savings["plain clustering, b x n x k at once"] = replace(saving, bounded_clustering=False)
    return {name: other for name, other in savings.items() if name == "as planned" or other != saving}


def largest_images(planned: Planned, saving: Saving, usable: float) -> int:
    """How many images a GPU can have in an iteration with this saving, in equal micro-batches."""
    parts = saving.micro_batches
    return parts * _largest(lambda number: planned.memory(parts * number, saving).peak, usable)


def accumulation(planned: Planned, saving: Saving, images: int, gpus: int, usable: float) -> Accumulation:
    """The fewest micro-batches in which a GPU's images fit. The teacher's tokens of all of them stay in memory."""

    def peak(number: int, parts: int) -> int:
        return planned.memory(number, replace(saving, micro_batches=parts)).peak

    wanted = (parts for parts in range(1, images + 1) if images % parts == 0 and peak(images, parts) <= usable)
    return Accumulation(next(wanted, None), gpus * _largest(lambda number: peak(number, number), usable))


def _largest(peak: Callable[[int], int], usable: float) -> int:
    """The largest number whose peak can be had, 0 if none; peaks rise, and nearly in proportion."""
    first, many = peak(1), 256
    if first > usable:
        return 0
    # A straight line says where to look first; from there in steps that grow, and then by halves.
    guess = max(int((usable - first) * (many - 1) / max(peak(many) - first, 1)), 2)
    step = max(guess // 64, 1)
    low, high = 1, guess
    while peak(high) <= usable:
        low, high, step = high, high + step, 2 * step
    while high - low > step and peak(high - step) > usable:
        high, step = high - step, 2 * step
    low = max(low, high - step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if peak(middle) <= usable else (low, middle)
    return low


def launch_seconds(planned: Planned, saving: Saving, gpus: int = 1) -> float:
    """Seconds of a step for launching its operations, however small they are, and waiting for other GPUs."""
    student, optimizer = planned.learner.student, planned.learner.student_optimizer
    encoder, predictor = len(blocks_of(student.encoder)), len(blocks_of(student.predictor))
    casts = CASTS_OF_BLOCK * (encoder + predictor) if saving.mixed_precision else 0
    part = ENCODER_BLOCK * encoder + PREDICTOR_BLOCK * predictor + casts + BESIDE_BLOCKS
    again = 0 if saving.checkpointing == "off" else RECOMPUTED_BLOCK * (encoder + predictor)
    launches = saving.micro_batches * (part + again) + OF_UPDATE + optimizer.launches()
    # A block's weights are gathered for teacher, forward and backward pass, and its gradients summed.
    exchanges = 4 * encoder + 3 * predictor + EXCHANGES_OF_CLUSTERING if gpus > 1 else 0
    return LAUNCH_SECONDS * launches + EXCHANGE_SECONDS * exchanges


def effort(
    planned: Planned, flop: IterationFlop, gpu: Gpu, gpus: int, saving: Saving, assumptions: Assumptions, mfu: float
) -> Effort:
    """Time from FLOP, energy from time. Blocks that are recomputed cost one more forward pass."""
    again = (flop.student_encoder + flop.predictor) / TRAINING if saving.checkpointing == "full" else 0.0
    peak = gpu.peak("bfloat16" if saving.mixed_precision else "float32")
    batch, steps = planned.config.optimization.batch_size, planned.config.optimization.known_steps
    # Operations are launched while earlier ones are computed, so a small step takes as long as launching it.
    seconds = max((sum(flop) + again) * batch / (gpus * peak * mfu), launch_seconds(planned, saving, gpus))
    hours = seconds * steps / 3600
    kwh = None if gpu.watts is None else hours * gpus * gpu.watts / 1000 * assumptions.pue
    return Effort(seconds, hours, hours * gpus, kwh, None if kwh is None else kwh * assumptions.carbon_intensity)


# Operations of a step as torch dispatches them, views left out (a test counts them again): of a block in teacher,
# student and backward pass, its casts to bfloat16, of a micro-batch outside of blocks (its clustering most of all), and
# of the update with AdamW. A compiler fuses some of them.
ENCODER_BLOCK, PREDICTOR_BLOCK, CASTS_OF_BLOCK, RECOMPUTED_BLOCK = 110, 75, 38, 30
BESIDE_BLOCKS, OF_UPDATE = 280, 95
# A launch, and an exchange of a few bytes between GPUs of a machine (both assumed).
LAUNCH_SECONDS, EXCHANGE_SECONDS = 1e-5, 3e-5
# A slice of the clustering has four.
EXCHANGES_OF_CLUSTERING = 4
# What the paper says of "a CAPI ViT-L model", its main one: 180 h on 32 A100-80GB.
PAPER_RECIPE, PAPER_GPU, PAPER_GPUS = "vitl14", "a100-80g", 32
PAPER_GPU_HOURS, PAPER_KWH, PAPER_KG = 5763.0, 2651.0, 928.0
# Keys that change neither FLOP nor power.
_FREE = (
    *("version", "seed", "run", "checkpoint", "evaluations", "init", "distributed"),
    *("data.workers", "data.cache_mib", "data.broken_limit", "data.mean", "data.std", "data.reduced_decoding"),
    *("optimization.micro_batches", "clustering.chunk_mib"),
)


def against_paper(config: Config, assumptions: Assumptions | None = None) -> list[PlanComparison] | None:
    """The plan of the paper's main model on the paper's GPUs beside what it reports; None for another recipe."""
    if differences(load_config(PAPER_RECIPE), config, _FREE):
        return None
    plain = load_config(PAPER_RECIPE)
    planned = plan_run(plain, find_gpu(PAPER_GPU), PAPER_GPUS, assumptions=assumptions).effort
    assert planned.kwh is not None
    assert planned.kg_co2 is not None
    return [
        PlanComparison("GPU hours", planned.gpu_hours, PAPER_GPU_HOURS),
        PlanComparison("kWh", planned.kwh, PAPER_KWH),
        PlanComparison("kgCO2eq", planned.kg_co2, PAPER_KG),
    ]


class PlannedCost(NamedTuple):
    """The size of the networks and the work of a whole run."""

    encoder_parameters: int
    trained_parameters: int
    flop_an_image: float
    images_seen: int

    @property
    def flop(self) -> float:
        return self.flop_an_image * self.images_seen


def planned_cost(config: Config) -> PlannedCost:
    """Parameters, FLOP of one image in one iteration, and how many images the run sees, repetitions included."""
    planned, optimization = networks(config), config.optimization
    return PlannedCost(
        encoder_parameters=planned.encoder_parameters,
        trained_parameters=planned.trained_parameters,
        flop_an_image=sum(flop_of(planned, optimization.batch_size // optimization.micro_batches)),
        images_seen=optimization.batch_size * optimization.steps,
    )
