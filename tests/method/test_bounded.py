"""The bounded clustering against a plain version that holds everything at once."""

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from capi.method import bounded
from capi.method.bounded import ClusteringSettings, cluster
from capi.method.clustering import OnlineClustering
from capi.method.sinkhorn import OneProcess


@pytest.fixture(params=["pieces", "compiled"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways in which groups that fit are balanced on a CPU."""
    monkeypatch.setattr(bounded, "_WORTH_COMPILING", 0 if request.param == "compiled" else 2**62)
    return str(request.param)


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
def test__loss_targets_and_gradients_equal_the_plain_version(
    way: str, sinkhorn: Any, bias: bool, budget: int | None
) -> None:
    settings = ClusteringSettings(sinkhorn=sinkhorn, chunk_bytes=budget)
    clustering = OnlineClustering(width=16, prototypes=50, bias=bias, settings=settings)
    if clustering.bias is not None:
        torch.nn.init.normal_(clustering.bias)
    tokens, predict_index = torch.randn(7, 11, 16), torch.rand(7, 11).argsort(1)[:, :4]
    loss, (targets,) = clustering([tokens], [predict_index])
    (3 * loss).backward()
    expected = plain(tokens, predict_index, clustering.prototypes, clustering.bias, settings)
    tolerance = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(loss.double(), expected[0], **tolerance)
    torch.testing.assert_close(targets.double(), expected[1], **tolerance)
    torch.testing.assert_close(clustering.prototypes.grad.double(), 3 * expected[2], **tolerance)
    if clustering.bias is not None:
        torch.testing.assert_close(clustering.bias.grad.double(), 3 * expected[3], **tolerance)


@pytest.mark.parametrize("budget", [None, 4_000])
def test__other_temperatures_and_iterations(way: str, budget: int | None) -> None:
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
@pytest.mark.parametrize("budget", [None, 4_000])
def test__logits_a_hundred_apart_give_no_nan(way: str, sinkhorn: Any, budget: int | None) -> None:
    settings = ClusteringSettings(sinkhorn=sinkhorn, chunk_bytes=budget)
    prototypes = torch.randn(40, 8) * torch.logspace(-1, 2, 40)[:, None]
    tokens, predict_index = torch.randn(5, 6, 8), torch.arange(6).expand(5, 6)
    totals = cluster(tokens, predict_index, prototypes, None, settings, OneProcess())
    expected = plain(tokens, predict_index, prototypes, None, settings)
    assert torch.isfinite(totals.targets).all()
    torch.testing.assert_close(totals.loss.double(), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(totals.prototype_gradient.double(), expected[2], rtol=1e-3, atol=1e-5)


class PeakBytes(TorchDispatchMode):
    """The most bytes that the tensors made under it held together; the inputs are not counted."""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self.inputs = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        # A storage lives as long as a tensor that was seen to use it.
        self.users: dict[int, int] = {}
        self.held = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.inputs:
                self._note(tensor)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        self.users[address] = self.users.get(address, 0) + 1
        if self.users[address] == 1:
            self.held += size
            self.peak = max(self.peak, self.held)
        weakref.finalize(tensor, self._forget, address, size)

    def _forget(self, address: int, size: int) -> None:
        self.users[address] -= 1
        if not self.users[address]:
            self.held -= size


@pytest.mark.parametrize("images", [1, 8])
@pytest.mark.parametrize("sinkhorn", ["positionwise", "standard"])
def test__memory_stays_within_the_budget_whatever_the_number_of_positions(way: str, sinkhorn: Any, images: int) -> None:
    width, prototypes, budget = 64, 512, 600_000
    settings = ClusteringSettings(sinkhorn=sinkhorn, chunk_bytes=budget)
    peaks = []
    for positions in (64, 512):
        tokens, predict_index = torch.randn(images, positions, width), torch.zeros(images, 1, dtype=torch.int64)
        weights = torch.randn(prototypes, width)
        with PeakBytes(tokens, predict_index, weights) as memory:
            cluster(tokens, predict_index, weights, None, settings, OneProcess())
        # Targets and gradients are what was asked for, and one factor for each sample lives beside the budget.
        outputs = 4 * (images * prototypes + prototypes * width + prototypes)
        peaks.append(memory.peak - outputs - 4 * 4 * images * positions)
    assert budget / 4 < min(peaks) <= max(peaks) <= budget
    # The plain version would hold this many bytes in each of its several tensors, and the tokens alone are this large.
    assert 8 * 512 * prototypes * 4 > 10 * budget
    assert 8 * 512 * width * 4 > 1.5 * budget


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("iterations", [3, 8])
def test__a_sample_that_no_prototype_reaches_gives_no_nan(way: str, iterations: int, budget: int | None) -> None:
    settings = ClusteringSettings(sinkhorn="standard", iterations=iterations, chunk_bytes=budget)
    tokens = torch.randn(4, 5, 8)
    prototypes = torch.randn(12, 8) * 100
    # Below the largest logit of every prototype by hundreds of temperatures.
    tokens[0, 0] = torch.linalg.lstsq(prototypes, -torch.ones(12) * 50).solution.flatten()
    totals = cluster(tokens, torch.arange(5).expand(4, 5), prototypes, None, settings, OneProcess())
    assert all(torch.isfinite(value).all() for value in totals[:4])
    if iterations == 3:
        expected = plain(tokens, torch.arange(5).expand(4, 5), prototypes, None, settings)
        torch.testing.assert_close(totals.targets.double(), expected[1], rtol=1e-3, atol=1e-4)
        assert totals.targets[0, 0].sum() < 1e-3


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("iterations", [3, 4, 6])
def test__a_sample_that_is_faintly_reached_is_assigned_after_as_many_iterations_as_by_the_plain_version(
    way: str, iterations: int, budget: int | None
) -> None:
    """Its kernel is about 1e-31, and eps keeps it down for three iterations."""
    settings = ClusteringSettings(sinkhorn="standard", iterations=iterations, chunk_bytes=budget)
    prototypes, tokens = 0.02 * torch.randn(40, 8), 0.1 * torch.randn(9, 3, 8)
    prototypes[:, 0] += 2.1
    tokens[..., 0] = 1
    tokens[1, 0, 0] = -1
    everywhere = torch.arange(3).expand(9, 3)
    totals = cluster(tokens, everywhere, prototypes, None, settings, OneProcess())
    expected = plain(tokens, everywhere, prototypes, None, settings)
    assert (expected[1][1, 0].sum() > 0.5) == (iterations > 3)
    torch.testing.assert_close(totals.loss.double(), expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(totals.targets.double(), expected[1], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(totals.prototype_gradient.double(), expected[2], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test__tokens_and_prototypes_of_any_precision_are_clustered_in_float32(dtype: torch.dtype) -> None:
    clustering = OnlineClustering(width=8, prototypes=6).to(dtype)
    loss, (targets,) = clustering([torch.randn(3, 4, 8, dtype=dtype)], [torch.zeros(3, 1, dtype=torch.int64)])
    loss.backward()
    assert targets.dtype == torch.float32
    assert clustering.prototypes.grad.dtype == dtype


@pytest.mark.parametrize("distance", [0.3, 3.0, 20.0])
def test__an_image_far_from_all_prototypes_has_its_softmax_too(way: str, distance: float) -> None:
    prototypes = 0.1 * torch.randn(40, 8)
    prototypes[:, 0] += distance
    tokens, predict_index = torch.randn(6, 3, 8), torch.arange(3).expand(6, 3)
    tokens[..., 0] = 20.0
    tokens[2, :, 0] = -20.0
    bias = torch.randn(40)
    totals = cluster(tokens, predict_index, prototypes, bias, ClusteringSettings(), OneProcess())
    expected = plain(tokens, predict_index, prototypes, bias, ClusteringSettings())
    torch.testing.assert_close(totals.loss.double(), expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(totals.targets.double(), expected[1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(totals.prototype_gradient.double(), expected[2], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(totals.bias_gradient.double(), expected[3], rtol=1e-4, atol=1e-6)
