"""What needs no second process: a group of one shards and puts together all the same."""

import pytest
import torch
from torch import nn

from capi.errors import CapiError
from capi.runtime.processes import Processes
from capi.runtime.sharding import average_gradients, device_mesh, fill_from_main, shard, whole, whole_state

CPU = torch.device("cpu")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("lost", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x))
        return result


def test__a_module_built_without_memory_gets_the_weights_and_buffers_of_another(group: Processes) -> None:
    torch.manual_seed(0)
    source = Small()
    with torch.device("meta"):
        module = Small()
    shard(module, {module.first: torch.float32}, device_mesh(group, None, CPU))
    module.to_empty(device="cpu")
    fill_from_main(module, source)
    x = torch.randn(7, 3)
    torch.testing.assert_close(module(x), source(x))
    for name, value in source.state_dict().items():
        assert torch.equal(whole_state(module)[name], value)
    assert torch.equal(module.get_buffer("lost"), torch.arange(4.0))
    # Nothing stays whole after a forward pass, or the average of two networks would not find its parts.
    assert all(hasattr(parameter, "full_tensor") for parameter in module.parameters())
    assert torch.equal(whole(module.first.weight), source.first.weight)
    assert whole(x) is x


def test__units_compute_in_their_precision_and_keep_float32_masters(group: Processes) -> None:
    module = Small()
    shard(module, {module.first: torch.bfloat16}, device_mesh(group, None, CPU))
    with torch.autocast("cpu", torch.bfloat16):
        output = module(torch.randn(7, 3))
    output.sum().backward()
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert {parameter.grad.dtype for parameter in module.parameters() if parameter.grad is not None} == {torch.float32}


def test__shards_must_divide_the_processes(group: Processes) -> None:
    with pytest.raises(CapiError, match=r"distributed\.shards is 3, which does not divide the 2 processes"):
        device_mesh(Processes(size=2), 3, CPU)


def test__gradients_of_whole_parameters_become_means() -> None:
    class Doubling(Processes):
        """Two processes with the same values would add up to this."""

        def sum(self, value: torch.Tensor) -> torch.Tensor:
            return value * 2 + 1

    parameter = nn.Parameter(torch.ones(3))
    average_gradients([parameter, nn.Parameter(torch.ones(1), requires_grad=False)], Doubling(size=2))
    (parameter * 4).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [4.5, 4.5, 4.5]
