import pytest

from capi.train.cost.hardware import board_power


@pytest.mark.parametrize(
    ("name", "watts"),
    [
        ("NVIDIA H100 PCIe", 350),
        ("NVIDIA H100 80GB HBM3", 700),
        ("NVIDIA A100 80GB PCIe", 300),
        ("NVIDIA A100-SXM4-80GB", 400),
    ],
)
def test__the_more_exact_name_counts(name: str, watts: float) -> None:
    assert board_power(name) == watts


@pytest.mark.parametrize("name", ["Unheard Of 9", "L", "", "A1000"])
def test__an_unknown_name_has_no_power(name: str) -> None:
    assert board_power(name) is None
