"""Every knob of a run. Frozen, strict about types, with limits, and unknown keys are errors.

What all sections are made of comes first, then the sections around the method (images, first weights, checkpoints, how
a run is carried out, shared and judged), those of the method (networks, targets, masks, optimizers), and the whole.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from capi.errors import CapiError, counted
from capi.runtime.summary import Summary

# Configs come from others too: what they ask for must be possible. The limits are far above any run that there was.
OpenFraction = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
NotNegative = Annotated[float, Field(ge=0, le=1e9)]
Count = Annotated[int, Field(ge=1, le=10**9)]
# YAML reads `on` and `off` as booleans, and earlier configs have those.
Switch = Annotated[
    Literal["auto", "on", "off"],
    BeforeValidator(lambda value: ("on" if value else "off") if isinstance(value, bool) else value),
]
Recomputed = Annotated[
    Literal["off", "full", "selective"], BeforeValidator(lambda value: "off" if value is False else value)
]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Side = Annotated[int, Field(ge=1, le=2**16)]
"""Pixels."""
Width = Annotated[int, Field(ge=1, le=2**16)]
Depth = Annotated[int, Field(ge=1, le=1024)]
Batch = Annotated[int, Field(ge=1, le=2**24)]
Iterations = Annotated[int, Field(ge=1, le=10_000)]
Workers = Annotated[int, Field(ge=0, le=1024)]
Mebibytes = Annotated[int, Field(ge=0, le=2**24)]
Pictures = Annotated[int, Field(ge=0, le=10_000)]
Options = dict[str, Any]
"""Keyword arguments of a component, which knows itself which it takes."""


class Section(BaseModel):
    """What all parts of the config share."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


Fraction = Annotated[float, Field(ge=0, le=1)]
Portion = Annotated[float, Field(gt=0, le=1)]
Aspect = Annotated[float, Field(ge=1e-3, le=1e3)]
PerChannel = tuple[Annotated[float, Field(ge=-1e6, le=1e6)], ...]


class DataConfig(Section):
    """The images."""

    image_size: Side | tuple[Side, Side] = 224
    """Side of the square crop in pixels, or [height, width]."""
    crop_scale: tuple[Portion, Portion] = (0.6, 1.0)
    """Share of an image's area that a crop covers, drawn between the two; [1.0, 1.0] resizes the whole image."""
    crop_aspect: tuple[Aspect, Aspect] = (0.75, 4 / 3)
    """Width / height of a crop, drawn log-uniformly between the two."""
    flip: bool = True
    """Mirror half of the images left to right."""
    color_jitter: Fraction = 0.0
    """Change brightness, contrast, saturation and hue of what the student sees, up to so much of the usual 0.4, 0.4,
    0.2 and 0.1; the teacher sees the colors as they are. 0, as in the paper: both see the same."""
    mean: PerChannel | Literal["auto"] = (0.485, 0.456, 0.406)
    """Mean of each channel, full scale being 1; `auto` takes it from the images."""
    std: PerChannel | Literal["auto"] = (0.229, 0.224, 0.225)
    """Std of each channel, full scale being 1; `auto` takes it from the images."""
    max_megapixels: Annotated[float, Field(gt=0, le=1e5)] = 178.0
    """Images with more pixels are refused, since a small file may unpack to fill the memory."""
    broken_limit: Fraction = 0.1
    """Share of the images that may be unreadable before the run stops."""
    reduced_decoding: bool = True
    """Decode a JPEG at 1/2, 1/4 or 1/8 of its size where the crop stays larger than the model's input."""
    window: Count | None = None
    """Images of shards and tables that are shuffled together, at least; null: 65536, parquet 4096. Not of folders."""
    workers: Workers | None = None
    """Processes that read images; null chooses by device. Changes nothing but speed."""
    cache_mib: Mebibytes = 1024
    """Memory for decoded images, shared by all workers. Changes nothing but speed."""

    @property
    def height_and_width(self) -> tuple[int, int]:
        return (self.image_size, self.image_size) if isinstance(self.image_size, int) else self.image_size

    @model_validator(mode="after")
    def _ranges_ascend(self) -> "DataConfig":
        for name, (low, high) in (("crop_scale", self.crop_scale), ("crop_aspect", self.crop_aspect)):
            if low > high:
                raise ValueError(f"data.{name} = [{low:g}, {high:g}] runs backwards: the smaller number comes first")
        if self.std != "auto" and min(self.std, default=1) <= 0:
            raise ValueError("data.std must be above 0 in every channel")
        return self


