import pytest
import torch

from capi.errors import CapiError
from capi.runtime.devices import choose_device


def test__a_device_that_is_not_there_is_refused() -> None:
    assert choose_device("cpu").type == choose_device(torch.device("cpu")).type == "cpu"
    for name in ("cuda:99", "toaster"):
        with pytest.raises(CapiError, match="is not there"):
            choose_device(name)
