"""The clustering in bounded memory against a slow version that holds everything at once."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from capi.errors import CapiError
from capi.method.clustering import OnlineClustering, walk
from capi.method.clustering.walk import ClusteringSettings, cluster, plan_slices, rebuild
from capi.models.costs import Counts, Workload
from capi.types import OneProcess
from tests.method.slow_clustering import assert_close, ours, slow


@pytest.fixture(params=["together", "one by one"])
def balanced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the positions of a slice are balanced at once."""
    if request.param == "one by one":
        monkeypatch.setattr(walk, "_CACHED_BYTES", 1)
    return str(request.param)


# Everything in one slice; several positions a slice; one.
@pytest.mark.parametrize("budget", [None, 20_000, 6_800])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sinkhorn", ["positionwise", "standard"])
@pytest.mark.usefixtures("balanced")
def test__loss_targets_and_gradients_equal_the_slow_version(sinkhorn: Any, bias: bool, budget: int | None) -> None:
    settings = ClusteringSettings(sinkhorn=sinkhorn, chunk_bytes=budget)
    tokens, prototypes = torch.randn(7, 11, 16), torch.randn(50, 16)
    offset = torch.randn(50) if bias else None
    assert_close(ours(tokens, prototypes, offset, settings), slow(tokens, prototypes, offset, settings))


