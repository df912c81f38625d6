"""How a run scales: step time with several processes; how time and memory grow with batch, prototypes, tokens, width.

    python benchmarks/scaling.py --picture docs/pictures/scaling.png

Each point of the growth is a process of its own (`capi plan --measure`), so that its peak memory is its own, and the
quickest of several; the plan for the same step is drawn beside it. The exponent is the slope between the last two
points on logarithmic axes. Processes are compared by short real runs of `capi pretrain`, under torchrun where there are
several, with the same global batch.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

AXES = {
    "batch": ("images in a batch", "optimization.batch_size={}", (16, 32, 64, 128)),
    "prototypes": ("prototypes", "clustering.prototypes={}", (512, 2048, 8192, 32768)),
    "tokens": ("patches of an image", "data.image_size={}", (32, 64, 96, 128)),
    "width": ("width", "model.width={}", (64, 128, 256, 512)),
}
QUICK = {"batch": (2, 4), "prototypes": (64, 512), "tokens": (32, 64), "width": (32, 64)}
BASE = ["model.heads=4", "masking.predict=8", "clustering.prototypes=1024"]
PATCH = 8


class Point(NamedTuple):
    """A step as it was measured and as it was planned: seconds and bytes."""

    size: int
    seconds: float
    bytes: float
    planned_seconds: float
    planned_bytes: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="mini")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--only", nargs="+", choices=[*AXES, "processes"], default=[*AXES, "processes"])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=40, help="of the runs that compare processes")
    parser.add_argument("--workers", type=int, default=1, help="processes that read images, for each that trains")
    parser.add_argument("--repeat", type=int, default=3, help="processes that measure each point of the growth")
    parser.add_argument("--quick", action="store_true", help="two small points on each axis")
    parser.add_argument("--picture", type=Path, help="where to draw the growth")
    arguments = parser.parse_args()
    grown: dict[str, list[Point]] = {}
    for axis in [axis for axis in AXES if axis in arguments.only]:
        sizes = QUICK[axis] if arguments.quick else AXES[axis][2]
        grown[axis] = [
            min(
                (measured(axis, size, arguments.recipe, arguments.batch_size) for _ in range(arguments.repeat)),
                key=lambda point: point.seconds,
            )
            for size in sizes
        ]
        print_growth(axis, grown[axis])
    if "processes" in arguments.only:
        short = [f"optimization.steps={arguments.steps}", f"data.workers={arguments.workers}"]
        compare_processes(arguments.recipe, arguments.batch_size, arguments.processes, short)
    if arguments.picture is not None and grown:
        draw(grown, arguments.picture)
        print(f"drawn into {arguments.picture}")


def measured(axis: str, size: int, recipe: str, batch_size: int) -> Point:
    """One step in a process of its own."""
    images = size if axis == "batch" else batch_size
    overrides = [*BASE, AXES[axis][1].format(size)]
    command = [sys.executable, "-m", "capi", "plan", recipe, *overrides, "--measure", "--images", str(images), "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - our own command
    plan = json.loads(ran.stdout)
    rows = {row["name"]: row for row in plan["measured"]["comparisons"]}
    time, memory = rows["seconds a step"], rows["peak bytes"]
    shown = (size // PATCH) ** 2 if axis == "tokens" else size
    return Point(shown, time["measured"], memory["measured"], time["planned"], memory["planned"])


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope between the last two points on logarithmic axes: 1 is growth in proportion."""
    return math.log(values[-1] / values[-2]) / math.log(sizes[-1] / sizes[-2])


def print_growth(axis: str, points: Sequence[Point]) -> None:
    for point in points:
        print(
            f"{axis:10} {point.size:6}: {point.seconds:8.3f} s, {point.bytes / 2**20:7.0f} MiB "
            f"(planned {point.planned_seconds:.3f} s, {point.planned_bytes / 2**20:.0f} MiB)"
        )
    sizes = [point.size for point in points]
    time = exponent(sizes, [point.seconds for point in points])
    memory = exponent(sizes, [point.bytes for point in points])
    print(f"{axis:10} time grows with exponent {time:.2f}, memory with {memory:.2f}", flush=True)


def compare_processes(recipe: str, batch_size: int, counts: Sequence[int], overrides: Sequence[str]) -> None:
    """The same global batch by one process and by several."""
    speeds = {count: run_speed(recipe, batch_size, count, overrides) for count in counts}
    for count, speed in speeds.items():
        against = speed / speeds[counts[0]]
        print(
            f"{count} processes: {speed:.1f} images/s, {batch_size / speed:.3f} s a step, {against:.2f} x", flush=True
        )


def run_speed(recipe: str, batch_size: int, processes: int, overrides: Sequence[str]) -> float:
    """Images per second of a short run on the built-in photos, its first half left out; the cores are shared evenly."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "capi", "pretrain", recipe, *BASE, f"optimization.batch_size={batch_size}"]
        command += [*overrides, "run.log_steps=1", "run.report=false", "run.snapshots=0"]
        command += ["evaluations=[]", "run.loggers=[]", "--device", "cpu", "--data", "demo", "--out", f"{folder}/run"]
        if processes > 1:
            command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *command]
        threads = str(max((os.cpu_count() or 1) // processes, 1))
        subprocess.run(  # noqa: S603 - our own command
            [sys.executable, *command],
            env={**os.environ, "OMP_NUM_THREADS": threads},
            check=True,
            capture_output=True,
        )
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    return speed_of([json.loads(line) for line in lines], batch_size)


def speed_of(records: Sequence[Mapping[str, Any]], batch_size: int) -> float:
    """Images a second from the middle of the run to its end."""
    timed = [record for record in records if "seconds" in record]
    first, last = timed[len(timed) // 2 - 1], timed[-1]
    return (last["step"] - first["step"]) * batch_size / (last["seconds"] - first["seconds"])


def draw(grown: Mapping[str, Sequence[Point]], path: Path) -> None:
    """Time above, memory below; what was planned is dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * len(grown), 6), layout="constrained")
    panels = figure.subplots(2, len(grown), squeeze=False)
    for column, (axis, points) in enumerate(grown.items()):
        sizes = [point.size for point in points]
        rows = (
            ("seconds a step", [point.seconds for point in points], [point.planned_seconds for point in points]),
            ("peak MiB", [point.bytes / 2**20 for point in points], [point.planned_bytes / 2**20 for point in points]),
        )
        for panel, (label, values, planned) in zip(panels[:, column], rows, strict=True):
            panel.loglog(sizes, values, marker="o", label="measured")
            panel.loglog(sizes, planned, linestyle="--", color="grey", label="planned")
            panel.set_xticks(sizes, [str(size) for size in sizes])
            panel.set_yticks(values, [f"{value:.3g}" for value in values])
            panel.minorticks_off()
            panel.set_xlabel(AXES[axis][0])
            panel.set_ylabel(label)
            panel.set_title(f"exponent {exponent(sizes, values):.2f} at the end", fontsize=10)
            panel.grid(alpha=0.3)
    panels[0][0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
