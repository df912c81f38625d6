"""Processes that are started together, as a launcher does it."""

import os
import socket
import subprocess
import sys
from typing import Any


def start(world: int, *arguments: str, **options: Any) -> list[subprocess.Popen[str]]:
    """Start so many processes as a launcher does."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        for rank in range(world)
    ]


def ended(processes: list[subprocess.Popen[str]], timeout: float = 240.0) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each."""
    results = []
    for process in processes:
        try:
            output, errors = process.communicate(timeout=timeout)
        finally:
            process.kill()
        results.append((process.returncode, output, errors))
    return results


def succeeded(processes: list[subprocess.Popen[str]]) -> None:
    for code, output, errors in ended(processes):
        assert code == 0, output + errors
