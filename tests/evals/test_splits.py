import pytest
import torch

from capi.errors import CapiError, counted
from capi.evals.results import few_held_out, hold_out


@pytest.mark.parametrize(
    ("count", "share", "held"), [(100, 0.1, 10), (109, 0.1, 10), (3, 0.1, 1), (2, 0.1, 1), (10, 0.5, 5)]
)
def test__every_sample_is_in_one_part_and_the_share_is_held_out(count: int, share: float, held: int) -> None:
    split = hold_out(count, share, seed=0)
    assert len(split.held_out) == held
    assert sorted([*split.fit.tolist(), *split.held_out.tolist()]) == list(range(count))


def test__both_parts_ascend() -> None:
    split = hold_out(50, 0.3, seed=0)
    assert all((part.diff() > 0).all() for part in split)


def test__the_split_follows_from_count_and_seed_alone() -> None:
    first = hold_out(60, 0.2, seed=3)
    torch.manual_seed(99)
    assert all(torch.equal(value, other) for value, other in zip(first, hold_out(60, 0.2, seed=3), strict=True))
    assert not torch.equal(first.held_out, hold_out(60, 0.2, seed=4).held_out)


def test__samples_are_held_out_all_over_the_set() -> None:
    # Sorted files put classes one after the other; a part at the end would hold out the last class alone.
    held = hold_out(1000, 0.1, seed=0).held_out
    assert torch.histc(held.float(), 10, 0, 1000).min() >= 2


@pytest.mark.parametrize(("count", "share"), [(0, 0.1), (1, 0.1), (5, 1.0)])
def test__nothing_left_to_fit_on_is_an_error(count: int, share: float) -> None:
    with pytest.raises(CapiError, match=f"{counted(count, 'training image')} cannot give"):
        hold_out(count, share, seed=0)


@pytest.mark.parametrize(
    ("held", "classes", "settings", "few"),
    [(49, 2, 2, True), (50, 2, 2, False), (50, 25, 30, False), (51, 26, 30, True), (6, 3, 1, False)],
)
def test__a_choice_by_few_images_or_few_of_a_class_is_a_warning(
    held: int, classes: int, settings: int, few: bool
) -> None:
    warnings = few_held_out(held, classes=classes, settings=settings)
    expected = f"the best of {settings} settings was chosen by {held} held-out images of {classes} classes"
    assert [warning.startswith(expected) for warning in warnings] == [True] * few
