"""Every page, in a browser: hostile text stays text, all screens fit, charts are drawn, nothing is fetched."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Page

from capi.config.paper import PaperRow, PaperTable
from capi.evals.comparison_cells import TableEntry, TableView, ViewRow
from capi.report.ablation import Point, RowOutcome, RunOutcome, TableOutcome
from capi.report.ablation import as_html as ablation_html
from capi.report.comparison import as_html as comparison_html
from capi.report.comparison import facts, scale_of
from capi.report.draw import ImageCard, PictureLink, SheetSection, as_page
from capi.report.pages.data import Column, Emergence
from capi.report.pages.run import comparison_pieces, run_pieces
from capi.report.pages.run import page as run_page
from capi.train.cost.plan import PlannedCost
from tests.browser import browser, page  # noqa: F401
from tests.report.report_runs import PIXEL, run_report
from tests.report.test_comparison_page import Cell, comparison, finished

EVIL = "<script>window.hacked = 1</script>\"'><img src=x onerror='window.hacked = 1'>"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def report_page(name: str) -> str:
    run = run_report(name, position_share=0.9)
    loss = run.columns["student_loss"]
    more = {name: loss, f"{name}/teacher": replace(loss, values=loss.values / 10)}
    said = {"emergence_note": name, "prototypes_note": name, "config": name}
    listed = {"cost": [(name, name)], "assumptions": [name], "provenance": [(name, name)], "notes": [name]}
    return run_page(run_pieces(replace(run, columns={**run.columns, **more}, **said, **listed)))


def runs_page(name: str) -> str:
    return run_page(comparison_pieces([run_report(name), run_report(position_share=0.9)], ["/run/0", f"/{name}"]))


def study(name: str) -> TableOutcome:
    points = [Point(64 * number, 10.0 * number, 0.2 + 0.01 * number) for number in range(1, 9)]
    photos = [Emergence(0, PIXEL, [(0, PIXEL), (60, PIXEL)])]

    def row(title: str, number: int) -> RowOutcome:
        runs = [
            RunOutcome(
                f"{title}-seed{seed}",
                {"csv/knn": 0.3 + 0.1 * number + 0.01 * seed},
                {"csv/knn": points},
                steps=60,
                total_steps=60,
                seconds=80.0,
                pictures=photos,
                failure=name if seed else "",
                report=f"runs/{name}/report.html",
            )
            for seed in range(2)
        ]
        cost = PlannedCost(10**6, 2 * 10**6, 1e9, 10**4 * 4**number)
        return RowOutcome(title, runs, PaperRow(name=title, models=["Adcab"], scores=[20.0 + number]), cost)

    paper = PaperTable(title=name, label="tab:ablations:sinkhorn", columns=["ADE20K k-NN"], rows=[], open=name)
    rows = [row(name, 0), row("other", 1)]
    untrained = [RowOutcome("untrained", [RunOutcome("untrained", {"csv/knn": 0.1})])]
    return TableOutcome("n", paper, rows, untrained, ["csv/knn"], {"csv/knn": name}, {name: name}, {})


def comparison_page(name: str) -> str:
    details = {
        "details": {"IoU by class": {name: 0.5}, "test images": {"test": 40}},
        "chosen": {name: name},
        "warnings": [name],
    }
    table = TableView(
        name,
        title=name,
        label=name,
        heads=("Model",),
        columns=((name, "val"), ("", name)),
        rows=(ViewRow((name,), "a", (TableEntry("folder/knn", "test", 79.4), TableEntry("folder/knn", "none", 61.8))),),
        notes=(name,),
    )
    compared = comparison(
        finished("a", "folder/knn", {"test": 0.3}, **details),
        finished(name, "folder/knn", {"test": 0.15}),
        Cell("c", "folder/knn", status="failed", reason=name),
        Cell("d", "folder/knn"),
    )
    return comparison_html(replace(compared, table=table), facts(compared))


def pictures_page(name: str) -> str:
    card = ImageCard(name, [PictureLink(f"wide/{name}.png", name, wide=True), PictureLink(f"photos/{name}.jpg", name)])
    return as_page([SheetSection("pca", name, name, "pca.png")], [card], {name: name}, [name])


PAGES: dict[str, Callable[[str], str]] = {
    "report": report_page,
    "runs": runs_page,
    "ablation": lambda name: ablation_html(study(name)),
    "comparison": comparison_page,
    "pictures": pictures_page,
}


@pytest.fixture(params=PAGES)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A page full of hostile names."""
    path = tmp_path / "page.html"
    path.write_text(PAGES[request.param](EVIL), encoding="utf-8")
    return path.as_uri()