class InitConfig(Section):
    """Weights that a new run starts from, in place of fresh ones: continued pretraining."""

    encoder: str | None = None
    """Where they come from: a run folder, a file, a folder of `transformers`, a name or whatever `capi.load` takes."""
    parts: Literal["all", "encoder"] = "all"
    """What is taken: everything that there is, or the encoder alone, as `capi adapt` does."""
    strict: bool = True
    """Whether the encoder and the predictor must fit in all their tensors; if not, what fits is taken."""

    @model_validator(mode="after")
    def _strictness_has_a_meaning(self) -> "InitConfig":
        if self.encoder is None and not self.strict:
            raise ValueError("init.strict=false has no meaning without weights to start from: set init.encoder")
        return self


class AdaptConfig(Section):
    """How much the encoder may change that a run starts from, with `init.encoder`."""

    frozen_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the steps in which the encoder is frozen, until predictor, head and prototypes have learnt; then its
    rate rises for as many steps."""
    rate_multiplier: Positive = 1.0
    """Learning rate of the encoder, in units of the student's."""
    layer_decay: Portion = 1.0
    """Learning rate of a block in units of the next one's. The patch embedding comes before the first block, the
    predictor after the last one."""
    blocks: Depth | None = None
    """Last blocks that are trained, with the norm after them; what lies before stays as it is. null: everything."""
    pull: NotNegative = 0.0
    """How strongly weights are pulled back to where they started (L2-SP), in place of their weight decay, which pulls
    to 0 in the same way."""
    lora_rank: Width | None = None
    """Rank of matrices beside each projection of attention and MLP, which are trained in place of all other weights of
    the encoder (LoRA); null: none."""
    lora_scale: Positive = 1.0
    """What the product of these matrices is multiplied by."""


class CheckpointConfig(Section):
    """When the state of a run is saved, and what is kept."""

    every_steps: Count = 1000
    """Save after so many steps."""
    every_minutes: Positive | None = 30.0
    """Save when so many minutes have passed since the last time; null leaves it to the steps."""
    keep: Count = 2
    """Newest checkpoints to keep."""
    best: str | None = None
    """Score of an evaluation, as the metrics name it (`folder/knn/teacher`), whose best checkpoint is kept as
    `checkpoints/best` beside the newest; null keeps none."""
    milestone_steps: Count | None = None
    """Checkpoints at multiples of this are kept for good; null keeps none."""
    asynchronous: bool | None = None
    """Write a checkpoint while training continues; null does so where an accelerator computes."""


class RunConfig(Section):
    """How a run is carried out."""

    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the networks' products; `auto` takes bfloat16 where a CUDA device has it, else float32."""
    compile: Switch = "auto"
    """Compile the blocks and heads of student and teacher and the clustering's slices with torch.compile: slower to
    start, faster to run; `auto` is on for CUDA. Where nothing can be compiled the run continues without it."""
    activation_checkpointing: Recomputed = "off"
    """Compute the student's blocks again in the backward pass, to save memory: all of them, or all but products."""
    non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """A non-finite loss stops the run, skips the batch, or goes back to the last checkpoint with other data."""
    non_finite_limit: Count = 10
    """Batches in a row to skip, or times to roll back, before the run stops all the same."""
    log_steps: Count = 10
    """Write metrics every so many steps."""
    loggers: list[str] | None = None
    """Where metrics go beside metrics.jsonl; null writes TensorBoard files where that package is installed."""
    snapshots: Pictures = 10
    """How often the features of some training images are drawn over the run, for the report; 0 draws none."""
    report: bool = True
    """Write report.html, with a gallery of the prototypes, at the end of the run."""


class DistributedConfig(Section):
    """How several processes share a run. Changes nothing but speed and memory."""

    shards: Count | None = None
    """Processes that hold one copy of the weights together; null: all of them; 1: each has a copy, as with DDP."""


class EvaluationConfig(Section):
    """A benchmark that the frozen encoder goes through while it is trained."""

    benchmark: str
    """A data set and a protocol, such as demo/knn or folder/attentive; or the path of a YAML file."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Values to change in the benchmark; the size of the images is that of the run unless it is given here."""
    every_steps: Count = 1000
    """Evaluate after so many steps, before the first and after the last."""
    weights: list[Literal["teacher", "student"]] = Field(default=["teacher"])
    """Whose encoder is looked at."""


