"""A fitted probe at work on new images: a class with its confidence for each image, or a label for each pixel.

An image that cannot be read is noted with the reason; the others are labeled all the same.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from capi.data.loader import made_ahead
from capi.data.sources import ImageSource
from capi.evals.features import Encoding, encode, frame_of
from capi.evals.fitted_probes import Judge, Probe, Segmenter
from capi.evals.images import ReadBatch, StillBatches
from capi.types import Int, VisionEncoder


class ImageLabel(NamedTuple):
    """The most likely class of an image, and its probability."""

    number: int
    label: int
    confidence: float


class PixelLabels(NamedTuple):
    """The labels of an image's pixels, at the size that the encoder sees."""

    number: int
    labels: Int[Tensor, "height width"]


class Prediction:
    """A probe over images, computed batch by batch while `labels` or `masks` is read; `failed` fills on the way.

    `encoding` says how the encoder is run; the size of the images is the probe's own.
    """

    def __init__(self, encoder: VisionEncoder, probe: Probe, source: ImageSource, encoding: Encoding) -> None:
        probe.refuse_other(encoder)
        self.encoder, self.probe, self.source = encoder, probe, source
        self.encoding = replace(encoding, size=probe.size)
        self.failed: dict[str, str] = {}

    def labels(self) -> Iterator[ImageLabel]:
        """Labels by a probe that classifies, of each image that can be read, in order."""
        model = self.probe.model
        assert not isinstance(model, Segmenter)
        judge = Judge(model)
        for batch in self._batches():
            features = encode(self.encoder, batch.images, self.encoding, pooled=model.needs_pooled)
            for numbers, confidences in judge.add(batch.numbers, features):
                yield from _most_likely(numbers, confidences)
        for numbers, confidences in judge.finish():
            yield from _most_likely(numbers, confidences)

    def masks(self) -> Iterator[PixelLabels]:
        """Masks by a probe that segments, of each image that can be read, in order."""
        model = self.probe.model
        assert isinstance(model, Segmenter)
        for batch in self._batches():
            features = encode(self.encoder, batch.images, self.encoding)
            labels = model.segment(features, self.encoding.size)
            yield from map(PixelLabels, batch.numbers.tolist(), labels)

    def _batches(self) -> Iterator[ReadBatch]:
        """Batches of images; those that cannot be read are noted and left out."""
        frame = frame_of(self.encoder, self.encoding, whole=self.probe.segments)
        batches = StillBatches(self.source, frame, torch.arange(len(self.source)), self.encoding.batch_size)
        done = 0
        for batch in made_ahead(batches, range(len(batches)), workers=self.encoding.workers):
            yield from [batch] if batch.failure is None else self._one_by_one(batches, batch)
            done += len(batch.numbers)
            self.encoding.progress("images", done, len(self.source))

    def _one_by_one(self, batches: StillBatches, batch: ReadBatch) -> Iterator[ReadBatch]:
        for number in batch.numbers:
            single = replace(batches, numbers=number[None], batch_size=1)[0]
            if single.failure is None:
                yield single
            else:
                self.failed[self.source.name(int(number))] = single.failure


def _most_likely(numbers: Int[Tensor, " b"], confidences: Tensor) -> Iterator[ImageLabel]:
    best = confidences.max(1)
    yield from map(ImageLabel, numbers.tolist(), best.indices.tolist(), best.values.tolist())
