"""Protocols with their data, from the config of a benchmark."""

import hashlib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from capi.config.benchmarks import BenchmarkConfig, SegmentationConfig
from capi.evals.classification import KnnClassification
from capi.evals.datasets import load_classification, load_segmentation
from capi.evals.features import Encoding, OnProgress, silent
from capi.evals.limits import limited
from capi.evals.probe_protocol import AttentiveClassification, LinearClassification
from capi.evals.results import EvaluationProtocol
from capi.evals.segmentation import KnnSegmentation, LogisticSegmentation
from capi.evals.tasks import DataOptions, EvaluationData, SegmentationData
from capi.runtime.devices import choose_workers


def load_data(config: BenchmarkConfig) -> EvaluationData:
    """Find the files of a benchmark's data set, or of the part that is asked for."""
    data = _whole_data(config)
    return limited(data, train=config.limit_train, tests=config.limit_tests, seed=config.seed)


def _whole_data(config: BenchmarkConfig) -> EvaluationData:
    root = None if config.data is None else Path(config.data)
    options = DataOptions(
        train=config.train,
        tests=config.tests,
        test_share=config.test_share,
        label=config.label,
        exclude=None if config.exclude is None else Path(config.exclude),
        more={name: Path(path) for name, path in config.more.items()},
        verify_counts=config.verify_counts,
    )
    if not isinstance(config, SegmentationConfig):
        return load_classification(config.dataset, root, options)
    ignored = None if config.ignored is None else frozenset(config.ignored)
    return load_segmentation(config.dataset, root, replace(options, ignored=ignored, class_names=config.class_names))


def build_encoding(
    config: BenchmarkConfig,
    own_size: tuple[int, int],
    *,
    device: torch.device | str = "cpu",
    folder: Path | None = None,
    progress: OnProgress = silent,
    images: int = 0,
    processes: int = 1,
) -> Encoding:
    """How an encoder of this size of its own is run.

    `images` is about how many there are to read, for each of `processes` on a machine.
    """
    return Encoding(
        size=config.height_and_width or own_size,
        batch_size=config.encode_batch,
        workers=choose_workers(config.workers, torch.device(device), images=images, processes=processes),
        device=device,
        precision=torch.bfloat16 if config.precision == "bfloat16" else torch.float32,
        folder=folder,
        memory_bytes=int(config.memory_gib * 2**30),
        progress=progress,
    )


def count_images(data: EvaluationData) -> int:
    """All images that an evaluation reads."""
    if isinstance(data, SegmentationData):
        return len(data.train.images) + len(data.test.images)
    return len(data.train.images) + sum(len(test.images) for test in data.tests.values())


def fingerprints(data: EvaluationData) -> dict[str, str]:
    """What identifies the images and masks by name, and their labels."""
    if isinstance(data, SegmentationData):
        parts = {"train": data.train, data.test_name: data.test}
        return {name: f"{part.images.fingerprint}/{part.masks.fingerprint}" for name, part in parts.items()}
    labels = {"train": (data.train.images, data.train.labels)}
    labels |= {name: (test.images, test.answers) for name, test in data.tests.items()}
    return {
        name: f"{images.fingerprint}/{hashlib.sha256(answers.contiguous().numpy().tobytes()).hexdigest()[:16]}"
        for name, (images, answers) in labels.items()
    }


_PROTOCOLS: tuple[Any, ...] = (
    *(KnnClassification, LinearClassification, AttentiveClassification),
    *(KnnSegmentation, LogisticSegmentation),
)
PROTOCOLS = {protocol.kind: protocol for protocol in _PROTOCOLS}


def build_protocol(config: BenchmarkConfig, data: EvaluationData, encoding: Encoding) -> EvaluationProtocol:
    """The protocol that a config asks for. What both call alike, it gets."""
    protocol = PROTOCOLS[config.protocol]
    names = {each.name for each in fields(protocol)} & type(config).model_fields.keys() - {"data"}
    built: EvaluationProtocol = protocol(data, encoding, **{name: getattr(config, name) for name in names})
    return built