def test__hostile_text_stays_text_and_the_policy_holds(page: Page, written: str) -> None:  # noqa: F811
    refused: list[str] = []
    page.on("console", lambda message: refused.append(message.text) if "Content Security" in message.text else None)
    page.goto(written)
    assert page.evaluate("window.hacked") is None
    assert page.locator("img[onerror]").count() == 0
    assert page.locator("body").inner_text().count("<script>window.hacked") >= 1
    assert refused == [], "everything that the page needs is allowed, and it asks for nothing else"
    policy = page.locator("meta[http-equiv]").get_attribute("content") or ""
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test__every_page_fits_every_screen(browser: Browser, written: str, scheme: str) -> None:  # noqa: F811
    for width in (390, 1280):
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
        opened = context.new_page()
        opened.goto(written)
        opened.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert opened.evaluate(OVERFLOW) == 0
        colors = opened.evaluate("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
        background, color = (sum(map(int, re.findall(r"\d+", color)[:3])) for color in colors)
        assert (background < color) is (scheme == "dark")
        context.close()


def test__an_ablation_draws_curves_seeds_and_levels(page: Page, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "page.html"
    path.write_text(ablation_html(study("default")), encoding="utf-8")
    page.goto(path.as_uri())
    curves = page.locator('[data-group="curves"] .chart')
    assert curves.count() == 2
    # Two rows: the mean of two seeds, and each seed behind it.
    assert curves.first.locator(".inside path.line").count() == 6
    assert curves.first.locator(".inside path.faint").count() == 4
    assert curves.first.locator(".legend li").all_inner_texts()[1:] == ["default\n28.00 %", "other\n28.00 %"]
    assert "seconds of training" in curves.nth(1).locator("svg.axes").text_content()
    size = page.locator('[data-group="sizes"] .chart')
    assert size.count() == 1
    assert "20T" in size.locator("svg.axes").text_content(), "work on a logarithmic axis"
    assert page.locator(".zoombar").count() == 0


@pytest.mark.parametrize(
    ("values", "scale"), [([0.01], 0.05), ([0.2, 0.1], 0.2), ([0.81], 1.0), ([1.0], 1.0), ([], 1.0)]
)
def test__bars_end_at_the_first_round_number_above(values: list[float], scale: float) -> None:
    assert scale_of(values) == scale


def test__a_comparison_has_bars_failures_and_classes(page: Page, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "page.html"
    path.write_text(comparison_page("run/b"), encoding="utf-8")
    page.goto(path.as_uri())
    widths = [page.locator(".bar .fill").nth(number).get_attribute("width") for number in range(4)]
    assert widths == ["100.00", "50.00", "0.00", "0.00"]
    assert page.locator(".bars .label.best").count() == 1
    assert page.locator(".bars .axis").inner_text().split("\n") == ["0 %", "15 %", "30 %"]
    assert "run/b" in page.locator("#failures + ul").inner_text()
    assert page.locator(".bars li").nth(3).inner_text().endswith("pending")
    ours, missing = page.locator("table").first.locator("tbody td.number").all_inner_texts()
    assert ours.split() == ["30.0", "79.4"]
    assert missing.split() == ["-", "61.8"]
    page.get_by_text("IoU by class of folder/knn").click()
    assert "50.00 %" in page.locator("details[open]").inner_text()


def test__pictures_are_linked_by_the_bytes_of_their_names() -> None:
    shown = pictures_page(b"caf\xe9.jpg".decode("utf-8", "surrogateescape"))
    assert shown.encode("utf-8")
    assert "./photos/caf%E9.jpg.jpg" in shown


@pytest.mark.long
def test__half_a_million_logged_steps_open_within_two_seconds(browser: Browser, tmp_path: Path) -> None:  # noqa: F811
    steps = np.arange(1, 500_001, dtype=np.int64)
    noise = np.random.default_rng(0).normal(size=len(steps))
    run = run_report()
    columns = {key: Column(steps, 1 + 0.1 * noise + 4 * np.exp(-steps / 1e5)) for key in run.columns}
    path = tmp_path / "page.html"
    path.write_text(run_page(run_pieces(replace(run, columns=columns))), encoding="utf-8")
    taken = []
    # A machine that has other things to do is as fast as its best try.
    for _ in range(5):
        context = browser.new_context()
        opened = context.new_page()
        opened.goto(path.as_uri())
        opened.wait_for_selector('[data-chart="student_loss"] path.line', state="attached")
        taken.append(opened.evaluate("performance.now()"))
        assert opened.locator("[data-chart]").count() > 5
        context.close()
    assert min(taken) < 2000


@pytest.mark.parametrize("width", [390, 1280])
def test__every_measure_of_health_is_in_view(browser: Browser, tmp_path: Path, width: int) -> None:  # noqa: F811
    """In few rows, and none is cut off at the edge."""
    path = tmp_path / "page.html"
    path.write_text(run_page(run_pieces(run_report())), encoding="utf-8")
    context = browser.new_context(viewport={"width": width, "height": 800})
    opened = context.new_page()
    opened.goto(path.as_uri())
    chips = opened.locator(".chips")
    row, box = opened.locator(".chip").first.bounding_box(), chips.bounding_box()
    assert row is not None
    assert box is not None
    count = opened.locator(".chip").count()
    assert count > 5
    assert box["height"] < (2.5 if width == 1280 else count + 1) * 1.5 * row["height"]
    assert chips.evaluate("each => each.scrollWidth - each.clientWidth") == 0
    assert opened.evaluate(OVERFLOW) == 0
    context.close()


def test__a_run_without_scores_says_on_the_first_screen_how_to_get_one(page: Page, tmp_path: Path) -> None:  # noqa: F811
    run = run_report()
    unscored = replace(run, columns={key: column for key, column in run.columns.items() if "/" not in key})
    path = tmp_path / "page.html"
    path.write_text(run_page(run_pieces(unscored)), encoding="utf-8")
    page.goto(path.as_uri())
    line = page.get_by_text("No evaluation, so no score")
    box = line.bounding_box()
    assert box is not None
    assert box["y"] + box["height"] < 900
    assert "capi evaluate run folder/knn data=LABELED" in line.inner_text()
    path.write_text(run_page(run_pieces(run)), encoding="utf-8")
    page.reload()
    assert page.get_by_text("No evaluation, so no score").count() == 0


def test__an_ablation_opens_with_the_orderings_that_hold(page: Page, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "page.html"
    page_text = study("default")
    path.write_text(ablation_html(page_text), encoding="utf-8")
    page.goto(path.as_uri())
    assert "; csv/knn here: default 30.5" in page.locator("main > h1 + p").inner_text()
    judged = "csv/knn-segmentation"
    rows = [
        replace(row, runs=[replace(run, scores={judged: run.scores["csv/knn"]}) for run in row.runs])
        for row in page_text.rows
    ]
    path.write_text(ablation_html(replace(page_text, rows=rows, columns=[judged])), encoding="utf-8")
    page.reload()
    assert page.locator("main > h1 + p").inner_text() == "The one ordering of the paper holds here."
    assert page.locator(".share").all_inner_texts() == ["1 holds"]