CONFIG_VERSION = 4
# Over all processes. The paper's largest run has 4e8 parameters, 256 patches and 2.5e9 values in a batch of images.
_MOST_PARAMETERS, _MOST_PATCHES, _MOST_VALUES = 10**11, 2**20, 2**38


class BaselineConfig(Section):
    """What an encoder of another method is beyond the sizes in `model`; `capi adapt` writes it down."""

    name: str
    """The baseline that it is one of (`capi models` lists them); its method fixes everything that is not said here."""
    layout: Literal["original", "transformers"] = "original"
    """Whose names of weights its file has: the authors' or those of transformers."""
    grid: Side
    """Rows and columns of patches that its positions are made for."""
    eps: Positive = 1e-6
    """Of its norms."""
    relative_bias: Literal["none", "shared", "block"] = "none"
    """Biases by the offset between two patches: none, one table for all blocks, or one in each."""
    resampling: Literal["fixed", "bicubic", "antialias", "offset", "rows"] = "bicubic"
    """How its positions are resampled to another grid."""


class PredictorConfig(Section):
    """How hidden patches are predicted. What is left null follows the encoder."""

    kind: str = "cross"
    """Which predictor, or FILE.py:NAME, one of your own."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of the predictor."""
    mask_tokens: Literal["predicted", "masked"] = "predicted"
    """Of kind `self`: mask tokens at the predicted positions only, or at all masked ones."""
    depth: Depth | None = None
    """Number of blocks; null means half of the encoder's, at least one."""
    width: Width | None = None
    """Width of a token; null means the encoder's."""
    heads: Width | None = None
    """Attention heads; null keeps the encoder's head width."""


class ModelConfig(Section):
    """The vision transformer and its predictor."""

    width: Width = 384
    """Width of a token (d)."""
    depth: Depth = 12
    """Number of transformer blocks."""
    heads: Width = 6
    """Attention heads; width / heads must be a multiple of 4."""
    patch_size: Side = 16
    """Side of a patch in pixels."""
    registers: Annotated[int, Field(ge=0, le=4096)] = 16
    """Extra tokens without image content (r)."""
    channels: Annotated[int, Field(ge=1, le=1024)] = 3
    """Channels of an image."""
    mlp_ratio: Annotated[float, Field(gt=0, le=64)] = 4.0
    """Width of an MLP's hidden layer, in units of the token width."""
    positions: str = "axial"
    """How tokens know where they stand."""
    stochastic_depth: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Share of the images for which each residual branch is dropped, in the student only."""
    predictor: PredictorConfig = PredictorConfig()
    """The predictor and its shape."""
    baseline: BaselineConfig | None = None
    """The encoder is another method's, of the sizes above; `positions` and `stochastic_depth` are then the predictor's
    alone. null: CAPI's own."""
    head: str = "linear"
    """From a prediction to prototype logits."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> "ModelConfig":
        for name, width, heads in (
            ("model", self.width, self.heads),
            ("model.predictor", self.predictor_width, self.predictor_heads),
        ):
            if width % heads or (width // heads) % 4:
                raise ValueError(
                    f"{name}.width of {width} with {counted(heads, 'head')} gives a head width of {width / heads:g}, "
                    f"expected a multiple of 4: change {name}.width or {name}.heads"
                )
            if round(width * self.mlp_ratio) < 1:
                raise ValueError(
                    f"model.mlp_ratio of {self.mlp_ratio:g} leaves nothing of {name}.width, {width}, for hidden layers"
                )
        return self

    @property
    def parameters(self) -> float:
        """About so many numbers in the blocks of encoder and predictor, and in the patch embedding."""
        a_block = 4 + 3 * self.mlp_ratio
        blocks = self.depth * self.width**2 + self.predictor_depth * self.predictor_width**2
        return a_block * blocks + self.channels * self.patch_size**2 * self.width

    @property
    def predictor_depth(self) -> int:
        return self.predictor.depth or max(self.depth // 2, 1)

    @property
    def predictor_width(self) -> int:
        return self.predictor.width or self.width

    @property
    def predictor_heads(self) -> int:
        return self.predictor.heads or max(self.predictor_width * self.heads // self.width, 1)


class ClusteringConfig(Section):
    """The online clustering that makes the targets where target.kind is clustering."""

    prototypes: Batch = 16384
    """Number of prototypes (k); with target.kind=ema_head that of the head's outputs."""
    bias: bool = True
    """Whether prototypes have a bias: the released run does, the paper's formula does not."""
    sinkhorn: Literal["positionwise", "standard"] = "positionwise"
    """Balance the batch at each position separately, or all patches together."""
    iterations: Iterations = 3
    """Sinkhorn-Knopp iterations."""
    target_temperature: Positive = 0.06
    """Temperature of the assignments."""
    prediction_temperature: Positive = 0.12
    """Temperature of the softmax that the prototypes are trained through."""
    learning_rate_multiplier: Positive = 0.5
    """Learning rate of the prototypes, in units of the backbone's."""
    weight_decay: NotNegative = 0.01
    """Weight decay of the prototypes and their bias."""
    chunk_mib: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """Working memory of the clustering in MiB; null chooses 96 on a CPU and 4096 on an accelerator, and what one
    position needs where that is more."""
    precision: Literal["auto", "float32", "tf32", "bfloat16"] = "auto"
    """What the factors of the logits are rounded to; sums and all else are in float32. Unless the logits are in
    float32, the factors of the prototypes' gradient are rounded to bfloat16. auto is tf32 on a GPU that has it, in a
    run whose precision is bfloat16, and float32 elsewhere."""
    queue: Annotated[int, Field(ge=0, le=2**24)] = 0
    """Images of earlier batches, over all processes, whose teacher tokens are balanced along; 0 keeps none."""


