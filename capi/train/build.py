"""What trains, from a config: learner, batches and the settings of the loop. Networks come from `zoo.build`."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from capi.config.schema import AdaptConfig, Config, OptimizationConfig
from capi.data.crops import normalize, recolor
from capi.data.decoding import Decoder
from capi.data.loader import BatchShare, Cropping, LoadedBatch, TrainingBatches, load_batches
from capi.data.reader import ImageReader
from capi.data.sources import ImageSource
from capi.data.survey import summarize
from capi.errors import CapiError, counted, expect
from capi.method.clustering.precision import choose_products
from capi.method.masking import MaskSampler, PatchGrid
from capi.method.student import Student
from capi.method.targets import Target
from capi.method.teacher import Teacher
from capi.models.encoder import Encoder
from capi.models.layers import TransformerBlock
from capi.models.plain_vit import PlainEncoder
from capi.runtime.devices import Transfer, keep_freed_memory
from capi.runtime.plugins import check_options, register
from capi.runtime.processes import Processes
from capi.runtime.randomness import sample_keys
from capi.train.guard import Guard
from capi.train.loop import LoopSettings
from capi.train.muon import Muon
from capi.train.optimizer import AdamW, Adaptation, MakeOptimizer, Optimizer, student_optimizer, target_optimizer
from capi.train.recomputation import recompute
from capi.train.schedules import Schedule
from capi.train.step import Learner
from capi.types import MaskedBatch, VisionEncoder
from capi.zoo.baselines.registry import baseline_named
from capi.zoo.build import COMPONENTS, build_student, component, run_context, statistics, target_class, target_settings
from capi.zoo.encoders import open_configured_encoder


class Networks(NamedTuple):
    """What has weights."""

    student: Student
    teacher: Teacher
    target: Target

    @property
    def blocks(self) -> list[TransformerBlock]:
        """The transformer blocks of the student."""
        return [module for module in self.student.modules() if isinstance(module, TransformerBlock)]


def build_learner(
    config: Config, device: torch.device | str = "cpu", frozen_encoder: VisionEncoder | None = None
) -> Learner:
    """Everything one iteration needs, freshly initialised from the config's seed.

    `frozen_encoder` is what makes the targets of kind `frozen`; `resolve_target` opens it.
    """
    expect("the config", config, Config, "what capi.load_config gives")
    keep_freed_memory()
    networks = build_networks(config, device, frozen_encoder)
    recompute(networks.blocks, config.run.activation_checkpointing)
    return assemble(config, networks, torch.device(device))


def build_networks(
    config: Config,
    device: torch.device | str = "cpu",
    frozen_encoder: VisionEncoder | None = None,
    processes: int = 1,
) -> Networks:
    """Student, teacher and target, as one of so many processes has them, freshly initialised from the config's seed."""
    torch.manual_seed(config.seed)
    student = build_student(config).to(device)
    hold_frozen(student, config)
    refuse_layers(config)
    teacher = Teacher(student, layers=config.target.layers, normalize=config.target.normalize)
    context = run_context(config, frozen_encoder, processes)
    target = target_class(config).build(context, teacher, **target_settings(config))
    return Networks(student, teacher, target.to(device))


def check_components(config: Config) -> None:
    """Components that are misspelt, or settings that they do not take, raise before anything is trained."""
    mask_sampler(config)
    optimizer_maker(config)
    refuse_layers(config)
    target_settings(config)
    component("model.predictor.kind", config)


def refuse_idle_adapt(config: Config) -> None:
    """Refuse options of the first weights where there are none."""
    default = AdaptConfig()
    changed = [name for name, value in config.adapt if value != getattr(default, name)]
    if changed and config.init.encoder is None:
        raise CapiError(
            f"adapt.{changed[0]} has no meaning without weights to start from: use `capi adapt MODEL`, or set "
            "init.encoder"
        )


