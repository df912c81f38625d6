"""Real processes: what several compute together must be what one computes alone."""

import atexit
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from capi.errors import CapiError
from capi.method.clustering.walk import ClusteringSettings
from capi.runtime.processes import LostProcessError, Processes, SharedError, joined, lost_process_is_an_error
from tests.method.queue_parts import local_part
from tests.method.slow_clustering import Results, ours


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


IMAGES, POSITIONS, WIDTH, PROTOTYPES = 12, 5, 8, 20


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(IMAGES, POSITIONS, WIDTH, generator=generator)
    prototypes = torch.randn(PROTOTYPES, WIDTH, generator=generator)
    return tokens, prototypes, torch.randn(PROTOTYPES, generator=generator)


def queued() -> torch.Tensor:
    """Two earlier batches."""
    return torch.randn(2 * IMAGES, POSITIONS, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()


def exchange(rank: int, world: int, port: int, folder: str) -> None:
    """Everything that processes say to each other, in one launch."""
    torch.set_num_threads(1)
    # What is registered first is called last: after the processes have parted.
    atexit.register(lambda: (Path(folder) / f"threads-{rank}").write_text("\n".join(threads())))
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with joined(torch.device("cpu")) as processes:
        agreed = agreements(processes)
        for name, settings in SETTINGS.items():
            tokens, prototypes, bias = inputs()
            mine = slice(rank * IMAGES // world, (rank + 1) * IMAGES // world)
            part = local_part(queued(), blocks=2, process=rank, processes=world)
            for case, earlier in (("batch", None), ("queue", part)):
                results = ours(tokens[mine], prototypes, bias, settings, earlier, processes)
                torch.save(results._asdict(), Path(folder) / f"{name}-{case}-{rank}.pt")
    # Who has met stays together: another command of the same script finds the same processes.
    with joined(torch.device("cpu")) as again:
        agreed["again"] = again is processes and float(again.sum(torch.tensor(1.0))) == world
        with pytest.raises(SharedError), joined(torch.device("cpu")):
            again.fail_together(CapiError("one command of several"))
        agreed["threads"] = "pt_gloo_runloop" in threads()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(agreed))


def threads() -> list[str]:
    """Names of this process's threads, where the system tells them."""
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]


def agreements(processes: Processes) -> dict[str, Any]:
    rank = processes.rank
    mean = processes.mean({"a": torch.tensor(float(rank)), "b": torch.tensor([rank, 2.0])})
    return {
        "main": processes.is_main,
        "sum": float(processes.sum(torch.tensor(float(rank)))),
        "max": float(processes.max(torch.tensor(float(rank)))),
        "mean": [mean["a"].item(), mean["b"].tolist()],
        "any": processes.any(rank == 1, False),
        "gather": processes.gather(f"{rank}"),
        "from_main": processes.from_main(lambda: f"found by {rank}"),
        "none_fails": shared_error(processes, None),
        "one_fails": shared_error(processes, 1),
        "all_fail": shared_error(processes, -1),
        "main_fails": main_fails(processes),
        "same": differences(processes, "width: 3"),
        "different": differences(processes, f"seed: 0\nwidth: {rank}"),
    }


def shared_error(processes: Processes, failing: int | None) -> str | None:
    try:
        with processes.together():
            if failing in (processes.rank, -1):
                raise CapiError("the disk is full")
    except SharedError as error:
        return str(error)
    return None


def main_fails(processes: Processes) -> str | None:
    def fail() -> None:
        raise CapiError("no such folder")

    try:
        processes.from_main(fail)
    except SharedError as error:
        return str(error)
    return None


def differences(processes: Processes, text: str) -> str | None:
    try:
        processes.refuse_differences("config", text)
    except SharedError as error:
        return str(error)
    return None


SETTINGS = {
    f"{sinkhorn}-{chunk_bytes}": ClusteringSettings(sinkhorn=sinkhorn, chunk_bytes=chunk_bytes)
    for sinkhorn, chunk_bytes in (
        ("positionwise", None),
        ("standard", None),
        ("positionwise", 14_000),
        ("standard", 14_000),
    )
}


@pytest.fixture(scope="module", params=[2, 3])
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    folder = tmp_path_factory.mktemp("processes")
    mp.spawn(exchange, (request.param, free_port(), str(folder)), nprocs=request.param)
    return request.param, folder


def test__processes_find_the_same_things_together(launched: tuple[int, Path]) -> None:
    world, folder = launched
    for rank in range(world):
        agreed = json.loads((folder / f"{rank}.json").read_text())
        assert agreed == {
            "main": rank == 0,
            "sum": sum(range(world)),
            "max": world - 1,
            "mean": [(world - 1) / 2, [(world - 1) / 2, 2.0]],
            "any": [True, False],
            "gather": [str(rank) for rank in range(world)],
            "from_main": "found by 0",
            "none_fails": None,
            "one_fails": "process 1: the disk is full",
            "all_fail": "the disk is full",
            "main_fails": "no such folder",
            "again": True,
            # Earlier releases of torch give them no name.
            "threads": sys.platform == "linux" and torch.__version__ >= "2.13",
            "same": None,
            "different": "process 1 was started with another config than process 0 ('width: 1', not 'width: 0'): start "
            "all with the same command",
        }