class EmaHeadConfig(Section):
    """The targets of iBOT: the moving average of the student's head on the teacher's tokens."""

    balance: Literal["centering", "sinkhorn"] = "centering"
    """Against collapse: take off a moving average of the logits, or balance them by Sinkhorn-Knopp."""
    student_temperature: Positive = 0.1
    """Temperature of the student's predictions, in place of optimization.student_temperature."""
    first_temperature: Positive = 0.04
    """Temperature of the targets at the start."""
    temperature: Positive = 0.07
    """Temperature of the targets from the end of the warm-up on."""
    center_momentum: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Momentum of the center."""
    iterations: Iterations = 3
    """Sinkhorn-Knopp iterations."""


class FrozenConfig(Section):
    """Targets from an encoder that never changes."""

    encoder: str | None = None
    """The encoder: a run folder, a file, pixels:PATCH_SIZE, FILE.py:NAME (which a recipe file cannot name without
    --trust FILE.py), or what else `capi evaluate` takes."""
    width: Width | None = None
    """Width of its features; null asks the encoder, and the run writes it down."""


class TargetConfig(Section):
    """What the student must predict."""

    kind: str = "clustering"
    """Which target, or FILE.py:NAME, one of your own."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of the target."""
    layers: Literal["last", "all"] | Annotated[list[Annotated[int, Field(ge=0, lt=1024)]], Field(min_length=1)] = "last"
    """What targets are made from: the teacher's output, as in the paper, or (ours) the mean of what all its blocks
    give, or of those that are listed, counted from 0."""
    normalize: Literal["none", "instance", "layer"] = "none"
    """How each layer is normalized: not at all, each channel over the patches of an image, or each patch over its
    channels."""
    ema_head: EmaHeadConfig = EmaHeadConfig()
    """Of kind `ema_head`."""
    frozen: FrozenConfig = FrozenConfig()
    """Of kind `frozen`."""

    @model_validator(mode="after")
    def _layers_are_named_once(self) -> "TargetConfig":
        if not isinstance(self.layers, str) and len({*self.layers}) < len(self.layers):
            raise ValueError(f"target.layers names a block twice in {self.layers}: name each once")
        return self


class MaskingConfig(Section):
    """Which patches are hidden and which of those are predicted."""

    kind: str = "inverse_block"
    """Shape of the mask, or FILE.py:NAME, one of your own."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of the mask."""
    ratio: OpenFraction = 0.65
    """Share of the patches that is hidden."""
    roll: bool = True
    """Shift the mask circularly, so that every position is hidden equally often."""
    predict: Count | Annotated[float, Field(gt=0, le=1)] = 7
    """Patches to predict in each image: a count (an integer) or a share of the hidden ones (with a decimal point)."""


