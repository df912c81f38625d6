"""Plans of chunks and pieces, and the rows of groups."""

import pytest
import torch

from capi.method.chunks import GroupLayout, plan_chunks, ranges


@pytest.mark.parametrize("budget", [1, 10_000, 250_000, 10**9])
@pytest.mark.parametrize("group_size", [1, 8, 1000])
def test__plans_keep_to_whole_groups(group_size: int, budget: int) -> None:
    rows = 1000
    plan = plan_chunks(rows, group_size, 48, 16, budget)
    assert 1 <= plan.piece_rows <= plan.chunk_rows <= rows
    if not plan.streamed:
        assert plan.chunk_rows % group_size == 0
        assert plan.piece_rows % group_size == 0
    assert plan.streamed == (budget < 4 * group_size * (48 + 16 + 3 * 16 + 48 * (3 + 4 / group_size)))


def test__the_batch_s_rows_come_first_in_each_group() -> None:
    layout = GroupLayout(own=2, earlier=3)
    rows = torch.arange(10.0)[:, None]
    assert layout.own_of(rows).flatten().tolist() == [0, 1, 5, 6]
    assert [layout.own_before(row) for row in (0, 1, 2, 4, 5, 7, 10)] == [0, 1, 2, 2, 2, 4, 4]


def test__ranges_end_where_they_must() -> None:
    assert list(ranges(3, 10, 3)) == [(3, 6), (6, 9), (9, 10)]
