import dataclasses
from html.parser import HTMLParser

from capi.api.ablation import Study, gather
from capi.report.ablation.html import as_html
from capi.report.ablation.outcomes import RunOutcome


class Outline(HTMLParser):
    """Headings, scripts and links of a page; every element must be closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in {"meta", "link", "img", "br"}:
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name == "href" and tag == "a"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def outline(page: str) -> Outline:
    found = Outline()
    found.feed(page)
    assert found.open == []
    return found


def test__the_page_has_every_part_and_no_script(done: Study) -> None:
    page = as_html(gather(done))
    found = outline(page)
    assert found.headings == [
        "Scores",
        "Which orderings of the paper hold",
        "Curves",
        "What the features show",
        "Health",
        "How it was run",
    ]
    assert "script" not in found.tags
    assert "runs/default-seed0/report.html" in found.links
    assert "28.5" in page


def test__a_study_that_has_not_begun_says_so(done: Study) -> None:
    table = gather(done)
    empty = [dataclasses.replace(row, runs=[RunOutcome(run.name) for run in row.runs]) for row in table.rows]
    page = as_html(dataclasses.replace(table, rows=empty, baselines=()))
    outline(page)
    assert "0 of 2 models are done" in page
    assert "not begun" in page


def test__a_row_that_broke_off_says_why_and_cannot_break_the_page(done: Study) -> None:
    table = gather(done)
    broken = dataclasses.replace(table.rows[0], runs=[RunOutcome("<b>x", failure="<script>alert(1)</script>")])
    page = as_html(dataclasses.replace(table, rows=[broken, table.rows[1]]))
    assert "script" not in outline(page).tags
    assert "broke off: &lt;script&gt;" in page


def test__rows_that_differ_in_work_are_drawn_against_it(done: Study) -> None:
    table = gather(done)
    cost = table.rows[0].cost
    dear = dataclasses.replace(table.rows[0], cost=cost._replace(images_seen=3 * cost.images_seen))
    page = as_html(dataclasses.replace(table, rows=[dear, table.rows[1]]))
    assert "Scores against FLOP" in outline(page).headings
