import base64
import hashlib
import re
from xml.etree import ElementTree

import pytest

from capi.report.pages.static import HEIGHT, WIDTH, Level, Series, chart, static_page, ticks


def drawn(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)  # noqa: S314 - our own text


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0.0, 10.0, [0, 2, 4, 6, 8, 10]),
        (0.17, 0.19, [0.17, 0.175, 0.18, 0.185, 0.19]),
        (-1.0, 1.0, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test__ticks_are_round_and_within(low: float, high: float, wanted: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(wanted)


def test__points_keep_their_order_and_stay_on_the_sheet() -> None:
    figure = drawn(chart("t", [Series("a", 0, [(0.0, 0.1), (5.0, 0.4), (10.0, 0.2)])], across="images", up="score"))
    circles = figure.findall(".//circle")
    across, up = ([float(one.get(name)) for one in circles] for name in ("cx", "cy"))
    assert across == sorted(across)
    # Higher scores stand higher, where the sheet counts from above.
    assert up[1] < up[2] < up[0]
    assert all(0 <= x <= WIDTH for x in across)
    assert all(0 <= y <= HEIGHT for y in up)


def test__faint_lines_have_no_dots_and_no_place_in_the_legend() -> None:
    lines = [Series("mean", 0, [(0.0, 0.1), (1.0, 0.2)]), Series("seed", 0, [(0.0, 0.0), (1.0, 0.3)], faint=True)]
    figure = drawn(chart("t", lines, [Level("pixels", 3, 0.15)], across="images", up="score"))
    assert len(figure.findall(".//circle")) == 2
    assert [item[-1].tail or "".join(item.itertext()) for item in figure.findall(".//li")] == ["mean", "pixels"]


def test__a_log_scale_puts_equal_ratios_at_equal_distances() -> None:
    points = [(1e12, 0.1), (1e13, 0.2), (1e14, 0.3)]
    figure = drawn(chart("t", [Series("a", 0, points)], across="FLOP", up="score", logarithmic=True))
    x = [float(one.get("cx")) for one in figure.findall(".//circle")]
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2)
    assert "10T" in {one.text for one in figure.findall(".//text")}


def test__a_log_scale_of_less_than_a_factor_of_two_has_numbers_too() -> None:
    points = [(1.1e12, 0.1), (1.7e12, 0.2)]
    figure = drawn(chart("t", [Series("a", 0, points)], across="FLOP", up="score", logarithmic=True))
    assert {"1.2T", "1.4T", "1.6T"} <= {one.text for one in figure.findall(".//text")}


def test__a_single_point_and_none_at_all_can_be_drawn() -> None:
    assert re.search('<circle[^>]*cx="[0-9.]+"', chart("t", [Series("a", 9, [(3.0, 0.2)])], across="x", up="y"))
    assert chart("t", [Series("a", 0, [])], across="x", up="y") == ""


def test__names_are_text() -> None:
    assert "<b>" not in chart("<b>", [Series("<b>", 0, [(0.0, 0.1)])], across="<b>", up="<b>")


def test__its_policy_allows_its_own_style_and_nothing_else() -> None:
    page = static_page("A & B", "<p>body</p>")
    style = re.search("<style>(.*)</style>", page, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = re.search('Content-Security-Policy" content="([^"]*)"', page)[1]
    assert f"style-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "script-src" not in policy


def test__a_title_is_text() -> None:
    assert "<h1>&lt;i&gt;</h1>" in static_page("<i>", "")
