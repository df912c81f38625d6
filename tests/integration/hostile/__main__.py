"""`python -m tests.integration.hostile GROUPS FOLDER EVERY` prints what became of every so many-th case, in JSON."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from tests.integration.hostile.running import run_groups


def main() -> None:
    groups, base, every = sys.argv[1].split(","), Path(sys.argv[2]), int(sys.argv[3])
    os.environ |= {"HOME": str(base / "home"), "XDG_CACHE_HOME": str(base / "cache"), "HF_HUB_OFFLINE": "1"}
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(base / "tmp")}
    for name in ("tmp", "cache"):
        (base / name).mkdir(parents=True)
    import torch

    torch.set_num_threads(1)
    shown = os.fdopen(os.dup(1), "w")
    for answer in run_groups(groups, base, every):
        shown.write(json.dumps(asdict(answer)) + "\n")
        shown.flush()


main()
