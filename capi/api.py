"""What a user calls, and the one place that wires the rooms together."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from capi.allocator import keep_freed_memory
from capi.config.schema import Config, ModelConfig
from capi.errors import CapiError
from capi.method.bounded import ClusteringSettings
from capi.method.clustering import OnlineClustering
from capi.method.masking import Grid, MaskSampler
from capi.method.student import Student
from capi.method.teacher import Teacher
from capi.models.encoder import Encoder
from capi.models.features import CapiEncoder
from capi.models.heads import LinearHead
from capi.models.predictor import Predictor
from capi.models.pretrained import load_released
from capi.train.check import StepCost, measure_step, memory_of, random_batch
from capi.train.optimizer import clustering_optimizer, student_optimizer
from capi.train.schedules import Schedule
from capi.train.step import Learner


def load(path: str | Path) -> CapiEncoder:
    """The frozen encoder of a checkpoint in the released layout (`.pth` or `.safetensors`).

    Calling it on normalised images gives `Features(pooled, registers, feature_map)`; with `pooled=False` the pooled
    vector is neither computed nor given. The architecture is read off the file, and a key that is missing, unknown or
    misshapen is an error that names it.
    """
    return load_released(Path(path))


def choose_device(name: str | None = None) -> torch.device:
    """The device of that name, or the best one there is: cuda, mps, cpu."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise CapiError(f'the device "{name}" is not there: use cpu, or another device that torch finds') from error
    return device


def build_student(model: ModelConfig, prototypes: int) -> Student:
    """Encoder, predictor and head as a config describes them, with fresh weights."""
    encoder = Encoder(
        width=model.width,
        depth=model.depth,
        heads=model.heads,
        patch_size=model.patch_size,
        registers=model.registers,
        channels=model.channels,
        mlp_width=round(model.width * model.mlp_ratio),
        rope=model.rope,
        drop_rate=model.stochastic_depth,
    )
    predictor = Predictor(
        width=model.predictor_width,
        depth=model.predictor_depth,
        heads=model.predictor_heads,
        context_width=model.width,
        mlp_width=round(model.predictor_width * model.mlp_ratio),
        rope=model.rope,
        drop_rate=model.stochastic_depth,
    )
    return Student(
        encoder=encoder, predictor=predictor, head=LinearHead(width=model.predictor_width, prototypes=prototypes)
    )


def build_learner(config: Config, device: torch.device | str = "cpu") -> Learner:
    """Everything one iteration needs, freshly initialised from the config's seed."""
    keep_freed_memory()
    torch.manual_seed(config.seed)
    optimization = config.optimization
    student = build_student(config.model, config.clustering.prototypes).to(device)
    clustering = OnlineClustering(
        width=config.model.width,
        prototypes=config.clustering.prototypes,
        bias=config.clustering.bias,
        settings=_clustering_settings(config),
    ).to(device)
    schedule = Schedule(
        total_steps=optimization.steps,
        warmup_steps=optimization.warmup_steps,
        cosine_kept=optimization.cosine_kept,
    )
    return Learner(
        student=student,
        teacher=Teacher(student),
        clustering=clustering,
        student_optimizer=student_optimizer(
            student,
            weight_decay=optimization.weight_decay,
            norm_decay_multiplier=optimization.norm_decay_multiplier,
            patch_embedding_rate_multiplier=optimization.patch_embedding_rate_multiplier,
        ),
        clustering_optimizer=clustering_optimizer(
            clustering,
            weight_decay=config.clustering.weight_decay,
            rate_multiplier=config.clustering.learning_rate_multiplier,
        ),
        learning_rate=partial(schedule.learning_rate, peak=optimization.learning_rate),
        teacher_momentum=partial(schedule.teacher_momentum, peak=optimization.teacher_momentum),
        student_temperature=optimization.student_temperature,
    )


def mask_sampler(config: Config) -> MaskSampler:
    """The masks of a config, once it is sure that they fit its grid."""
    masking = config.masking
    sampler = MaskSampler(kind=masking.kind, ratio=masking.ratio, roll=masking.roll, predict=masking.predict)
    sampler.counts(Grid(*config.grid))
    return sampler


def check(
    config: Config,
    *,
    device: torch.device | str | None = None,
    rounds: int = 3,
    progress: Callable[[], None] = lambda: None,
) -> StepCost:
    """Build a config, run real iterations on random images, and say what they cost. Nothing is written."""
    chosen = choose_device(None if device is None else str(device))
    masks, grid = mask_sampler(config), Grid(*config.grid)
    visible, _, _ = masks.counts(grid)
    if least_bytes(config, visible) > memory_of(chosen):
        raise CapiError(_too_large(config))
    try:
        batch = random_batch(
            masks=masks,
            grid=grid,
            image_shape=(config.model.channels, *config.data.height_and_width),
            batch_size=config.optimization.batch_size,
            seed=config.seed,
            device=chosen,
        )
        cost = measure_step(build_learner(config, chosen), batch, grid.size, rounds, progress)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise CapiError(_too_large(config)) from error
    except RuntimeError as error:
        # What torch raises when the memory of a CPU runs out has no class of its own.
        if "alloc" not in str(error):
            raise
        raise CapiError(_too_large(config)) from error
    if not math.isfinite(cost.student_loss):
        raise CapiError(f"the loss is {cost.student_loss}: a temperature, rate or number of iterations is out of range")
    return cost


def least_bytes(config: Config, visible: int) -> int:
    """Less than an iteration can do with: images, weights with their optimiser, and what the backward pass keeps."""
    model, batch_size = config.model, config.optimization.batch_size
    height, width = config.data.height_and_width
    images = batch_size * model.channels * height * width
    # Weights, gradients, two moments and the teacher's copy.
    weights = 5 * (12 * model.depth * model.width**2 + 2 * config.clustering.prototypes * model.width)
    # Norms, queries, keys, values, attention, and the MLP's hidden layer before and after its GELU.
    token = model.width * (6 + 2 * model.mlp_ratio)
    kept = batch_size * (1 - model.stochastic_depth) * (visible + model.registers) * token * model.depth
    return int(4 * (images + weights + kept))


def _too_large(config: Config) -> str:
    return (
        f"a batch of {config.optimization.batch_size} images does not fit the memory of this machine: lower "
        "optimization.batch_size, or the model"
    )


def _clustering_settings(config: Config) -> ClusteringSettings:
    clustering = config.clustering
    return ClusteringSettings(
        sinkhorn=clustering.sinkhorn,
        iterations=clustering.iterations,
        target_temperature=clustering.target_temperature,
        prediction_temperature=clustering.prediction_temperature,
        chunk_bytes=None if clustering.chunk_mib is None else clustering.chunk_mib * 2**20,
    )