class OptimizationConfig(Section):
    """Both optimisers, the schedules and the student's temperature."""

    batch_size: Batch = 16384
    """Images in an iteration, over all processes and micro-batches."""
    micro_batches: Batch = 1
    """Parts in which a batch is computed where memory is short. Without `model.stochastic_depth` the result is that of
    the whole batch; with it each part drops its own share of images, rounded up."""
    steps: Count = 500_000
    """Iterations of the whole run."""
    epochs: Positive | None = None
    """Passes over all images, in place of `steps`: a run writes down the steps that they make, rounded up."""
    schedule_steps: Count | None = None
    """Steps that the schedules are made for, where a finished run was extended: later steps keep the last rate and
    momentum. null: `steps`. `capi pretrain --extend` sets it."""
    warmup_share: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the steps in which the learning rate rises."""
    optimizer: str = "adamw"
    """What updates the student, or FILE.py:NAME, one of your own. Prototypes always have `adamw`."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of the student's optimizer."""
    learning_rate: Positive = 1e-3
    """Peak learning rate."""
    matrix_rate_multiplier: Positive = 1.0
    """Learning rate of the 2-D weights inside blocks, in units of the student's."""
    schedule: Literal["cosine", "warmup_stable_decay"] = "cosine"
    """What the learning rate does after the warm-up: follow a cosine, or stay and fall to 0 at the end (ours)."""
    cosine_kept: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of the cosine that is run through after the warm-up; 1 is the full cosine."""
    decay_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of the steps in which the learning rate falls, with `warmup_stable_decay`."""
    weight_decay: NotNegative = 0.1
    """Weight decay of the student; biases have none."""
    norm_decay_multiplier: NotNegative = 0.1
    """Weight decay of norm scales, in units of the student's."""
    patch_embedding_rate_multiplier: Positive = 0.2
    """Learning rate of the patch embedding, in units of the student's."""
    clip: Positive | None = None
    """Longest gradient of the student, and of the target's own parameters; a longer one is scaled down to it. The paper
    clips nothing."""
    teacher_momentum: Annotated[float, Field(ge=0, le=1)] = 0.999
    """Momentum of the teacher where the learning rate is highest."""
    student_temperature: Positive = 0.12
    """Temperature of the student's predictions."""

    @model_validator(mode="after")
    def _settings_are_of_the_schedule(self) -> "OptimizationConfig":
        other = {"cosine": "decay_share", "warmup_stable_decay": "cosine_kept"}[self.schedule]
        if getattr(self, other) != type(self).model_fields[other].default:
            raise ValueError(
                f"optimization.{other} has no meaning with optimization.schedule={self.schedule}: leave it out"
            )
        if self.schedule == "warmup_stable_decay" and self.warmup_share + self.decay_share > 1:
            raise ValueError(
                f"optimization.warmup_share = {self.warmup_share:g} and optimization.decay_share = "
                f"{self.decay_share:g} are more than the whole run: lower one of them"
            )
        return self

    @property
    def warmup_steps(self) -> int:
        return int(self.scheduled_steps * self.warmup_share)

    @property
    def decay_steps(self) -> int:
        return int(self.scheduled_steps * self.decay_share)

    @property
    def scheduled_steps(self) -> int:
        return self.schedule_steps or self.known_steps

    @property
    def known_steps(self) -> int:
        """`steps`, once it is known how many images an epoch has."""
        if self.epochs is not None:
            raise CapiError(
                "optimization.epochs counts passes over images, and here it is not known how many there are: give "
                "optimization.steps, which is epochs * images / optimization.batch_size"
            )
        return self.steps


