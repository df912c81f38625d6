"""Every tensor in reference/tiny, reproduced."""

from typing import Any

import pytest
import torch
from torch import Tensor

from capi.method.clustering import OnlineClustering
from capi.method.clustering.walk import ClusteringSettings
from capi.method.student import student_of
from capi.method.teacher import Teacher
from capi.models.features import CapiEncoder
from capi.train.optimizer import student_optimizer, target_optimizer
from capi.train.schedules import Schedule
from capi.train.step import Learner, train_step
from capi.types import MaskedBatch
from capi.zoo.released import load_released
from tests.conftest import REFERENCE

TOLERANCE = {"rtol": 1e-5, "atol": 5e-6}


@pytest.fixture
def model() -> CapiEncoder:
    return load_released(REFERENCE / "student.pth")


@pytest.fixture
def batch(reference: dict[str, Tensor]) -> MaskedBatch:
    return MaskedBatch(reference["images"], reference["visible_index"], reference["predict_index"])


def _clustering(reference: dict[str, Tensor], sinkhorn: Any = "positionwise", **settings: Any) -> OnlineClustering:
    prototypes, width = reference["clustering.weight"].shape
    clustering = OnlineClustering(
        width=width, prototypes=prototypes, settings=ClusteringSettings(sinkhorn=sinkhorn, **settings)
    )
    with torch.no_grad():
        clustering.prototypes.copy_(reference["clustering.weight"])
        clustering.bias.copy_(reference["clustering.bias"])
    return clustering


def test__evaluation_features(model: CapiEncoder, reference: dict[str, Tensor]) -> None:
    features = model(reference["images"])
    torch.testing.assert_close(features.pooled, reference["eval.global"], **TOLERANCE)
    torch.testing.assert_close(features.registers, reference["eval.registers"], **TOLERANCE)
    torch.testing.assert_close(features.feature_map, reference["eval.feature_map"], **TOLERANCE)


def test__masked_forward(model: CapiEncoder, batch: MaskedBatch, reference: dict[str, Tensor]) -> None:
    encoded = model.encoder(batch.images, batch.visible_index)
    torch.testing.assert_close(model.encoder.patches(encoded), reference["pretrain.encoder_patches"], **TOLERANCE)
    rows, columns = model.encoder.patch_embedding.grid(batch.images)
    positions = model.encoder(batch.images).coordinates[0, -rows * columns :][batch.predict_index]
    predictions = model.predictor(encoded, positions)
    torch.testing.assert_close(predictions, reference["pretrain.predictions"], **TOLERANCE)
    assert model.head is not None
    torch.testing.assert_close(model.head(predictions), reference["pretrain.student_logits"], **TOLERANCE)


def test__student_logits_in_one_call(model: CapiEncoder, batch: MaskedBatch, reference: dict[str, Tensor]) -> None:
    assert model.head is not None
    student = student_of(encoder=model.encoder, predictor=model.predictor, head=model.head)
    torch.testing.assert_close(student(*batch[:3]), reference["pretrain.student_logits"], **TOLERANCE)


# All positions in one slice, and one position a slice.
@pytest.mark.parametrize("chunk_bytes", [None, 10_000])
@pytest.mark.parametrize("sinkhorn", ["positionwise", "standard"])
def test__assignments_and_loss(reference: dict[str, Tensor], sinkhorn: str, chunk_bytes: int | None) -> None:
    clustering = _clustering(reference, sinkhorn, chunk_bytes=chunk_bytes)
    images, positions, _ = reference["clustering.tokens"].shape
    every_position = torch.arange(positions).expand(images, -1)
    loss, (assignments,) = clustering([reference["clustering.tokens"]], [every_position])
    torch.testing.assert_close(assignments, reference[f"clustering.assignments_{sinkhorn}"], **TOLERANCE)
    torch.testing.assert_close(loss, reference[f"clustering.loss_{sinkhorn}"].squeeze(), **TOLERANCE)


def test__logits_are_products_with_the_prototypes(reference: dict[str, Tensor]) -> None:
    tokens = torch.nn.functional.normalize(reference["clustering.tokens"], dim=-1, eps=1e-7)
    clustering = _clustering(reference)
    logits = tokens @ clustering.prototypes.T + clustering.bias
    torch.testing.assert_close(logits, reference["clustering.logits"], **TOLERANCE)


def test__three_optimization_steps(
    model: CapiEncoder, batch: MaskedBatch, reference: dict[str, Tensor], reference_config: dict[str, Any]
) -> None:
    training = reference_config["train"]
    assert model.head is not None
    student = student_of(encoder=model.encoder, predictor=model.predictor, head=model.head).requires_grad_(True).train()
    clustering = _clustering(reference)
    clustering.student_temperature = reference_config["student_temperature"]
    learner = Learner(
        student=student,
        teacher=Teacher(student),
        target=clustering,
        student_optimizer=student_optimizer(student, weight_decay=training["weight_decay"]),
        target_optimizer=target_optimizer(clustering, weight_decay=training["clustering_weight_decay"]),
        learning_rate=lambda step: training["learning_rates"][step],
        teacher_momentum=lambda _: training["teacher_momentum"],
    )
    for step in range(3):
        metrics = train_step(learner, [batch], step)
        torch.testing.assert_close(metrics.student_loss.double(), reference["train.student_loss"][step], **TOLERANCE)
        torch.testing.assert_close(metrics.target_loss.double(), reference["train.clustering_loss"][step], **TOLERANCE)
    model.eval()
    with torch.no_grad():
        student_map = model(batch.images, pooled=False).feature_map
        teacher_map = learner.teacher(batch.images).view_as(student_map)
    torch.testing.assert_close(student_map, reference["train.student_feature_map_after"], **TOLERANCE)
    torch.testing.assert_close(teacher_map, reference["train.teacher_feature_map_after"], **TOLERANCE)
    torch.testing.assert_close(clustering.prototypes, reference["train.clustering_weight_after"], **TOLERANCE)


def test__schedules(reference: dict[str, Tensor], reference_config: dict[str, Any]) -> None:
    settings = reference_config["schedule"]
    schedule = Schedule(
        total_steps=settings["steps"], warmup_steps=settings["warmup_steps"], cosine_kept=settings["cosine_kept"]
    )
    rates = [schedule.learning_rate(step, peak=settings["peak_learning_rate"]) for step in range(100)]
    momenta = [schedule.teacher_momentum(step, peak=settings["momentum_at_peak"]) for step in range(100)]
    torch.testing.assert_close(torch.tensor(rates, dtype=torch.float64), reference["schedule.lr"], rtol=1e-12, atol=0)
    torch.testing.assert_close(
        torch.tensor(momenta, dtype=torch.float64), reference["schedule.momentum"], rtol=1e-12, atol=0
    )
