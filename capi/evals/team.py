"""Encoding by several processes: batch i of a job is encoded by process i modulo their number.

The main process runs the evaluation as if it were alone. What it wants encoded it tells the others, encodes its own
share, and asks for theirs in order, so that it sees the very batches that one process would have made. The others work
one batch ahead, hold one batch, and know nothing of probes. A batch that fails raises when its turn comes, which is
the error that one process would have met first. A job may be left in the middle: the next one, or the end, settles it.

Evaluation by several processes: all of them open the same model and data, the main one evaluates, all encode.
"""

import io
import json
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console

from capi.data.sources import ImageSource
from capi.errors import CapiError, counted
from capi.evals.features import EncodedBatch, Encoding, EncodingJob, encoded_here
from capi.evals.fitted_probes import encoder_facts
from capi.evals.images import ReadBatch
from capi.evals.tasks import EvaluationData, MaskSource, SegmentationData
from capi.runtime.devices import choose_device
from capi.runtime.processes import MAIN, Exchange, LostProcessError, Processes, follow, joined, lead
from capi.runtime.progress import EvaluationProgress, default_console
from capi.types import Features, VisionEncoder

_NO_PIXELS = torch.empty(0)


class SharedEncoding:
    """The main process's side. `sources` are the images and masks that all processes have, in one order."""

    def __init__(self, exchange: Exchange, sources: Sequence[object]) -> None:
        self.exchange, self.sources = exchange, sources
        self._job: EncodingJob | None = None
        self._waiting: set[int] = set()

    def encoded(self, encoder: VisionEncoder, job: EncodingJob, encoding: Encoding) -> Iterator[EncodedBatch]:
        """All batches, in order; those of other processes come without their pixels."""
        self.settle()
        self.exchange.announce(packed(job, self.sources))
        self._job, self._waiting = job, set(range(1, min(self.exchange.size, job.count)))
        own = encoded_here(encoder, job, range(MAIN, job.count, self.exchange.size), encoding)
        for item in range(job.count):
            assert self._job is job, "another job was started before this one was done"
            owner = item % self.exchange.size
            yield next(own) if owner == MAIN else self._asked(owner, item, encoding)

    def _asked(self, owner: int, item: int, encoding: Encoding) -> EncodedBatch:
        self.exchange.send(owner, True)
        failure, tensors = self.exchange.receive(owner)
        if failure is not None or item + self.exchange.size >= (0 if self._job is None else self._job.count):
            self._waiting.discard(owner)
        if failure is not None:
            raise CapiError(failure)
        numbers, masks, pooled, *rest = tensors
        registers, feature_map = (values.to(encoding.device) for values in rest)
        vectors = pooled.to(encoding.device) if len(pooled) else None
        read = ReadBatch(numbers, _NO_PIXELS, masks if len(masks) else None)
        return EncodedBatch(read, Features(vectors, registers, feature_map))

    def settle(self) -> None:
        """Release processes that still wait for work."""
        waiting, self._waiting, self._job = self._waiting, set(), None
        for owner in sorted(waiting):
            self.exchange.send(owner, False)


def help_encode(
    exchange: Exchange, word: bytes, encoder: VisionEncoder, encoding: Encoding, sources: Sequence[object]
) -> None:
    """The others' side of one job: encode the batches that are this process's, and hand them in when asked."""
    job = unpacked(word, sources)
    items = range(exchange.rank, job.count, exchange.size)
    batches = encoded_here(encoder, job, items, encoding)
    for _ in items:
        failure, batch = None, None
        try:
            batch = next(batches)
        except CapiError as error:
            failure = str(error)
        wanted, _ = exchange.receive(MAIN)
        if not wanted:
            return
        exchange.send(MAIN, failure, [] if batch is None else _tensors(batch))
        if failure is not None:
            return


def _tensors(batch: EncodedBatch) -> list[torch.Tensor]:
    """All but the pixels; what is missing is empty."""
    masks, pooled = batch.read.masks, batch.features.pooled
    return [
        batch.read.numbers,
        torch.empty(0) if masks is None else masks,
        torch.empty(0) if pooled is None else pooled,
        batch.features.registers,
        batch.features.feature_map,
    ]


