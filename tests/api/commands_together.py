"""Run by torchrun: commands one after the other in processes that stay together, since starting them takes seconds.

    python -m torch.distributed.run --nproc-per-node 3 -m tests.api.commands_together FOLDER

FOLDER has commands.json, a list of lists of words; each process leaves there what every command ended with and printed,
and the main one what tensors looked like that another one sent.
"""

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from capi.cli import app as shared
from capi.cli import main
from capi.runtime.processes import Exchange, joined

RANK = os.environ.get("RANK", "0")
SENT = {
    "floats": torch.tensor([[1.5, -2.0], [float("inf"), 0.0]]),
    "halves": torch.tensor([0.25], dtype=torch.float16),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "wrong way round": torch.arange(6).view(2, 3).T,
    "flags": torch.tensor([True, False]),
    "empty": torch.zeros(3, 0, 4),
    "scalar": torch.tensor(3),
}


def run(words: list[str]) -> dict[str, Any]:
    """What a command ends with and prints."""
    sys.argv = ["capi", *(word.replace("RANK", RANK) for word in words)]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            main()
            code: Any = 0
        except SystemExit as ended:
            code = ended.code or 0
    return {"code": code, "out": out.getvalue(), "errors": errors.getvalue()}


def tensors_arrive() -> bool:
    with joined(torch.device("cpu")) as processes:
        exchange, last = Exchange(processes), processes.size - 1
        if processes.rank == last:
            exchange.send(0, {"from": last}, list(SENT.values()))
        if not processes.is_main:
            return True
        note, tensors = exchange.receive(last)
    same = [
        value.dtype == other.dtype and torch.equal(value, other)
        for value, other in zip(tensors, SENT.values(), strict=True)
    ]
    return note == {"from": last} and all(same)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    # Nobody ends another one here.
    shared.SECONDS_TO_SPEAK = 0.0
    commands = json.loads((folder / "commands.json").read_text())
    ended = {name: run(words) for name, words in commands.items()}
    left = {"commands": ended, "tensors": tensors_arrive()}
    (folder / f"{RANK}.json").write_text(json.dumps(left))
