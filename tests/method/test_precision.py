"""The precision of the clustering's two products, on a CPU and as a GPU would be asked for it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from capi.config.schema import Config
from capi.errors import CapiError
from capi.method.clustering.precision import ProductPrecision, choose_products, product
from capi.method.clustering.walk import ClusteringSettings, cluster
from capi.runtime.devices import as_on_accelerator
from capi.train.build import assemble, build_learner, build_networks, describe_precision
from capi.types import OneProcess
from tests.method.slow_clustering import ours, slow
from tests.variants import varied

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
AMPERE, TURING = (8, 0), (7, 5)


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> Any:
    def pretend(capability_here: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability_here)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")

    return pretend


def test__auto_is_tf32_for_runs_in_bfloat16_on_gpus_that_have_it(capability: Any) -> None:
    assert choose_products("auto", CPU, torch.bfloat16) == "float32"
    for version, run, expected in (
        (AMPERE, torch.bfloat16, "tf32"),
        (AMPERE, torch.float32, "float32"),
        (TURING, torch.bfloat16, "float32"),
    ):
        capability(version)
        assert choose_products("auto", CUDA, run) == expected


def test__auto_is_float32_on_gpus_of_amd(capability: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch calls them cuda, and their architecture's number looks like a capability."""
    capability((9, 4))
    assert choose_products("auto", CUDA, torch.bfloat16) == "tf32"
    monkeypatch.setattr(torch.version, "hip", "6.3")
    assert choose_products("auto", CUDA, torch.bfloat16) == "float32"
    with pytest.raises(CapiError, match="has no TF32"):
        choose_products("tf32", CUDA, torch.bfloat16)


def test__a_step_that_is_counted_here_has_the_precision_of_a_gpu() -> None:
    with as_on_accelerator():
        assert choose_products("auto", CPU, torch.bfloat16) == "tf32"
    assert choose_products("auto", CPU, torch.bfloat16) == "float32"


def test__tf32_is_refused_where_there_is_none(capability: Any, small_config: Config) -> None:
    capability(TURING)
    with pytest.raises(CapiError, match=r"tf32 needs a CUDA GPU of Ampere or newer, but Tesla T4 has no TF32"):
        choose_products("tf32", CUDA, torch.bfloat16)
    with pytest.raises(CapiError, match=r"the device cpu has no TF32: set clustering\.precision=auto"):
        build_learner(varied(small_config, "clustering.precision=tf32"))
    # A plan may be made anywhere.
    assert choose_products("tf32", torch.device("meta"), torch.bfloat16) == "tf32"


def test__a_learner_has_the_precision_of_its_device(capability: Any, small_config: Config) -> None:
    capability(AMPERE)
    config = varied(small_config, "run.precision=bfloat16")
    networks = build_networks(config, "meta")
    for device, expected in ((CPU, "float32"), (torch.device("meta"), "tf32")):
        assert assemble(config, networks, device).target.settings.precision == expected  # type: ignore[union-attr]


def test__what_auto_is_tells_gpus_of_one_run_apart(capability: Any, small_config: Config) -> None:
    """Processes compare it before the first step."""
    config, sentences = varied(small_config, "run.precision=bfloat16"), []
    for each in (AMPERE, TURING):
        capability(each)
        sentences.append(describe_precision(config, CUDA))
    assert sentences == [
        "networks: torch.bfloat16\nclustering: tf32",
        "networks: torch.bfloat16\nclustering: float32",
    ]


class Products(TorchDispatchMode):
    """How float32 products are computed while each one runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.out):
            self.seen.append(torch.get_float32_matmul_precision())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("precision", "expected"), [("float32", ["highest", "highest"]), ("tf32", ["high", "highest"])]
)
@pytest.mark.parametrize("around", ["highest", "medium"])
def test__the_setting_of_torch_holds_for_the_products_alone(
    precision: ProductPrecision, expected: list[str], around: str
) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(around)
    try:
        with Products() as products:
            settings = ClusteringSettings(precision=precision)
            cluster(torch.randn(4, 3, 8), torch.randn(6, 8), None, settings, OneProcess())
        assert torch.get_float32_matmul_precision() == around
    finally:
        torch.set_float32_matmul_precision(before)
    assert products.seen == expected


def test__bfloat16_rounds_the_factors_and_nothing_else() -> None:
    left, right = torch.randn(5, 64), torch.randn(64, 7)
    rounded = (left.bfloat16().double() @ right.bfloat16().double()).float()
    torch.testing.assert_close(product(left, right, "bfloat16"), rounded, rtol=1e-5, atol=1e-5)
    total = torch.randn(5, 7)
    expected = total + rounded
    assert product(left, right, "bfloat16", total, out=total) is total
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sinkhorn", ["positionwise", "standard"])
@pytest.mark.parametrize("chunk_bytes", [None, 18_000])
def test__with_logits_in_tf32_the_gradient_alone_is_in_bfloat16(sinkhorn: Any, chunk_bytes: int | None) -> None:
    """On a CPU, whose TF32 is float32. Small chunks walk over slices, and stream standard Sinkhorn."""
    tokens, prototypes, bias = torch.randn(16, 5, 32), torch.randn(40, 32), torch.randn(40)
    settings = ClusteringSettings(sinkhorn=sinkhorn, chunk_bytes=chunk_bytes)
    exact = cluster(tokens, prototypes, bias, settings, OneProcess())
    results = cluster(tokens, prototypes, bias, replace(settings, precision="tf32"), OneProcess())
    torch.testing.assert_close(results.loss, exact.loss)
    for factor, expected in zip(results.factors, exact.factors, strict=True):
        torch.testing.assert_close(factor, expected)
    assert 1e-5 < distance(results.prototype_gradient, exact.prototype_gradient) < 1e-2
    assert distance(results.bias_gradient, exact.bias_gradient) < 1e-2


def distance(gradient: Tensor, expected: Tensor) -> float:
    return float((gradient - expected).norm() / expected.norm())


@pytest.mark.parametrize("sinkhorn", ["positionwise", "standard"])
def test__in_bfloat16_assignments_stay_balanced_and_near_those_of_float32(sinkhorn: Any) -> None:
    tokens, prototypes, bias = torch.randn(16, 5, 32), torch.randn(40, 32), torch.randn(40)
    settings = ClusteringSettings(sinkhorn=sinkhorn, precision="bfloat16")
    results, expected = ours(tokens, prototypes, bias, settings), slow(tokens, prototypes, bias, settings)
    torch.testing.assert_close(results.assignments.sum(-1), torch.ones(16, 5), rtol=1e-4, atol=0)
    moved = (results.assignments - expected.assignments).abs().sum(-1) / 2
    assert 1e-5 < moved.mean() < 0.03
    torch.testing.assert_close(results.loss.double(), expected.loss, rtol=1e-2, atol=0)
    difference: Tensor = (results.prototype_gradient - expected.prototype_gradient).norm()
    assert difference < 0.05 * expected.prototype_gradient.norm()
