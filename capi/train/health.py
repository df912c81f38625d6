"""What a run measures of itself, what is healthy, and what to do where it is not: one table, one set of rules.

`METRICS` is the one table: name, title, unit, meaning, direction and healthy range of every metric. The progress bar,
TensorBoard, the alarms of a run, the doctor, the report and the docs read it (`python scripts/metrics_table.py`).

A `Watchman` sees the records of a run in order and judges each metric: a range where the table has one, a loss by its
fall, a score by its start, every value by being finite. It gives the warnings while a run trains; doctor and report
show the findings of the same watchman, so they cannot disagree. A range is compared with the median of the last
records, so that one odd batch raises no alarm. Where the ranges come from stands in docs/guides/seeing.md.
"""

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal

import numpy as np

from capi.method.clustering import OnlineClustering
from capi.method.targets import LossLabel, TargetFacts

FindingState = Literal["alarm", "look", "well", "unknown"]
"""Wrong in any run; may have a good reason; well; not known yet."""
# Records whose median is compared with a range, and how many of them there must be.
_RECENT, _ENOUGH = 5, 3
# Values whose median stands for a time of the run, how many a loss must have, and the share of the run before which
# losses and scores are not judged.
_FEW, _ENOUGH_LOSSES, _EARLY = 5, 12, 0.2
# A loss that fell by less than this has not fallen; one that fell by less in the last half has stopped.
_FALL, _STANDSTILL = 0.01, 0.005
# Scores of few images vary by chance: so many are judged together. All of them this far below the best have fallen.
_LAST_SCORES, _LOST = 3, 0.8
# Broken images that are worth a look, and a wait for data that is.
_BROKEN, _WAIT = 0.01, 0.2
_CLOCK = "seconds"


@dataclass(frozen=True)
class RunFacts:
    """What the judgement of a run depends on, apart from its metrics."""

    prototypes: int
    width: int
    total_steps: int
    target: TargetFacts = field(default_factory=OnlineClustering.facts)
    settings: frozenset[str] = frozenset()
    """Which of `ADVISED` the run has already, and is not advised."""
    batch_size: int = 1
    images: int | None = None
    broken_limit: float = 1.0
    is_evaluated: bool = False


@dataclass(frozen=True)
class Metric:
    """A row of the table. `low` and `high` are in units of `scale`, and hold from a share of the run on."""

    key: str
    title: str
    meaning: str
    unit: str = ""
    better: Literal["", "lower", "higher"] = ""
    low: float | None = None
    high: float | None = None
    below: str = ""
    above: str = ""
    settings: tuple[str, ...] = ()
    start: float = 0.2
    scale: Callable[[RunFacts], float] = lambda _: 1.0
    range_in_words: str = ""
    """Where the range depends on the run."""
    short: str = ""
    """Its name in the progress bar, where it is shown there."""
    digits: int = 2
    is_loss: bool = False
    plotted: bool = False
    """Whether it is in the picture of curves that a run ends with."""
    compared: bool = False
    """Whether it is a column of the table of several runs."""

    @property
    def has_range(self) -> bool:
        return self.low is not None or self.high is not None

    @property
    def description(self) -> str:
        """Meaning, unit and direction in one line."""
        unit = f" In {self.unit}." if self.unit and self.unit not in self.meaning else ""
        return self.meaning + unit + (f" {self.better.capitalize()} is better." if self.better else "")

    def is_measured(self, facts: RunFacts) -> bool:
        """Whether runs with this target measure it at all; a loss comes with its gradient."""
        key = self.key.replace("_loss", "_gradient") if self.is_loss else self.key
        return key in facts.target.measures

    def limits(self, facts: RunFacts) -> tuple[float, float]:
        """The lowest and highest healthy value in this run."""
        scale = self.scale(facts)
        low = -math.inf if self.low is None else self.low * scale
        return low, math.inf if self.high is None else self.high * scale

    def healthy(self, facts: RunFacts | None = None) -> str:
        """The range in words."""
        if facts is None:
            low = -math.inf if self.low is None else self.low
            return self.range_in_words or range_text((low, math.inf if self.high is None else self.high))
        return range_text(self.limits(facts))

    def advice(self, value: float, facts: RunFacts) -> str | None:
        """What to do about a value; None where it is well."""
        low, high = self.limits(facts)
        if not math.isfinite(value):
            return "The value is NaN: the weights or the data are broken; go back to an earlier checkpoint."
        below, above = facts.target.advice.get(self.key, ("", ""))
        if value < low:
            return f"{self.below} {below}".strip()
        return f"{self.above} {above} {self._settings_missing(facts)}".strip() if value > high else None

    def _settings_missing(self, facts: RunFacts) -> str:
        """The settings that help and that the run has not, of the sections that its target reads."""
        sections = ("masking", *facts.target.reads)
        missing = [
            setting
            for setting in self.settings
            if setting not in facts.settings and setting.partition(".")[0] in sections
        ]
        return f"Use {' and '.join(missing)}." if missing else ""


