import re

from capi.report.pages.data import RunReport, RunState
from capi.report.pages.run_comparison import overview
from tests.report.report_runs import run_report


def cells(shown: str, row: int) -> list[str]:
    body = shown.split("<tbody>")[1].split("</tr>")[row]
    return [re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<t[dh].*?</t[dh]>", body)]


def test__each_run_has_its_state_alarms_and_last_values() -> None:
    shown = overview([run_report("one"), run_report("two", position_share=0.9)], ["/run/0", "/run/1"])
    assert cells(shown, 0)[:4] == ["one", "✓ finished", "none", "60"]
    assert cells(shown, 1)[:4] == ["two", "✓ finished", "▲ Position in the features", "60"]
    assert cells(shown, 0)[4:] == ["0.6402", "1.152", "2", "100", "60.00%", "50.00%"]
    assert 'href="/run/1"' in shown


def test__what_a_run_lacks_is_said() -> None:
    empty = RunReport("empty", RunState("running", None, 60))
    shown = overview([run_report("one"), empty], ["/run/0", "/run/1"])
    assert cells(shown, 1) == ["empty", "▶ running", "none", "none", *["none"] * 6]


def test__names_are_text() -> None:
    assert "&lt;b&gt;" in overview([run_report("<b>")], ["/run/0"])