def packed(job: EncodingJob, sources: Sequence[object]) -> bytes:
    """A job as bytes, in which sources that all processes have are but numbers."""
    numbers = {id(source): number for number, source in enumerate(sources)}

    class Pickler(pickle.Pickler):
        """Names of millions of files need not travel."""

        def persistent_id(self, value: Any) -> int | None:
            return numbers.get(id(value))

    written = io.BytesIO()
    Pickler(written).dump(job)
    return written.getvalue()


def unpacked(word: bytes, sources: Sequence[object]) -> EncodingJob:
    """The same job, over this process's own sources."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, number: Any) -> object:
            return sources[number]

    # From a process of the same command, never from a file.
    job = Unpickler(io.BytesIO(word)).load()
    assert isinstance(job, EncodingJob)
    return job


ReadableSource = ImageSource | MaskSource


@dataclass(frozen=True)
class Execution:
    """Where an evaluation runs and who sees how far it is."""

    processes: Processes
    device: torch.device
    progress: EvaluationProgress


@contextmanager
def executing(device: torch.device | str | None, console: Console | None) -> Iterator[Execution]:
    """Join the processes that were started together and choose the device, once for a call of the API."""
    # Features go from process to process over the CPU: an evaluation may do other things for hours in between.
    with joined(torch.device("cpu")) as processes, EvaluationProgress(console or default_console()) as progress:
        with prepared(processes):
            chosen = choose_device(device)
        yield Execution(processes, chosen, progress)


@contextmanager
def prepared(processes: Processes) -> Iterator[None]:
    """What fails in one process fails in all. One may take much longer than another, to list files or to download."""
    failure: CapiError | None = None
    try:
        yield
    except CapiError as error:
        failure = error
    processes.wait()
    processes.fail_together(failure)


def sources_of(data: EvaluationData) -> list[ReadableSource]:
    """All images and masks of a data set, in one order."""
    if isinstance(data, SegmentationData):
        return [source for part in (data.train, data.test) for source in (part.images, part.masks)]
    return [data.train.images, *(test.images for test in data.tests.values())]


@dataclass
class SharedWork:
    """How the main process encodes, and what the other processes get of what it finds."""

    encoding: Encoding
    result: Any = None


@contextmanager
def lead_encoding(
    processes: Processes, encoder: VisionEncoder, sources: Sequence[ReadableSource], encoding: Encoding
) -> Iterator[SharedWork]:
    """The main process evaluates, and all of them encode. The others get its result, or its failure."""
    if processes.size == 1:
        yield SharedWork(encoding)
        return
    _refuse_differences(processes, encoder, sources)
    exchange = Exchange(processes)
    team = SharedEncoding(exchange, sources)
    work = SharedWork(replace(encoding, team=team))
    with lead(exchange) as findings:
        try:
            yield work
        except LostProcessError:
            raise
        except Exception:
            # Whatever comes of it, no process is left waiting to be asked; after an interruption nobody waits for that.
            team.settle()
            raise
        team.settle()
        findings.result = work.result


def follow_encoding(
    processes: Processes, encoder: VisionEncoder, sources: Sequence[ReadableSource], encoding: Encoding
) -> Any:
    """Encode for the main process until it is done; what it found."""
    _refuse_differences(processes, encoder, sources)
    exchange = Exchange(processes)
    return follow(exchange, lambda job: help_encode(exchange, job, encoder, encoding, sources))


def _refuse_differences(processes: Processes, encoder: VisionEncoder, sources: Sequence[ReadableSource]) -> None:
    """Batches of another model or of other images would go into the same score."""
    facts: dict[str, Any] = encoder_facts(encoder)
    processes.refuse_differences("model", json.dumps(facts))
    processes.refuse_differences(
        "data", "\n".join(f"{counted(len(source), 'file')}, {source.fingerprint}" for source in sources)
    )
