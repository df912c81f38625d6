"""A training loop of one's own, with names of `capi` alone: what it trained is exported, loaded and evaluated."""

from pathlib import Path

import pytest
import torch

import capi

SMALL = [
    *("data.image_size=16", "model.width=32", "model.depth=2", "model.heads=2", "model.patch_size=4"),
    *("clustering.prototypes=8", "masking.predict=2", "optimization.batch_size=4", "optimization.steps=3"),
]


def trained(*overrides: str) -> tuple[object, list[float]]:
    config = capi.load_config("tiny4", [*SMALL, *overrides])
    learner = capi.build_learner(config)
    losses = []
    for step in range(config.optimization.steps):
        torch.manual_seed(step)
        batch = capi.masked_batch(config, torch.randn(4, 3, 16, 16), step)
        losses.append(float(capi.train_step(learner, [batch], step).student_loss))
    return learner, losses


@pytest.mark.parametrize("weights", ["teacher", "student"])
@pytest.mark.parametrize("format", ["safetensors", "released", "transformers"])
def test__what_a_loop_trained_is_exported_and_loaded(tmp_path: Path, format: str, weights: str) -> None:
    learner, _ = trained()
    file = capi.export(learner, tmp_path / "own", format=format, weights=weights)
    images = torch.randn(2, 3, 16, 16)
    model = learner.teacher.average if weights == "teacher" else learner.student
    model.eval()
    visible = torch.arange(16).expand(2, -1)
    patches = model.encoder(images, visible).tokens[:, -16:]
    features = capi.load(file)(images, pooled=False)
    torch.testing.assert_close(features.feature_map.flatten(1, 2), patches, rtol=1e-5, atol=1e-5)


def test__a_learner_is_evaluated_as_its_export_is(tmp_path: Path, class_folders: Path) -> None:
    learner, _ = trained()
    options = [f"data={class_folders}", "workers=0", "neighbors=[1,3]", "validation_share=0.3"]
    exported = capi.export(learner, tmp_path / "own.safetensors")
    scores = [capi.evaluate(model, "folder/knn", options, device="cpu").record for model in (learner, exported)]
    assert scores[0]["scores"] == scores[1]["scores"]
    assert scores[0]["weights"] == "teacher"
    assert scores[0]["encoder"] == scores[1]["encoder"]


def test__an_evaluation_does_not_disturb_the_training(class_folders: Path) -> None:
    """Stochastic depth and gradients are those of training afterwards."""
    learner, _ = trained()
    capi.evaluate(learner, "folder/knn", [f"data={class_folders}", "workers=0"], device="cpu")
    assert learner.student.training
    assert all(parameter.requires_grad for parameter in learner.student.parameters())


def test__the_loop_sees_the_masks_and_losses_of_a_run(tmp_path: Path) -> None:
    """The same seed draws the same masks, step by step, and so gives the same losses."""
    assert trained()[1] == trained()[1]
    config = capi.load_config("tiny4", SMALL)
    images = torch.zeros(4, 3, 16, 16)
    first, again, next_one = (capi.masked_batch(config, images, step) for step in (0, 0, 1))
    assert torch.equal(first.predict_index, again.predict_index)
    assert not torch.equal(first.visible_index, next_one.visible_index)


def test__statistics_that_are_not_known_are_refused(tmp_path: Path) -> None:
    learner, _ = trained("data.mean=auto", "data.std=auto")
    with pytest.raises(capi.CapiError, match=r"set data\.mean and data\.std"):
        capi.export(learner, tmp_path / "own.safetensors")
