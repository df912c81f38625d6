"""Evaluation by several processes: all of them open the same model and data, the main one evaluates, all encode."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from capi.data.sources import ImageSource
from capi.errors import CapiError
from capi.evals.features import Encoding
from capi.evals.probe_files import encoder_facts
from capi.evals.tasks import EvaluationData, MaskSource, SegmentationData
from capi.evals.team import SharedEncoding, help_encode
from capi.runtime.leading import Exchange, follow, lead
from capi.runtime.processes import LostProcessError, Processes
from capi.types import VisionEncoder

Result = TypeVar("Result")
Source = ImageSource | MaskSource


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


def encoding_together(
    processes: Processes,
    encoder: VisionEncoder,
    sources: Sequence[Source],
    encoding: Encoding,
    action: Callable[[Encoding], Result],
    *,
    told: Callable[[Result], Result] = lambda result: result,
) -> Result:
    """What the main process finds while all of them encode. The others get what is `told` of it, or its failure."""
    if processes.size == 1:
        return action(encoding)
    _refuse_differences(processes, encoder, sources)
    exchange = Exchange(processes)
    if not processes.is_main:
        found: Result = follow(exchange, lambda job: help_encode(exchange, job, encoder, encoding, sources))
        return found
    team = SharedEncoding(exchange, sources)
    return lead(exchange, lambda: _settled(team, lambda: action(replace(encoding, team=team))), told)


def _settled(team: SharedEncoding, action: Callable[[], Result]) -> Result:
    """Whatever comes of it, no process is left waiting to be asked; someone who interrupts does not wait for that."""
    try:
        result = action()
    except LostProcessError:
        raise
    except Exception:
        team.settle()
        raise
    team.settle()
    return result


def _refuse_differences(processes: Processes, encoder: VisionEncoder, sources: Sequence[Source]) -> None:
    """Batches of another model or of other images would go into the same score."""
    facts: dict[str, Any] = encoder_facts(encoder)
    processes.refuse_differences("model", json.dumps(facts))
    processes.refuse_differences("data", "\n".join(f"{len(one)} files, {one.fingerprint}" for one in sources))