def hold_frozen(student: Student, config: Config) -> None:
    """Take what must stay as it is from the parameters that are trained."""
    encoder, adapt = cast("Encoder | PlainEncoder", student.encoder), config.adapt
    if adapt.lora_rank is not None:
        for name, parameter in encoder.named_parameters():
            parameter.requires_grad_(name.endswith((".down", ".up")))
    elif adapt.blocks is not None:
        encoder.requires_grad_(False)
        for trained in (*encoder.blocks[-adapt.blocks :], getattr(encoder, "final_norm", None)):
            if trained is not None:
                trained.requires_grad_(True)
    baseline = config.model.baseline
    if baseline and baseline_named(baseline.name).layout.positions in ("row", "column"):
        # Sines and cosines, which are fixed.
        cast("Tensor", encoder.positions).requires_grad_(False)


def refuse_layers(config: Config) -> None:
    """Refuse options of the teacher's layers for targets that are not made from them."""
    for key, default in (("layers", "last"), ("normalize", "none")):
        if getattr(config.target, key) != default and not target_class(config).reads_teacher:
            raise CapiError(
                f"target.{key} chooses among the teacher's layers, but target.kind={config.target.kind} reads none of "
                "them: leave it out"
            )


def build_schedule(optimization: OptimizationConfig) -> Schedule:
    """The learning rate and the teacher's momentum by step."""
    return Schedule(
        total_steps=optimization.scheduled_steps,
        warmup_steps=optimization.warmup_steps,
        cosine_kept=optimization.cosine_kept,
        decay_steps=optimization.decay_steps if optimization.schedule == "warmup_stable_decay" else None,
    )


def assemble(config: Config, networks: Networks, device: torch.device) -> Learner:
    """Networks, wherever their weights lie, with their optimisers and schedules."""
    student, teacher, target = networks
    optimization, precision = config.optimization, choose_precision(config.run.precision, device)
    target.prepare(device, precision)
    schedule = build_schedule(optimization)
    return Learner(
        student=student,
        teacher=teacher,
        target=target,
        student_optimizer=student_optimizer(
            student,
            optimizer=optimizer_maker(config),
            weight_decay=optimization.weight_decay,
            norm_decay_multiplier=optimization.norm_decay_multiplier,
            patch_embedding_rate_multiplier=optimization.patch_embedding_rate_multiplier,
            matrix_rate_multiplier=optimization.matrix_rate_multiplier,
            adaptation=Adaptation(
                frozen_steps=int(optimization.scheduled_steps * config.adapt.frozen_share),
                rate_multiplier=config.adapt.rate_multiplier,
                layer_decay=config.adapt.layer_decay,
                pull=config.adapt.pull,
            ),
        ),
        target_optimizer=target_optimizer(
            target,
            weight_decay=config.clustering.weight_decay,
            rate_multiplier=config.clustering.learning_rate_multiplier,
        ),
        learning_rate=partial(schedule.learning_rate, peak=optimization.learning_rate),
        teacher_momentum=partial(schedule.teacher_momentum, peak=optimization.teacher_momentum),
        precision=precision,
        clip=optimization.clip,
        guard=Guard(device),
        statistics=None if "auto" in {config.data.mean, config.data.std} else statistics(config),
        image_size=config.data.height_and_width,
    )


# What `optimization.optimizer` may name.
OPTIMIZERS: dict[str, type[Optimizer]] = {"adamw": AdamW, "muon": Muon}
_OPTIMIZER = "optimization.optimizer"
COMPONENTS[_OPTIMIZER] = (OPTIMIZERS, Optimizer)


def register_optimizer(name: str, optimizer: type[Optimizer]) -> None:
    """Make an optimizer of your own known as `optimization.optimizer=NAME` in this process."""
    register(OPTIMIZERS, name, optimizer, _OPTIMIZER, Optimizer)


