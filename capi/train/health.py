"""Healthy ranges of what a run measures of itself, and what to do where it leaves them.

Every measure of `capi.method.health`, and the entropy of the targets, has a rule: the range in which healthy runs stay,
from which share of the run on it holds, and advice in plain words. A rule looks at the median of the last records, so
that one odd batch rings nothing. A target has the rules of what can be measured with it, and advice that names keys it
has. Where the ranges come from stands in docs/seeing.md.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple

# Records whose median is judged, and how many of them there must be.
_RECENT, _ENOUGH = 5, 3

State = Literal["well", "alarm", "unknown"]


@dataclass(frozen=True)
class RunFacts:
    """What the ranges depend on."""

    prototypes: int
    width: int
    total_steps: int
    target: str = "clustering"
    """The kind of the target, which decides what is measured."""
    settings: frozenset[str] = frozenset()
    """Which of `ADVISED` the run has already, and is not advised."""


class Advice(NamedTuple):
    """What to do about values below and above the healthy range.

    `settings` help against values above it, by the names and values of the config. Those that the run has are left out.
    """

    below: str = ""
    above: str = ""
    settings: tuple[str, ...] = ()

    def on_high(self, facts: RunFacts) -> str:
        missing = [setting for setting in self.settings if setting not in facts.settings]
        return f"{self.above} Use {' and '.join(missing)}." if missing else self.above


@dataclass(frozen=True)
class Rule:
    """The healthy range of a measure. `low` and `high` are in units of `unit`, and hold from a share of the run on."""

    key: str
    title: str
    meaning: str
    low: float | None = None
    high: float | None = None
    below: str = ""
    above: str = ""
    settings: tuple[str, ...] = ()
    start: float = 0.2
    unit: Callable[[RunFacts], float] = lambda _: 1.0
    targets: tuple[str, ...] | None = None
    """The kinds of target with which it is measured; None: with all of them."""
    otherwise: Mapping[str, Advice] = field(default_factory=dict)
    """Advice for kinds of target that lack the keys which `below` and `above` name."""

    def is_measured(self, facts: RunFacts) -> bool:
        """Whether runs with this target measure it at all."""
        return self.targets is None or facts.target in self.targets

    def limits(self, facts: RunFacts) -> tuple[float, float]:
        """The lowest and highest healthy value in this run."""
        unit = self.unit(facts)
        low = -math.inf if self.low is None else self.low * unit
        return low, math.inf if self.high is None else self.high * unit

    def advice(self, value: float, facts: RunFacts) -> str | None:
        """What to do about a value; None where it is well."""
        low, high = self.limits(facts)
        if not math.isfinite(value):
            return "The value is no number: the weights or the data are broken; go back to an earlier checkpoint."
        advice = self.otherwise.get(facts.target, Advice(self.below, self.above, self.settings))
        return advice.below if value < low else advice.on_high(facts) if value > high else None


# Targets that a clustering makes, that are distributions over prototypes, that are made from the teacher's tokens.
_CLUSTERED = ("clustering",)
_DISTRIBUTIONS = (*_CLUSTERED, "ema_head")
_OF_THE_TEACHER = (*_DISTRIBUTIONS, "features")
_PLACES = (
    "Features tell where a patch is instead of what it shows: positional collapse. Check that the images are not all "
    "aligned in the same way."
)
_ROLLED = "masking.roll=true"
_POSITIONWISE = ("clustering.sinkhorn=positionwise", _ROLLED)
ADVISED = _POSITIONWISE
_LESS_POSITION = Advice(above=_PLACES, settings=(_ROLLED,))

RULES = (
    Rule(
        "target_entropy",
        "Entropy of the targets",
        "How undecided the targets are about a patch, in nat; uniform ones would have the logarithm of the number of "
        "prototypes.",
        low=0.02,
        high=0.6,
        below="The targets are almost hard: a patch belongs to one prototype whatever it shows. Raise "
        "clustering.target_temperature, or lower clustering.learning_rate_multiplier.",
        above="The clustering cannot tell patches apart, and the student has nothing to learn. Train longer, lower "
        "clustering.target_temperature, or use fewer prototypes for so few images.",
        unit=lambda facts: math.log(facts.prototypes),
        targets=_DISTRIBUTIONS,
        otherwise={
            "ema_head": Advice(
                below="The targets are almost hard: a patch belongs to one prototype whatever it shows. Raise "
                "target.ema_head.temperature and target.ema_head.first_temperature.",
                above="The teacher's head cannot tell patches apart, and the student has nothing to learn. Train "
                "longer, lower target.ema_head.temperature, or use fewer with clustering.prototypes.",
            )
        },
    ),
    Rule(
        "prototype_perplexity",
        "Prototypes in use",
        "Share of the prototypes that patches are nearest to; 1 means that all are used alike.",
        low=0.25,
        below="Most patches crowd around few prototypes. Train longer, use fewer with clustering.prototypes, or raise "
        "clustering.learning_rate_multiplier.",
        targets=_CLUSTERED,
    ),
    Rule(
        "dead_prototypes",
        "Dead prototypes",
        "Share of the prototypes that hardly any patch is nearest to.",
        high=0.5,
        above="Prototypes are wasted. Train longer, use fewer with clustering.prototypes, or larger batches.",
        targets=_CLUSTERED,
    ),
    Rule(
        "position_share",
        "Position in the features",
        "Share of the variance of the teacher's features that position alone explains; 0 means none.",
        high=0.08,
        above=_PLACES,
        settings=_POSITIONWISE,
        targets=_OF_THE_TEACHER,
        otherwise={"ema_head": _LESS_POSITION, "features": _LESS_POSITION},
    ),
    Rule(
        "position_information",
        "Position in the prototypes",
        "Mutual information between a patch's position and its nearest prototype, in nat; 0 means none.",
        high=0.25,
        above="Prototypes stand for places instead of contents: positional collapse. Check that the images are not all "
        "aligned in the same way.",
        settings=_POSITIONWISE,
        targets=_CLUSTERED,
    ),
    Rule(
        "effective_rank",
        "Effective rank of the features",
        "How many directions the teacher's features vary along, of as many as the model is wide.",
        low=1.0,
        below="Features have collapsed to a few directions. Lower optimization.learning_rate, raise "
        "optimization.teacher_momentum, or raise optimization.warmup_share.",
        # Of a narrow model one or two directions are a collapse too.
        unit=lambda facts: max(0.025 * facts.width, 2.0),
        targets=_OF_THE_TEACHER,
    ),
    Rule(
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
    Rule(
        "student_gradient",
        "Gradient of the student",
        "Length of the student's gradient.",
        low=1e-6,
        high=50.0,
        below="No gradient reaches the student: the targets may be constant.",
        above="Gradients explode. Lower optimization.learning_rate or raise optimization.warmup_share.",
    ),
    Rule(
        "clustering_gradient",
        "Gradient of the prototypes",
        "Length of the gradient of the clustering loss.",
        low=1e-8,
        high=50.0,
        below="No gradient reaches the prototypes.",
        above="Gradients explode. Lower clustering.learning_rate_multiplier.",
        targets=_CLUSTERED,
    ),
)


@dataclass(frozen=True)
class Finding:
    """What a rule says of a run."""

    rule: Rule
    state: State
    value: float | None
    limits: tuple[float, float]
    advice: str = ""

    @property
    def sentence(self) -> str:
        """The finding in one line."""
        shown = "not measured yet" if self.value is None else f"{self.value:.3g}"
        return f"{self.rule.title}: {shown} (healthy: {spoken(self.limits)})" + (
            f". {self.advice}" if self.advice else ""
        )


def spoken(limits: tuple[float, float]) -> str:
    """A range in words."""
    low, high = limits
    if math.isinf(low) and math.isinf(high):
        return "any finite number"
    if math.isinf(low):
        return f"up to {high:.3g}"
    return f"{low:.3g} or more" if math.isinf(high) else f"{low:.3g} to {high:.3g}"


@dataclass
class Watchman:
    """Sees the records of a run in order and says what is well by the last of them."""

    facts: RunFacts
    recent: dict[str, deque[float]] = field(default_factory=dict)
    step: int = 0
    ringing: set[str] = field(default_factory=set)

    @property
    def rules(self) -> list[Rule]:
        """Those whose measures the run's target allows."""
        return [rule for rule in RULES if rule.is_measured(self.facts)]

    def see(self, record: Mapping[str, Any]) -> list[Finding]:
        """Take in a record; the alarms that it sets off and that did not ring before."""
        self.step, new = record["step"], []
        for rule in self.rules:
            if rule.key in record:
                self._note(rule.key, record[rule.key])
                finding = self._finding(rule)
                if finding.state != "alarm":
                    self.ringing.discard(rule.key)
                elif rule.key not in self.ringing:
                    self.ringing.add(rule.key)
                    new.append(finding)
        return new

    def _note(self, key: str, value: float | None) -> None:
        # JSON has no NaN: a null among numbers is one. A measure that is not known yet has no number before it.
        known = self.recent.setdefault(key, deque(maxlen=_RECENT))
        if value is not None or known:
            known.append(math.nan if value is None else float(value))

    def forget(self) -> None:
        """The run goes back: what was seen of it did not happen."""
        self.recent.clear()
        self.ringing.clear()

    def findings(self) -> list[Finding]:
        """One for every rule of the run, as things stand."""
        return [self._finding(rule) for rule in self.rules]

    def _finding(self, rule: Rule) -> Finding:
        values, limits = self.recent.get(rule.key, ()), rule.limits(self.facts)
        value = _typical(values)
        early = self.step < rule.start * self.facts.total_steps or len(values) < _ENOUGH
        if value is None or (early and math.isfinite(value)):
            return Finding(rule, "unknown", value, limits)
        advice = rule.advice(value, self.facts)
        return Finding(rule, "well" if advice is None else "alarm", value, limits, advice or "")


def _typical(values: Iterable[float]) -> float | None:
    """The median; no number where one of two recent values is none."""
    known = list(values)
    if not known:
        return None
    broken = [value for value in known if not math.isfinite(value)]
    return math.nan if 2 * len(broken) >= len(known) else median(value for value in known if math.isfinite(value))
