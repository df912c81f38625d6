import json
import re
from dataclasses import replace

from capi.report.pages.data import RunReport, RunState
from capi.report.pages.page import Live
from capi.report.pages.run import comparison_pieces, page, run_pieces
from capi.train.health import METRICS
from tests.report.report_runs import run_report


def test__sections_stand_in_the_order_of_their_weight() -> None:
    headings = re.findall(r'<h2 id="(\w+)"', page(run_pieces(run_report())))
    assert headings == ["learnt", "scores", "curves", "health", "prototypes", "cost", "config", "provenance"]


def test__the_state_and_the_alarms_open_the_page() -> None:
    content = page(run_pieces(run_report(position_share=0.9)))
    assert content.index("✓ finished") < content.index("▲ 1 thing not well") < content.index('id="health"')
    assert "medians of the last records" in content
    empty = page(run_pieces(RunReport("new", RunState("running", None, 60))))
    assert "has not written metrics yet" in empty


def test__the_config_keeps_its_indentation() -> None:
    assert "model:\n  width: 128" in page(run_pieces(run_report()))


def test__digests_change_with_their_part_alone() -> None:
    run = run_report()
    before, after = run_pieces(run).digests, run_pieces(replace(run, config="seed: 1")).digests
    assert {name for name in before if before[name] != after[name]} == {"config"}
    assert "charts" in before


def test__a_served_page_knows_where_to_ask() -> None:
    pieces = run_pieces(run_report())
    content = page(pieces, Live("/run/3", 0.5, home="/"))
    (inside,) = re.findall(r'id="settings">(.*?)</script>', content)
    assert json.loads(inside)["live"] == {"base": "/run/3", "seconds": 0.5, "digests": pieces.digests}
    assert 'href="/"' in content


def cells(shown: str, row: int) -> list[str]:
    body = shown.split("<tbody>")[1].split("</tr>")[row]
    return [re.sub(r"<[^>]*>", "", cell).strip() for cell in re.findall(r"<t[dh].*?</t[dh]>", body, re.DOTALL)]


def overview(runs: list[RunReport]) -> str:
    return comparison_pieces(runs, [f"/run/{number}" for number in range(len(runs))]).sections["runs"]


def test__each_run_has_its_state_verdict_and_last_values() -> None:
    shown = overview([run_report("one"), run_report("two", position_share=0.9)])
    assert cells(shown, 0)[:4] == ["one", "✓ finished", "All is well.", "60"]
    assert cells(shown, 1)[:4] == ["two", "✓ finished", "▲ Position in the features", "60"]
    assert cells(shown, 0)[4:] == ["0.6402", "1.152", "2", "100", "60.00%", "50.00%"]
    assert 'href="/run/1"' in shown


def test__the_table_of_metrics_says_which_are_compared() -> None:
    heads = re.findall(r"<th[^>]*>(.*?)</th>", overview([run_report("one"), run_report("two")]))
    shown = [metric.title for metric in METRICS if metric.compared and metric.key in run_report().columns]
    assert [head for head in heads if head in {metric.title for metric in METRICS}] == shown
    assert len(shown) == 4


def test__what_a_run_lacks_is_said() -> None:
    empty = RunReport("empty", RunState("running", None, 60))
    shown = overview([run_report("one"), empty])
    assert cells(shown, 1) == ["empty", "▶ running", "Nothing is known yet.", "none", *["none"] * 6]
