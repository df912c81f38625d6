"""Every recipe that comes with the package."""

import pytest
import torch
from torch import Tensor

from capi.config.files import load_config, recipe_names, recipe_text, recipe_title
from capi.config.paper import paper_models
from capi.config.schema import CONFIG_VERSION
from capi.errors import CapiError
from capi.method.masking import PatchGrid
from capi.train import build
from capi.train.build import build_learner, mask_sampler, resolve_target
from capi.train.cost.plan import planned_cost
from capi.train.step import train_step
from capi.types import Features, MaskedBatch
from capi.zoo.build import build_student, target_facts

NAMES = recipe_names()


class StandIn:
    """A teacher with patches of 14 px that costs nothing."""

    patch_size = 14

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, images: Tensor, *, pooled: bool = True) -> Features:
        batch, rows, columns = len(images), images.shape[2] // 14, images.shape[3] // 14
        return Features(None, torch.zeros(batch, 0, self.width), torch.randn(batch, rows, columns, self.width))


def test__there_are_recipes() -> None:
    assert {"vitl14", "vitb14", "vits14", "vitl16", "vits16", "tiny4", "small", "demo", "distill"} <= set(NAMES)


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


@pytest.mark.parametrize("name", [*NAMES, *paper_models()])
def test__names_no_data_set(name: str) -> None:
    """Images are the user's, and so is what they are judged by."""
    config = load_config(name)
    assert config.evaluations == []
    assert config.init.encoder is None


def test__the_demo_trains_the_network_that_a_folder_of_photos_gets() -> None:
    demo, small = load_config("demo"), load_config("small")
    assert (demo.model, demo.data, demo.masking, demo.clustering) == (
        small.model,
        small.data,
        small.masking,
        small.clustering,
    )


@pytest.mark.parametrize("name", NAMES)
def test__validates_and_builds(name: str) -> None:
    config = load_config(name)
    visible, masked, predicted = mask_sampler(config).counts(PatchGrid(*config.grid))
    assert visible > 0
    assert 0 < predicted <= masked
    with torch.device("meta"):
        student = build_student(config)
    if target_facts(config).has_prototypes:
        assert student.head.direction.shape == (config.clustering.prototypes, config.model.predictor_width)
    else:
        assert student.head.weight.shape == (config.target.frozen.width, config.model.predictor_width)


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


def test__the_student_of_a_distillation_is_smaller_than_its_teacher_on_the_same_grid() -> None:
    """The teacher is the released ViT-L/14, which nothing here needs: its width stands in the recipe."""
    config, teacher = load_config("distill"), load_config("vitl14")
    assert config.target.frozen.encoder == "capi_vitl14_lvd"
    assert config.target.frozen.width == teacher.model.width
    assert (config.grid, config.model.patch_size) == (teacher.grid, teacher.model.patch_size)
    with torch.device("meta"):
        sizes = [
            sum(parameter.numel() for parameter in build_student(each).encoder.parameters())
            for each in (config, teacher)
        ]
    assert sizes[0] < sizes[1] / 10


def test__a_distillation_trains_with_a_teacher_of_the_width_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    small = ["model.depth=1", "optimization.batch_size=2", "data.image_size=56", "masking.predict=2"]
    config = load_config("distill", small)
    monkeypatch.setattr(build, "open_configured_encoder", lambda *_, **__: StandIn(1024))
    resolved, teacher = resolve_target(config)
    assert resolved == config
    learner = build_learner(config, frozen_encoder=teacher)
    masks = mask_sampler(config)(PatchGrid(*config.grid), torch.arange(2))
    report = train_step(learner, [MaskedBatch(torch.randn(2, 3, 56, 56), *masks)], step=0)
    assert report.student_loss.isfinite()
    monkeypatch.setattr(build, "open_configured_encoder", lambda *_, **__: StandIn(768))
    with pytest.raises(CapiError, match=r"frozen\.width is 1024, but capi_vitl14_lvd has features of width 768"):
        resolve_target(config)


def test__what_a_distillation_costs_is_not_known_before_its_teacher_is_opened() -> None:
    with pytest.raises(CapiError, match="what a frozen encoder costs is not known before it is opened"):
        planned_cost(load_config("distill"))
