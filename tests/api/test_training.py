import pytest

import capi
from capi.api.training import as_config
from capi.config.schema import Config


def test__overrides_go_with_a_recipe(small_config: Config) -> None:
    assert as_config("tiny4", ["seed=5"]).seed == 5
    assert as_config(small_config) is small_config
    with pytest.raises(capi.CapiError, match="overrides go with a recipe"):
        as_config(small_config, ["seed=5"])
