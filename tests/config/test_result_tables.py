"""The paper's result tables as data."""

import pytest

from capi.config.experiments import asked_for, result_tables, table_named
from capi.config.paper import paper_tables
from capi.errors import CapiError
from capi.zoo.baselines.registry import BASELINES
from capi.zoo.published.registry import RELEASED


def test__every_row_names_a_model_that_can_be_loaded() -> None:
    for table in result_tables().values():
        for row in table.rows:
            if row.model is None:
                assert table.source != "the paper"
                continue
            assert row.model in RELEASED or row.model.removeprefix("baseline:") in BASELINES


def test__numbers_of_capi_are_those_of_the_list_of_its_own_models() -> None:
    """Both lists were read off the paper by themselves."""
    own = {table.label: table for table in paper_tables().values()}
    for table in result_tables().values():
        if table.source != "the paper":
            continue
        ours = {tuple(row.scores) for row in table.rows if row.model in RELEASED}
        assert ours == {tuple(row.scores) for row in own[table.label].rows}, table.label


def test__a_cell_asks_for_the_columns_benchmark_unless_its_row_changes_it() -> None:
    table = table_named("main")
    usual = next(row for row in table.rows if row.cells[0] == "MAE")
    linear = next(row for row in table.rows if row.cells[0].startswith("MSN"))
    assert asked_for(usual, table.columns[0]).name == "imagenet/attentive"
    asked = asked_for(linear, table.columns[0])
    assert asked.name == "imagenet/linear (features pooled)"
    assert asked.config.model_dump()["features"] == ("pooled",)
    resolutions = table_named("high-res")
    assert asked_for(resolutions.rows[0], resolutions.columns[1]).config.image_size == 448


def test__sizes_are_the_paper_s_also_for_models_that_have_their_own() -> None:
    sizes = {
        name: {asked_for(row, column).config.image_size for row in table.rows for column in table.columns}
        for name, table in result_tables().items()
    }
    assert sizes.pop("high-res") == {224, 448}
    assert (sizes.pop("imagenette"), sizes.pop("cifar10")) == ({128}, {32})
    assert all(size == {224} for size in sizes.values()), sizes


def test__an_option_goes_only_to_protocols_that_have_it() -> None:
    table = table_named("pooling")
    assert asked_for(table.rows[3], table.columns[0]).name == "imagenet/attentive"


def test__a_misspelt_table_finds_its_neighbor() -> None:
    with pytest.raises(CapiError, match='no table "densee"; did you mean "dense"'):
        table_named("densee")
