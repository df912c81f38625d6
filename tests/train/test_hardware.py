import pytest
import torch

from capi.config.files import load_config
from capi.errors import CapiError
from capi.train.build import build_learner
from capi.train.cost import hardware
from capi.train.cost.flop import iteration_flop
from capi.train.cost.hardware import find_gpu, gpu_of_device, gpus, measured_peak, peak_images_per_second, this_machine


def test__the_table_has_what_data_sheets_print() -> None:
    a100, h200 = gpus()["a100-80g"], gpus()["h200"]
    assert (a100.memory, a100.bfloat16, a100.float32, a100.watts) == (80e9, 312e12, 19.5e12, 400)
    assert (h200.memory, h200.bfloat16, h200.watts) == (141e9, 989e12, 700)
    assert all(gpu.memory >= 10e9 and gpu.watts and not gpu.measured for gpu in gpus().values())
    # Tensor cores are faster than the rest of the chip.
    assert all(gpu.bfloat16 is None or gpu.bfloat16 > 1.9 * gpu.float32 for gpu in gpus().values())


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


def test__an_unknown_gpu_is_answered_with_the_nearest_name() -> None:
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


@pytest.mark.parametrize(
    ("title", "memory", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 85.1e9, "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", 42.3e9, "a100-40g"),
        ("NVIDIA A100 80GB PCIe", 85.0e9, "a100-80g"),
        ("NVIDIA H100 80GB HBM3", 85.0e9, "h100"),
        ("NVIDIA H100 PCIe", 85.0e9, "h100-pcie"),
        ("NVIDIA H200", 150.0e9, "h200"),
        ("Tesla V100-SXM2-16GB", 16.9e9, "v100-16g"),
        ("Tesla T4", 15.8e9, "t4"),
        ("NVIDIA GeForce RTX 4090", 25.3e9, "rtx4090"),
        ("NVIDIA RTX A6000", 51.0e9, "a6000"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 17.0e9, None),
        ("NVIDIA GeForce RTX 3080 Ti", 12.6e9, None),
        ("NVIDIA RTX 6000 Ada Generation", 51.0e9, None),
        ("AMD Instinct MI250X", 64.0e9, None),
    ],
)
def test__a_driver_s_name_is_found_in_the_table(title: str, memory: float, name: str | None) -> None:
    assert gpu_of_device(title, memory) == (None if name is None else gpus()[name])


def test__the_peak_of_a_run_is_that_of_all_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    config, cuda = load_config("tiny4", ["run.precision=float32"]), torch.device("cuda")
    learner = build_learner(config)
    assert peak_images_per_second(config, learner, torch.device("cpu"), 1) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(hardware, "memory_of", lambda _: 85e9)
    alone, four = (peak_images_per_second(config, learner, cuda, count) for count in (1, 4))
    assert alone is not None
    # Fewer images a device round stochastic depth otherwise.
    assert four == pytest.approx(4 * alone, rel=0.05)
    counts = {"patches": 64, "visible": 22, "predicted": 7}
    flop = iteration_flop(learner.student, learner.target, batch_size=config.optimization.batch_size, **counts)
    assert alone == pytest.approx(67e12 / sum(flop), rel=0.2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Something Else")
    assert peak_images_per_second(config, learner, cuda, 1) is None