def optimizer_maker(config: Config) -> MakeOptimizer:
    """The student's optimizer with its options, once it is sure that it takes them."""
    kind: type[Optimizer] = component(_OPTIMIZER, config)
    name, options = config.optimization.optimizer, config.optimization.options
    check_options(kind.__init__, options, "optimization.options", given=["groups"], name=name)
    if config.adapt.pull and not kind.pulls:
        raise CapiError(f"adapt.pull has no meaning with optimization.optimizer={name}: leave one of them out")
    return partial(kind, **options)


def resolve_target(config: Config, *, device: torch.device | str = "cpu") -> tuple[Config, VisionEncoder | None]:
    """The encoder of targets of kind `frozen`, opened, and the config with its width; other targets need none."""
    frozen_target, kind = config.target.frozen, target_class(config)
    # Settings that the target does not read are refused before anything is opened.
    target_settings(config)
    if not kind.wants_encoder:
        return config, None
    if frozen_target.encoder is None:
        raise CapiError(
            f"target.kind={config.target.kind} needs the encoder that makes the targets: set target.frozen.encoder"
        )
    encoder = open_configured_encoder(frozen_target.encoder, device=device)
    if frozen_target.width not in (None, encoder.width):
        raise CapiError(
            f"target.frozen.width is {frozen_target.width}, but {frozen_target.encoder} has features of width "
            f"{encoder.width}: leave it out"
        )
    resolved = frozen_target.model_copy(update={"width": encoder.width})
    return config.model_copy(update={"target": config.target.model_copy(update={"frozen": resolved})}), encoder


def choose_precision(name: str, device: torch.device) -> torch.dtype:
    """bfloat16 where the device computes it fast; on a CPU it would be hundreds of times slower."""
    if name == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if fast else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def describe_precision(config: Config, device: torch.device) -> str:
    """What `auto` is on this device, a line each; it must be the same on all devices of a run."""
    run = choose_precision(config.run.precision, device)
    return f"networks: {run}\nclustering: {choose_products(config.clustering.precision, device, run)}"


def mask_sampler(config: Config | None = None) -> MaskSampler:
    """The masks of a config, by default of one without settings, checked against its grid."""
    config = config or Config()
    masking = config.masking
    # Imports it, where it is code of the user's own.
    component("masking.kind", config)
    sampler = MaskSampler(
        kind=masking.kind, ratio=masking.ratio, roll=masking.roll, predict=masking.predict, options=masking.options
    )
    sampler.counts(PatchGrid(*config.grid))
    return sampler


def masked_batch(config: Config, images: Tensor, step: int) -> MaskedBatch:
    """Normalized images (b c h w) with the masks that a run of this config draws for them at this step."""
    keys = sample_keys(config.seed, step, torch.arange(len(images)))
    visible_index, predict_index = mask_sampler(config)(PatchGrid(*config.grid), keys)
    return MaskedBatch(images, visible_index.to(images.device), predict_index.to(images.device))


