"""The bounded clustering against a plain version that holds everything at once."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from capi.method.bounded import ClusteringSettings, cluster, plan_chunks
from capi.method.clustering import OnlineClustering
from capi.method.sinkhorn import OneProcess

# Everything in one chunk; several chunks of whole groups; groups that do not fit and are streamed; one row at a time.
BUDGETS = [None, 40_000, 4_000, 1]


def plain(
    tokens: Tensor, predict_index: Tensor, prototypes: Tensor, bias: Tensor | None, settings: ClusteringSettings
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Loss, targets and gradients as the formulas say, in float64 with autograd."""
    weight = prototypes.detach().double().requires_grad_()
    offset = None if bias is None else bias.detach().double().requires_grad_()
    logits = F.linear(F.normalize(tokens.double(), dim=-1, eps=1e-7), weight, offset)
    samples = (0,) if settings.sinkhorn == "positionwise" else (0, 1)
    with torch.no_grad():
        assignments = torch.exp((logits - logits.amax(samples, keepdim=True)) / settings.target_temperature)
        for _ in range(settings.iterations):
            assignments /= assignments.sum(samples, keepdim=True) + 1e-8
            assignments /= assignments.sum(-1, keepdim=True) + 1e-8
    loss = -(assignments * F.log_softmax(logits / settings.prediction_temperature, -1)).sum(-1).mean()
    loss.backward()
    targets = assignments.gather(1, predict_index[..., None].expand(-1, -1, len(prototypes)))
    return loss.detach(), targets, weight.grad, None if offset is None else offset.grad


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sinkhorn", ["positionwise", "standard"])
def test__loss_targets_and_gradients_equal_the_plain_version(sinkhorn: Any, bias: bool, budget: int | None) -> None:
    settings = ClusteringSettings(sinkhorn=sinkhorn, chunk_bytes=budget)
    clustering = OnlineClustering(width=16, prototypes=50, bias=bias, settings=settings)
    if clustering.bias is not None:
        torch.nn.init.normal_(clustering.bias)
    tokens, predict_index = torch.randn(7, 11, 16), torch.rand(7, 11).argsort(1)[:, :4]
    loss, targets = clustering(tokens, predict_index)
    (3 * loss).backward()
    expected = plain(tokens, predict_index, clustering.prototypes, clustering.bias, settings)
    tolerance = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(loss.double(), expected[0], **tolerance)
    torch.testing.assert_close(targets.double(), expected[1], **tolerance)
    torch.testing.assert_close(clustering.prototypes.grad.double(), 3 * expected[2], **tolerance)
    if clustering.bias is not None:
        torch.testing.assert_close(clustering.bias.grad.double(), 3 * expected[3], **tolerance)


@pytest.mark.parametrize("budget", [None, 4_000])
def test__other_temperatures_and_iterations(budget: int | None) -> None:
    settings = ClusteringSettings(
        sinkhorn="standard", iterations=5, target_temperature=0.1, prediction_temperature=0.15, chunk_bytes=budget
    )
    prototypes, tokens = torch.randn(30, 8), torch.randn(4, 9, 8)
    predict_index = torch.tensor([[8, 0]] * 4)
    totals = cluster(tokens, predict_index, prototypes, None, settings, OneProcess())
    expected = plain(tokens, predict_index, prototypes, None, settings)
    torch.testing.assert_close(totals.loss.double(), expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(totals.targets.double(), expected[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sinkhorn", ["positionwise", "standard"])
def test__logits_a_hundred_apart_give_no_nan(sinkhorn: Any) -> None:
    settings = ClusteringSettings(sinkhorn=sinkhorn, chunk_bytes=4_000)
    prototypes = torch.randn(40, 8) * torch.logspace(-1, 2, 40)[:, None]
    tokens, predict_index = torch.randn(5, 6, 8), torch.arange(6).expand(5, 6)
    totals = cluster(tokens, predict_index, prototypes, None, settings, OneProcess())
    expected = plain(tokens, predict_index, prototypes, None, settings)
    assert torch.isfinite(totals.targets).all()
    torch.testing.assert_close(totals.loss.double(), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(totals.prototype_gradient.double(), expected[2], rtol=1e-3, atol=1e-5)


class LargestTensor(TorchDispatchMode):
    """The bytes of the largest tensor that is made under it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("sinkhorn", ["positionwise", "standard"])
def test__no_tensor_outgrows_the_budget_whatever_the_number_of_positions(sinkhorn: Any) -> None:
    images, width, prototypes, budget = 8, 4, 512, 300_000
    settings = ClusteringSettings(sinkhorn=sinkhorn, chunk_bytes=budget)
    largest = []
    for positions in (16, 64, 256):
        tokens, predict_index = torch.randn(images, positions, width), torch.zeros(images, 1, dtype=torch.int64)
        with LargestTensor() as seen:
            cluster(tokens, predict_index, torch.randn(prototypes, width), None, settings, OneProcess())
        largest.append(seen.bytes)
    assert max(largest) <= budget
    # The plain version would hold this many bytes in each of its several tensors.
    assert images * 256 * prototypes * 4 > 10 * budget


@pytest.mark.parametrize("budget", [1, 10_000, 250_000, 10**9])
@pytest.mark.parametrize("group_size", [1, 8, 1000])
def test__plans_keep_to_the_budget_and_to_whole_groups(group_size: int, budget: int) -> None:
    rows, prototypes = 1000, 48
    plan = plan_chunks(rows, group_size, prototypes, budget)
    row_bytes = 4 * (prototypes + 16)
    assert 1 <= plan.piece_rows <= plan.chunk_rows <= rows
    if not plan.streamed:
        assert plan.chunk_rows % group_size == 0
        assert plan.piece_rows % group_size == 0
    if budget > 4 * row_bytes:
        assert (plan.chunk_rows + 3 * plan.piece_rows) * row_bytes <= budget
