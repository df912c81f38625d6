import math
import re

from capi.report.pages.data import RunReport
from capi.report.pages.health import health, spark
from capi.train.health import RULES, TABLE, Finding
from tests.report.report_runs import FACTS, column, run_report


def finding(key: str, value: float, state: str = "well") -> Finding:
    rule = TABLE[key]
    return Finding(state, rule.title, "text", "", key, value, rule.limits(FACTS))  # type: ignore[arg-type]


def test__every_measure_is_shown_with_range_and_state() -> None:
    shown = health(run_report())
    for rule in RULES:
        assert rule.title in shown
    assert shown.count("✓</span> well") == len(RULES)
    assert "up to 0.08" in shown
    assert shown.count('class="spark"') == len(RULES)


def test__alarms_come_first_with_advice_and_with_when_they_were_raised() -> None:
    shown = health(run_report(position_share=0.9))
    assert "positional collapse" in shown
    assert shown.index('class="alarms"') < shown.index('class="measures"')
    assert re.search(r"Position in the features: at step \d+", shown)


def test__an_alarm_that_comes_and_goes_takes_one_line() -> None:
    run = run_report()
    alarm = finding("position_share", 0.9, "alarm")
    past = [(step, alarm) for step in (10, 30, 50)]
    shown = health(RunReport("run", run.state, run.columns, run.findings, past))
    assert "3 times, first at step 10, last at step 50" in shown


def test__what_was_not_measured_is_said() -> None:
    run = run_report()
    none = [
        Finding("unknown", rule.title, "not measured yet", "", rule.key, None, rule.limits(FACTS)) for rule in RULES
    ]
    shown = health(RunReport("run", run.state, {}, none))
    assert shown.count("not measured") == len(RULES)
    assert "Nothing is known yet" in shown


def test__without_a_config_health_is_not_judged() -> None:
    assert "cannot be judged" in health(RunReport("run", run_report().state))


def test__small_curves_rise_where_values_rise() -> None:
    drawn = spark(column(1.0, 2.0, 3.0), finding("student_gradient", 3.0))
    path = re.search(r'd="([^"]*)"', drawn)
    assert path
    points = [tuple(map(float, point.split())) for point in re.findall(r"[ML]([\d. ]+)", path[1])]
    assert [x for x, _ in points] == [0.0, 100.0, 200.0]
    assert points[0][1] > points[1][1] > points[2][1]


def test__small_curves_have_gaps_and_show_points_that_stand_alone() -> None:
    path = re.search(r'd="([^"]*)"', spark(column(1.0, math.nan, 2.0, 3.0), finding("student_gradient", 3.0)))
    assert path
    assert path[1].count("M") == 2
    assert "h2" in path[1].split("M")[1]
    assert spark(column(math.nan), finding("student_gradient", 3.0)) == ""


def test__the_crossed_limit_is_in_sight() -> None:
    band = re.search(
        r'class="band" width="200" y="([\d.]+)" height="([\d.]+)"',
        spark(column(0.8, 0.9), finding("position_share", 0.9, "alarm")),
    )
    assert band
    # Healthy is below the limit, the lowest value in sight: a thin band at the bottom.
    assert float(band[1]) > 40
    whole = re.search(r'y="([\d.]+)" height="([\d.]+)"', spark(column(0.01, 0.02), finding("position_share", 0.02)))
    assert whole
    assert (float(whole[1]), float(whole[2])) == (0.0, 48.0)
