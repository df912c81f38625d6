"""Every knob of a benchmark: a data set, a protocol, and how they are run. The paper's values are the defaults."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from capi.config.schema import Batch, Count, NotNegative, OpenFraction, Pictures, Positive, Section, Seed, Side, Workers
from capi.runtime.protocol import (
    OUR_NEIGHBORS,
    OUR_TEMPERATURE,
    OUR_VOTES,
    PAPER_DECAYS,
    PAPER_DISTANCES,
    PAPER_ITERATIONS,
    PAPER_NEIGHBORS,
    PAPER_RATES,
    PAPER_SHARE,
    PAPER_STRENGTHS,
    PAPER_TOLERANCE,
    VectorKind,
)

# Of images that are encoded at a time.
_MOST_PIXELS = 2**34


# By the default of `protocol`, every class below that has one.
PROTOCOL_CONFIGS: "dict[str, type[BenchmarkConfig]]" = {}


class BenchmarkConfig(Section):
    """What every benchmark has: a data set and the way its images are encoded."""

    task: ClassVar[Literal["classification", "segmentation"]]
    protocol: str
    """How features are judged."""

    dataset: str
    """A data set that `capi datasets` lists."""
    data: str | None = None
    """Where it lies: a folder, or the file of a CSV."""
    more: dict[str, str] = Field(default_factory=dict)
    """Where further test sets lie, by name."""
    train: str | None = None
    """The split to train on; null takes the data set's own."""
    tests: tuple[str, ...] | None = None
    """The splits to test on; null takes the data set's own."""
    test_share: OpenFraction | None = None
    """Share of the images to test on where `folder`, `csv` or `masks` has no splits; null means 0.2."""
    label: str | None = None
    """A CSV's column with the class; null means `label`."""
    exclude: str | None = None
    """A file with the names of images to leave out, a name a line."""
    verify_counts: bool = True
    """Whether the data set must have as many images as the official one."""
    limit_train: Count | None = None
    """At most so many training images, drawn by the seed; null takes all."""
    limit_tests: Count | None = None
    """At most so many images of each test set, drawn by the seed; null takes all."""
    image_size: Side | tuple[Side, Side] | None = None
    """Side of the images in pixels, or [height, width]; null takes the model's own: a run's, else 224."""
    validation_share: OpenFraction = PAPER_SHARE
    """Share of the training images that settings are chosen by."""
    seed: Seed = 0
    """Seed of everything random."""
    encode_batch: Annotated[int, Field(ge=1, le=2**16)] = 32
    """Images that are encoded at a time. Changes nothing but speed and the last digits."""
    workers: Workers | None = None
    """Processes that read images; null chooses by device. Changes nothing but speed."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the encoder's products."""
    memory_gib: Annotated[float, Field(gt=0, le=1e6)] = 4.0
    """Features that need more memory than this are mapped to a file in the folder of the results."""
    save_probe: bool = True
    """Write the fitted probe beside the results; that of k-NN holds all training features."""

    @model_validator(mode="after")
    def _batches_fit_a_memory(self) -> "BenchmarkConfig":
        height, width = self.height_and_width or (1, 1)
        if self.encode_batch * height * width > _MOST_PIXELS:
            raise ValueError(
                f"encode_batch = {self.encode_batch} images of {height} x {width} pixels are more than fit a memory: "
                "lower encode_batch or image_size"
            )
        return self

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        protocol = cls.model_fields["protocol"]
        if not protocol.is_required():
            PROTOCOL_CONFIGS[protocol.default] = cls

    @property
    def height_and_width(self) -> tuple[int, int] | None:
        return (self.image_size, self.image_size) if isinstance(self.image_size, int) else self.image_size


