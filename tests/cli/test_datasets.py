"""What the command line tells of data sets."""

import pytest

from capi.evals.datasets import DATASETS
from tests.cli.conftest import RunHere, assert_refused


def test__data_sets_are_listed_with_their_tasks(run_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    ran = run_here("datasets")
    assert ran.code == 0
    rows = {line.split()[0]: line for line in ran.stdout.splitlines()[1:]}
    assert set(rows) == set(DATASETS)
    assert "classification, segmentation" in rows["pets"]
    assert rows["voc"].rstrip().endswith("segmentation")
    assert "classification" not in rows["voc"]


def test__a_data_set_shows_its_layout_and_its_options(run_here: RunHere) -> None:
    ran = run_here("datasets", "show", "voc")
    assert ran.code == 0, ran.stderr
    assert ran.stdout.startswith("voc: Pascal VOC 2012")
    for words in ("ROOT/JPEGImages/NAME.jpg", "10582", "Options beside data=PATH: more, verify_counts"):
        assert words in ran.stdout
    shown = run_here("datasets", "show", "demo").stdout
    assert "\nOptions: tests, train, verify_counts" in shown


def test__the_nearest_data_set_is_named(run_here: RunHere) -> None:
    assert_refused(run_here("datasets", "show", "pet"), 'did you mean "pets"?')
