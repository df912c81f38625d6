"""What can be said of any run, whatever its recipe: losses, scores, speed, images and sizes.

A rule looks at the metrics and the config and makes remarks. What rings is wrong in any run; what is worth a look may
have a good reason.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from capi.config.schema import Config
from capi.data.statistics import statistics_warning
from capi.report.pages.data import Column, number
from capi.train.health import RULES
from capi.types import Statistics

State = Literal["alarm", "look", "well", "unknown"]
_LOSSES = {"student_loss": "Loss of the student", "clustering_loss": "Loss of the clustering"}
# Kinds of target that are the same from the first step to the last.
_FIXED = ("pixels", "frozen")
# Values whose median stands for a time of the run, how many a curve must have, and the share of the run before which
# curves are not judged.
_FEW, _ENOUGH, _EARLY = 5, 12, 0.2
# A loss that fell by less than this has not fallen; one that fell by less in the last half stands still.
_FALL, _STANDSTILL = 0.01, 0.005
# Scores of few images vary by chance: so many are judged together. All of them this far below the best have fallen.
_LAST_SCORES, _LOST = 3, 0.8
# Images of a batch for each prototype: with 1/16 the targets stay vague and less is learnt (docs/small-data.md).
_IMAGES_A_PROTOTYPE = 1 / 8
# Broken images that are worth a look.
_BROKEN = 0.01


@dataclass(frozen=True)
class Remark:
    """One thing that there is to say, and what to do about it."""

    state: State
    title: str
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Seen:
    """What rules look at; None where it is not known."""

    columns: Mapping[str, Column]
    config: Config | None = None
    images: int | None = None
    statistics: Statistics | None = None
    """Mean and std of a sample of the images, as the run measured them when it started."""
    device: str | None = None

    @property
    def clusters(self) -> bool:
        """Whether prototypes are learnt beside the student; without a config, whether their loss was logged."""
        return self.config.target.kind == "clustering" if self.config else "clustering_loss" in self.columns

    @property
    def targets_change(self) -> bool:
        """Whether the teacher has a part in the targets."""
        return self.config is None or self.config.target.kind not in _FIXED

    @property
    def is_float32(self) -> bool:
        """Whether the run has this precision already; `auto` is bfloat16 on a GPU alone."""
        precision = self.config.run.precision if self.config else "auto"
        return precision == "float32" or (precision == "auto" and self.device is not None and "cuda" not in self.device)

    @property
    def is_early(self) -> bool:
        """Whether it is too early to judge curves."""
        if self.config is None:
            return False
        return self.last_step < _EARLY * self.config.optimization.steps

    @property
    def last_step(self) -> int:
        return max((int(column.steps[-1]) for column in self.columns.values() if len(column.steps)), default=0)

    @property
    def scores(self) -> dict[str, Column]:
        """What evaluations found, where they found numbers."""
        found = {key: _finite(column) for key, column in self.columns.items() if "/" in key}
        return {key: column for key, column in found.items() if len(column.steps)}


def remarks(seen: Seen) -> list[Remark]:
    """Of all rules."""
    return [remark for rule in _RULES for remark in rule(seen)]


def on_numbers(seen: Seen) -> Iterable[Remark]:
    """Values that are no numbers, after there were some. Losses must be numbers from the first on."""
    judged = {rule.key for rule in RULES}
    precise = "" if seen.is_float32 else ", or use run.precision=float32"
    for key, column in seen.columns.items():
        lost = np.isnan(column.values)
        since_known = lost if key in _LOSSES else lost & (np.cumsum(~lost) > 0)
        if not since_known.any():
            continue
        # The rules of health look at the last values themselves.
        ends = bool(lost[-1]) and key not in judged
        text = f"{since_known.sum()} of {len(lost)} values are no numbers, the last at step {_at(column, since_known)}"
        yield Remark(
            "alarm" if ends else "look",
            f"Numbers of {key}",
            text,
            f"Go back to an earlier checkpoint; lower optimization.learning_rate{precise}.",
        )


def on_losses(seen: Seen) -> Iterable[Remark]:
    """Whether they fell at all, and still do."""
    for key, title in _LOSSES.items():
        if key == "clustering_loss" and not seen.clusters:
            continue
        column = _finite(seen.columns.get(key))
        if len(column.steps) < _ENOUGH or seen.is_early:
            yield Remark("unknown", title, "too few records to judge whether it falls")
            continue
        first, middle, last = _first(column.values), _middle(column.values), _last(column.values)
        if last > first * (1 - _FALL):
            yield Remark(
                "alarm",
                title,
                f"{number(first)} at first, {number(last)} now: it did not fall",
                "Nothing is learnt. Check that the images differ, and try another optimization.learning_rate.",
            )
        elif last > middle * (1 - _STANDSTILL):
            yield _standstill(title, f"{number(middle)} half-way, {number(last)} now: it stands still", seen)
        else:
            yield Remark("well", title, f"fell from {number(first)} to {number(last)}, also in the last half")


def _standstill(title: str, text: str, seen: Seen) -> Remark:
    """Targets may get harder while the teacher learns: a loss stands still then while the features get better."""
    risen = [key for key, column in seen.scores.items() if _still_rises(column)]
    if risen:
        reason = ": the targets get harder" if seen.targets_change else ""
        return Remark("well", title, f"{text}, while {risen[0]} still rises{reason}")
    harder = "The targets get harder as the teacher learns, so judge by scores if you can."
    ended = "The targets stay the same, so that it has learnt what it can at this rate, unless scores still rise."
    return Remark("look", title, text, harder if seen.targets_change else ended)


def on_scores(seen: Seen) -> Iterable[Remark]:
    """Where evaluations stand against the untrained encoder and against their best."""
    if not seen.scores:
        asked = seen.config is not None and bool(seen.config.evaluations)
        advice = "" if asked else "The key evaluations of the config asks for some."
        yield Remark("unknown", "Scores", "no evaluation was made", advice)
    for key, column in seen.scores.items():
        values, steps = column.values, column.steps
        text = f"{values[0]:.1%} at step {steps[0]}"
        if len(steps) <= _LAST_SCORES or seen.is_early:
            yield Remark("unknown", key, f"{text}, {values[-1]:.1%} now: too few scores to judge")
            continue
        text += f", {values[-1]:.1%} now, {values.max():.1%} at best (step {steps[values.argmax()]})"
        if np.median(values[-_LAST_SCORES:]) < values[0]:
            yield Remark("alarm", key, text, "The features got worse than at the start: see what else rings.")
        elif values[-_LAST_SCORES:].max() < _LOST * values.max():
            yield Remark(
                "look", key, text, "The score fell from its best. With few images to score that may be chance."
            )
        else:
            yield Remark("well", key, text)


def on_speed(seen: Seen) -> Iterable[Remark]:
    """Whether the last steps took much longer than usual."""
    speeds = _steps_per_second(seen.columns.get("seconds"))
    if len(speeds) < _ENOUGH:
        return
    batch, unit = (seen.config.optimization.batch_size, "images/s") if seen.config else (1, "steps/s")
    usual, now = (f"{median * batch:.3g}" for median in (np.median(speeds), _last(speeds)))
    text = f"{now} {unit} now, {usual} as a rule"
    if _last(speeds) < np.median(speeds) / 2:
        advice = "Look for other work on the machine, a slow disk, or too few data.workers."
        yield Remark("look", "Speed", f"{text}: it fell by more than half", advice)
    else:
        yield Remark("well", "Speed", text)


def on_images(seen: Seen) -> Iterable[Remark]:
    """How many cannot be read."""
    broken = _finite(seen.columns.get("broken_images")).last
    if broken is None or not seen.images:
        return
    share, limit = broken / seen.images, seen.config.data.broken_limit if seen.config else 1.0
    text = f"{broken:.0f} of {seen.images} were found to be unreadable ({share:.1%})"
    advice = f"They are named in the log. Repair them: the run stops above data.broken_limit = {limit:g}."
    state: State = "alarm" if share > limit else "look" if share > _BROKEN else "well"
    yield Remark(state, "Images", text, "" if state == "well" else advice)


def on_range(seen: Seen) -> Iterable[Remark]:
    """Whether the images are near what they are normalized with; far from it they look constant to the model."""
    if seen.statistics is None or seen.config is None:
        return
    mean, std = seen.config.data.mean, seen.config.data.std
    if isinstance(mean, str) or isinstance(std, str) or len(mean) != len(seen.statistics.mean):
        return
    warning = statistics_warning(seen.statistics, Statistics(mean, std))
    if warning is None:
        yield Remark("well", "Range of the images", "mean and std are near data.mean and data.std")
        return
    text, _, advice = warning.rpartition(": use ")
    yield Remark(
        "look",
        "Range of the images",
        f"{text}; inputs that are nearly constant, or far from 0, make a run collapse",
        f"Start another run with {advice}.",
    )


def on_sizes(seen: Seen) -> Iterable[Remark]:
    """Whether batch and data are large enough for so many prototypes."""
    if seen.config is None or not seen.clusters:
        return
    batch, prototypes = seen.config.optimization.batch_size, seen.config.clustering.prototypes
    if seen.config.clustering.sinkhorn == "positionwise":
        text = f"{batch} images are balanced over {prototypes} prototypes at each position"
        small = batch < _IMAGES_A_PROTOTYPE * prototypes
    else:
        patches = batch * seen.config.grid[0] * seen.config.grid[1]
        text = f"{patches} patches are balanced over {prototypes} prototypes"
        small = patches < prototypes
    advice = "Use fewer with clustering.prototypes, or a larger optimization.batch_size." if small else ""
    yield Remark("look" if small else "well", "Batch", text + (": too few" if small else ""), advice)
    if seen.images:
        few = seen.images < prototypes
        text = f"{seen.images} images for {prototypes} prototypes, {seen.images / prototypes:.3g} for each"
        yield Remark(
            "look" if few else "well",
            "Data",
            text,
            "There are more prototypes than images: use fewer with clustering.prototypes." if few else "",
        )


_RULES: tuple[Callable[[Seen], Iterable[Remark]], ...] = (
    on_numbers,
    on_losses,
    on_scores,
    on_speed,
    on_images,
    on_sizes,
)


def _finite(column: Column | None) -> Column:
    if column is None:
        return Column(np.empty(0, np.int64), np.empty(0))
    known = np.isfinite(column.values)
    return Column(column.steps[known], column.values[known])


def _first(values: npt.NDArray[np.float64]) -> float:
    return float(np.median(values[: min(_FEW, max(len(values) // 10, 1))]))


def _middle(values: npt.NDArray[np.float64]) -> float:
    start = (len(values) - _FEW) // 2
    return float(np.median(values[start : start + _FEW]))


def _last(values: npt.NDArray[np.float64]) -> float:
    return float(np.median(values[-_FEW:]))


def _still_rises(column: Column) -> bool:
    """Whether the last score is the best one, and above those of the first half."""
    values = column.values
    return bool(values[-1] >= values.max() and values[-1] > values[(len(values) - 1) // 2])


def _steps_per_second(seconds: Column | None) -> npt.NDArray[np.float64]:
    """Between neighbouring records; the clock starts anew with each start of the run."""
    clock = _finite(seconds)
    steps, passed = np.diff(clock.steps), np.diff(clock.values)
    forward = (steps > 0) & (passed > 0)
    return np.asarray(steps[forward] / passed[forward], dtype=np.float64)


def _at(column: Column, where: npt.NDArray[np.bool_]) -> int:
    return int(column.steps[where][-1])
