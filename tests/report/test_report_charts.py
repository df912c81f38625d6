import json
import math

import numpy as np
import pytest

from capi.report.pages.charts import STRETCHES, chart_list, charts_data, thin
from capi.report.pages.data import Column, RunReport
from capi.report.pages.page import as_json
from tests.report.report_runs import column, run_report


def noise(count: int) -> Column:
    values = np.random.default_rng(0).normal(size=count)
    return Column(np.arange(count, dtype=np.int64) * 10, values)


def test__thinning_keeps_the_extremes_of_every_stretch() -> None:
    whole = noise(10_007)
    drawn = thin(whole, 50)
    assert len(drawn.values) <= 2 * 50 + 2
    steps = set(drawn.steps.tolist())
    # A slow clear version: 10007 values in stretches of 201.
    for start in range(0, 10_007, 201):
        part = whole.values[start : start + 201]
        assert 10 * (start + int(part.argmin())) in steps
        assert 10 * (start + int(part.argmax())) in steps


def test__thinned_points_are_points_of_the_curve_in_order_with_both_ends() -> None:
    whole = noise(5000)
    drawn = thin(whole, 100)
    assert (np.diff(drawn.steps) > 0).all()
    assert (drawn.steps[0], drawn.steps[-1]) == (0, 49_990)
    np.testing.assert_array_equal(drawn.values, whole.values[drawn.steps // 10])


def test__thinning_keeps_gaps() -> None:
    whole = noise(5000)
    whole.values[[777, 2000]] = math.nan
    drawn = thin(whole, 100)
    assert drawn.steps[np.isnan(drawn.values)].tolist() == [7770, 20000]


def test__a_stretch_without_any_number_is_a_gap_alone() -> None:
    whole = noise(5000)
    whole.values[:] = math.nan
    assert np.isnan(thin(whole, 100).values).all()


def test__short_curves_stay_as_they_are() -> None:
    assert thin(column(1.0, 2.0)).values.tolist() == [1.0, 2.0]


def test__a_hundred_thousand_records_become_few_points() -> None:
    run = RunReport("long", run_report().state, {f"metric {index}": noise(100_000) for index in range(3)})
    lines = [line for chart in charts_data([run])["charts"] for line in chart["lines"]]
    assert [line["records"] for line in lines] == [100_000] * 3
    assert all(len(line["steps"]) <= 3 * STRETCHES + 2 for line in lines)


def test__scores_come_first_with_the_teacher_before_the_student() -> None:
    charts = chart_list(["student_loss", "b/knn/student", "b/knn/teacher", "a/knn/mean/teacher", "seconds"])
    assert [chart.key for chart in charts] == ["a/knn/mean", "b/knn", "student_loss"]
    assert list(charts[1].metrics.values()) == ["teacher", "student"]
    assert [chart.group for chart in charts] == ["scores", "scores", "curves"]


def test__unknown_metrics_are_drawn_as_further_charts() -> None:
    charts = chart_list(["from_the_future", "student_loss"])
    assert [chart.key for chart in charts] == ["student_loss", "from_the_future"]


def test__every_known_metric_has_a_chart() -> None:
    run = run_report()
    keys = {key for chart in chart_list(run.columns) for key in chart.metrics}
    assert keys == set(run.columns) - {"seconds"}
    assert all("no words for" not in chart.meaning for chart in chart_list(run.columns))


def test__several_runs_are_lines_of_one_chart() -> None:
    data = charts_data([run_report("one"), run_report("two")])
    loss = next(chart for chart in data["charts"] if chart["key"] == "student_loss")
    assert [line["label"] for line in loss["lines"]] == ["one", "two"]
    score = next(chart for chart in data["charts"] if chart["key"] == "demo/knn")
    assert [line["label"] for line in score["lines"]] == ["one teacher", "one student", "two teacher", "two student"]


def test__gaps_before_the_first_number_are_no_missing_values() -> None:
    run = RunReport("run", run_report().state, {"x": column(math.nan, math.nan, 1.0, math.nan, 2.0)})
    (line,) = charts_data([run])["charts"][0]["lines"]
    assert line["steps"] == [15, 20, 25]
    assert line["values"] == [1.0, None, 2.0]
    assert line["missing"] == 1


def test__healthy_ranges_stand_where_runs_agree() -> None:
    charts = {chart["key"]: chart for chart in charts_data([run_report()])["charts"]}
    assert charts["position_share"]["limits"] == [None, 0.08]
    assert charts["position_share"]["healthy"] == "up to 0.08"
    assert charts["student_loss"]["limits"] is None


@pytest.mark.parametrize(("score", "percent"), [(0.5, True), (17.0, False)])
def test__scores_are_percents_only_where_they_are_shares(score: float, percent: bool) -> None:
    run = RunReport("run", run_report().state, {"mine/teacher": column(0.1, score)})
    assert charts_data([run])["charts"][0]["percent"] is percent


def test__json_in_a_page_cannot_end_its_element() -> None:
    written = as_json({"</script><b>&": [1.5, None]})
    assert not set("<>&") & set(written)
    assert json.loads(written) == {"</script><b>&": [1.5, None]}