def test__the_gradient_that_is_handed_out_is_that_of_the_loss() -> None:
    clustering = OnlineClustering(width=16, prototypes=50)
    tokens = torch.randn(7, 11, 16)
    loss, (targets,) = clustering([tokens], [torch.arange(4).expand(7, -1)])
    (3 * loss).backward()
    expected = slow(tokens, clustering.prototypes, clustering.bias, clustering.settings)
    torch.testing.assert_close(targets.double(), expected.assignments[:, :4], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        clustering.prototypes.grad.double(), 3 * expected.prototype_gradient, rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(clustering.bias.grad.double(), 3 * expected.bias_gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("budget", [None, 4_000])
@pytest.mark.parametrize("sinkhorn", ["positionwise", "standard"])
def test__other_temperatures_and_iterations(sinkhorn: Any, budget: int | None) -> None:
    settings = ClusteringSettings(
        sinkhorn=sinkhorn, iterations=5, target_temperature=0.1, prediction_temperature=0.15, chunk_bytes=budget
    )
    prototypes, tokens = torch.randn(30, 8), torch.randn(4, 9, 8)
    assert_close(ours(tokens, prototypes, None, settings), slow(tokens, prototypes, None, settings), rtol=1e-4)


@pytest.mark.parametrize("sinkhorn", ["positionwise", "standard"])
@pytest.mark.parametrize("budget", [None, 5_000])
def test__logits_a_hundred_apart_give_no_nan(sinkhorn: Any, budget: int | None) -> None:
    settings = ClusteringSettings(sinkhorn=sinkhorn, chunk_bytes=budget)
    prototypes, tokens = torch.randn(40, 8) * torch.logspace(-1, 2, 40)[:, None], torch.randn(5, 6, 8)
    results, expected = ours(tokens, prototypes, None, settings), slow(tokens, prototypes, None, settings)
    assert torch.isfinite(results.assignments).all()
    torch.testing.assert_close(results.loss.double(), expected.loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(results.prototype_gradient.double(), expected.prototype_gradient, rtol=1e-3, atol=1e-5)


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
@pytest.mark.usefixtures("balanced")
def test__memory_stays_within_the_budget_whatever_the_number_of_positions(sinkhorn: Any, images: int) -> None:
    width, prototypes, budget = 64, 512, 600_000
    settings = ClusteringSettings(sinkhorn=sinkhorn, chunk_bytes=budget)
    peaks = []
    for positions in (64, 512):
        tokens, weights = torch.randn(images, positions, width), torch.randn(prototypes, width)
        with PeakBytes(tokens, weights) as memory:
            cluster(tokens, weights, None, settings, OneProcess())
        # The gradient and what rebuilds targets are beside the budget.
        groups = positions if sinkhorn == "positionwise" else 1
        peaks.append(memory.peak - 4 * prototypes * (width + 1 + 2 * groups))
    assert budget / 4 < max(peaks) <= budget
    # The slow version would hold this many bytes in each of its several tensors, and the tokens alone are this large.
    assert 8 * 512 * prototypes * 4 > 10 * budget
    assert 8 * 512 * width * 4 > 1.5 * budget


@pytest.mark.parametrize("budget", [None, 2_300])
@pytest.mark.parametrize("iterations", [3, 8, 50])
@pytest.mark.parametrize("sinkhorn", ["positionwise", "standard"])
def test__a_sample_that_no_prototype_reaches_gives_no_nan(sinkhorn: Any, iterations: int, budget: int | None) -> None:
    settings = ClusteringSettings(sinkhorn=sinkhorn, iterations=iterations, chunk_bytes=budget)
    tokens, prototypes = torch.randn(4, 5, 8), torch.randn(12, 8) * 100
    # Below the largest logit of every prototype by hundreds of temperatures.
    tokens[0, 0] = torch.linalg.lstsq(prototypes, -torch.ones(12) * 50).solution.flatten()
    results = ours(tokens, prototypes, None, settings)
    assert all(torch.isfinite(value).all() for value in results if value is not None)
    if sinkhorn == "standard" and iterations == 3:
        expected = slow(tokens, prototypes, None, settings)
        torch.testing.assert_close(results.assignments.double(), expected.assignments, rtol=1e-3, atol=1e-4)
        assert results.assignments[0, 0].sum() < 1e-3


@pytest.mark.parametrize("budget", [None, 6_500])
@pytest.mark.parametrize("iterations", [3, 4, 6])
def test__a_sample_that_is_faintly_reached_is_assigned_after_as_many_iterations_as_by_the_slow_version(
    iterations: int, budget: int | None
) -> None:
    """Its kernel is about 1e-31, and eps keeps it down for three iterations."""
    settings = ClusteringSettings(sinkhorn="standard", iterations=iterations, chunk_bytes=budget)
    prototypes, tokens = 0.02 * torch.randn(40, 8), 0.1 * torch.randn(9, 3, 8)
    prototypes[:, 0] += 2.1
    tokens[..., 0] = 1
    tokens[1, 0, 0] = -1
    results, expected = ours(tokens, prototypes, None, settings), slow(tokens, prototypes, None, settings)
    assert (expected.assignments[1, 0].sum() > 0.5) == (iterations > 3)
    torch.testing.assert_close(results.loss.double(), expected.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results.assignments.double(), expected.assignments, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(results.prototype_gradient.double(), expected.prototype_gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test__tokens_and_prototypes_of_any_precision_are_clustered_in_float32(dtype: torch.dtype) -> None:
    clustering = OnlineClustering(width=8, prototypes=6).to(dtype)
    loss, (targets,) = clustering([torch.randn(3, 4, 8, dtype=dtype)], [torch.zeros(3, 1, dtype=torch.int64)])
    loss.backward()
    assert targets.dtype == torch.float32
    assert clustering.prototypes.grad.dtype == dtype


@pytest.mark.parametrize("distance", [0.3, 3.0, 20.0])
def test__an_image_far_from_all_prototypes_has_its_softmax_too(distance: float) -> None:
    prototypes, tokens, bias = 0.1 * torch.randn(40, 8), torch.randn(6, 3, 8), torch.randn(40)
    prototypes[:, 0] += distance
    tokens[..., 0] = 20.0
    tokens[2, :, 0] = -20.0
    settings = ClusteringSettings()
    assert_close(ours(tokens, prototypes, bias, settings), slow(tokens, prototypes, bias, settings), rtol=1e-4)


@pytest.mark.parametrize("sinkhorn", ["positionwise", "standard"])
def test__a_token_that_is_nan_makes_the_loss_nan(sinkhorn: Any) -> None:
    tokens = torch.randn(3, 4, 8)
    tokens[1, 2, 3] = torch.nan
    results = cluster(tokens, torch.randn(20, 8), None, ClusteringSettings(sinkhorn=sinkhorn), OneProcess())
    assert results.loss.isnan()
    assert results.prototype_gradient.isnan().any()


@pytest.mark.parametrize("sinkhorn", ["positionwise", "standard"])
def test__targets_of_any_images_are_rebuilt_as_they_were_balanced_together(sinkhorn: Any) -> None:
    tokens, prototypes, bias = torch.randn(6, 5, 8), torch.randn(20, 8), torch.randn(20)
    settings = ClusteringSettings(sinkhorn=sinkhorn)
    expected = slow(tokens, prototypes, bias, settings).assignments
    factors = cluster(tokens, prototypes, bias, settings, OneProcess()).factors
    index = torch.rand(6, 5).argsort(1)[:, :3]
    for images in (slice(0, 2), slice(2, 3), slice(3, 6)):
        image = torch.arange(images.start, images.stop)[:, None]
        chosen = tokens[image, index[images]]
        targets = rebuild(chosen, index[images], prototypes, bias, settings, factors, images.start)
        torch.testing.assert_close(targets.double(), expected[image, index[images]], rtol=1e-4, atol=1e-6)


class Counted(OneProcess):
    """Counts the exchanges that several processes would make."""

    def __init__(self) -> None:
        self.exchanges = 0

    def sum(self, value: Tensor) -> Tensor:
        self.exchanges += 1
        return value

    max = sum


def test__of_a_slice_the_maximum_and_each_iteration_are_one_exchange() -> None:
    tokens, prototypes = torch.randn(4, 30, 8), torch.randn(20, 8)
    for sinkhorn, expected in (("positionwise", 3 * (1 + 3)), ("standard", 1 + 3)):
        reduction, settings = Counted(), ClusteringSettings(sinkhorn=sinkhorn, chunk_bytes=20_000)  # type: ignore[arg-type]
        assert plan_slices(4, 30, 20, 8, settings).positions == 10
        cluster(tokens, prototypes, None, settings, reduction)
        assert reduction.exchanges == expected


def test__a_vit_l_step_on_gpus_makes_at_most_forty_exchanges() -> None:
    slices = plan_slices(512, 256, 16384, 1024, ClusteringSettings(), accelerator=True)
    assert slices.at_once == slices.positions
    assert 4 * -(-256 // slices.positions) <= 40
    # A slice of another size would be compiled once more.
    assert 256 % slices.positions == 0
    with torch.device("meta"):
        clustering = OnlineClustering(width=1024, prototypes=16384)
    parts = clustering.memory(Counts(registers=16, patches=256, visible=90, predicted=19), Workload(512), 16384)
    assert 3 * 2**30 < next(part.bytes for part in parts if part.name == "clustering's working memory") <= 4 * 2**30


@pytest.mark.parametrize("accelerator", [True, False])
def test__the_default_budget_has_room_for_one_position_and_a_smaller_one_is_refused(accelerator: bool) -> None:
    many = plan_slices(2**20, 49, 16384, 384, ClusteringSettings(), accelerator=accelerator)
    assert many.positions == many.at_once == 1
    with pytest.raises(CapiError, match=r"chunk_mib = 1 is too little for one position of 64 images, .* need 12.7 MiB"):
        plan_slices(64, 196, 16384, 384, ClusteringSettings(chunk_bytes=2**20), accelerator=accelerator)