def test__no_thread_of_the_network_is_left_when_a_process_ends(launched: tuple[int, Path]) -> None:
    """One that lets go of a tensor while Python ends would abort the process; also a command that failed parts."""
    world, folder = launched
    for rank in range(world):
        assert "pt_gloo_runloop" not in (folder / f"threads-{rank}").read_text()


@pytest.mark.parametrize("name", SETTINGS)
def test__clustering_is_that_of_the_global_batch_and_the_global_queue(launched: tuple[int, Path], name: str) -> None:
    world, folder = launched
    settings, values = SETTINGS[name], {}
    for case, earlier in (("batch", None), ("queue", queued())):
        paths = [folder / f"{name}-{case}-{rank}.pt" for rank in range(world)]
        parts = [Results(**torch.load(path, weights_only=True)) for path in paths]
        values[case] = alone = ours(*inputs(), settings, earlier)
        tolerance = {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(torch.cat([part.assignments for part in parts]), alone.assignments, **tolerance)
        for field in ("loss", "prototype_gradient", "bias_gradient"):
            mean = torch.stack([getattr(part, field) for part in parts]).mean(0)
            torch.testing.assert_close(mean, getattr(alone, field), **tolerance)
    # Balancing each process by itself, or without the queue, would give something else: the test could fail.
    tokens, prototypes, bias = inputs()
    own = ours(tokens[: IMAGES // world], prototypes, bias, settings)
    assert (own.assignments - values["batch"].assignments[: IMAGES // world]).abs().max() > 1e-3
    assert (values["queue"].assignments - values["batch"].assignments).abs().max() > 1e-3


def test__a_process_that_was_started_alone_exchanges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined(torch.device("cpu")) as processes:
        assert (processes.rank, processes.size, processes.is_main) == (0, 1, True)
        value = torch.tensor([1.0])
        assert processes.sum(value) is value
        assert processes.max(value) is value
        assert processes.any(True, False) == (True, False)
        assert processes.from_main(lambda: None) is None
        with pytest.raises(CapiError, match="as it is"), processes.together():
            raise CapiError("as it is")


def test__a_missing_address_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with (
        pytest.raises(CapiError, match="MASTER_ADDR is not set: start them with torchrun"),
        joined(torch.device("cpu")),
    ):
        pass


def test__a_taken_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in {
            "WORLD_SIZE": "2",
            "RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(CapiError, match=f"could not meet at 127.0.0.1:{port} .the port is taken."):
            joined(torch.device("cpu")).__enter__()


def test__a_meeting_ends_where_something_else_answers_at_the_port() -> None:
    """The library itself would wait for ever."""
    code = (
        "from datetime import timedelta; import torch; from capi.runtime import processes; "
        "processes.TIMEOUT = timedelta(seconds=2); processes.joined(torch.device('cpu')).__enter__()"
    )
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(silent.getsockname()[1])}
        surroundings = os.environ | address | {"WORLD_SIZE": "2", "RANK": "1"}
        command = [sys.executable, "-c", code]
        ran = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=False, timeout=100)
    assert ran.returncode == 2
    assert f"Error: the 2 processes could not meet at 127.0.0.1:{address['MASTER_PORT']}" in ran.stderr


@pytest.mark.parametrize(("later", "code"), [("failed", 2), ("well", 0)])
def test__after_a_command_that_failed_python_ends_at_once(later: str, code: int) -> None:
    """Its threads of the network are still there; a command that ends well after it parts as ever."""
    program = f"""
import atexit, sys, torch, torch.distributed as dist
from capi.runtime.processes import joined, leave_with
atexit.register(print, "Python ended")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    with joined(torch.device("cpu")):
        raise KeyError
except KeyError:
    leave_with(2)
if {later!r} == "well":
    with joined(torch.device("cpu")):
        pass
print("said last", end="")
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)
    # Releases of torch before 2.10 say there who is connected.
    said = re.sub(r"^\[Gloo\].*\n", "", ran.stdout, flags=re.MULTILINE)
    assert (ran.returncode, said) == (code, "said last" + ("Python ended\n" if later == "well" else "")), ran


@pytest.mark.parametrize("given", ["two", "0", "-1"])
def test__a_number_of_processes_that_is_none_is_reported(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", given)
    with pytest.raises(CapiError, match=r"WORLD_SIZE is .*: expected the number of processes"):
        joined(torch.device("cpu")).__enter__()


def test__what_gloo_says_is_reported_without_its_source_and_its_guesses() -> None:
    said = "[/a/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:188. This is typically caused by a worker"
    text = r"any more \(Connection closed by peer \[127.0.0.1\]:188\)"
    with pytest.raises(LostProcessError, match=text), lost_process_is_an_error():
        raise RuntimeError(said)


def test__the_processes_of_a_machine_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Processes().count_on_machine() == 1
    monkeypatch.setattr(Processes, "gather", lambda *_: [0, 1, 2, 0, 1, 2])
    assert Processes(rank=4, size=6, local_rank=1).count_on_machine() == 3
