import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from capi.evals.comparison_cells import Cell, Comparison
from capi.report.comparison.html import as_html, colors, scale_of
from capi.report.comparison.page import facts
from tests.report.test_comparison_page import comparison, finished

EVIL = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>"
VOID = {"meta", "br"}


class Page(HTMLParser):
    """Tags with their attributes, the text, and whether everything that was opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data.strip())

    def widths(self) -> list[str]:
        fills = [attributes["style"] or "" for _, attributes in self.tags if attributes.get("class") == "fill"]
        return [re.findall("width:([^;]*)", style)[0] for style in fills]


def page(found: Comparison) -> Page:
    parsed = Page(as_html(found, facts(found)))
    assert parsed.open == []
    return parsed


def two(**more: Any) -> Comparison:
    return comparison(
        finished("a", "folder/knn", {"test": 0.3}, **more), finished("b", "folder/knn", {"test": 0.15}, **more)
    )


def test__bars_start_at_nothing_and_end_at_the_scale_that_is_written_below() -> None:
    parsed = page(two())
    assert parsed.widths() == ["100.00%", "50.00%"]
    assert [text for text in parsed.texts if text in {"0 %", "15 %", "30 %"}] == ["0 %", "15 %", "30 %"]


@pytest.mark.parametrize(
    ("values", "scale"), [([0.01], 0.05), ([0.2, 0.1], 0.2), ([0.81], 1.0), ([1.0], 1.0), ([], 1.0)]
)
def test__the_scale_is_the_first_round_number_above(values: list[float], scale: float) -> None:
    assert scale_of(values) == scale


def test__the_best_is_marked_in_bars_and_table() -> None:
    found = two()
    parsed = page(found)
    assert sum(attributes.get("class") == "value best" for _, attributes in parsed.tags) == 1
    tied = replace(found, cells=found.cells | {("b", "folder/knn"): finished("b", "folder/knn", {"test": 0.3})})
    assert sum(attributes.get("class") == "value best" for _, attributes in page(tied).tags) == 2
    assert page(tied).texts.count("best") == 2


@pytest.mark.parametrize("place", ["model", "reason", "warning", "class", "chosen", "score"])
def test__nothing_from_outside_becomes_a_tag(place: str) -> None:
    cells = {
        "model": finished(EVIL, "folder/knn", {"test": 0.3}),
        "reason": Cell("a", "folder/knn", status="failed", reason=EVIL),
        "warning": finished("a", "folder/knn", {"test": 0.3}, warnings=[EVIL]),
        "class": finished("a", "folder/knn", {"test": 0.3}, details={"IoU by class": {EVIL: 0.5}}),
        "chosen": finished("a", "folder/knn", {"test": 0.3}, chosen={EVIL: EVIL}),
        "score": finished("a", "folder/knn", {EVIL: 0.3}),
    }
    found = comparison(cells[place])
    parsed = page(found)
    assert EVIL in " ".join(parsed.texts)
    assert not {"script", "img"} & {tag for tag, _ in parsed.tags}
    assert not any(name.startswith("on") for _, attributes in parsed.tags for name in attributes)


def test__nothing_is_fetched_from_elsewhere() -> None:
    parsed = page(two())
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in parsed.tags}
    text = as_html(two(), facts(two()))
    assert "http" not in text.replace("http-equiv", "")
    assert "default-src 'none'" in text


def test__a_failed_cell_gives_its_reason_and_a_pending_one_is_marked() -> None:
    cells = [Cell("c", "folder/knn", status="failed", reason="its data is gone"), Cell("d", "folder/knn")]
    parsed = page(comparison(*cells))
    assert {"its data is gone", "failed", "pending"} <= set(parsed.texts)
    assert any(attributes.get("id") == "failures" for _, attributes in parsed.tags)


def test__iou_by_class_is_in_details_for_each_model() -> None:
    found = comparison(
        finished(
            "a", "masks/knn-segmentation", {"test mIoU": 0.3}, details={"IoU by class": {"cat": 0.125, "dog": None}}
        ),
        finished("b", "masks/knn-segmentation", {"test mIoU": 0.2}, details={"IoU by class": {"cat": 0.375}}),
    )
    texts = page(found).texts
    assert "IoU by class of masks/knn-segmentation" in texts
    start = texts.index("cat")
    assert texts[start : start + 6] == ["cat", "12.50 %", "37.50 %", "dog", "-", "-"]


def test__every_model_has_a_colour_of_its_own() -> None:
    found = colors([str(number) for number in range(30)])
    assert len(set(found.values())) == 30
    assert all(re.fullmatch("#[0-9a-f]{6}", color) for color in found.values())


def test__a_long_name_is_shortened_and_given_in_full_below() -> None:
    model = "/somewhere/far/away/in/a/deep/folder/run"
    parsed = page(comparison(finished(model, "folder/knn", {"test": 0.3})))
    assert parsed.texts.count(model) == 1
    assert any(text.startswith("…/") for text in parsed.texts)
    assert any(attributes.get("title") == model for _, attributes in parsed.tags)
