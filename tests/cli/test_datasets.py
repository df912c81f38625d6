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


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", DATASETS)
def test__a_layout_is_as_wide_as_the_terminal_and_loses_no_word(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch, name: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = run_here("datasets", "show", name).stdout
    assert max(map(len, shown.splitlines())) <= width
    assert " ".join(DATASETS[name].layout.split()) in " ".join(shown.split())


def test__the_text_of_an_entry_stays_in_its_column(run_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = run_here("datasets", "show", "csv").stdout.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("  split    its split;"))
    assert all(line.startswith(" " * 11) for line in lines[first + 1 : first + 4])


def test__the_nearest_data_set_is_named(run_here: RunHere) -> None:
    assert_refused(run_here("datasets", "show", "pet"), 'did you mean "pets"?')
