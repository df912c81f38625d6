"""What to choose for so many images on this hardware: a recipe and values, each with its reason and where that is from.

The rules are those of docs/measurements/small-data.md as far as it has measured them, else the paper's own values,
else rules of thumb, and each says which.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

import numpy as np

from capi.config.files import load_config
from capi.config.schema import Config
from capi.data.crops import center_box
from capi.data.decoding import BrokenImageError
from capi.data.locations import DataLocation, open_images, photos_alone
from capi.data.reader import ImageReader, read_bytes
from capi.data.sources import ImageSource, masks_warning
from capi.data.survey import (
    THUMBNAIL,
    areas_warning,
    channels_warning,
    count_copies,
    evenly,
    extremes,
    has_areas,
    most_common_channels,
    names_by_channels,
    quick_statistics,
    significant,
    statistics_warning,
)
from capi.errors import CapiError, counted
from capi.runtime.summary import Summary
from capi.train.build import build_reader
from capi.train.cost.hardware import Gpu, find_gpu
from capi.train.cost.plan import Assumptions, RunPlan, plan_run
from capi.types import Statistics
from capi.zoo.build import statistics

Origin = Literal["measured", "paper", "rule of thumb"]

PASSES, FEWEST_PASSES, MOST_PASSES, FEWEST_STEPS = 100, 30, 300, 1300
# Prototypes for each image of a batch: 256 to 64 and 512 to 128 did well in docs/measurements/small-data.md.
PROTOTYPES_AN_IMAGE = 4
SMALLEST_BATCH = 64
_SAMPLE = 64
# Images whose values are looked at, each decoded whole.
_FEW_VALUES = 8
# What machines with many GPUs usually have.
GPUS_A_MACHINE = 8


class Choice(NamedTuple):
    """A value, why, and where that is from."""

    key: str
    value: object
    reason: str
    origin: Origin


class Rung(NamedTuple):
    """A recipe for so many images and more, with a batch of its own where the recipe's is too large for them."""

    recipe: str
    images: int = 0
    batch: int | None = None


_MEASURED = "docs/measurements/small-data.md"
_PETS = f"{_MEASURED}, the run on 3680 photos"
_LADDER = (
    Rung("small"),
    Rung("vits16", 20_000),
    Rung("vitb14", 1_000_000, batch=4096),
    Rung("vitl16", 10_000_000),
    Rung("vitl14", 50_000_000),
)
# Fewer photos than these are the limit, not the optimizer; and so few teach no good encoder.
_FEW_PHOTOS, _TOO_FEW_PHOTOS = 1000, 100
_OF_FEW = Rung("demo")
# Images that a patch of 8 pixels would cut into too few.
_TINY = Rung("tiny4")
_TINY_SIDE = 48


@dataclass(frozen=True)
class Images:
    """What a suggestion has to know of the images."""

    count: int
    side: int
    channels: int = 3
    statistics: Statistics | None = None
    """Mean and std of a few of them, where they are known."""
    copies: int = 0
    """Files with the bytes of another one."""
    values: tuple[float, float] | None = None
    """The lowest and the highest value of a few of them, in units of full scale."""
    warnings: tuple[str, ...] = ()
    """What is odd about some of them: they look like masks, or have other channels."""
    data: tuple[str, ...] = ()
    """Where they lie, as `--data` takes it; of folders with photos and masks the photos alone."""

    def __str__(self) -> str:
        values = (
            ""
            if self.values is None
            else f", values {' to '.join(significant([value]) for value in self.values)} of full scale"
        )
        count, channels = counted(self.count, "image"), counted(self.channels, "channel")
        return f"{count} of about {self.side} px, {channels}{values}"


