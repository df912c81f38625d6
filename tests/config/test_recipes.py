"""Every recipe that comes with the package."""

import pytest
import torch

from capi.build import build_student, mask_sampler
from capi.config.benchmark_loading import load_benchmark
from capi.config.loading import load_config, recipe_names, recipe_text, recipe_title
from capi.config.schema import CONFIG_VERSION
from capi.method.masking import Grid

NAMES = recipe_names()


def test__there_are_recipes() -> None:
    assert {"vitl14", "vitb14", "vits14", "vitl16", "vits16", "tiny4"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test__opens_with_title_command_cost_and_expectation(name: str) -> None:
    comment = [line for line in recipe_text(name).splitlines() if line.startswith("#")]
    assert len(recipe_title(name)) > 20
    command = next(line for line in comment if line.startswith("# Command:"))
    assert f"capi pretrain {name}" in command or f"capi {name}" in command
    assert any(line.startswith("# Cost:") for line in comment)
    assert any(line.startswith("# Expected:") for line in comment)


@pytest.mark.parametrize("name", NAMES)
def test__is_of_the_present_version(name: str) -> None:
    assert f"\nversion: {CONFIG_VERSION}\n" in recipe_text(name)


@pytest.mark.parametrize("name", NAMES)
def test__its_evaluations_are_benchmarks(name: str) -> None:
    for evaluation in load_config(name).evaluations:
        assert load_benchmark(evaluation.benchmark, options=evaluation.options)


@pytest.mark.parametrize("name", NAMES)
def test__validates_and_builds(name: str) -> None:
    config = load_config(name)
    visible, masked, predicted = mask_sampler(config).counts(Grid(*config.grid))
    assert visible > 0
    assert 0 < predicted <= masked
    with torch.device("meta"):
        student = build_student(config)
    assert student.head.direction.shape == (config.clustering.prototypes, config.model.predictor_width)


@pytest.mark.parametrize(
    ("name", "width", "depth", "predictor_depth", "patch", "rate", "momentum", "steps"),
    [
        ("vitl14", 1024, 24, 12, 14, 1e-3, 0.999, 500_000),
        ("vitb14", 768, 12, 6, 14, 1e-3, 0.999, 500_000),
        ("vits14", 384, 12, 6, 14, 2e-3, 0.998, 500_000),
        ("vitl16", 1024, 24, 12, 16, 2e-3, 0.996, 100_000),
    ],
)
def test__paper_recipes_are_the_rows_of_its_model_table(
    name: str, width: int, depth: int, predictor_depth: int, patch: int, rate: float, momentum: float, steps: int
) -> None:
    config = load_config(name)
    model, optimization = config.model, config.optimization
    assert (model.width, model.depth, model.predictor_depth, model.patch_size) == (width, depth, predictor_depth, patch)
    assert (model.width // model.heads, model.predictor_width, model.registers) == (64, width, 16)
    assert (optimization.learning_rate, optimization.teacher_momentum, optimization.steps) == (rate, momentum, steps)
    assert (optimization.batch_size, config.clustering.prototypes, config.masking.predict) == (16384, 16384, 7)
    assert (model.positions, config.clustering.bias, config.clustering.sinkhorn) == ("released", True, "positionwise")