_POSITIONWISE = ("clustering.sinkhorn=positionwise", "masking.roll=true")
ADVISED = (*_POSITIONWISE, "run.precision=float32")

METRICS = (
    Metric(
        "student_loss",
        "Loss of the student",
        "How far predictions are from the targets.",
        better="lower",
        short="loss",
        digits=3,
        is_loss=True,
        plotted=True,
        compared=True,
    ),
    Metric(
        "clustering_loss",
        "Loss of the clustering",
        "Cross-entropy to the balanced assignments.",
        unit="nat",
        better="lower",
        short="clustering",
        digits=3,
        is_loss=True,
        plotted=True,
        compared=True,
    ),
    Metric(
        "target_entropy",
        "Entropy of the targets",
        "How undecided the targets are about a patch; uniform ones would have the logarithm of the number of "
        "prototypes.",
        unit="nat",
        low=0.02,
        high=0.6,
        below="The targets are almost hard: a patch belongs to one prototype whatever it shows.",
        above="The targets cannot tell patches apart, and the student has nothing to learn.",
        scale=lambda facts: math.log(facts.prototypes),
        range_in_words="2 to 60 % of ln k",
        short="entropy",
        plotted=True,
        compared=True,
    ),
    Metric(
        "prototype_perplexity",
        "Prototypes in use",
        "Share of the prototypes that patches are nearest to; 1 means that all are used alike.",
        better="higher",
        low=0.25,
        below="Most patches crowd around few prototypes. Train longer, use fewer with clustering.prototypes, or raise "
        "clustering.learning_rate_multiplier.",
    ),
    Metric(
        "dead_prototypes",
        "Dead prototypes",
        "Share of the prototypes that get less than a twentieth of an even share of the patches.",
        better="lower",
        high=0.5,
        above="Prototypes are wasted. Train longer, use fewer with clustering.prototypes, or larger batches.",
    ),
    Metric(
        "position_share",
        "Position in the features",
        "Share of the variance of the teacher's features that position alone explains; 0 means none.",
        better="lower",
        high=0.08,
        above="Features tell where a patch is instead of what it shows: positional collapse. Check that the images are "
        "not all aligned in the same way.",
        settings=_POSITIONWISE,
    ),
    Metric(
        "position_information",
        "Position in the prototypes",
        "Mutual information between a patch's position and its nearest prototype; 0 means none.",
        unit="nat",
        better="lower",
        high=0.25,
        above="Prototypes stand for places instead of contents: positional collapse. Check that the images are not all "
        "aligned in the same way.",
        settings=_POSITIONWISE,
    ),
    Metric(
        "effective_rank",
        "Effective rank of the features",
        "How many directions the teacher's features vary along, of as many as the model is wide.",
        unit="directions",
        low=1.0,
        below="Features have collapsed to a few directions. Lower optimization.learning_rate, raise "
        "optimization.teacher_momentum, or raise optimization.warmup_share.",
        # Of a narrow model one or two directions are a collapse too.
        scale=lambda facts: max(0.025 * facts.width, 2.0),
        range_in_words="2.5 % of the width or more, at least 2",
    ),
    Metric(
        "teacher_gap",
        "Gap between student and teacher",
        "Distance between the weights of student and teacher, relative to their size.",
        low=1e-6,
        high=0.5,
        below="The teacher is the student, or nothing is learnt. Check optimization.learning_rate and "
        "optimization.teacher_momentum.",
        above="The teacher does not keep up with the student. Lower optimization.teacher_momentum, or the "
        "learning rate.",
    ),
    Metric(
        "student_gradient",
        "Gradient of the student",
        "Norm of the student's gradient.",
        low=1e-6,
        high=50.0,
        below="No gradient reaches the student: the targets may be constant.",
        above="Gradients explode. Lower optimization.learning_rate or raise optimization.warmup_share.",
    ),
    Metric(
        "clustering_gradient",
        "Gradient of the prototypes",
        "Norm of the gradient of the clustering loss.",
        low=1e-8,
        high=50.0,
        below="No gradient reaches the prototypes.",
        above="Gradients explode. Lower clustering.learning_rate_multiplier.",
    ),
    Metric(
        "prototype_use",
        "Balance of the assignments",
        "How evenly the targets use the prototypes; 1 is even.",
        plotted=True,
    ),
    Metric(
        "target_deviation",
        "Spread of the targets",
        "Standard deviation of a channel of the targets, on average; constant targets have 0.",
        short="spread",
    ),
    Metric(
        "images_per_second",
        "Speed",
        "Training speed since the run was last started.",
        unit="images/s",
        better="higher",
        short="images/s",
        digits=0,
        compared=True,
    ),
    Metric(
        "mfu",
        "Share of peak",
        "FLOP that the steps since the last record required, over what the devices' data sheets promise (MFU); without "
        "evaluations. Not measured where the peak is not known.",
        better="higher",
        short="mfu",
    ),
    Metric(
        "data_wait",
        "Wait for data",
        "Share of the time since the last record that the device had nothing to compute because images were not there.",
        better="lower",
        short="wait",
    ),
    Metric(
        "peak_memory",
        "Peak of memory",
        "The most memory that was in use so far: of the device, or of the main process where the CPU computes.",
        unit="GiB",
        better="lower",
        short="GiB",
        digits=1,
    ),
    Metric("learning_rate", "Learning rate", "Of the student, at each step.", plotted=True),
    Metric("teacher_momentum", "Momentum of the teacher", "How slowly the teacher follows the student; 1: not at all."),
    Metric(
        "broken_images",
        "Broken images",
        "Images that could not be read so far, and were replaced by others.",
        unit="images",
        better="lower",
        digits=0,
    ),
    Metric("seconds", "Clock", "Time since the run was last started.", unit="s"),
    Metric("evaluation_seconds", "Time of evaluations", "Part of `seconds` that evaluations took.", unit="s"),
)
TABLE = {metric.key: metric for metric in METRICS}
RULES = tuple(metric for metric in METRICS if metric.has_range)


