"""Maps of names: there and back, and what is wrong with a file."""

import pytest
import torch

from capi.errors import CapiError
from capi.zoo.baselines.keys import Layout, Subnetwork, find_state, fits, rule, to_ours, with_bias
from tests.zoo.baseline_checkpoints import to_theirs

LAYOUT = Layout(
    method="a test",
    rules=(
        rule("table", "positions", as_grid=True),
        *with_bias("layer.{n}.qkv", "blocks.{n}.query", "blocks.{n}.key", "blocks.{n}.value"),
        rule("layer.{n}.half", "blocks.{n}.first", None),
        *with_bias("absent", "absent"),
    ),
    signature="table",
    ignored=(r"head\..*",),
    parts={"one": Subnetwork((("model",),), ("", "net.")), "two": Subnetwork((("other",),))},
    renamed=((r"stack\.", "layer."),),
)


def _ours() -> dict[str, torch.Tensor]:
    state = {"positions": torch.randn(1, 9, 4)}
    for number in range(2):
        for name in ("query", "key", "value"):
            state |= {
                f"blocks.{number}.{name}.weight": torch.randn(4, 4),
                f"blocks.{number}.{name}.bias": torch.randn(4),
            }
        state[f"blocks.{number}.first"] = torch.randn(4)
    return state


def test__writing_and_reading_gives_the_same() -> None:
    ours = _ours()
    theirs = to_theirs(ours, LAYOUT)
    assert theirs["table"].shape == (1, 3, 3, 4)
    assert theirs["layer.1.qkv.weight"].shape == (12, 4)
    assert theirs["layer.0.half"].shape == (8,)
    torch.testing.assert_close(theirs["layer.1.qkv.bias"][4:8], ours["blocks.1.key.bias"])
    back = to_ours(theirs, LAYOUT, {name: tuple(value.shape) for name, value in ours.items()}, "a file")
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], ours[name]) for name in ours)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("layer.1.qkv.bias"), 'a file lacks "layer.1.qkv.bias" of the layout of a test'),
        (lambda state: state.update(stranger=torch.zeros(1)), 'a file has "stranger", which the layout of a test does'),
        (
            lambda state: state.update({"layer.0.half": torch.zeros(7)}),
            r'"layer.0.half" of shape \(7,\), expected \(8,\)',
        ),
        (lambda state: state.update({"layer.0.half": torch.zeros(8, dtype=torch.long)}), "hold no real numbers"),
    ],
)
def test__what_is_missing_too_much_or_misshapen_names_itself(change: object, message: str) -> None:
    ours = _ours()
    shapes = {name: tuple(value.shape) for name, value in ours.items()}
    state = to_theirs(ours, LAYOUT)
    change(state)  # type: ignore[operator]
    assert not fits(state, LAYOUT, shapes)
    with pytest.raises(CapiError, match=message):
        to_ours(state, LAYOUT, shapes, "a file")


def test__a_part_is_found_behind_its_names_and_wrappers() -> None:
    contents = {
        "model": {"module.net.table": torch.zeros(1), "module.net.stack.0": torch.ones(1), "head.x": torch.zeros(1)}
    }
    state = find_state(contents, LAYOUT, LAYOUT.part(None))
    assert state is not None
    assert set(state) == {"table", "layer.0", "head.x"}
    assert find_state(contents, LAYOUT, LAYOUT.part("two")) is None
    assert find_state(["no dict"], LAYOUT, LAYOUT.part("one")) is None


def test__an_unknown_part_and_a_name_that_comes_twice_are_reported() -> None:
    with pytest.raises(CapiError, match='have no part "three": there is one, two'):
        LAYOUT.part("three")
    with pytest.raises(CapiError, match=r'holds "layer.0" twice'):
        find_state(
            {"model": {"table": torch.zeros(1), "layer.0": torch.zeros(1), "stack.0": torch.zeros(1)}},
            LAYOUT,
            LAYOUT.part("one"),
        )


def test__two_names_that_stand_for_one_are_refused() -> None:
    state = to_theirs(_ours(), LAYOUT)
    twice = state | {name.replace("layer.", "stack."): value for name, value in state.items()}
    with pytest.raises(CapiError, match=r'holds "layer\..*" twice, once as "stack\..*": save the encoder alone'):
        find_state({"model": twice}, LAYOUT, LAYOUT.part(None))
