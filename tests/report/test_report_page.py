import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

from capi.report.pages.data import RunReport, RunState
from capi.report.pages.page import Live, policy
from capi.report.pages.run import comparison_pieces, page, run_pieces
from tests.report.report_runs import run_report


class Tags(HTMLParser):
    """Every opening tag with its attributes."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test__sections_stand_in_the_order_of_their_weight() -> None:
    headings = re.findall(r'<h2 id="(\w+)"', page(run_pieces(run_report())))
    assert headings == ["learnt", "scores", "curves", "health", "prototypes", "cost", "config", "provenance"]


def test__a_page_fetches_nothing() -> None:
    addresses = [
        value
        for _, attributes in Tags(page(run_pieces(run_report()))).found
        for key, value in attributes.items()
        if key in {"src", "href"} and value
    ]
    assert addresses
    assert all(address.startswith(("data:", "#")) for address in addresses)


def test__the_policy_names_exactly_the_script_and_style_of_the_page() -> None:
    content = page(run_pieces(run_report()))
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", content, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{rule} 'sha256-{digest}'" in policy(live=False)
    assert policy(live=False) in content
    assert "default-src 'none'" in content
    assert "connect-src 'none'" in content
    assert "connect-src 'self'" in page(run_pieces(run_report()), Live("", 1.0))


def test__the_state_and_the_alarms_open_the_page() -> None:
    content = page(run_pieces(run_report(position_share=0.9)))
    assert content.index("✓ finished") < content.index("▲ 1 thing not well") < content.index('id="health"')
    empty = page(run_pieces(RunReport("new", RunState("running", None, 60))))
    assert "has not written metrics yet" in empty


def test__the_config_keeps_its_indentation() -> None:
    assert "model:\n  width: 128" in page(run_pieces(run_report()))


def test__digests_change_with_their_part_alone() -> None:
    run = run_report()
    before, after = run_pieces(run).digests, run_pieces(replace(run, config="seed: 1")).digests
    assert {name for name in before if before[name] != after[name]} == {"config"}
    assert "charts" in before


def test__the_data_of_the_page_is_that_of_the_charts() -> None:
    pieces = run_pieces(run_report())
    (inside,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page(pieces))
    assert json.loads(inside) == pieces.charts


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


def test__what_a_run_lacks_is_said() -> None:
    empty = RunReport("empty", RunState("running", None, 60))
    shown = overview([run_report("one"), empty])
    assert cells(shown, 1) == ["empty", "▶ running", "Nothing is known yet.", "none", *["none"] * 6]
