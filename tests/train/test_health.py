"""Each range raises an alarm where it should and nowhere else; so do runs made to collapse, and a healthy one none."""

import math
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from capi.config.files import parse_config
from capi.config.schema import Config
from capi.method.health import HealthMonitor
from capi.method.masking import PatchGrid
from capi.runtime.randomness import sample_keys
from capi.train.build import build_learner, mask_sampler
from capi.train.health import METRICS, RULES, Finding, Metric, RunFacts, Watchman, bar_parts, range_text, verdict
from capi.train.run import run_facts
from capi.train.step import train_step
from capi.types import MaskedBatch
from tests.variants import TARGETS, learner_of, varied

FACTS = RunFacts(prototypes=256, width=128, total_steps=1000)
LATE = 900
EVERY_TARGET: dict[str, list[str]] = {"clustering": [], **TARGETS}


def limits(rule: Metric) -> list[tuple[str, float]]:
    named = {"low": rule.limits(FACTS)[0], "high": rule.limits(FACTS)[1]}
    return [(name, value) for name, value in named.items() if math.isfinite(value)]


CASES = [(rule, side, limit) for rule in RULES for side, limit in limits(rule)]
NAMES = [f"{rule.key}-{side}" for rule, side, _ in CASES]


def after(rule: Metric, *values: float | None, step: int = LATE) -> Finding:
    """What is said of a rule after records with these values, the last of them at a step."""
    watchman = Watchman(FACTS)
    for number, value in enumerate(values):
        watchman.see({"step": step - len(values) + number + 1, rule.key: value})
    return next(finding for finding in watchman.findings() if finding.key == rule.key)


def healthy(rule: Metric) -> float:
    low, high = rule.limits(FACTS)
    return 2 * low if math.isinf(high) else high / 2


@pytest.mark.parametrize(("rule", "side", "limit"), CASES, ids=NAMES)
def test__a_value_beyond_a_limit_is_an_alarm_and_one_inside_is_not(rule: Metric, side: str, limit: float) -> None:
    beyond, inside = (limit * 0.99, limit * 1.01) if side == "low" else (limit * 1.01, limit * 0.99)
    raised = after(rule, beyond, beyond, beyond)
    assert (raised.state, raised.value) == ("alarm", beyond)
    assert raised.advice.startswith(rule.below if side == "low" else rule.above)
    assert all(setting in raised.advice for setting in (rule.settings if side == "high" else ()))
    assert len(raised.advice) > 20
    for value in (inside, limit, healthy(rule)):
        well = after(rule, value, value, value)
        assert (well.state, well.advice) == ("well", "")


def test__every_rule_has_a_limit_and_words() -> None:
    assert {rule.key for rule, _, _ in CASES} == {rule.key for rule in RULES}
    assert len({rule.key for rule in RULES}) == len(RULES)
    assert all(rule.title and rule.meaning.endswith(".") for rule in RULES)


@pytest.mark.parametrize("name", EVERY_TARGET)
def test__the_rules_of_a_run_are_those_of_what_it_measures(small_config: Config, name: str) -> None:
    config, monitor = varied(small_config, *EVERY_TARGET[name]), HealthMonitor()
    batch = batch_of(config, torch.randn(6, 3, 32, 24), 0)
    metrics = train_step(learner_of(config), [batch], 5, monitor)
    judged = {rule.key for rule in Watchman(run_facts(config)).rules}
    assert judged == monitor.values().keys() | ({"target_entropy"} & metrics.values().keys())


@pytest.mark.parametrize("name", EVERY_TARGET)
def test__advice_names_options_that_the_target_takes(small_config: Config, name: str) -> None:
    config, named = varied(small_config, *EVERY_TARGET[name]), 0
    facts = run_facts(config)
    for rule in Watchman(facts).rules:
        said = [rule.advice(value, facts) for value in beyond(rule, facts)]
        for option, value in re.findall(r"\b([a-z_]+(?:\.[a-z_]+)+)(=\w+)?", " ".join(filter(None, said))):
            changed = varied(config, option + (value or f"={halved(config, option)}"))
            # What a run has is not advised.
            again = [rule.advice(value, run_facts(changed)) or "" for value in beyond(rule, facts)]
            assert not value or not any(option + value in advice for advice in again)
            # The default value of a key would be taken, but means nothing.
            assert name == "clustering" or option == "clustering.prototypes" or not option.startswith("clustering.")
            named += 1
    assert named >= 5


def beyond(rule: Metric, facts: RunFacts) -> tuple[float, float]:
    low, high = rule.limits(facts)
    return max(low, -1e9) - 1, min(high, 1e9) + 1


def halved(config: Config, option: str) -> float:
    """A value that is not the default one, which any target would take."""
    value: Any = config
    for part in option.split("."):
        value = getattr(value, part)
    return value // 2 if isinstance(value, int) else value / 2


