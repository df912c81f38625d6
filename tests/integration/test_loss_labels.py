"""Reports and curves call the student's loss what it is, with every target."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes

import capi
from capi.config.schema import Config
from capi.report.pages.run import comparison_pieces, page
from capi.report.run_report import gather
from tests.photos import noise_photos
from tests.variants import varied

# Written down by hand, from the papers.
LOSSES = {
    "clustering": ("Cross-entropy", "nat"),
    "ema_head": ("Cross-entropy", "nat"),
    "features": ("Huber loss", "normalized features"),
    "pixels": ("Squared error", "normalized pixels"),
    "frozen": ("Huber loss", "normalized features"),
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noise_photos(tmp_path_factory.mktemp("photos"), 8)


def trained(config: Config, photos: Path, out: Path, kind: str) -> Path:
    short = ["optimization.steps=4", "data.workers=0", "run.log_steps=2", "run.loggers=[]", "run.snapshots=0"]
    frozen = ["target.frozen.encoder=pixels:8"] if kind == "frozen" else []
    varied_config = varied(config, *short, f"target.kind={kind}", *frozen)
    return capi.pretrain(varied_config, data=photos, out=out, device="cpu").path


class _Data(HTMLParser):
    """The element of a page that holds the curves."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.text = False, ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = ("id", "data") in attrs

    def handle_data(self, data: str) -> None:
        self.text += data if self.inside else ""


def charts_of(written: str) -> dict[str, dict[str, Any]]:
    parser = _Data()
    parser.feed(written)
    return {chart["key"]: chart for chart in json.loads(parser.text)["charts"]}


@pytest.mark.parametrize("kind", LOSSES)
def test__report_and_curves_name_the_loss_of_the_target(
    small_config: Config, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    titles: list[str] = []
    monkeypatch.setattr(Axes, "set_title", lambda _, title, **__: titles.append(title))
    run = trained(small_config, photos, tmp_path / "run", kind)
    name, unit = LOSSES[kind]
    assert f"{name} of the student ({unit})" in titles
    record = json.loads((run / "run.json").read_text())
    assert record["loss"] == {"name": name, "unit": unit}
    # A run of an older version says it by its config alone.
    (run / "run.json").write_text(json.dumps({key: value for key, value in record.items() if key != "loss"}))
    for written in (run / "report.html", capi.report(run, tmp_path / "again.html", device="cpu")):
        charts = charts_of(written.read_text(encoding="utf-8"))
        assert (
            charts["student_loss"]["meaning"] == f"{name} between predictions and targets, in {unit}. Lower is better."
        )
        if unit != "nat":
            said = " ".join([*titles, *(chart["title"] + chart["meaning"] for chart in charts.values())])
            assert not re.search(r"\bnat\b|cross-entropy", said, re.IGNORECASE)


def test__runs_with_different_targets_are_not_called_comparable(
    small_config: Config, photos: Path, tmp_path: Path
) -> None:
    runs = [gather(trained(small_config, photos, tmp_path / kind, kind)) for kind in ("clustering", "pixels")]
    written = page(comparison_pieces(runs, ["a", "b"]))
    assert charts_of(written)["student_loss"]["meaning"] == (
        "Losses of different targets, which cannot be compared: Cross-entropy in nat; Squared error in normalized "
        "pixels."
    )
    for report in runs:
        last = report.columns["student_loss"].last
        assert f"{last:.4g} {LOSSES['clustering' if report.name == 'clustering' else 'pixels'][1]}</td>" in written


def test__a_loss_that_ends_in_nan_is_called_nan(small_config: Config, photos: Path, tmp_path: Path) -> None:
    run = trained(small_config, photos, tmp_path / "run", "pixels")
    metrics = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(re.sub(r'("step": 4.*"student_loss": )[^,}]+', r"\1null", metrics))
    (alarm,) = [finding for finding in gather(run).alarms if finding.key == "student_loss"]
    assert alarm.title == "Loss of the student"


def test__what_is_no_label_is_not_shown(small_config: Config, photos: Path, tmp_path: Path) -> None:
    run = trained(small_config, photos, tmp_path / "run", "features")
    record = json.loads((run / "run.json").read_text())
    for loss in (None, 7, {}, {"name": "x"}, {"name": 1, "unit": 2}, {"name": "a" * 99, "unit": "b"}):
        (run / "run.json").write_text(json.dumps(record | {"loss": loss}))
        written = capi.report(run, device="cpu").read_text(encoding="utf-8")
        assert "Huber loss between predictions and targets" in charts_of(written)["student_loss"]["meaning"]
