"""The time of a whole step against an earlier version of the package, in one interleaved run.

    python benchmarks/versions.py
    python benchmarks/versions.py --commit HEAD~1 --only demo

The earlier version is checked out into a temporary `git worktree`; by default it is the last one before the clustering
was written again. Each version trains in a process of its own, with one thread, on the same images and masks. They take
turns: while one computes a step, the other waits. Times are seconds of the CPU, the best of several rounds. The earlier
version balances large groups by numba where this Python has it.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BEFORE = "cfd3bcb"
# The paper's setting of prototypes and predictions where the step is large.
CASES = {
    "vits16": (
        "ViT-S/16 at 224 px",
        ["optimization.batch_size=64", "clustering.prototypes=16384", "masking.predict=7"],
    ),
    "demo": ("the demo recipe", ["optimization.batch_size=64"]),
}


def work(case: str, overrides: list[str]) -> None:
    """Compute a step, and print what it took, for each line of the input."""
    import torch

    from capi.config.files import load_config
    from capi.runtime.devices import keep_freed_memory
    from capi.train.build import build_learner, masked_batch
    from capi.train.step import train_step

    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(0)
    config = load_config(case, ["optimization.batch_size=64", *CASES[case][1], *overrides])
    images = torch.randn(config.optimization.batch_size, config.model.channels, *config.data.height_and_width)
    learner, batch = build_learner(config), masked_batch(config, images, 0)
    for step, _ in enumerate(sys.stdin):
        torch.manual_seed(step)
        start = time.process_time()
        metrics = train_step(learner, [batch], step)
        print(json.dumps([time.process_time() - start, float(metrics.student_loss)]), flush=True)


@contextmanager
def version(tree: Path, *arguments: str) -> Iterator[Any]:
    """A process that computes with the package of that tree."""
    # numba may lie in a folder of that variable.
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(  # noqa: S603 - this file itself
        [sys.executable, __file__, "--work", *arguments],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=tree,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def step() -> list[float]:
        print(file=process.stdin, flush=True)
        assert process.stdout is not None
        return list(json.loads(process.stdout.readline()))

    with process:
        yield step
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


@contextmanager
def earlier(commit: str) -> Iterator[Path]:
    """The package as it was then."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)  # noqa: S603 - git
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)  # noqa: S603 - git


def compare(case: str, tree: Path, rounds: int, overrides: list[str]) -> None:
    with ExitStack() as stack:
        steps = {
            name: stack.enter_context(version(each, case, *overrides))
            for name, each in (("before", tree), ("present", ROOT))
        }
        measured = {name: [step()] for name, step in steps.items()}
        for _ in range(rounds):
            for name, step in steps.items():
                measured[name].append(step())
    before, present = (min(seconds for seconds, _ in measured[name][1:]) for name in ("before", "present"))
    losses = [measured[name][0][1] for name in ("before", "present")]
    print(
        f"{CASES[case][0]}: before {before:.3f} s, present {present:.3f} s, {present / before - 1:+.1%} "
        f"(losses of the first step {losses[0]:.6f} and {losses[1]:.6f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--commit", default=BEFORE)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--work", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments.overrides)
        return
    print(f"against {arguments.commit}, {'with' if importlib.util.find_spec('numba') else 'without'} numba")
    with earlier(arguments.commit) as tree:
        for case in CASES:
            if arguments.only in (None, case):
                compare(case, tree, arguments.rounds, arguments.overrides)


if __name__ == "__main__":
    main()
