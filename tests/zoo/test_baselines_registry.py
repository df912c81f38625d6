"""Baselines by name."""

from pathlib import Path

import pytest

from capi.errors import CapiError
from capi.zoo.baselines.registry import BASELINES, PAPER_BASELINES, baseline_named, list_baselines


def test__the_papers_encoders_are_listed_first_and_each_once() -> None:
    names = [each.name for each in list_baselines()]
    assert tuple(names[: len(PAPER_BASELINES)]) == PAPER_BASELINES
    assert sorted(names) == sorted(BASELINES)


def test__a_misspelt_name_finds_its_neighbour() -> None:
    assert baseline_named("mae_vitl16").title == "MAE"
    with pytest.raises(CapiError, match='no baseline "mae_vit_l16"; did you mean "mae_vitl16"'):
        baseline_named("mae_vit_l16")


def test__the_documentation_lists_every_baseline_with_its_licence_and_how_it_was_verified() -> None:
    text = (Path(__file__).parents[2] / "docs" / "baselines.md").read_text(encoding="utf-8")
    lines = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    for name, baseline in BASELINES.items():
        assert baseline.licence in lines[name]
        assert f"| {'transformers' if baseline.model_type else 'documentation'} |" in lines[name]
        assert f"| {baseline.parameters / 1e6:.0f} |" in lines[name]
