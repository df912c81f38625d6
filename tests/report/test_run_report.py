import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import Page

from capi.errors import CapiError
from capi.report.costs import CostAssumptions
from capi.report.run_report import FollowedRun, gather, write_report
from tests.browser import browser, page  # noqa: F401
from tests.report.run_folders import START, add_checkpoint, add_pictures, append, make_run, record, records

OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run with pictures, and a name that is no good HTML."""
    path = make_run(tmp_path / "<b>run&amp;", records(position_share=0.9))
    add_pictures(path)
    add_checkpoint(path)
    return path


def open_report(page: Page, run: Path) -> None:  # noqa: F811
    page.goto(write_report(run).as_uri())


# ---- what is gathered


def test__a_finished_run_is_gathered_whole(run: Path) -> None:
    report = gather(run)
    assert (report.name, report.state.kind, report.state.step) == ("<b>run&amp;", "finished", 60)
    assert [finding.key for finding in report.alarms] == ["position_share"]
    assert [finding.key for _, finding in report.past] == ["position_share"]
    assert len(report.emergence) == 2
    assert len(report.prototypes) == 3
    assert dict(report.cost)["Time"] == "2 minutes, in one start"
    assert ("Command", "capi demo --out <i>run<i>") in report.provenance
    assert report.notes == []


@pytest.mark.parametrize("content", [None, ""])
def test__a_run_without_metrics_is_shown_as_far_as_it_goes(tmp_path: Path, content: str | None) -> None:
    path = make_run(tmp_path / "run")
    if content is not None:
        (path / "metrics.jsonl").write_text(content)
    report = gather(path)
    assert report.state.step is None
    assert "no metrics" in report.state.sentence
    assert "optimization" in report.config
    assert "capi visualize" in report.emergence_note
    write_report(path)


def test__a_run_that_stopped_early_says_where(tmp_path: Path) -> None:
    report = gather(make_run(tmp_path / "run", records(), steps=100))
    assert "stopped at step 60 of 100" in report.state.sentence


def test__a_run_that_continues_says_so(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", records(), steps=100)
    code = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        process.stdout.readline()
        assert gather(path).state.kind == "running"
        process.communicate(b"\n")


def test__damage_in_the_metrics_is_reported(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", [*records(11), record(60, student_loss=None)])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('nonsense\n{"step": 65, "wo')
    notes = " ".join(gather(path).notes)
    assert "1 line." in notes
    assert "cut off" in notes
    assert "Loss of the student" in [finding.title for finding in gather(path).alarms]


def test__metrics_of_newer_versions_are_drawn(tmp_path: Path) -> None:
    assert "from_the_future" in gather(make_run(tmp_path / "run", records(from_the_future=1.0))).columns


def test__of_a_run_of_a_newer_version_what_can_be_shown_is_shown(run: Path) -> None:
    written = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**written, "format": 99}))
    report = gather(run)
    assert report.measures == []
    assert any("newer capi" in note and "health is not judged" in note for note in report.notes)
    assert "student_loss" in report.columns
    assert "newer capi" in write_report(run).read_text(encoding="utf-8")


def test__a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CapiError, match="is no run"):
        write_report(tmp_path)


def test__files_that_cannot_be_read_are_reported(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    with pytest.raises(CapiError, match="cannot be read"):
        write_report(run)
    (run / "config.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(CapiError, match="not a text in UTF-8"):
        write_report(run)
    (run / "run.json").write_text("[]")
    with pytest.raises(CapiError, match="expected an object"):
        write_report(run)


def test__an_unreadable_config_leaves_the_curves(run: Path) -> None:
    (run / "config.yaml").write_text("no_such_key: 1\n")
    report = gather(run)
    assert report.measures == []
    assert "student_loss" in report.columns
    assert "config cannot be read" in report.notes[0]
    write_report(run)


def test__provenance_of_many_starts_is_cut(tmp_path: Path) -> None:
    starts = [{**START, "step": step} for step in range(30)]
    facts = gather(make_run(tmp_path / "run", records(), starts=starts)).provenance
    assert ("Starts", "30, of which the last 20 follow") in facts
    assert [name for name, _ in facts if name.startswith("Start ")] == [f"Start {number}" for number in range(11, 31)]


def test__a_record_with_missing_facts_is_shown(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", records(), starts=[{}, 5])
    (path / "run.json").write_text(json.dumps({"format": 1, "starts": [{}, 5]}))
    assert "unknown" in dict(gather(path).provenance)["Data"]


def test__a_followed_run_reads_on(run: Path) -> None:
    followed = FollowedRun(run)
    before = followed.stamp()
    assert followed.read().state.step == 60
    append(run, record(65, brand_new=3.0))
    assert followed.stamp() != before
    report = followed.read()
    assert report.state.step == 65
    assert report.columns["brand_new"].last == 3.0
    assert report.columns["student_loss"].steps.tolist() == [*range(5, 61, 5), 65]


def test__another_run_in_the_same_folder_is_read_again(run: Path) -> None:
    followed = FollowedRun(run)
    followed.read()
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("steps: 60", "steps: 600"))
    assert followed.read().state.total == 600


# ---- where it is written


def test__the_report_lies_beside_the_run_or_where_it_is_wanted(run: Path, tmp_path: Path) -> None:
    assert write_report(run) == run / "report.html"
    assert write_report(run, tmp_path / "mine.html").read_text() == (run / "report.html").read_text()
    assert write_report(run, tmp_path) == tmp_path / "report.html"
    assert not list(run.glob(".*partial"))


def test__a_place_that_cannot_be_written_is_reported(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CapiError, match="cannot be written"):
        write_report(run, tmp_path / "missing" / "report.html")


def test__power_and_grid_can_be_given(run: Path) -> None:
    content = write_report(run, costs=CostAssumptions(watts=1000.0, carbon=0.5)).read_text()
    assert "1000 W all the time, as was given" in content
    with pytest.raises(CapiError, match="watts"):
        write_report(run, costs=CostAssumptions(watts=-1.0))


def test__names_that_are_no_text_can_be_written(tmp_path: Path) -> None:
    name = os.fsdecode(b"bad\xff")
    make_run(tmp_path / "run", records()).rename(tmp_path / name)
    assert "bad?" in write_report(tmp_path / name).read_text()


# ---- in a browser


def test__curves_are_drawn_with_all_their_points(page: Page, run: Path) -> None:  # noqa: F811
    open_report(page, run)
    path = page.locator('[data-chart="student_loss"] path.line').first.get_attribute("d")
    assert path
    assert len(re.findall("[ML]", path)) == 12
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", path)]
    assert heights == sorted(heights), "the loss falls, so its curve goes down"
    assert page.locator('[data-group="scores"] [data-chart="demo/knn"] .inside path.line').count() == 2
    assert page.locator("[data-chart]").count() == 17


def test__every_picture_is_decoded(page: Page, run: Path) -> None:  # noqa: F811
    open_report(page, run)
    widths = page.eval_on_selector_all("img", "images => images.map(one => one.naturalWidth)")
    # For each of two images the photo, the first and the chosen picture, and three steps; and three prototypes.
    assert len(widths) == 2 * (1 + 2 + 3) + 3
    assert all(width > 0 for width in widths)


def test__alarms_are_listed_before_the_measures(page: Page, run: Path) -> None:  # noqa: F811
    open_report(page, run)
    assert "Position in the features" in page.locator(".alarms li").inner_text()
    chip = page.locator(".chip.alarm")
    assert chip.locator("summary").inner_text() == "▲ Position in the features 0.9"
    chip.locator("summary").click()
    assert "healthy: up to 0.08" in chip.inner_text()
    assert page.locator(".chip.well").count() == 8


def test__dragging_zooms_all_curves_and_a_double_click_shows_all(page: Page, run: Path) -> None:  # noqa: F811
    open_report(page, run)
    plot = page.locator('[data-chart="student_loss"] .plot')
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 60, steps=3)
    page.mouse.up()
    first, last = (int(field.input_value()) for field in page.locator(".zoombar input").all())
    assert 20 < first < last < 50
    labels = page.locator('[data-chart="learning_rate"] svg.axes text').all_text_contents()
    assert "30" in labels or "40" in labels
    assert "0" not in labels
    assert "60" not in labels
    plot.dblclick()
    assert [field.input_value() for field in page.locator(".zoombar input").all()] == ["0", "60"]


def test__typed_steps_zoom(page: Page, run: Path) -> None:  # noqa: F811
    open_report(page, run)
    page.locator(".zoombar input").first.fill("40")
    page.locator(".zoombar input").first.press("Enter")
    labels = page.locator('[data-chart="student_loss"] svg.axes text').all_text_contents()
    assert "40" in labels
    assert "20" not in labels


def test__pointing_and_arrow_keys_read_values(page: Page, run: Path) -> None:  # noqa: F811
    open_report(page, run)
    chart = page.locator('[data-chart="student_loss"]')
    assert "0.6402" in chart.locator(".legend").inner_text()
    chart.locator(".plot").hover(position={"x": 60, "y": 50})
    assert "step 5:" in chart.locator(".legend").inner_text()
    assert f"{5 / 6**0.5:.3f}" in chart.locator(".legend").inner_text()
    page.mouse.move(0, 0)
    chart.locator(".plot").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert "step 55:" in chart.locator("[aria-live]").inner_text()


def test__a_logarithmic_scale_makes_powers_evenly_spaced(page: Page, tmp_path: Path) -> None:  # noqa: F811
    run = make_run(tmp_path / "run", [{"step": step, "halving": 0.5**step} for step in range(10)])
    open_report(page, run)
    chart = page.locator('[data-chart="halving"]')
    chart.get_by_role("button", name="log scale").click()
    path = chart.locator(".inside path.line").get_attribute("d")
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", path or "")]
    gaps = [after - before for before, after in pairwise(heights)]
    assert max(gaps) - min(gaps) < 0.3


def test__values_stand_in_a_table_too(page: Page, run: Path) -> None:  # noqa: F811
    open_report(page, run)
    chart = page.locator('[data-chart="demo/knn"]')
    chart.locator("summary").click()
    assert chart.locator("thead").inner_text().split() == ["step", "teacher", "student"]
    assert chart.locator("tbody tr").last.inner_text().split() == ["60", "60.00", "%", "50.00", "%"]


def test__missing_numbers_are_marked_and_said(page: Page, tmp_path: Path) -> None:  # noqa: F811
    values = [1.0, 2.0, None, 4.0, 5.0]
    run = make_run(tmp_path / "run", [{"step": step, "x": value} for step, value in enumerate(values)])
    open_report(page, run)
    chart = page.locator('[data-chart="x"]')
    assert "1 value is NaN" in chart.inner_text()
    assert chart.locator("path.gap").count() == 1
    assert (chart.locator("path.line").first.get_attribute("d") or "").count("M") == 2


def test__the_slider_shows_each_step(page: Page, run: Path) -> None:  # noqa: F811
    open_report(page, run)
    figure = page.locator(".emergence figure").first
    newest = figure.locator(".current").get_attribute("src")
    page.locator(".timeline input").fill("0")
    assert "step 0" in figure.locator("figcaption").inner_text()
    assert figure.locator(".current").get_attribute("src") == figure.locator(".film img").first.get_attribute("src")
    assert figure.locator(".current").get_attribute("src") != newest


def test__a_run_without_metrics_says_what_is_missing(page: Page, tmp_path: Path) -> None:  # noqa: F811
    open_report(page, make_run(tmp_path / "run"))
    text = page.locator("main").inner_text()
    assert "There are no metrics" in text
    assert "No evaluation has been logged" in text
    assert "there are no curves to draw" in text
    assert "This run has kept no pictures" in text
    assert page.locator(".zoombar").is_hidden()


def test__nan_losses_are_alarms(run: Path) -> None:
    assert "Loss of the student</b>" not in write_report(run).read_text(encoding="utf-8")
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    broken = {"step": last["step"] + 1, "student_loss": None, "clustering_loss": 3.0}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(broken) + "\n")
    report = gather(run)
    assert {"student_loss"} == {finding.key for finding in report.alarms} & {"student_loss", "clustering_loss"}
    assert "Loss of the student</b>: 1 of 13 values are NaN" in write_report(run).read_text(encoding="utf-8")