class GridMasks:
    """Masks for one grid, as the loader's workers draw them."""

    def __init__(self, sampler: MaskSampler, grid: PatchGrid) -> None:
        self.sampler, self.grid = sampler, grid

    def __call__(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        return self.sampler(self.grid, keys)


def build_reader(config: Config, source: ImageSource, *, cache_bytes: int = 0) -> ImageReader:
    """How the images of a run are read."""
    decoder = Decoder(
        channels=config.model.channels,
        max_pixels=int(config.data.max_megapixels * 1e6),
        smallest_side=config.model.patch_size,
        reduced=config.data.reduced_decoding,
        crop_first=True,
    )
    return ImageReader(source, decoder, cache_bytes)


def resolve_steps(config: Config, images: int) -> Config:
    """A config with as many steps as its epochs are; the last batch may begin a further pass."""
    optimization = config.optimization
    if optimization.epochs is None:
        return config
    steps = math.ceil(optimization.epochs * images / optimization.batch_size)
    return config.model_copy(
        update={"optimization": optimization.model_copy(update={"steps": max(steps, 1), "epochs": None})}
    )


def few_warning(images: int) -> str | None:
    """A single image teaches its own crops."""
    if images > 1:
        return None
    return "the data set is a single image, of whose crops alone a run learns: give more with --data"


def largest_batch(images: int) -> int:
    """The largest power of two that holds no image twice."""
    return 2 ** int(math.log2(max(images, 1)))


def batch_warning(config: Config, images: int) -> str | None:
    """A batch with more samples than there are images holds some of them twice."""
    batch = config.optimization.batch_size
    if batch <= images:
        return None
    return (
        f"optimization.batch_size = {batch} is more than the {counted(images, 'image')} of this data, so a batch "
        f"holds one image several times: set optimization.batch_size={largest_batch(images)} or less "
        "(docs/measurements/small-data.md)"
    )


def resolve_statistics(config: Config, source: ImageSource) -> Config:
    """The config with `auto` means and deviations replaced by those of the images."""
    if "auto" not in {config.data.mean, config.data.std}:
        return config
    summary = summarize(build_reader(config, source))
    mean = tuple(summary.mean) if config.data.mean == "auto" else config.data.mean
    std = tuple(summary.std) if config.data.std == "auto" else config.data.std
    return config.model_copy(update={"data": config.data.model_copy(update={"mean": mean, "std": std})})


def choose_share(config: Config, processes: Processes) -> BatchShare:
    """The part of each batch that is this process's."""
    size, micro_batches = config.optimization.batch_size, config.optimization.micro_batches
    if size % (micro_batches * processes.size):
        parts = counted(processes.size, "process")
        parts += f" of {micro_batches} micro-batches each" if micro_batches > 1 else ""
        raise CapiError(
            f"optimization.batch_size = {size} cannot be shared equally by {parts}: set a multiple of "
            f"{micro_batches * processes.size}"
        )
    return BatchShare(size, micro_batches, processes.rank, processes.size)


def training_batches(
    config: Config, source: ImageSource, workers: int, processes: Processes | None = None
) -> TrainingBatches:
    """The batches of a run, by number; of several processes, this one's part of them."""
    data = config.data
    return TrainingBatches(
        build_reader(config, source, cache_bytes=data.cache_mib * 2**20 // max(workers, 1)),
        cropping=Cropping(data.height_and_width, data.crop_scale, data.crop_aspect, data.flip, data.color_jitter),
        share=choose_share(config, processes or Processes()),
        masks=GridMasks(mask_sampler(config), PatchGrid(*config.grid)),
        seed=config.seed,
        window=data.window,
    )


def batch_loader(
    batches: TrainingBatches, workers: int, device: torch.device
) -> Callable[[int, int], Iterator[list[LoadedBatch]]]:
    """A function from a range of steps to their batches."""
    return partial(load_batches, batches, workers=workers, pin_memory=device.type == "cuda")


def device_mover(config: Config, device: torch.device) -> Callable[[LoadedBatch], MaskedBatch]:
    """Pixels become normalised images on the device, masks go along."""
    mean, std = statistics(config)
    transfer = Transfer(device)

    def move(loaded: LoadedBatch) -> MaskedBatch:
        values = [loaded.images, loaded.visible_index, loaded.predict_index]
        pixels, visible_index, predict_index, *colors = transfer(
            values if loaded.colors is None else [*values, loaded.colors]
        )
        recolored = normalize(recolor(pixels, colors[0], device), mean, std, device) if colors else None
        return MaskedBatch(normalize(pixels, mean, std, device), visible_index, predict_index, recolored)

    return move


def loop_settings(config: Config) -> LoopSettings:
    """The loop's part of a config."""
    return LoopSettings(
        total_steps=config.optimization.known_steps,
        batch_size=config.optimization.batch_size,
        seed=config.seed,
        log_steps=config.run.log_steps,
        save_steps=config.checkpoint.every_steps,
        save_minutes=config.checkpoint.every_minutes,
        best=config.checkpoint.best,
        non_finite=config.run.non_finite,
        non_finite_limit=config.run.non_finite_limit,
    )
