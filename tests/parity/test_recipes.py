"""The paper's recipes compute what they computed when recipes.json was written, whatever is added beside them.

Where processor and torch are those that it was written with, every bit of the weights is the same. Other processors add
up in another order: there losses and the distances that weights move agree to 1e-5 (7e-7 between the kernels for
AVX-512 and those for any processor). Other releases of torch draw other weights, so there is nothing to compare. After
a change that means to compute something else, write it again: `python -m tests.parity.recipes`, and add a line to
`CHANGES` in capi/runtime/numerics.py.
"""

import json

import pytest
import torch

from tests.parity.recipes import FILE, RECIPES, computed, machine, one_thread

RECORD = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.skipif(
    torch.__version__.partition("+")[0] != RECORD["machine"]["torch"].partition("+")[0],
    reason="releases of torch draw different random weights",
)
@pytest.mark.parametrize("recipe", RECIPES)
def test__a_recipe_of_the_paper_computes_what_it_did(recipe: str) -> None:
    expected = RECORD["recipes"][recipe]
    with one_thread():
        digests = computed(recipe)
    for losses, before in zip(digests["losses"], expected["losses"], strict=True):
        assert losses == pytest.approx(before, rel=1e-5)
    assert digests["moved"] == pytest.approx(expected["moved"], rel=1e-5)
    if machine() == RECORD["machine"]:
        assert digests == expected