@pytest.mark.parametrize(("rule", "side", "limit"), CASES, ids=NAMES)
def test__there_is_no_alarm_early_or_on_few_records(rule: Metric, side: str, limit: float) -> None:
    beyond = limit * (0.5 if side == "low" else 2)
    start = math.ceil(rule.start * FACTS.total_steps)
    assert start > 3
    assert after(rule, beyond, beyond).state == "unknown"
    assert after(rule, beyond, beyond, beyond, step=start - 1).state == "unknown"
    assert after(rule, beyond, beyond, beyond, step=start).state == "alarm"


@pytest.mark.parametrize(("rule", "side", "limit"), CASES, ids=NAMES)
def test__one_odd_record_raises_no_alarm_and_hides_none(rule: Metric, side: str, limit: float) -> None:
    beyond, good = limit * (1e-3 if side == "low" else 1e3), healthy(rule)
    for odd in (beyond, math.nan, None):
        # What was NaN is worth a look.
        well = "well" if odd == beyond else "look"
        assert after(rule, good, good, odd).state == well
        assert after(rule, good, odd, good, good).state == well
    for odd in (good, math.nan, None):
        assert after(rule, beyond, odd, beyond, beyond).state == "alarm"


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test__nan_is_an_alarm_at_any_time(broken: float) -> None:
    for rule in RULES:
        finding = after(rule, healthy(rule), broken, broken, step=5)
        assert finding.state == "alarm"
        assert math.isnan(finding.value)
        assert "NaN" in finding.advice
        # As the file of metrics has it.
        assert after(rule, healthy(rule), None, None, step=5).state == "alarm"


def test__what_was_never_measured_is_unknown() -> None:
    for finding in Watchman(FACTS).findings():
        if finding.key not in {rule.key for rule in RULES}:
            assert finding.state == "unknown"
            continue
        assert (finding.state, finding.value) == ("unknown", None)
        assert "not measured yet" in finding.sentence
    rule = RULES[0]
    assert after(rule, None, None, None).state == "unknown"
    # Unknown at first, known later.
    assert after(rule, None, None, healthy(rule), healthy(rule), healthy(rule)).state == "well"


def test__only_the_last_five_records_count() -> None:
    rule = next(rule for rule in RULES if rule.key == "position_share")
    assert after(rule, *[0.9] * 50, 0.0, 0.0).state == "alarm"
    assert after(rule, *[0.9] * 50, 0.0, 0.0, 0.0).state == "well"


def test__records_of_evaluations_between_change_nothing() -> None:
    rule = next(rule for rule in RULES if rule.key == "position_share")
    watchman = Watchman(FACTS)
    for step in (800, 810, 820):
        raised = watchman.see({"step": step, rule.key: 0.9})
        assert watchman.see({"step": step, "demo/knn/teacher": 0.5}) == []
    assert [finding.key for finding in raised] == [rule.key]


def test__an_alarm_is_given_once_until_all_was_well_again() -> None:
    watchman, given = Watchman(FACTS), []
    values = [0.9] * 6 + [0.0] * 5 + [0.9] * 5
    for number, value in enumerate(values):
        given += [number for _ in watchman.see({"step": 500 + number, "position_share": value})]
    # The third of the first ones, and the third after it had been well.
    assert given == [2, 13]
    assert watchman.raised == {"position_share"}


def test__a_finding_in_one_line_has_value_range_and_advice() -> None:
    rule = next(rule for rule in RULES if rule.key == "dead_prototypes")
    assert after(rule, 0.9, 0.9, 0.9).sentence == f"Dead prototypes: 0.9 (healthy: up to 0.5). {rule.above}"
    assert range_text((2.0, math.inf)) == "2 or more"
    assert range_text((-math.inf, math.inf)) == "any finite number"
    assert range_text((0.5, 2.0)) == "0.5 to 2"


def test__every_metric_that_is_logged_stands_in_the_table(small_config: Config) -> None:
    listed = {metric.key for metric in METRICS}
    assert len(listed) == len(METRICS)
    for overrides in EVERY_TARGET.values():
        config, monitor = varied(small_config, *overrides), HealthMonitor()
        batch = batch_of(config, torch.randn(6, 3, 32, 24), 0)
        metrics = train_step(learner_of(config), [batch], 5, monitor)
        assert metrics.values().keys() | monitor.values().keys() <= listed


def test__the_bar_shows_the_speed_first() -> None:
    values = {"student_loss": 5.4321, "clustering_loss": 3.21, "target_entropy": 0.56, "images_per_second": 123.4}
    assert bar_parts({**values, "seconds": 3.0}) == ["123 images/s", "loss 5.432", "clustering 3.210", "entropy 0.56"]


def batch_of(config: Config, images: Tensor, step: int) -> MaskedBatch:
    keys = sample_keys(config.seed, step, torch.arange(len(images)))
    return MaskedBatch(images, *mask_sampler(config)(PatchGrid(*config.grid), keys))


