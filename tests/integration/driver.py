"""A run that kills itself: `driver.py DATA OUT [EVENT [KIND]]`.

Moments worth dying at are counted as the run passes them: both ends of a step, the line of metrics that is half
written, and every stage of the checkpoint writer. At number EVENT the process sends itself SIGKILL, which nothing can
catch. With a KIND only moments of that kind count.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import capi
from capi.runtime import tensor_file
from capi.train import checkpoint, loop, metrics

OVERRIDES = [
    "data.image_size=16",
    "data.workers=1",
    "model.width=16",
    "model.depth=2",
    "model.heads=2",
    "model.registers=4",
    "clustering.prototypes=12",
    "optimization.batch_size=6",
    "optimization.micro_batches=2",
    "optimization.steps=44",
    "optimization.learning_rate=0.01",
    "optimization.teacher_momentum=0.9",
    "checkpoint.every_steps=4",
    "run.log_steps=1",
    "run.loggers=[]",
]
passed = 0


def moment(kind: str) -> None:
    """Pass a moment, or die at it."""
    global passed  # noqa: PLW0603
    if len(sys.argv) <= 3 or (len(sys.argv) > 4 and sys.argv[4] != kind):
        return
    passed += 1
    if passed == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)


def around(owner: Any, name: str, kind: str) -> None:
    """Make a moment before and after a function."""
    real = getattr(owner, name)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        moment(kind)
        result = real(*arguments, **options)
        moment(kind)
        return result

    setattr(owner, name, wrapped)


def write_in_two_parts(self: metrics.JsonLines, record: metrics.MetricRecord) -> None:
    """The line of a record, with a moment in the middle."""
    line = metrics.json.dumps(dict(record)) + "\n"
    for part in (line[:9], line[9:]):
        moment("metrics")
        self._file.write(part)
        self._file.flush()


def write_header_in_two_parts(file: Any, contents: Any, write: Callable[..., None] = tensor_file._write_all) -> None:
    """The bytes of a checkpoint's file, with moments in the middle of its header and before the first tensor."""
    if not isinstance(contents, bytes):
        write(file, contents)
        return
    for part in (contents[:9], contents[9:]):
        write(file, part)
        moment("writer")


class Registers:
    """An evaluation, so that its lines are resumed too."""

    every_steps = 5

    def run(self, learner: Any, step: int) -> dict[str, float]:
        return {"registers": float(learner.student.encoder.registers.detach().sum())}


if __name__ == "__main__":
    around(loop, "train_step", "step")
    around(checkpoint.TensorWriter, "write_data", "writer")
    tensor_file._write_all = write_header_in_two_parts
    around(checkpoint, "atomic_write", "writer")
    around(Path, "rename", "writer")
    around(checkpoint.Checkpoints, "_remove_old", "writer")
    metrics.JsonLines.__call__ = write_in_two_parts  # type: ignore[method-assign]
    capi.pretrain(
        "tiny4", OVERRIDES, data=sys.argv[1], out=sys.argv[2], resume=True, device="cpu", evaluations=[Registers()]
    )
