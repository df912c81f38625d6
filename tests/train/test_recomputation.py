import pytest
import torch

from capi.config.files import overridden, parse_config
from capi.config.schema import Config
from capi.method.student import Student
from capi.train.build import build_networks
from capi.train.recomputation import recompute
from tests.train.saved_bytes import saved_bytes


def gradients(config: Config, kind: str) -> tuple[list[torch.Tensor], int]:
    """Gradients of a student's forward and backward pass, and the bytes that were saved between them."""
    networks = build_networks(config)
    recompute(networks.blocks, kind)  # type: ignore[arg-type]
    student: Student = networks.student
    patches = config.grid[0] * config.grid[1]
    images = torch.randn(4, 3, *config.data.height_and_width, generator=torch.Generator().manual_seed(0))
    order = torch.arange(patches).expand(4, -1)
    torch.manual_seed(0)
    saved, output = saved_bytes(lambda: student(images, order[:, : patches // 2], order[:, patches // 2 :]))
    output.square().sum().backward()
    return [parameter.grad for parameter in student.parameters() if parameter.grad is not None], saved


@pytest.fixture
def deep(small_config: Config) -> Config:
    raw = overridden(small_config.model_dump(mode="json"), ["model.depth=6", "model.stochastic_depth=0.4"])
    return parse_config(raw, source="test")


def test__gradients_stay_the_same_with_less_kept(deep: Config) -> None:
    plain, all_kept = gradients(deep, "off")
    for kind, share in (("full", 0.5), ("selective", 0.95)):
        again, saved = gradients(deep, kind)
        assert len(again) == len(plain)
        for value, other in zip(again, plain, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-7)
        assert saved < share * all_kept, kind
