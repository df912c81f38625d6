"""Saving and loading the whole state of a run.

A checkpoint is a folder `step_N` that appears at once and complete: it is written under another name, flushed to the
disk and then renamed. Whatever happens before leaves the previous ones as they were. Tensors lie in safetensors files,
one of each process that wrote, which any number of processes can read; everything else lies in `state.json`. Which
process writes what is planned by torch.distributed.checkpoint; nothing of a folder is a pickle.
"""

import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, futures, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from capi.errors import CapiError
from capi.runtime.atomic import atomic_write, remove
from capi.runtime.documents import read_object
from capi.runtime.processes import LostProcessError, Processes, SharedError
from capi.runtime.tensor_file import write_tensors
from capi.train.optimizer import Optimizer
from capi.train.step import Learner
from capi.zoo.checkpoint_files import BEST, STATE, CheckpointFolder, StoredTensors, damaged
from capi.zoo.checkpoint_index import parts_metadata

_LOG = logging.getLogger("capi")
# Format 2 added how often prototypes were used lately, format 3 has no pickles.
FORMAT_VERSION = 3
_SINCE_2 = "clustering.recent_use"
_PARTIAL = ".partial-"


@dataclass
class Position:
    """Where a run stands, apart from its tensors. Schedules and random numbers follow from the step."""

    step: int = 0
    # Batches of data that a roll-back left out: step s sees the data of number s + data_offset.
    data_offset: int = 0
    skipped: int = 0
    rollbacks: int = 0
    broken: dict[str, str] = field(default_factory=dict)


class CheckpointError(SharedError):
    """A checkpoint could not be saved. Where there are several processes, all find that."""


class _Pending(NamedTuple):
    """A checkpoint that is being written: where, what is to be said of it, and when its tensors are there."""

    partial: Path
    record: dict[str, Any]
    written: "Future[Any]"
    best: bool


