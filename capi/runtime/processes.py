"""The processes of a run: who this one is, what all of them find together, and what the main one asks of the others.

torchrun, or whoever starts several processes, gives each its number in the environment (RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, MASTER_PORT). `joined` brings them together; without that environment a process is alone, every exchange
gives back what went in, and no process group exists.

Values of a batch go over the device's own network (NCCL, or gloo on a CPU). What is agreed on goes over groups on the
CPU, so that it never waits for a device: `control` from step to step, `patient` where one process may take hours over
its data or an evaluation, and `background` for a thread that saves while the others train.

Threads of gloo let go of tensors a little after an exchange has ended. One that does so while Python ends takes the
process down with SIGABRT, so `_part` ends them all before, and nothing else may hold the groups they work for.
"""

import atexit
import gc
import os
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from capi.errors import CapiError, counted

# A process that is there but does not answer for so long ends the others; one that ends is noticed at once.
TIMEOUT = timedelta(minutes=10)
# How long processes wait for one that evaluates or writes a report while they have nothing to do.
PATIENCE = timedelta(hours=24)
Shared = TypeVar("Shared")
# gloo has no exceptions of its own.
_OF_THE_NETWORK = re.compile(r"gloo|NCCL|connection (was )?(closed|reset)|timed out|broken pipe|socket", re.IGNORECASE)


class SharedError(CapiError):
    """Raised in all processes at once; the main one prints it."""


class LostProcessError(CapiError):
    """An exchange failed because another process is gone."""


@dataclass
class _Meeting:
    """The groups of this process beside the first one; `Processes` may outlive them, and holds none."""

    control: Any = None
    patient: Any = None
    background: Any = None
    # Whether the first group was made here, and is to be ended here.
    is_own: bool = False


_MEETING = _Meeting()


