"""Evaluation by several processes: all of them open the same model and data, the main one evaluates, all encode."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console

from capi.data.sources import ImageSource
from capi.errors import CapiError
from capi.evals.features import Encoding
from capi.evals.probe_files import encoder_facts
from capi.evals.tasks import EvaluationData, MaskSource, SegmentationData
from capi.evals.team import SharedEncoding, help_encode
from capi.runtime.devices import choose_device
from capi.runtime.leading import Exchange, follow, lead
from capi.runtime.processes import LostProcessError, Processes, joined
from capi.runtime.progress import EvaluationProgress
from capi.types import VisionEncoder

Source = ImageSource | MaskSource


@dataclass(frozen=True)
class Execution:
    """Where an evaluation runs and who is told how far it is."""

    processes: Processes
    device: torch.device
    progress: EvaluationProgress


@contextmanager
def executing(device: torch.device | str | None, console: Console | None) -> Iterator[Execution]:
    """Join the processes that were started together and choose the device, once for a call of the API."""
    # Features go from process to process over the CPU: an evaluation may do other things for hours in between.
    with joined(torch.device("cpu")) as processes, EvaluationProgress(console) as progress:
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


def sources_of(data: EvaluationData) -> list[Source]:
    """All images and masks of a data set, in one order."""
    if isinstance(data, SegmentationData):
        return [source for part in (data.train, data.test) for source in (part.images, part.masks)]
    return [data.train.images, *(test.images for test in data.tests.values())]


def on_a_machine(processes: Processes) -> int:
    """How many processes share the cores of a machine."""
    return max(processes.gather(processes.local_rank)) + 1


@dataclass
class SharedWork:
    """How the main process encodes, and what the other processes get of what it finds."""

    encoding: Encoding
    result: Any = None


@contextmanager
def lead_encoding(
    processes: Processes, encoder: VisionEncoder, sources: Sequence[Source], encoding: Encoding
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


def follow_encoding(processes: Processes, encoder: VisionEncoder, sources: Sequence[Source], encoding: Encoding) -> Any:
    """Encode for the main process until it is done; what it found."""
    _refuse_differences(processes, encoder, sources)
    exchange = Exchange(processes)
    return follow(exchange, lambda job: help_encode(exchange, job, encoder, encoding, sources))


def _refuse_differences(processes: Processes, encoder: VisionEncoder, sources: Sequence[Source]) -> None:
    """Batches of another model or of other images would go into the same score."""
    facts: dict[str, Any] = encoder_facts(encoder)
    processes.refuse_differences("model", json.dumps(facts))
    processes.refuse_differences("data", "\n".join(f"{len(one)} files, {one.fingerprint}" for one in sources))