def is_score(key: str) -> bool:
    """Whether a metric is what an evaluation scored, such as folder/knn/teacher."""
    return "/" in key


def metric_of(key: str, loss: LossLabel | None = None) -> Metric:
    """The row of a metric; scores and metrics of other versions get one of their own. `loss` names the student's."""
    if key == "student_loss" and loss is not None:
        return replace(TABLE[key], meaning=loss.meaning, unit=loss.unit)
    if is_score(key):
        return Metric(key, key, "Score of the frozen features.", better="higher")
    return TABLE.get(key, Metric(key, key, "A metric that this version of capi has no words for."))


def bar_parts(values: Mapping[str, float]) -> list[str]:
    """The numbers of the progress bar, the speed first."""
    shown = [metric for metric in METRICS if metric.short and metric.key in values]
    speed = [f"{values[each.key]:.{each.digits}f} {each.short}" for each in shown if each.key == "images_per_second"]
    others = [f"{each.short} {values[each.key]:.{each.digits}f}" for each in shown if each.key != "images_per_second"]
    return [*speed, *others]


def number_text(value: float | None) -> str:
    """A value for people, with the digits that matter."""
    if value is None:
        return "not measured"
    if not math.isfinite(value):
        return "NaN"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def range_text(limits: tuple[float, float]) -> str:
    """A range in words."""
    low, high = limits
    if math.isinf(low) and math.isinf(high):
        return "any finite number"
    if math.isinf(low):
        return f"up to {high:.3g}"
    return f"{low:.3g} or more" if math.isinf(high) else f"{low:.3g} to {high:.3g}"


@dataclass(frozen=True)
class Finding:
    """What there is to say of one thing, and what to do about it."""

    state: FindingState
    title: str
    text: str
    advice: str = ""
    key: str = ""
    """The metric, where it is one."""
    value: float | None = None
    limits: tuple[float, float] | None = None

    @property
    def sentence(self) -> str:
        """The finding in one line."""
        return f"{self.title}: {self.text}" + (f". {self.advice}" if self.advice else "")


