"""Benchmarks that a learner goes through while it is trained."""

import itertools
from dataclasses import replace
from pathlib import Path

import torch

from capi.config.files import FILE_ENDINGS, load_benchmark
from capi.config.schema import Config, EvaluationConfig
from capi.evals.build import build_encoding, build_protocol, count_images, load_data
from capi.evals.results import EvaluationProtocol
from capi.method.student import Student
from capi.train.step import Learner
from capi.zoo.build import frozen, statistics


class LearnerEvaluation:
    """A benchmark that teacher or student go through while they are trained."""

    def __init__(self, name: str, protocol: EvaluationProtocol, settings: EvaluationConfig, config: Config) -> None:
        self.name, self.protocol, self.settings, self.config = name, protocol, settings, config
        self.every_steps = settings.every_steps

    def run(self, learner: Learner, step: int) -> dict[str, float]:  # noqa: ARG002 - the contract
        """The score to quote as `benchmark/weights`, any others with their name between."""
        models = {"teacher": learner.teacher.average, "student": learner.student}
        scores: dict[str, float] = {}
        for weights in self.settings.weights:
            quoted, *others = self._scores(models[weights])
            scores[f"{self.name}/{weights}"] = quoted[1]
            scores |= {f"{self.name}/{name}/{weights}": score for name, score in others}
        return scores

    def _scores(self, model: Student) -> list[tuple[str, float]]:
        was_training = model.training
        model.eval()
        try:
            return list(self.protocol.run(frozen(model, statistics(self.config))).scores.items())
        finally:
            model.train(was_training)


def build_evaluations(config: Config, device: torch.device) -> list[LearnerEvaluation]:
    """The evaluations of a run, under names that tell them apart in its metrics."""
    names: list[str] = []
    for settings in config.evaluations:
        base = Path(settings.benchmark).stem if settings.benchmark.endswith(FILE_ENDINGS) else settings.benchmark
        tries = (base if number == 1 else f"{base}-{number}" for number in itertools.count(1))
        names.append(next(name for name in tries if name not in names))
    return [
        build_evaluation(config, settings, name, device)
        for settings, name in zip(config.evaluations, names, strict=True)
    ]


def build_evaluation(config: Config, settings: EvaluationConfig, name: str, device: torch.device) -> LearnerEvaluation:
    """An evaluation of a run, at the run's own size as afterwards; images are read once and kept."""
    benchmark = load_benchmark(settings.benchmark, options=settings.options)
    data = load_data(benchmark)
    encoding = build_encoding(benchmark, config.data.height_and_width, device=device, images=count_images(data))
    protocol = build_protocol(benchmark, data, replace(encoding, image_cache={}))
    return LearnerEvaluation(name, protocol, settings, config)