@dataclass(frozen=True, repr=False)
class Suggestion(Summary):
    """A run for some images: its recipe, what changes in it, and its plan."""

    images: Images
    recipe: Choice
    choices: list[Choice]
    config: Config
    plan: RunPlan

    @property
    def overrides(self) -> list[str]:
        return [f"{choice.key}={choice.value}" for choice in self.choices]

    def summary(self) -> tuple[str, dict[str, str]]:
        choices = {choice.key: f"{choice.value}: {choice.reason}" for choice in (self.recipe, *self.choices)}
        advice = {"advice": f"{'. '.join(self.advice)}."} if self.advice else {}
        return f"For {self.images}", choices | advice | {"planned": self.length, "command": self.command()}

    @property
    def advice(self) -> list[str]:
        """What an expert would say beside the values."""
        images, said = self.images, list(self.images.warnings)
        data, name = shlex.join(self._data_words(images.data)), _name_of(images.data)
        if images.copies:
            said.append(
                f"{images.copies:,} of {counted(images.count, 'file')} have the bytes of another one: `capi data "
                "check` names them, and without them each pass teaches more"
            )
        too_few = images.count < _TOO_FEW_PHOTOS
        if too_few:
            said.append(
                f"{counted(images.count, 'image')} {'is' if images.count == 1 else 'are'} too few to train a good "
                "encoder on: start from one that others trained, and take the last command below as a trial"
            )
        if images.channels != 3:
            said.append(
                f"Published encoders see 3 channels, and these images have {images.channels}: adapt one, whose new "
                f"channels begin as the mean of its own (`capi adapt {_PUBLISHED} {data} --out {name}_adapted "
                f"model.channels={images.channels} data.mean=auto data.std=auto`), and train your own, with the "
                "command below; `capi compare` shows which is better"
            )
        elif images.count < _ENOUGH_TO_COMPETE:
            extracted = shlex.quote(images.data[0]) if len(images.data) == 1 else "IMAGES"
            few = "so few" if too_few else f"{images.count:,}"
            said.append(
                f"Try a published encoder first: {few} photos seldom teach more than the 142 million behind "
                f"{_PUBLISHED}. `capi extract {_PUBLISHED} {extracted} --out {name}.safetensors` takes it as it is"
            )
            said.append(
                f"Then adapt it: `capi adapt {_PUBLISHED} {data} --out {name}_adapted` trains it further on these "
                "images, and takes DINOv2, MAE and others as well (docs/guides/adapting.md); in a recipe it is "
                f"init.encoder={_PUBLISHED} with optimization.optimizer=adamw"
            )
            if too_few:
                return said
            said.append(
                "Last, train your own, with the command below. Images unlike photos (microscopes, satellites) want a "
                "trial of all three: `capi compare` shows them side by side. For a small encoder that does what a "
                "large one does there is the recipe distill (docs/guides/distillation.md)"
            )
        return said

    @property
    def length(self) -> str:
        """How long the run is, in steps and passes."""
        steps, batch = self.config.optimization.steps, self.plan.batch_size
        passes = max(steps * batch / self.images.count, 1)
        return f"{counted(steps, 'step')} of {batch:,}, {counted(round(passes), 'pass')} over the images"

    @staticmethod
    def _data_words(data: Sequence[str]) -> list[str]:
        return [word for name in data or ("IMAGES",) for word in ("--data", name)]

    def command(self, data: str | Sequence[str] | None = None, out: str | None = None) -> str:
        """What starts the run; by default on the images that were looked at."""
        gpus, start = self.plan.gpus, ["capi", "pretrain"]
        if gpus > GPUS_A_MACHINE and gpus % GPUS_A_MACHINE == 0:
            nodes = str(gpus // GPUS_A_MACHINE)
            start = ["capi", "launch", "slurm", "--nodes", nodes, "--gpus-per-node", str(GPUS_A_MACHINE)]
        elif gpus > 1:
            start = ["torchrun", "--nproc-per-node", str(gpus), "-m", *start]
        names = self.images.data if data is None else [data] if isinstance(data, str) else data
        words = [*start, str(self.recipe.value), *self.overrides, *self._data_words(names)]
        return shlex.join([*words, "--out", out or f"{_name_of(names)}_run"])


def _name_of(data: Sequence[str]) -> str:
    """What a folder with results of these images may be called."""
    place = re.split(r"[?{*]", data[0].partition("://")[2] or data[0])[0] if data else ""
    name = re.sub(r"[^\w.-]+", "_", Path(place).name.partition("@")[0]).strip("._-")
    return re.sub(r"\.(csv|zip|tar|parquet|arrow)$", "", name) or "images"


_PUBLISHED = "capi_vitl14_lvd"
# Photos from which on a training of one's own may do better than a published encoder (a rule of thumb).
_ENOUGH_TO_COMPETE = 1_000_000


def look_at(source: ImageSource) -> Images:
    """How many images there are, how long the shorter side of a typical one is, and what channels they have."""
    named = names_by_channels(source)
    channels = most_common_channels(named)
    others = {other: names for other, names in named.items() if other != channels}
    decoder = replace(build_reader(load_config("small"), source).decoder, channels=channels)
    reader = ImageReader(source, decoder)
    sides, errors = _sides(reader)
    if not sides:
        tried = min(len(source), _SAMPLE)
        raise CapiError(
            f"{counted(tried, 'image')} tried, and none could be read ({errors[0]}): --suggest needs images to look at"
        )
    statistics, copies = quick_statistics(reader), count_copies(source)
    values, areas = _values(reader)
    odd = channels_warning(channels, len(named.get(channels, ())), others)
    warnings = tuple(filter(None, (masks_warning(source) or areas_warning(areas), odd)))
    return Images(len(source), int(median(sides)), channels, statistics, copies, values=values, warnings=warnings)


def _values(reader: ImageReader) -> tuple[tuple[float, float] | None, list[bool]]:
    """The lowest and the highest value of a few images, as they are stored, and whether each is made of areas."""
    ends, areas = [], []
    for index in evenly(len(reader.source), _FEW_VALUES):
        try:
            picture = reader.decoder.open(read_bytes(reader.source, index))
            shape = picture.shape
            box = center_box((shape.height, shape.width), (THUMBNAIL, THUMBNAIL), 1.0)
            decoded = picture.part(box, (THUMBNAIL, THUMBNAIL))[0]
        except (BrokenImageError, OSError):
            continue
        channels = np.asarray(decoded).shape[2:]
        if channels and reader.decoder.channels not in {1, *channels}:
            continue
        ends.append(extremes(decoded, reader.decoder.channels))
        areas.append(has_areas(decoded))
    if not ends:
        return None, areas
    return (float(min(lowest.min() for lowest, _ in ends)), float(max(highest.max() for _, highest in ends))), areas


def _sides(reader: ImageReader) -> tuple[list[int], list[BrokenImageError]]:
    """The shorter sides of some images, and why others could not be read."""
    sides, errors = [], []
    for index in evenly(len(reader.source), _SAMPLE):
        try:
            sides.append(min(reader.size(index)))
        except BrokenImageError as error:
            errors.append(error)
    return sides, errors


def suggest(
    data: DataLocation, *, gpu: str = "this", gpus: int = 1, hours: float = 24.0, assumptions: Assumptions | None = None
) -> Suggestion:
    """A recipe with batch, prototypes and length for these images on this hardware, each with its reason."""
    source = open_images(data)
    photos = photos_alone(data, source)
    images = look_at(source if photos is None else open_images(photos))
    if photos is not None:
        images = replace(images, warnings=(f"{masks_warning(source)}, as the command below does", *images.warnings))
    names = photos or ([str(data)] if isinstance(data, str | Path) else list(map(str, data)))
    images = replace(images, data=tuple(names))
    return suggest_run(images, find_gpu(gpu), gpus, hours=hours, assumptions=assumptions)


def suggest_run(
    images: Images, gpu: Gpu, gpus: int = 1, *, hours: float = 24.0, assumptions: Assumptions | None = None
) -> Suggestion:
    """The largest recipe for so many images that so many hours allow."""
    wanted = [rung for rung in _LADDER if rung.images <= images.count]
    if images.side < _TINY_SIDE or images.count < _FEW_PHOTOS:
        wanted = [_TINY if images.side < _TINY_SIDE else _OF_FEW]
    for rung in reversed(wanted):
        suggestion = _on(rung, images, gpu, gpus, assumptions)
        if suggestion is not None and suggestion.plan.effort.hours > hours:
            # Too few hours mean fewer passes over the images, and a smaller recipe before too few passes.
            steps = max(int(suggestion.config.optimization.steps * hours / suggestion.plan.effort.hours), 1)
            enough = steps * suggestion.plan.batch_size >= FEWEST_PASSES * images.count
            suggestion = _on(rung, images, gpu, gpus, assumptions, steps) if enough or rung is wanted[0] else None
        if suggestion is not None:
            return suggestion
    raise CapiError(
        f"no recipe fits the {gpu.memory / 1e9:.0f} GB of {gpu.title}, not even {wanted[0].recipe}: give another --gpu"
    )


def _on(
    rung: Rung, images: Images, gpu: Gpu, gpus: int, assumptions: Assumptions | None, steps: int | None = None
) -> Suggestion | None:
    """A rung for these images; None where no accumulation makes it fit."""
    recipe = Choice("recipe", rung.recipe, *_recipe_reason(rung, images))
    plain, choices = load_config(rung.recipe), list(_choices(rung, images, gpus, steps))
    # What the recipe has already is not said again.
    choices = [choice for choice in choices if reduce(getattr, choice.key.split("."), plain) != choice.value]
    config = _config(rung.recipe, choices)
    plan = plan_run(config, gpu, gpus, assumptions=assumptions)
    parts = plan.accumulation.micro_batches
    if parts is None:
        return None
    if parts > 1:
        reason = f"a GPU has room for {plan.largest_images} of its {plan.images_a_gpu} images at once, as planned"
        choices.append(Choice("optimization.micro_batches", parts, reason, "rule of thumb"))
        config = _config(rung.recipe, choices)
        plan = plan_run(config, gpu, gpus, assumptions=assumptions)
    return Suggestion(images, recipe, choices, config, plan)


def _config(recipe: str, choices: Iterable[Choice]) -> Config:
    return load_config(recipe, [f"{choice.key}={choice.value}" for choice in choices])


def _recipe_reason(rung: Rung, images: Images) -> tuple[str, Origin]:
    if rung is _TINY:
        return f"images of {images.side} px: its patches of 4 px still make a grid of 8 x 8", "rule of thumb"
    if rung is _OF_FEW:
        return f"learnt more from 675 photos than `small` ({_MEASURED})", "measured"
    if rung.recipe == "small":
        return f"learnt from 3409 and 3680 photos ({_MEASURED})", "measured"
    if rung.recipe.startswith("vitl"):
        data = "ImageNet-22k, 14 million images" if rung.recipe == "vitl16" else "LVD-142M"
        return f"what the paper trains on {data}", "paper"
    return (
        f"between the recipes that were measured and those of the paper, from {rung.images:,} images on",
        "rule of thumb",
    )


def _choices(rung: Rung, images: Images, gpus: int, steps: int | None) -> Iterator[Choice]:
    recipe = load_config(rung.recipe)
    # No larger than the images are, and whole patches.
    patch, recipe_side = recipe.model.patch_size, recipe.data.height_and_width[0]
    side = max(min(recipe_side, images.side) // patch * patch, 4 * patch)
    batch = rung.batch or recipe.optimization.batch_size
    # At least 16 batches in a pass, no image twice in one, and a number that so many GPUs divide.
    while batch > 1 and (batch > images.count or (batch > SMALLEST_BATCH and 16 * batch > images.count)):
        batch //= 2
    batch = -(-batch // gpus) * gpus
    if side != recipe_side:
        yield Choice("data.image_size", side, f"images of {images.side} px have no detail beyond that", "rule of thumb")
    yield from _channel_choices(recipe, images)
    yield Choice("optimization.batch_size", batch, *_batch_reason(batch))
    yield _prototypes(recipe, batch)
    length = steps or _length(rung, recipe, batch, images)
    yield Choice("optimization.steps", length, *_length_reason(rung, length, batch, images, steps is not None))
    yield _momentum(length)


def _channel_choices(recipe: Config, images: Images) -> Iterator[Choice]:
    """Channels that the images have, and their own mean and std where the recipe's are far off or too few."""
    if images.channels != recipe.model.channels:
        yield Choice("model.channels", images.channels, "what the images have", "measured")
        reason = f"one for each of {images.channels} channels"
    elif images.statistics and statistics_warning(images.statistics, statistics(recipe)):
        mean, std = (significant(values) for values in images.statistics)
        reason = f"the images have mean {mean} and std {std}, far from the recipe's"
    else:
        return
    yield Choice("data.mean", "auto", reason, "measured")
    yield Choice("data.std", "auto", "as for data.mean", "measured")


def _batch_reason(batch: int) -> tuple[str, Origin]:
    if batch < SMALLEST_BATCH:
        return "no more than there are images: 64 did better where there were enough", "rule of thumb"
    if batch <= 128:
        return "64 and 128 did about as well, 256 less (trials c1, c3, b7)", "measured"
    if batch == 16384:
        return "the paper's", "paper"
    return "so that a pass over the images has at least 16 batches", "rule of thumb"


def _prototypes(recipe: Config, batch: int) -> Choice:
    """As many prototypes as a batch can be balanced over."""
    least = min(PROTOTYPES_AN_IMAGE * batch, 16384)
    if batch == 16384:
        return Choice("clustering.prototypes", 16384, "the paper's", "paper")
    if batch <= 128:
        reason = f"{PROTOTYPES_AN_IMAGE} for each image of a batch; 2048 for 128 images stay vague (trial b3)"
        return Choice("clustering.prototypes", least, reason, "measured")
    reason = f"{PROTOTYPES_AN_IMAGE} for each image of a batch, as was measured with small ones"
    return Choice("clustering.prototypes", min(least, max(recipe.clustering.prototypes, 4096)), reason, "rule of thumb")


def _length(rung: Rung, recipe: Config, batch: int, images: Images) -> int:
    """A hundred passes; where the paper has trained the recipe, no more images than it did."""
    wanted = PASSES * images.count // batch
    if rung.recipe.startswith("vitl"):
        wanted = min(wanted, recipe.optimization.steps * recipe.optimization.batch_size // batch)
    return max(wanted, min(FEWEST_STEPS, MOST_PASSES * images.count // batch))


def _length_reason(rung: Rung, steps: int, batch: int, images: Images, shortened: bool) -> tuple[str, Origin]:
    passes = round(steps * batch / images.count)
    if rung.recipe.startswith("vitl") and passes < PASSES - 1 and not shortened:
        return f"the paper's, {counted(passes, 'pass')} over the images", "paper"
    if shortened:
        return f"what the hours allow: {counted(passes, 'pass')} over the images", "rule of thumb"
    if steps < FEWEST_STEPS:
        return (
            f"{counted(passes, 'pass')} over the images: more gained nothing once ({_MEASURED}, the demo)",
            "measured",
        )
    return (
        f"{counted(passes, 'pass')} over the images; measured were 97 and 123, the paper's vitl16 has about 115",
        "measured" if images.count < 20_000 else "paper",
    )


def _momentum(steps: int) -> Choice:
    """A teacher that follows within a small share of the run."""
    key, why = "optimization.teacher_momentum", "the teacher must follow within the run"
    if steps <= 2000:
        return Choice(
            key, 0.97, f"{why}: better than 0.99 and 0.996, as good as 0.93 (trials a3, a2, b4, c5)", "measured"
        )
    if steps <= 20_000:
        return Choice(key, 0.99, f"{why}: as in {_PETS}", "measured")
    if steps <= 200_000:
        return Choice(key, 0.996, "the paper's for 100 000 iterations", "paper")
    return Choice(key, 0.999, "the paper's for 500 000 iterations", "paper")
