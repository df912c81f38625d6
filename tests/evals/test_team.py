import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from capi.data.crops import Frame
from capi.data.sources import EncodedImages
from capi.errors import CapiError
from capi.evals.features import EncodedBatch, Encoding, EncodingJob, encoded_batches, encoded_here
from capi.evals.images import AugmentedBatches, StillBatches
from capi.evals.team import SharedEncoding, help_encode, packed, unpacked
from capi.runtime.processes import SharedError, follow, lead
from capi.types import Features
from tests.data.pictures import noise
from tests.evals.toys import Masks, RandomPatches, source_of
from tests.runtime.threads import ThreadExchange, together

COUNT = 11
ENCODING = Encoding(size=(8, 8), batch_size=2)
Action = Callable[[Encoding], Any]


class Watched(RandomPatches):
    """Counts the images that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, images: Tensor, *, pooled: bool = True) -> Features:
        self.seen += len(images)
        return super().forward(images, pooled=pooled)


@functools.cache
def photos() -> EncodedImages:
    return source_of([noise(9, 12, 3, seed=seed) for seed in range(COUNT)])


def masks() -> Masks:
    return Masks([noise(9, 12, seed=seed) for seed in range(COUNT)])


def run_together(
    size: int, action: Action, sources: Sequence[object], encoders: list[Watched] | None = None
) -> list[Any]:
    """What the main process finds, and how the others end."""

    def act(exchange: ThreadExchange) -> Any:
        encoder = Watched() if encoders is None else encoders[exchange.rank]
        if exchange.rank:
            return follow(exchange, lambda job: help_encode(exchange, job, encoder, ENCODING, sources))
        team = SharedEncoding(exchange, sources)
        with lead(exchange) as findings:
            try:
                result = action(replace(ENCODING, team=team))
            finally:
                team.settle()
            findings.result = exchange.size
        return result

    return together(size, act)


def same(batches: Sequence[EncodedBatch], expected: Sequence[EncodedBatch]) -> bool:
    def tensors(batch: EncodedBatch) -> list[Tensor | None]:
        return [batch.read.numbers, batch.read.masks, *batch.features]

    return len(batches) == len(expected) and all(
        (tensor is None and other is None) or (tensor is not None and other is not None and torch.equal(tensor, other))
        for left, right in zip(batches, expected, strict=True)
        for tensor, other in zip(tensors(left), tensors(right), strict=True)
    )


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("options", [{}, {"pooled": True}, {"patches": False, "registers": False}], ids=str)
def test__batches_are_those_of_one_process_bit_for_bit(size: int, options: dict[str, bool]) -> None:
    """Six batches, the last one smaller: also where they are fewer than the processes."""
    images, labels = photos(), masks()
    encoders = [Watched() for _ in range(size)]

    def action(encoding: Encoding) -> list[EncodedBatch]:
        return list(encoded_batches(encoders[0], images, encoding, masks=labels, whole=True, **options))

    batches, *others = run_together(size, action, [images, labels], encoders)
    alone = list(encoded_batches(RandomPatches(), images, ENCODING, masks=labels, whole=True, **options))
    assert same(batches, alone)
    assert others == [size] * (size - 1)
    # Batch i is of process i modulo their number, and nobody encodes what is another's.
    shares = [sum(min(2, COUNT - 2 * item) for item in range(rank, 6, size)) for rank in range(size)]
    assert [encoder.seen for encoder in encoders] == shares


def test__pieces_of_augmented_batches_are_shared_too() -> None:
    images = photos()
    batches = AugmentedBatches(images, Frame((8, 8)), torch.arange(COUNT), 5, seed=3, piece_size=2)
    job = EncodingJob(batches, count=4 * batches.pieces, pooled=True)

    def action(encoding: Encoding) -> list[EncodedBatch]:
        assert encoding.team is not None
        return list(encoding.team.encoded(RandomPatches(), job, encoding))

    from_three, *_ = run_together(3, action, [images])
    assert same(from_three, list(encoded_here(RandomPatches(), job, range(job.count), ENCODING)))


@pytest.mark.parametrize(("patches", "numbers_an_image"), [(True, 4 * 8), (False, 8)])
def test__what_is_not_wanted_is_not_sent(patches: bool, numbers_an_image: int) -> None:
    images, sent = photos(), []

    def act(exchange: ThreadExchange) -> None:
        if exchange.rank:
            follow(exchange, lambda job: help_encode(exchange, job, RandomPatches(), ENCODING, [images]))
            sent.append(exchange.sent_bytes)
        else:
            encoding = replace(ENCODING, team=SharedEncoding(exchange, [images]))
            job = encoded_batches(RandomPatches(), images, encoding, patches=patches)
            with lead(exchange) as findings:
                findings.result = len(list(job))

    assert together(2, act) == [None, None]
    # Three batches with five images; beside its features each has a number of eight bytes.
    assert sent == [5 * (4 * numbers_an_image + 8)]


def test__a_job_may_be_left_in_the_middle() -> None:
    images = photos()

    def action(encoding: Encoding) -> list[EncodedBatch]:
        for count in (0, 1, 2, 3, 6):
            left = encoded_batches(RandomPatches(), images, encoding)
            for _ in range(count):
                next(left)
        return list(encoded_batches(RandomPatches(), images, encoding))

    batches, *others = run_together(3, action, [images])
    assert same(batches, list(encoded_batches(RandomPatches(), images, ENCODING)))
    assert others == [3, 3]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("broken", [(5, 9), (9, 5), (0, 2), (3,), (10,)], ids=str)
def test__the_first_failure_in_order_is_reported(size: int, broken: tuple[int, ...]) -> None:
    files = list(photos().contents)
    for number in broken:
        files[number] = b"no picture"
    images = EncodedImages([f"image {number}" for number in range(COUNT)], files)

    def action(encoding: Encoding) -> list[EncodedBatch]:
        return list(encoded_batches(RandomPatches(), images, encoding))

    error, *others = run_together(size, action, [images])
    assert isinstance(error, CapiError)
    assert f"image {min(broken)} cannot be read" in str(error)
    assert [(type(other), str(other)) for other in others] == [(SharedError, str(error))] * (size - 1)


def test__two_jobs_at_once_are_a_mistake() -> None:
    images = photos()

    def action(encoding: Encoding) -> None:
        first = encoded_batches(RandomPatches(), images, encoding)
        next(first)
        next(encoded_batches(RandomPatches(), images, encoding))
        next(first)

    error, _ = run_together(2, action, [images])
    assert isinstance(error, AssertionError)


def test__sources_that_all_have_do_not_travel() -> None:
    images, labels = photos(), masks()
    job = EncodingJob(StillBatches(images, Frame((8, 8)), torch.arange(3), 2, labels), 2, pooled=True)
    word = packed(job, [images, labels])
    assert len(word) < 2000 < sum(map(len, images.contents))
    others = source_of([noise(9, 12, 3, seed=99)] * COUNT)
    arrived = unpacked(word, [others, labels])
    assert isinstance(arrived.batches, StillBatches)
    assert (arrived.batches.source, arrived.batches.masks) == (others, labels)
    assert (arrived.count, arrived.pooled, arrived.batches.numbers.tolist()) == (2, True, [0, 1, 2])