class KnnConfig(BenchmarkConfig):
    """Classification by the nearest training images."""

    task = "classification"
    protocol: Literal["knn"] = "knn"
    neighbors: Annotated[tuple[Count, ...], Field(min_length=1, max_length=1000)] = OUR_NEIGHBORS
    """Numbers of neighbors to try."""
    votes: Annotated[tuple[Literal["majority", "weighted"], ...], Field(min_length=1, max_length=1000)] = OUR_VOTES
    """Each neighbour counts alike, or by exp(similarity / temperature)."""
    temperature: Positive = OUR_TEMPERATURE
    """Temperature of the weighted vote."""
    features: Annotated[tuple[VectorKind, ...], Field(min_length=1, max_length=1000)] = ("mean_patch", "pooled")
    """What stands for an image; each is reported, and the one that does best on held-out images is quoted."""


class ProbeConfig(BenchmarkConfig):
    """Heads that are trained by gradient, all settings at once."""

    task = "classification"
    schedule: Literal["auto", "paper", "small"] = "auto"
    """`paper` streams augmented images, `small` caches features for fewer steps; `auto`: paper from 100 000 images."""
    iterations: Count | None = None
    """Steps of training; null takes the schedule's."""
    batch_size: Batch | None = None
    """Images in a step, whatever the number of devices; null takes the schedule's."""
    learning_rates: Annotated[tuple[Positive, ...], Field(min_length=1, max_length=1000)] = PAPER_RATES
    """Peak learning rates to try, for a batch of 256."""
    weight_decays: Annotated[tuple[NotNegative, ...], Field(min_length=1, max_length=1000)] = PAPER_DECAYS
    """Weight decays to try."""
    loss_mean: Literal["head", "released"] = "head"
    """`released`: one mean over 120 heads, as in the released code, which AdamW feels as 120 times its eps."""


class AttentiveConfig(ProbeConfig):
    """Classification by a head that attends to the patches with one learned query."""

    protocol: Literal["attentive"] = "attentive"


class LinearConfig(ProbeConfig):
    """Classification by a linear map of one vector an image."""

    protocol: Literal["linear"] = "linear"
    features: Annotated[tuple[VectorKind, ...], Field(min_length=1, max_length=1000)] = ("mean_patch", "pooled", "both")
    """What stands for an image; each is reported, and the one that does best on held-out images is quoted."""


class SegmentationConfig(BenchmarkConfig):
    """A label for every patch or pixel."""

    task = "segmentation"
    ignored: tuple[int, ...] | None = None
    """Labels of pixels that do not count; null takes the data set's own."""
    class_names: tuple[str, ...] | None = None
    """Names of the labels 0, 1, 2, ... where the data set has none."""
    standardize: bool = True
    """Give every channel mean 0 and std 1 on the training patches."""
    pictures: Pictures = 8
    """Test images whose prediction is drawn."""

    @model_validator(mode="after")
    def _one_test(self) -> "SegmentationConfig":
        if self.tests is not None and len(self.tests) != 1:
            raise ValueError(f"tests = {self.tests} does not fit: segmentation reports one split")
        return self


class KnnSegmentationConfig(SegmentationConfig):
    """Segmentation by the pixel labels of the nearest training patches."""

    protocol: Literal["knn-segmentation"] = "knn-segmentation"
    neighbors: Annotated[tuple[Count, ...], Field(min_length=1, max_length=1000)] = PAPER_NEIGHBORS
    """Numbers of neighbors to try."""
    distances: Annotated[tuple[Literal["l2", "cosine"], ...], Field(min_length=1, max_length=1000)] = PAPER_DISTANCES
    """Distances to try."""
    ignored_labels_vote: bool = True
    """Whether ignored labels in a neighbour's patch vote too, as in the published numbers."""
    ties: Literal["smallest", "nearest"] = "smallest"
    """Of equally frequent labels the smallest, as in the published numbers, or that of the nearest neighbour."""


class LogisticSegmentationConfig(SegmentationConfig):
    """Segmentation by logistic regression on patches."""

    protocol: Literal["logistic-segmentation"] = "logistic-segmentation"
    strengths: Annotated[tuple[Positive, ...], Field(min_length=1, max_length=1000)] = PAPER_STRENGTHS
    """Inverse penalties (C) to try."""
    tolerance: Positive = PAPER_TOLERANCE
    """A fit ends when less than this share of its penalty is left to gain."""
    max_iterations: Count = PAPER_ITERATIONS
    """Steps after which a fit ends in any case, with a warning."""
