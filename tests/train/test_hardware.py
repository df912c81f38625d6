import pytest
import torch

from capi.errors import CapiError
from capi.train.cost.hardware import find_gpu, gpus, measured_peak, this_machine


def test__the_table_has_what_data_sheets_print() -> None:
    a100, h200 = gpus()["a100-80g"], gpus()["h200"]
    assert (a100.memory, a100.bfloat16, a100.float32, a100.watts) == (80e9, 312e12, 19.5e12, 400)
    assert (h200.memory, h200.bfloat16, h200.watts) == (141e9, 989e12, 700)
    assert all(one.memory >= 10e9 and one.watts and not one.measured for one in gpus().values())
    # Tensor cores are faster than the rest of the chip.
    assert all(one.bfloat16 is None or one.bfloat16 > 1.9 * one.float32 for one in gpus().values())


def test__chips_without_bfloat16_compute_in_float32() -> None:
    old, new = find_gpu("v100-16g"), find_gpu("l4")
    assert (old.precision("auto"), new.precision("auto"), new.precision("float32")) == (
        "float32",
        "bfloat16",
        "float32",
    )
    assert (old.peak("bfloat16"), new.peak("bfloat16"), new.peak("float32")) == (15.7e12, 121e12, 30.3e12)
    with pytest.raises(CapiError, match="V100 SXM2 16 GB has no bfloat16"):
        old.precision("bfloat16")


def test__an_unknown_gpu_is_told_its_neighbour() -> None:
    with pytest.raises(CapiError, match=r'no GPU "a100"; did you mean "a100-[48]0g"\?'):
        find_gpu("a100")


@pytest.mark.parametrize(("threads", "said"), [(1, "this machine, 1 thread"), (2, "this machine, 2 threads")])
def test__threads_are_counted(monkeypatch: pytest.MonkeyPatch, threads: int, said: str) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert this_machine(torch.device("cpu"), size=64).title == said


def test__this_machine_is_measured() -> None:
    machine = this_machine(torch.device("cpu"), size=64)
    assert machine.measured
    assert not machine.accelerator
    assert (machine.bfloat16, machine.watts) == (None, None)
    assert machine.memory > 1e8
    assert 1e6 < machine.float32 < 1e14


def test__the_peak_is_that_of_the_fastest_product(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 9.0, 10.0, 12.0, 20.0, 25.0])
    monkeypatch.setattr("capi.train.cost.hardware.time.perf_counter", lambda: next(clock))
    assert measured_peak(torch.device("cpu"), torch.float32, 8, rounds=2) == 2 * 8**3 / 2