@dataclass(frozen=True)
class Processes:
    """All processes, seen from one of them; also the reduction of statistics to those of the global batch.

    Every process must call the same methods in the same order.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def control(self) -> Any:
        return _MEETING.control

    @property
    def patient(self) -> Any:
        return _MEETING.patient

    @property
    def background(self) -> Any:
        return _MEETING.background

    def sum(self, value: Tensor) -> Tensor:
        return self._reduce(value, dist.ReduceOp.SUM)

    def max(self, value: Tensor) -> Tensor:
        return self._reduce(value, dist.ReduceOp.MAX)

    def mean(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Means over the processes of several float tensors, in one exchange."""
        if self.size == 1:
            return dict(values)
        # A zero that no device computed lies on the CPU.
        device = next((value.device for value in values.values() if value.device.type != "cpu"), torch.device("cpu"))
        parts = (value.detach().to(device, torch.float32, non_blocking=True) for value in values.values())
        together = torch.cat([part.flatten() for part in parts])
        flat = self.sum(together) / self.size
        means = flat.split([value.numel() for value in values.values()])
        return {name: mean.view(value.shape) for (name, value), mean in zip(values.items(), means, strict=True)}

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Whether each flag is raised in any process."""
        if self.size == 1:
            return flags
        with lost_process_is_an_error():
            raised = torch.tensor(flags, dtype=torch.uint8)
            dist.all_reduce(raised, op=dist.ReduceOp.MAX, group=self.control)
        return tuple(map(bool, raised.tolist()))

    def gather(self, value: Shared) -> list[Shared]:
        """Small values of all processes, in the order of their numbers."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with lost_process_is_an_error():
            dist.all_gather_object(values, value, group=self.patient)
        return values

    def count_on_machine(self) -> int:
        """How many processes share the cores of this machine."""
        return max(self.gather(self.local_rank)) + 1

    def from_main(self, action: Callable[[], Shared]) -> Shared:
        """What the main process finds, in all of them; also its error."""
        result: Shared | None = None
        with self.together():
            if self.is_main:
                result = action()
        if self.size == 1:
            return result  # type: ignore[return-value]
        box = [result]
        with lost_process_is_an_error():
            dist.broadcast_object_list(box, src=0, group=self.patient)
        return box[0]  # type: ignore[return-value]

    @contextmanager
    def together(self) -> Iterator[None]:
        """What fails in one process fails in all, with the same sentence. Nothing may be exchanged within it."""
        if self.size == 1:
            yield
            return
        failure: CapiError | None = None
        try:
            yield
        except CapiError as error:
            failure = error
        self.fail_together(failure)

    def fail_together(self, failure: CapiError | None) -> None:
        """Raise the first failure of any process in all of them."""
        if self.size == 1:
            if failure is not None:
                raise failure
            return
        failures = self.gather(None if failure is None else str(failure))
        failed = [(rank, sentence) for rank, sentence in enumerate(failures) if sentence is not None]
        if failed:
            rank, sentence = failed[0]
            # The main process speaks for all of them; only another one needs its number.
            named = f"process {rank}: {sentence}" if rank and len(failed) < self.size else sentence
            raise SharedError(named) from failure

    def refuse_differences(self, what: str, text: str) -> None:
        """All processes must have been given the same."""
        texts = self.gather(text)
        for rank, other in enumerate(texts):
            if other != texts[0]:
                pairs = zip_longest(texts[0].splitlines(), other.splitlines(), fillvalue="nothing")
                ours, theirs = next((mine.strip(), other.strip()) for mine, other in pairs if mine != other)
                raise SharedError(
                    f"process {rank} was started with another {what} than process 0 ({theirs!r}, not {ours!r}): start "
                    "all with the same command"
                )

    def wait(self) -> None:
        """Until all are here, also if one evaluates for hours."""
        if self.size > 1:
            with lost_process_is_an_error():
                dist.barrier(group=self.patient)

    def _reduce(self, value: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size == 1:
            return value
        result = value.contiguous().clone()
        with lost_process_is_an_error():
            dist.all_reduce(result, op=operation)
        return result


@contextmanager
def joined(device: torch.device) -> Iterator[Processes]:
    """The processes that were started together; this one alone where it was started alone.

    They meet once and stay together until they end, since torchrun's meeting point serves once. Where a group exists
    already it is used, and left as it is.
    """
    if not dist.is_available() or (not dist.is_initialized() and _started_together() == 1):
        yield Processes()
        return
    if not dist.is_initialized():
        _join()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        yield _processes(dist.group.WORLD)
    finally:
        # After a bad end another process may be gone, and saying goodbye would wait for it.
        atexit.unregister(_part)
    atexit.unregister(_leave)
    atexit.register(_part)


def _started_together() -> int:
    given = os.environ.get("WORLD_SIZE", "1")
    if not given.isdecimal() or int(given) < 1:
        raise CapiError(f"WORLD_SIZE is {given!r}: expected the number of processes, which torchrun sets")
    return int(given)


@lru_cache(maxsize=1)
def _processes(_: object) -> Processes:
    """All processes of a group, with the groups beside it."""
    _MEETING.control = dist.new_group(backend="gloo", timeout=TIMEOUT)
    _MEETING.patient = dist.new_group(backend="gloo", timeout=PATIENCE)
    _MEETING.background = dist.new_group(backend="gloo", timeout=PATIENCE)
    return Processes(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")))


def _part() -> None:
    """End the groups that were made here; a group ends, and its threads with it, when nobody holds it any more."""
    _processes.cache_clear()
    is_own = _MEETING.is_own
    vars(_MEETING).update(vars(_Meeting()))
    if is_own and dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def leave_with(code: int) -> None:
    """How a command that failed ends once it is left: nothing ends the network's threads then, so Python must not."""
    if dist.is_available() and dist.is_initialized():
        atexit.register(_leave, code)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def own_device(device: torch.device) -> torch.device:
    """The device of this process: of several GPUs in a machine, the one with its number there."""
    if device.type == "cuda" and device.index is None and "LOCAL_RANK" in os.environ:
        number = int(os.environ["LOCAL_RANK"])
        if number >= torch.cuda.device_count():
            raise CapiError(
                f"this machine has {counted(torch.cuda.device_count(), 'GPU')}, but process {number} of it was "
                "started: start as many processes as there are GPUs"
            )
        return torch.device("cuda", number)
    return device


def _join() -> None:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise CapiError(f"WORLD_SIZE asks for several processes, but {missing[0]} is not set: start them with torchrun")
    # Tensors of each device over its own network, whatever device the first command was for.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    # The library waits longer than asked, or forever where another program answers.
    watch = threading.Timer(TIMEOUT.total_seconds(), _give_up, [where])
    watch.daemon = True
    watch.start()
    try:
        dist.init_process_group(backend, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        reason = "the port is taken" if "EADDRINUSE" in str(error) else _first_line(error)
        raise CapiError(_not_met(where, reason)) from error
    finally:
        watch.cancel()
    _MEETING.is_own = True


def _not_met(where: str, reason: str) -> str:
    return (
        f"the {os.environ['WORLD_SIZE']} processes could not meet at {where} ({reason}): give another MASTER_PORT "
        "(torchrun --master-port), and see that all machines can reach the first one"
    )


def _give_up(where: str) -> None:
    """End the process from a thread, since the main one is inside the library."""
    minutes = TIMEOUT.total_seconds() / 60
    sys.stderr.write(f"Error: {_not_met(where, f'not all came within {minutes:.0f} minutes')}\n")
    sys.stderr.flush()
    os._exit(2)


@contextmanager
def lost_process_is_an_error() -> Iterator[None]:
    """What the network says when a peer is gone, as one sentence."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or _OF_THE_NETWORK.search(str(error))):
            raise
        raise LostProcessError(
            f"another process of the run has ended or does not answer any more ({_first_line(error)}): see what it "
            "said last, then resume with --resume"
        ) from error


def _first_line(error: BaseException) -> str:
    """The message without the place in the library's source that gloo begins with, and its guesses."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^]]*\.cc:\d+\]\s*", "", line).split(". This is")[0][:160]


ALONE = Processes()
MAIN = 0


class Done(NamedTuple):
    """The last word of the main process: what it found, or why it failed."""

    result: Any = None
    failure: str | None = None


@dataclass(frozen=True)
class Exchange:
    """How the main process talks to the others."""

    processes: Processes

    @property
    def rank(self) -> int:
        return self.processes.rank

    @property
    def size(self) -> int:
        return self.processes.size

    def announce(self, word: Any) -> None:
        """Said by the main process, once all others listen."""
        with lost_process_is_an_error():
            dist.broadcast_object_list([word], src=MAIN, group=self.processes.patient)

    def heard(self) -> Any:
        """What the main process says next."""
        box: list[Any] = [None]
        with lost_process_is_an_error():
            dist.broadcast_object_list(box, src=MAIN, group=self.processes.patient)
        return box[0]

    def send(self, to: int, note: Any, tensors: Sequence[Tensor] = ()) -> None:
        """A small value and tensors of any kind; waits until they are received."""
        shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        head = torch.frombuffer(bytearray(pickle.dumps((note, shapes))), dtype=torch.uint8)
        with lost_process_is_an_error():
            self._send(torch.tensor([len(head)]), to)
            self._send(head, to)
            for tensor in tensors:
                # Empty ones are known by their shape.
                if tensor.numel():
                    self._send(tensor.detach().cpu().contiguous().flatten().view(torch.uint8), to)

    def receive(self, source: int) -> tuple[Any, list[Tensor]]:
        """The same, on the CPU."""
        with lost_process_is_an_error():
            length = self._receive(1, torch.int64, source)
            head = self._receive(int(length), torch.uint8, source)
            # From a process of the same command, never from a file.
            note, shapes = pickle.loads(head.numpy().tobytes())  # noqa: S301
            return note, [self._tensor(shape, dtype, source) for shape, dtype in shapes]

    def _tensor(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> Tensor:
        values = torch.empty(shape, dtype=dtype)
        if values.numel():
            dist.recv(values.flatten().view(torch.uint8), src=source, group=self.processes.patient)
        return values

    def _receive(self, count: int, dtype: torch.dtype, source: int) -> Tensor:
        values = torch.empty(count, dtype=dtype)
        dist.recv(values, src=source, group=self.processes.patient)
        return values

    def _send(self, values: Tensor, to: int) -> None:
        dist.send(values, dst=to, group=self.processes.patient)


@dataclass
class Findings:
    """What the others get at the end."""

    result: Any = None


@contextmanager
def lead(exchange: Exchange) -> Iterator[Findings]:
    """The main process works while the others follow; at the end they get the result it leaves here, or its failure."""
    findings = Findings()
    try:
        yield findings
    except LostProcessError:
        # There is nobody left to tell.
        raise
    except Exception as error:
        exchange.announce(Done(failure=str(error)))
        raise
    exchange.announce(Done(findings.result))


def follow(exchange: Exchange, act: Callable[[Any], None]) -> Any:
    """Do whatever the main process asks for, until it is done; what it found."""
    while not isinstance(word := exchange.heard(), Done):
        act(word)
    if word.failure is not None:
        raise SharedError(word.failure)
    return word.result
