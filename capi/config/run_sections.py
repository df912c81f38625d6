"""The sections around the method: images, first weights, checkpoints, how a run is carried out, shared and judged."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from capi.config.section import Count, Mebibytes, Pictures, Positive, Section, Side, Workers

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
    mean: PerChannel | Literal["auto"] = (0.485, 0.456, 0.406)
    """Mean of each channel, full scale being 1; `auto` takes it from the images."""
    std: PerChannel | Literal["auto"] = (0.229, 0.224, 0.225)
    """Deviation of each channel, full scale being 1; `auto` takes it from the images."""
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
    strict: bool = True
    """Whether the encoder and the predictor must fit in all their tensors; if not, what fits is taken."""

    @model_validator(mode="after")
    def _strictness_has_a_meaning(self) -> "InitConfig":
        if self.encoder is None and not self.strict:
            raise ValueError("init.strict=false has no meaning without weights to start from: set init.encoder")
        return self


class CheckpointConfig(Section):
    """When the state of a run is saved, and what is kept."""

    every_steps: Count = 1000
    """Save after so many steps."""
    every_minutes: Positive | None = 30.0
    """Save when so many minutes have passed since the last time; null leaves it to the steps."""
    keep: Count = 2
    """Newest checkpoints to keep."""
    milestone_steps: Count | None = None
    """Checkpoints at multiples of this are kept for good; null keeps none."""
    asynchronous: bool | None = None
    """Write a checkpoint while training goes on; null does so where an accelerator computes."""


class RunConfig(Section):
    """How a run is carried out."""

    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the networks' products; `auto` takes bfloat16 where a CUDA device has it, else float32."""
    compile: bool = False
    """Compile the blocks of student and teacher with torch.compile: slower to start, faster to run."""
    activation_checkpointing: Literal["off", "full", "selective"] = "off"
    """Compute the student's blocks again in the backward pass, to save memory: all of them, or all but products."""
    non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """A loss that is no number stops the run, skips the batch, or goes back to the last checkpoint with other data."""
    non_finite_limit: Count = 10
    """Batches in a row to skip, or times to roll back, before the run stops all the same."""
    log_steps: Count = 10
    """Write metrics every so many steps."""
    loggers: list[Literal["tensorboard", "wandb"]] | None = None
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
