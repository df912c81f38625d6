from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from capi.errors import CapiError
from capi.runtime.devices import Transfer, choose_device, choose_workers, count_cores, float32_products

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test__a_device_that_is_not_there_is_refused() -> None:
    assert choose_device("cpu").type == choose_device(torch.device("cpu")).type == "cpu"
    for name in ("cuda:99", "toaster"):
        with pytest.raises(CapiError, match="is not there"):
            choose_device(name)


def test__reading_ahead_pays_for_many_images_only() -> None:
    assert [choose_workers(None, CPU, images=count) for count in (0, 255, 256, 10**6)] == [0, 0, 1, 1]
    assert choose_workers(None, CUDA, images=255) == 0
    assert 1 <= choose_workers(None, CUDA, images=256) <= 12
    assert [choose_workers(5, device, images=count) for device in (CPU, CUDA) for count in (0, 10**6)] == [5] * 4
    assert choose_workers(0, CUDA, images=10**6) == 0


def test__processes_on_a_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert [choose_workers(None, CUDA, processes=count) for count in (1, 2, 8, 64, 100)] == [12, 12, 7, 1, 1]
    assert choose_workers(9, CUDA, processes=64) == 9
    assert choose_workers(None, CPU) == 1
    assert [count_cores(count) for count in (1, 3, 64, 100)] == [64, 21, 1, 1]


class Streams:
    """Notes in which order an accelerator would be asked for what."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def Stream(self, device: torch.device) -> str:  # noqa: N802 - torch's name
        self.asked.append(("made", device))
        return "copies"

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.asked.append(("in", stream))
        yield
        self.asked.append(("out of", stream))

    def current_stream(self, _: torch.device) -> "Streams":
        return self

    def wait_stream(self, stream: str) -> None:
        self.asked.append(("steps wait for", stream))


def test__batches_are_copied_beside_the_steps_which_wait_for_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, held = Streams(), []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda value, stream: held.append((value, stream)))
    cpu = torch.device("cpu")
    transfer, values = Transfer(cpu, streams), (torch.ones(2), torch.arange(3))
    for _ in range(2):
        moved = transfer(values)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(moved, values, strict=True))
    once = [("in", "copies"), ("out of", "copies"), ("steps wait for", "copies")]
    assert streams.asked == [("made", cpu), *once, *once]
    # What the steps read is not given away before they have.
    assert [stream for _, stream in held] == [streams] * 4
    assert Transfer(cpu)(values)[1] is values[1]


def test__products_have_a_precision_only_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's default, whatever another test made of it.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    before = torch.get_float32_matmul_precision()
    with float32_products("high"):
        assert torch.get_float32_matmul_precision() == "high"
        with float32_products("highest"):
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cudnn.allow_tf32
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before
    assert torch.backends.cudnn.allow_tf32