@dataclass
class Series:
    """One metric so far: its finite values with their steps, the last records, and how many values were NaN."""

    steps: "array[int]" = field(default_factory=lambda: array("q"))
    values: "array[float]" = field(default_factory=lambda: array("d"))
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    missing: int = 0
    last_missing: int = 0

    def add(self, step: int, value: float, *, from_the_first: bool) -> None:
        """JSON has no NaN: a null is one. Before the first number it means that nothing is known yet."""
        if math.isfinite(value):
            self.steps.append(step)
            self.values.append(value)
        elif self.recent or from_the_first:
            self.missing, self.last_missing = self.missing + 1, step
        else:
            return
        self.recent.append(value)

    @property
    def is_nan(self) -> bool:
        """Whether the last value is NaN, after there were numbers."""
        return bool(self.recent) and not math.isfinite(self.recent[-1])

    @property
    def typical(self) -> float | None:
        """The median of the last records; NaN where half of them are."""
        finite = [value for value in self.recent if math.isfinite(value)]
        if not self.recent:
            return None
        return math.nan if 2 * len(finite) <= len(self.recent) else median(finite)


class Watchman:
    """Sees the records of a run in order and says what is well by the last of them."""

    def __init__(self, facts: RunFacts | None) -> None:
        """Without facts, of a run whose config cannot be read, ranges are not judged."""
        self.facts = facts
        self._limits = {rule.key: rule.limits(facts) for rule in self.rules} if facts else {}
        self._watched = {rule.key for rule in self.rules} | {metric.key for metric in METRICS if metric.is_loss}
        self._watched.add("broken_images")
        self.forget()

    def forget(self) -> None:
        """The run goes back: what was seen of it did not happen."""
        self.series: dict[str, Series] = {}
        self.step = 0
        self.raised: set[str] = set()
        self.past: list[tuple[int, Finding]] = []

    @property
    def rules(self) -> list[Metric]:
        """The ranges that hold for the run's target."""
        return [rule for rule in RULES if self.facts and rule.is_measured(self.facts)]

    def see(self, record: Mapping[str, Any]) -> list[Finding]:
        """Take in a record; the alarms that it raises and that were not raised before."""
        self.step, new = record["step"], []
        for key, value in record.items():
            if key == "step" or not (value is None or isinstance(value, int | float)):
                continue
            is_loss = key in TABLE and TABLE[key].is_loss
            number = math.nan if value is None else float(value)
            series = self.series.get(key) or self.series.setdefault(key, Series())
            series.add(self.step, number, from_the_first=is_loss)
            low, high = self._limits.get(key, (math.inf, -math.inf))
            if series.typical is not None and low <= series.typical <= high:
                # There may be many records, and words for each would take most of the time.
                self.raised.discard(key)
                continue
            # Of what has no rule NaN alone is an alarm; the clock has one for all of its values, and raises none.
            finding = self._judged(key) if key in self._watched or is_score(key) or math.isnan(number) else None
            if finding is None or finding.state != "alarm":
                self.raised.discard(key)
            elif key not in self.raised:
                self.raised.add(key)
                new.append(finding)
        self.past += [(self.step, finding) for finding in new]
        return new

    def findings(self) -> list[Finding]:
        """One for each metric that can be judged, as things stand: ranges, losses, scores, then the others."""
        # The losses that a run has; without a config those that were logged.
        logged = {"student_loss", *self.series}
        losses = [metric for metric in METRICS if metric.is_loss]
        judged = [rule.key for rule in self.rules]
        judged += [loss.key for loss in losses if (loss.is_measured(self.facts) if self.facts else loss.key in logged)]
        judged += [key for key in self.series if is_score(key) and key not in judged]
        if not any(map(is_score, judged)):
            judged.append("scores")
        judged += [key for key in self.series if key not in judged]
        findings = [self._judged(key) for key in judged]
        return [finding for finding in findings if finding is not None]

    @property
    def _is_early(self) -> bool:
        return self.facts is not None and self.step < _EARLY * self.facts.total_steps

    def _judged(self, key: str) -> Finding | None:
        """The finding of a metric; None where there is nothing to say."""
        series, metric = self.series.get(key, Series()), metric_of(key)
        if self.facts and metric.has_range and metric.is_measured(self.facts):
            return _noting_nan(self._of_range(metric, series, self.facts), series)
        if series.is_nan:
            return Finding("alarm", metric.title, _nan_text(series), self._on_nan(), key, math.nan)
        if metric.is_loss:
            finding: Finding | None = self._of_loss(metric, series)
        elif is_score(key) or key == "scores":
            finding = self._of_score(key, series)
        else:
            others = {_CLOCK: self._of_speed, "broken_images": self._of_images, "data_wait": self._of_wait}
            finding = others.get(key, lambda _: None)(series)
        if finding is None and series.missing:
            return Finding("look", metric.title, _nan_text(series), self._on_nan(), key)
        return finding and _noting_nan(finding, series)

    def _on_nan(self) -> str:
        precise = self.facts is None or "run.precision=float32" not in self.facts.settings
        other = ", or use run.precision=float32" if precise else ""
        return f"Go back to an earlier checkpoint; lower optimization.learning_rate{other}."

    def _of_range(self, rule: Metric, series: Series, facts: RunFacts) -> Finding:
        """Whether the median of the last records lies in the healthy range."""
        limits, value = rule.limits(facts), series.typical
        healthy = f"(healthy: {range_text(limits)})"
        if value is None:
            return Finding("unknown", rule.title, f"not measured yet {healthy}", "", rule.key, None, limits)
        text = f"{number_text(value)} {healthy}"
        early = self.step < rule.start * facts.total_steps or len(series.recent) < _ENOUGH
        if early and math.isfinite(value):
            return Finding("unknown", rule.title, f"{text}: too early to judge", "", rule.key, value, limits)
        advice = rule.advice(value, facts)
        return Finding("alarm" if advice else "well", rule.title, text, advice or "", rule.key, value, limits)

    def _of_loss(self, metric: Metric, series: Series) -> Finding:
        """Whether it fell at all, and still does."""
        values = series.values
        about: dict[str, Any] = {"title": metric.title, "key": metric.key, "value": values[-1] if values else None}
        if len(values) < _ENOUGH_LOSSES or self._is_early:
            return Finding("unknown", text="too few records to judge whether it falls", **about)
        half = (len(values) - _FEW) // 2
        first = median(values[: min(_FEW, max(len(values) // 10, 1))])
        middle, last = median(values[half : half + _FEW]), median(values[-_FEW:])
        now = f"{number_text(last)} now"
        if last > first * (1 - _FALL):
            text = f"{number_text(first)} at first, {now}: it did not fall"
            advice = "Nothing is learnt. Check that the images differ, and try another optimization.learning_rate."
            return Finding("alarm", text=text, advice=advice, **about)
        if last <= middle * (1 - _STANDSTILL):
            text = f"fell from {number_text(first)} to {number_text(last)}, also in the last half"
            return Finding("well", text=text, **about)
        text = f"{number_text(middle)} half-way, {now}: no further fall"
        changes = self.facts is None or self.facts.target.reads_teacher
        # Targets may get harder while the teacher learns: the loss stays then while the features get better.
        rising = [key for key, scores in self.series.items() if is_score(key) and _still_rises(scores.values)]
        if rising:
            reason = ": the targets get harder" if changes else ""
            return Finding("well", text=f"{text}, while {rising[0]} still rises{reason}", **about)
        harder = "The targets get harder as the teacher learns, so judge by scores if you can."
        ended = "The targets stay the same, so it has learnt what it can at this rate, unless scores still rise."
        return Finding("look", text=text, advice=harder if changes else ended, **about)

    def _of_score(self, key: str, series: Series) -> Finding:
        """Where an evaluation stands against the untrained encoder and against its best."""
        values, steps = series.values, series.steps
        if not values:
            asked = self.facts is not None and self.facts.is_evaluated
            advice = "" if asked else "To have scores during a run, list benchmarks under `evaluations` in its config."
            return Finding("unknown", "Scores", "no evaluation was made", advice)
        about: dict[str, Any] = {"title": key, "key": key, "value": values[-1]}
        text, best = f"{values[0]:.1%} at step {steps[0]}", max(values)
        if len(steps) <= _LAST_SCORES or self._is_early:
            return Finding("unknown", text=f"{text}, {values[-1]:.1%} now: too few scores to judge", **about)
        text += f", {values[-1]:.1%} now, {best:.1%} at best (step {steps[values.index(best)]})"
        if median(values[-_LAST_SCORES:]) < values[0]:
            advice = "The features got worse than at the start: see what else is wrong."
            return Finding("alarm", text=text, advice=advice, **about)
        if max(values[-_LAST_SCORES:]) < _LOST * best:
            advice = "The score fell from its best. With few images to score that may be chance."
            return Finding("look", text=text, advice=advice, **about)
        return Finding("well", text=text, **about)

    def _of_speed(self, series: Series) -> Finding | None:
        """Whether the last steps took much longer than usual; the clock starts again with each start of the run."""
        steps, seconds = np.diff(np.array(series.steps)), np.diff(np.array(series.values))
        forward = (steps > 0) & (seconds > 0)
        speeds = steps[forward] / seconds[forward]
        if len(speeds) < _ENOUGH_LOSSES:
            return None
        batch, unit = (self.facts.batch_size, "images/s") if self.facts else (1, "steps/s")
        usual, now = float(np.median(speeds)), float(np.median(speeds[-_FEW:]))
        text = f"{now * batch:.3g} {unit} now, {usual * batch:.3g} as a rule"
        if now >= usual / 2:
            return Finding("well", "Speed", text, "", _CLOCK, now * batch)
        advice = "Look for other work on the machine, a slow disk, or too few data.workers."
        return Finding("look", "Speed", f"{text}: it fell by more than half", advice, _CLOCK, now * batch)

    def _of_wait(self, series: Series) -> Finding | None:
        """Whether the loader starves the device."""
        share = series.typical
        if share is None or len(series.recent) < _ENOUGH:
            return None
        text = f"{share:.0%} of the time the device had nothing to compute because images were not there"
        if share <= _WAIT:
            return Finding("well", TABLE["data_wait"].title, text, "", "data_wait", share)
        advice = (
            "The loader starves the device. Raise data.workers, or give the run more cores; raise data.cache_mib; pack "
            "the files with `capi shards`; or store smaller images. `capi data check` measures how fast they are read."
        )
        return Finding("look", TABLE["data_wait"].title, text, advice, "data_wait", share)

    def _of_images(self, series: Series) -> Finding | None:
        """How many images cannot be read."""
        if not series.values or not self.facts or not self.facts.images:
            return None
        broken, limit = series.values[-1], self.facts.broken_limit
        share = broken / self.facts.images
        text = f"{broken:.0f} of {self.facts.images} were found to be unreadable ({share:.1%})"
        advice = f"They are named in the log. Repair them: the run stops above data.broken_limit = {limit:g}."
        state: FindingState = "alarm" if share > limit else "look" if share > _BROKEN else "well"
        return Finding(state, "Images", text, "" if state == "well" else advice, "broken_images", broken)


def _nan_text(series: Series) -> str:
    total = len(series.values) + series.missing
    return f"{series.missing} of {total} values are NaN, the last at step {series.last_missing}"


def _noting_nan(finding: Finding, series: Series) -> Finding:
    """Values that were NaN on the way are worth a look even if they are over."""
    if not series.missing or finding.state not in {"well", "unknown"}:
        return finding
    return replace(finding, state="look", text=f"{finding.text}; {_nan_text(series)}")


def _still_rises(values: Sequence[float]) -> bool:
    """Whether the last score is the best one, and above those of the first half."""
    return len(values) > 0 and values[-1] >= max(values) and values[-1] > values[(len(values) - 1) // 2]


def is_too_short(findings: Iterable[Finding]) -> bool:
    """Whether a run has too few records, or steps, to say of any of its losses whether it falls."""
    states = {finding.state for finding in findings if finding.key in TABLE and TABLE[finding.key].is_loss}
    return states == {"unknown"}


def verdict(findings: Sequence[Finding]) -> str:
    """What is well with a run, in one line."""
    states = [finding.state for finding in findings]
    alarms, look = states.count("alarm"), states.count("look")
    counted = "1 thing" if look == 1 else f"{look} things"
    if alarms:
        return f"{alarms} thing{'s' * (alarms != 1)} not well, {look} worth a look."
    if "well" not in states:
        return "Nothing is known yet."
    if is_too_short(findings):
        return "Too short to judge whether the loss falls" + (f"; {counted} worth a look." if look else ".")
    return f"No alarm; {counted} worth a look." if look else "All is well."
