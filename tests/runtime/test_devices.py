import pytest
import torch

from capi.errors import CapiError
from capi.runtime.devices import choose_device, choose_workers, count_cores

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