class Config(Section, Summary):
    """A whole run."""

    version: int = CONFIG_VERSION
    """Version of this format; older files are migrated when they are read."""
    seed: Seed = 0
    """Seed of everything random."""
    data: DataConfig = DataConfig()
    """How images are read and cropped."""
    model: ModelConfig = ModelConfig()
    """The networks: encoder, predictor, head."""
    masking: MaskingConfig = MaskingConfig()
    """Which patches are hidden, and which of them predicted."""
    target: TargetConfig = TargetConfig()
    """What must be predicted."""
    clustering: ClusteringConfig = ClusteringConfig()
    """Prototypes, Sinkhorn and their optimiser."""
    optimization: OptimizationConfig = OptimizationConfig()
    """Batch, steps, rates and momentum."""
    init: InitConfig = InitConfig()
    """Trained weights to start from."""
    adapt: AdaptConfig = AdaptConfig()
    """How much they may change."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the run is saved, and how many saves are kept."""
    run: RunConfig = RunConfig()
    """Precision, logging, health and what happens when a loss is NaN or infinite."""
    distributed: DistributedConfig = DistributedConfig()
    """How weights are spread over processes."""
    evaluations: list[EvaluationConfig] = Field(default_factory=list)
    """Evaluations during the run."""

    def summary(self) -> tuple[str, dict[str, str]]:
        """What differs from the defaults, section by section; `capi recipes show` prints every value."""

        def plain(values: object) -> str:
            if isinstance(values, dict):
                return ", ".join(f"{key}={plain(value)}" for key, value in values.items())
            return f"[{', '.join(map(plain, values))}]" if isinstance(values, list) else str(values)

        changed = self.model_dump(mode="json", exclude_defaults=True)
        return "Config, where it differs from the defaults:", {name: plain(each) for name, each in changed.items()}

    __repr__ = Summary.__repr__
    __str__ = Summary.__repr__

    @model_validator(mode="after")
    def _channels_have_statistics(self) -> "Config":
        for name, values in (("mean", self.data.mean), ("std", self.data.std)):
            if values != "auto" and len(values) != self.model.channels:
                raise ValueError(
                    f"data.{name} has {len(values)} values, but model.channels is {self.model.channels}: give one for "
                    f"each channel, or data.{name}=auto"
                )
        if self.optimization.batch_size % self.optimization.micro_batches:
            raise ValueError(
                f"optimization.batch_size = {self.optimization.batch_size} cannot be split into "
                f"{self.optimization.micro_batches} micro-batches of one size"
            )
        return self

    @model_validator(mode="after")
    def _layers_are_there(self) -> "Config":
        layers, depth = self.target.layers, self.model.depth
        if not isinstance(layers, str) and max(layers) >= depth:
            raise ValueError(
                f"target.layers names block {max(layers)}, but model.depth is {depth}: choose from 0 to {depth - 1}"
            )
        return self

    @model_validator(mode="after")
    def _adapts_what_is_there(self) -> "Config":
        adapt = self.adapt
        if adapt.blocks is not None and adapt.blocks > self.model.depth:
            raise ValueError(
                f"adapt.blocks trains the last {adapt.blocks} blocks, but the encoder has {self.model.depth}: choose "
                f"at most {self.model.depth}, or leave it out to train everything"
            )
        if adapt.pull and adapt.lora_rank is not None:
            raise ValueError("adapt.pull has no meaning with adapt.lora_rank: leave one of them out")
        if adapt.lora_rank is not None and adapt.lora_rank > self.model.width:
            raise ValueError(
                f"adapt.lora_rank is {adapt.lora_rank}, more than model.width = {self.model.width}: choose a small "
                "number such as 16"
            )
        return self

    @model_validator(mode="after")
    def _queue_holds_whole_batches(self) -> "Config":
        # Every process then keeps an equal share, and the oldest batch makes room for the newest.
        queue, batch = self.clustering.queue, self.optimization.batch_size
        if queue % batch:
            lower = queue // batch * batch
            raise ValueError(
                f"clustering.queue = {queue} is no multiple of optimization.batch_size = {batch}, but it holds whole "
                f"batches: set clustering.queue={lower} or {lower + batch}"
            )
        return self

    @model_validator(mode="after")
    def _patches_fill_images(self) -> "Config":
        size = self.model.patch_size
        if any(side % size for side in self.data.height_and_width):
            height, width = self.data.height_and_width
            raise ValueError(
                f"data.image_size of {height} x {width} is no multiple of model.patch_size = {size}: change one of them"
            )
        return self

    @model_validator(mode="after")
    def _memory_is_possible(self) -> "Config":
        model, (height, width) = self.model, self.data.height_and_width
        patches = self.grid[0] * self.grid[1]
        pixels = self.optimization.batch_size * height * width * model.channels
        for value, most, what, keys in (
            (model.parameters, _MOST_PARAMETERS, "parameters", "model.width, model.depth and model.mlp_ratio"),
            (
                self.clustering.prototypes * model.predictor_width,
                _MOST_PARAMETERS,
                "parameters of prototypes",
                "clustering.prototypes",
            ),
            (patches, _MOST_PATCHES, "patches in an image", "data.image_size and model.patch_size"),
            (pixels, _MOST_VALUES, "values in a batch of images", "optimization.batch_size and data.image_size"),
        ):
            if value > most:
                raise ValueError(f"{keys} ask for {value:.3g} {what}, but at most {most:.3g} are possible: lower them")
        return self

    @property
    def grid(self) -> tuple[int, int]:
        height, width = self.data.height_and_width
        return height // self.model.patch_size, width // self.model.patch_size