class Checkpoints(CheckpointFolder):
    """The checkpoints of a run: the newest `keep` of them, the best, and those at multiples of `milestone_steps`."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 2,
        milestone_steps: int | None = None,
        processes: Processes | None = None,
        asynchronous: bool = False,
    ) -> None:
        super().__init__(folder)
        self.keep, self.milestone_steps = keep, milestone_steps
        self.processes, self.asynchronous = processes or Processes(), asynchronous
        self._pending: _Pending | None = None
        self._thread = ThreadPoolExecutor(1)

    def save(self, learner: Learner, position: Position, *, best: bool = False) -> None:
        """Save, then remove what need not be kept. Asynchronously, the tensors are copied and the rest comes later."""
        self.finish()
        if position.step not in self.processes.from_main(self.steps):
            self._pending = self._begin(learner, position, best)
            if not self.asynchronous:
                self.finish()
        elif self.processes.is_main:
            if best:
                self._mark_best(position.step)
            self._remove_old()

    def poll(self) -> None:
        """Complete a save in the background once all its tensors are written. Waits for nothing, exchanges nothing."""
        if self._pending is not None and self._pending.written.done():
            self._complete()

    def finish(self) -> None:
        """Wait until what is being saved is saved, in all processes."""
        failure: CapiError | None = None
        try:
            if self._pending is not None:
                self._complete()
        except CheckpointError as error:
            failure = error
        try:
            self.processes.fail_together(failure)
        except LostProcessError:
            # Who is gone tells nothing.
            raise
        except CapiError as error:
            raise CheckpointError(str(error)) from error

    def _begin(self, learner: Learner, position: Position, best: bool) -> "_Pending":
        partial = self.folder / f"{_PARTIAL}{position.step}"
        try:
            self.processes.from_main(lambda: self._make_folder(partial))
            with self.processes.together():
                if not partial.is_dir():
                    raise CapiError("the folder that the main process made is not there: all machines must share it")
        except LostProcessError:
            raise
        except CapiError as error:
            raise self._failed(position.step, error) from error
        written = self._start_writing(tensors(learner), partial)
        return _Pending(partial, {"format": FORMAT_VERSION, **asdict(position)}, written, best)

    def _make_folder(self, partial: Path) -> None:
        self.remove_partial()
        try:
            partial.mkdir(parents=True)
        except OSError as error:
            raise CapiError(_cause(error)) from error

    def _start_writing(self, state: dict[str, Tensor], partial: Path) -> "Future[Any]":
        """The tensors on their way to the disk. In the background it is a copy of them, since training continues."""
        writer = TensorWriter(partial)
        if not self.asynchronous:
            return _finished(lambda: self._write(state, writer))
        # What the library copies from an accelerator it does not copy from a CPU.
        copied = {name: value.clone() if value.device.type == "cpu" else value for name, value in state.items()}
        if self.processes.size > 1:
            group = self.processes.background
            return state_dict_saver.async_save(copied, storage_writer=writer, process_group=group)  # type: ignore[return-value]
        copied = {name: value.to("cpu") for name, value in copied.items()}
        return self._thread.submit(self._write, copied, writer)

    def _write(self, state: dict[str, Tensor], writer: "TensorWriter") -> None:
        group, alone = self.processes.background, self.processes.size == 1
        with warnings.catch_warnings():
            # Without a process group the library takes the run for one of a single process, which it is.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            state_dict_saver.save(state, storage_writer=writer, process_group=group, no_dist=alone)

    def _complete(self) -> None:
        """Give a checkpoint its name once its tensors are there; when the main process knows, all have written."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        try:
            pending.written.result()
            if self.processes.is_main:
                self._give_name(pending)
                if pending.best:
                    self._mark_best(pending.record["step"])
        except (Exception, CheckpointException) as error:
            if self.processes.is_main:
                shutil.rmtree(pending.partial, ignore_errors=True)
            raise self._failed(pending.record["step"], error) from error
        except BaseException:
            shutil.rmtree(pending.partial, ignore_errors=True)
            raise
        if self.processes.is_main:
            self._remove_old()

    def _give_name(self, pending: "_Pending") -> None:
        sizes = {path.name: path.stat().st_size for path in pending.partial.iterdir()}
        atomic_write(pending.partial / STATE, json.dumps(pending.record | {"files": sizes}, indent=1))
        _sync_folder(pending.partial)
        place = self.path(pending.record["step"])
        if place.exists():
            # Damaged, or it would have been resumed from.
            self._remove(place)
        pending.partial.rename(place)
        _sync_folder(self.folder)

    def _mark_best(self, step: int) -> None:
        """A link beside the checkpoints, which appears at once and complete."""
        partial = self.folder / f".{BEST}"
        partial.unlink(missing_ok=True)
        partial.symlink_to(self.path(step).name, target_is_directory=True)
        partial.replace(self.folder / BEST)

    def _failed(self, step: int, error: BaseException) -> CheckpointError:
        last = self.steps()[-1:]
        stands = f"the checkpoint of step {last[0]} is whole" if last else "there is no earlier checkpoint"
        return CheckpointError(
            f"the checkpoint of step {step} could not be saved in {self.folder} ({_cause(error)}); {stands}: make "
            "room, then resume with --resume"
        )

    def remove_partial(self) -> None:
        """Remove what an interrupted save left behind."""
        for path in self.folder.glob(f"{_PARTIAL}*"):
            remove(path)

    def _remove_old(self) -> None:
        every = self.milestone_steps
        for step in self.steps()[: -self.keep]:
            if not (every and step % every == 0) and step != self.best:
                self._remove(self.path(step))

    def _remove(self, checkpoint: Path) -> None:
        """Remove a checkpoint under another name, so that an interrupted removal leaves none half there."""
        removed = self.folder / f"{_PARTIAL}old-{checkpoint.name}"
        checkpoint.rename(removed)
        shutil.rmtree(removed)

    def load(self, learner: Learner, step: int | None = None) -> Position:
        """Fill the learner from a checkpoint, the newest if none is named."""
        chosen = self._chosen(step)
        position = self.position(chosen)
        wanted = tensors(learner)
        version: int = self._record(chosen)["format"]
        if version < 2:
            wanted.pop(_SINCE_2, None)
        StoredTensors(self.path(chosen)).read(wanted)
        return position

    def position(self, step: int) -> Position:
        """What a checkpoint holds beside its tensors."""
        record = self._record(step)
        version = record["format"]
        if version > FORMAT_VERSION:
            raise CapiError(
                f"{self.path(step)} has checkpoint format {version}, but this capi knows formats up to "
                f"{FORMAT_VERSION}: install a newer capi"
            )
        values = asdict(Position()) | {each.name: record[each.name] for each in fields(Position) if each.name in record}
        broken = values.pop("broken")
        sound = isinstance(broken, dict) and all(isinstance(reason, str) for reason in broken.values())
        if not sound or values["step"] != step or any(type(each) is not int or each < 0 for each in values.values()):
            raise damaged(self.path(step), ValueError(f"{STATE} does not say where the run stands"))
        return Position(broken=broken, **values)

    def _record(self, step: int) -> dict[str, Any]:
        try:
            record = read_object(self.path(step) / STATE)
            if type(record["format"]) is not int:
                raise ValueError(f"{STATE} does not say its format")
        except (ValueError, KeyError) as error:
            raise damaged(self.path(step)) from error
        return record

    def _chosen(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            raise CapiError(f"{self.folder} holds no complete checkpoint")
        if step is not None and step not in steps:
            raise CapiError(f"{self.folder} has no checkpoint of step {step}, but of {', '.join(map(str, steps))}")
        return steps[-1] if step is None else step


def tensors(learner: Learner) -> dict[str, Tensor]:
    """Every tensor that training changes, by name."""
    target = learner.target
    modules = {"student": learner.student, "teacher": learner.teacher, target.name: target}
    state = {f"{name}.{key}": value for name, module in modules.items() for key, value in module.state_dict().items()}
    # What a target keeps of earlier batches, whether or not it counts it as learnt.
    state |= {f"{target.name}.{key}": value for key, value in target.named_buffers()}
    for key, blocks in target.sharded_buffers.items():
        # Each block of images is shared by the processes, so that any other number of them finds its own.
        name = f"{target.name}.{key}"
        state[name] = learner.spread(state[name].unflatten(0, (blocks, -1)), 1)
    state |= _moments("student_optimizer", learner.student, learner.student_optimizer)
    if learner.target_optimizer is not None:
        state |= _moments(f"{target.name}_optimizer", target, learner.target_optimizer)
    return state


def _moments(prefix: str, module: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors by parameter, made where it has not stepped yet."""
    moments: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        state = optimizer.state[parameter]
        if not state:
            state.update(optimizer.initial_state(parameter))
        moments |= {f"{prefix}.{name}.{key}": value for key, value in state.items()}
    return moments


class TensorWriter(BlockingAsyncStager, StorageWriter):
    """Writes what torch's planner gives this process into one safetensors file."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Each process learns its number, by which its file is named."""
        return [replace(plan, storage_data=number) for number, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "futures.Future[list[WriteResult]]":
        items, kinds, parts = {}, {}, {}
        for item in plan.items:
            name, of = item.index.fqn, item.tensor_data
            assert of is not None, "a checkpoint holds tensors alone"
            items[name] = item
            kinds[name] = (of.properties.dtype, tuple(of.chunk.sizes))
            if of.chunk.sizes != of.size:
                parts[name] = (tuple(of.size), tuple(of.chunk.offsets))
        file = self.folder / f"process_{plan.storage_data:05d}.safetensors"

        def value_of(name: str) -> Tensor:
            value = planner.resolve_data(items[name])
            assert isinstance(value, Tensor)
            return value

        write_tensors(file, kinds, value_of, parts_metadata(parts))
        done: futures.Future[list[WriteResult]] = futures.Future()
        done.set_result([WriteResult(item.index, 0, None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The headers of the files say everything."""

    def reset(self, *_: Any) -> None:
        """A writer writes one checkpoint."""

    def set_up_storage_writer(self, *_: Any, **__: Any) -> None:
        """The folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @classmethod
    def validate_checkpoint_id(cls, *_: Any) -> bool:
        return True


def _finished(action: Callable[[], None]) -> "Future[Any]":
    """What was done here and now, as if it had been done elsewhere."""
    done: Future[Any] = Future()
    try:
        action()
        done.set_result(None)
    # The library's own exception is no Exception.
    except (Exception, CheckpointException) as error:
        done.set_exception(error)
    return done


def _sync_folder(path: Path) -> None:
    """Make renames in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cause(error: BaseException) -> str:
    """The innermost reason: the library wraps what the disk says."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:200] or type(error).__name__
