"""The compiled groups; that they equal the plain version is shown in test_bounded.py, which runs both ways."""

import importlib.util
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from capi.method import bounded, compiled
from capi.method.bounded import ClusteringSettings, Totals, cluster
from capi.method.sinkhorn import OneProcess
from tests.method.test_bounded import PeakBytes

SETTINGS = ClusteringSettings()


@pytest.fixture(autouse=True)
def worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "_WORTH_COMPILING", 0)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many threads each compiled chunk had."""
    threads: list[int] = []
    absorb_groups = compiled.absorb_groups

    def counted(logits: Tensor, offset: Tensor, scratch: Any, **named: Any) -> float:
        threads.append(len(scratch))
        return absorb_groups(logits, offset, scratch, **named)

    monkeypatch.setattr(compiled, "absorb_groups", counted)
    return threads


def clustered(settings: ClusteringSettings = SETTINGS, reduction: Any = None, earlier: Tensor | None = None) -> Totals:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(6, 12, 8, generator=generator)
    prototypes, bias = torch.randn(70, 8, generator=generator), torch.randn(70, generator=generator)
    predict_index = torch.tensor([[0, 8, 3]] * 6)
    return cluster(tokens, predict_index, prototypes, bias, settings, reduction or OneProcess(), earlier)


def test__powers_of_two_are_those_of_numpy_to_float32() -> None:
    exponents = np.concatenate([np.linspace(-120, 0, 100_001), np.arange(-120, 1), [-0.5, -1.5]]).astype(np.float32)
    found = np.array([compiled._power(x) for x in exponents], np.float32)
    expected = np.exp2(exponents.astype(np.float64))
    np.testing.assert_allclose(found, expected, rtol=2.5e-7)
    assert found[exponents == 0].tolist() == [1.0, 1.0]


def test__no_bit_depends_on_the_number_of_threads(batches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results.append(clustered())
    assert sorted(set(batches)) == [1, 2, 3]
    for found in results[1:]:
        for ours, theirs in zip(found[:4], results[0][:4], strict=True):
            assert torch.equal(ours, theirs)


def test__chunks_that_end_amid_the_threads_leave_no_group_out(batches: list[int]) -> None:
    whole, parts = clustered(), clustered(ClusteringSettings(chunk_bytes=14_000))
    assert len(batches) > 2
    for ours, theirs in zip(parts[:4], whole[:4], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class _Elsewhere:
    def sum(self, values: Tensor) -> Tensor:
        return values

    def max(self, values: Tensor) -> Tensor:
        return values


def refused(name: str) -> Any:
    raise ImportError("it needs another numpy")


@pytest.mark.parametrize("way", ["processes", "queue", "streamed", "small", "missing", "broken"])
def test__where_it_cannot_go_the_pieces_do_the_same(
    way: str, batches: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = clustered()
    assert batches
    batches.clear()
    settings = ClusteringSettings(chunk_bytes=2_000) if way == "streamed" else SETTINGS
    if way == "small":
        monkeypatch.setattr(bounded, "_WORTH_COMPILING", 6 * 12 * 70 + 1)
    if way in ("missing", "broken"):
        monkeypatch.setattr(bounded, "_compiled", bounded._compiled.__wrapped__)
        monkeypatch.setattr(importlib, "import_module", refused)
    if way == "missing":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    earlier = torch.randn(2, 12, 8) if way == "queue" else None
    found = clustered(settings, _Elsewhere() if way == "processes" else None, earlier)
    assert not batches
    assert ("numba cannot be imported (it needs another numpy)" in caplog.text) == (way == "broken")
    if earlier is None:
        for ours, theirs in zip(found[:4], expected[:4], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compiling", [True, False])
def test__a_token_that_is_no_number_makes_the_loss_none(compiling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "_WORTH_COMPILING", 0 if compiling else 2**62)
    tokens = torch.randn(3, 4, 8)
    tokens[1, 2, 3] = torch.nan
    totals = cluster(tokens, torch.zeros(3, 1, dtype=torch.int64), torch.randn(20, 8), None, SETTINGS, OneProcess())
    assert totals.loss.isnan()
    assert totals.prototype_gradient.isnan().any()


def test__its_threads_end_with_the_work() -> None:
    before = threading.active_count()
    clustered()
    assert threading.active_count() == before


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test__threads_share_the_budget_and_go_beyond_it_with_no_group(
    threads: int, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    tokens, prototypes, index = torch.randn(8, 30, 384), torch.randn(512, 384), torch.zeros(8, 1, dtype=torch.int64)
    for budget in (111_104, 200_000, 400_000):
        with PeakBytes(tokens, prototypes, index) as memory:
            cluster(tokens, index, prototypes, None, ClusteringSettings(chunk_bytes=budget), OneProcess())
        # Targets, gradients and a few numbers for each sample are beside the budget.
        assert memory.peak - 4 * (8 * 512 + 512 * 384 + 512) - 4 * 4 * 8 * 30 <= budget
    # So many threads have no room in these budgets: pieces are quicker than few of them.
    assert bool(batches) == (threads < 8)