def colors(generator: torch.Generator) -> Tensor:
    """Soft blobs of colour with some noise, in no place more than in another."""
    blobs = torch.randn(32, 3, 5, 5, generator=generator)
    noise = torch.randn(32, 3, 24, 24, generator=generator)
    return torch.nn.functional.interpolate(blobs, size=(24, 24), mode="bilinear") + 0.3 * noise


def aligned(generator: torch.Generator) -> Tensor:
    """All images show the same in the same place, and little else."""
    template = torch.randn(1, 3, 6, 6, generator=torch.Generator().manual_seed(9))
    return 2 * torch.nn.functional.interpolate(template, size=(24, 24)) + 0.5 * colors(generator)


def constant(generator: torch.Generator) -> Tensor:
    return torch.full((32, 3, 24, 24), 0.4)


def alarms_of_a_run(draw: Callable[[torch.Generator], Tensor], *overrides: str, steps: int = 40) -> set[str]:
    tree: dict[str, Any] = {
        "data": {"image_size": 24},
        "model": {"width": 32, "depth": 2, "heads": 2, "patch_size": 4, "registers": 4, "stochastic_depth": 0.0},
        "clustering": {"prototypes": 32},
        "masking": {"predict": 8},
        "optimization": {"batch_size": 32, "steps": steps, "learning_rate": 2e-3, "teacher_momentum": 0.97},
    }
    config = parse_config(tree, overrides)
    learner, watchman = build_learner(config), Watchman(RunFacts(32, 32, steps))
    generator, raised = torch.Generator().manual_seed(0), set()
    for step in range(steps):
        monitor = HealthMonitor()
        metrics = train_step(learner, [batch_of(config, draw(generator), step)], step, monitor)
        record = {"step": step + 1, "target_entropy": float(metrics.described["target_entropy"]), **monitor.values()}
        raised |= {finding.key for finding in watchman.see(record)}
    ranges = {rule.key for rule in RULES}
    assert {finding.state for finding in watchman.findings() if finding.key in ranges} <= {"well", "alarm"}
    return raised


@pytest.mark.long
def test__a_healthy_run_raises_no_alarm() -> None:
    assert alarms_of_a_run(colors) == set()


@pytest.mark.long
@pytest.mark.parametrize(
    ("draw", "overrides", "expected"),
    [
        (aligned, ["clustering.sinkhorn=standard"], {"position_share", "position_information"}),
        (constant, [], {"position_share", "prototype_perplexity", "dead_prototypes", "effective_rank"}),
        (colors, ["clustering.target_temperature=2.0"], {"target_entropy"}),
        (colors, ["optimization.learning_rate=1.0", "optimization.teacher_momentum=0.0"], {"dead_prototypes"}),
    ],
    ids=["standard sinkhorn on aligned images", "constant images", "soft targets", "learning rate far too large"],
)
def test__a_run_made_to_collapse_raises_alarms(draw: Any, overrides: list[str], expected: set[str]) -> None:
    assert expected <= alarms_of_a_run(draw, *overrides)


def test__a_watchman_that_forgets_starts_again() -> None:
    watchman = Watchman(RunFacts(prototypes=64, width=128, total_steps=10))
    records = [{"step": step, "position_share": 0.9} for step in (5, 6, 7, 8)]
    assert [len(watchman.see(record)) for record in records] == [0, 0, 1, 0]
    watchman.forget()
    assert [len(watchman.see(record)) for record in records] == [0, 0, 1, 0]


def test__the_docs_have_the_table_of_metrics() -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "metrics_table.py"))
    page = script["PAGE"].read_text(encoding="utf-8")
    assert script["with_table"](page) == page, "run `python scripts/metrics_table.py --write`"


def test__a_run_without_enough_losses_is_too_short_to_judge() -> None:
    def seen(records: int) -> list[Finding]:
        watchman = Watchman(RunFacts(prototypes=256, width=128, total_steps=records))
        for step in range(1, records + 1):
            losses = {"student_loss": 5 - step / 100, "clustering_loss": 5 - step / 100}
            watchman.see({"step": step, **losses, **{rule.key: healthy(rule) for rule in RULES}})
        return watchman.findings()

    assert "well" in {finding.state for finding in seen(3)}
    assert verdict(seen(3)) == "Too short to judge whether the loss falls."
    worth_a_look = Finding("look", "Wait for data", "long", "", "data_wait")
    assert verdict([*seen(3), worth_a_look]) == "Too short to judge whether the loss falls; 1 thing worth a look."
    assert verdict(seen(60)) == "All is well."
    wrong = Finding("alarm", "Dead prototypes", "many", "", "dead_prototypes")
    assert verdict([*seen(3), wrong]) == "1 thing not well, 0 worth a look."
