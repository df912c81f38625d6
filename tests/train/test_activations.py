"""The counts against the bytes that autograd really keeps."""

import pytest
import torch
from torch import Tensor

from capi.config.files import load_config
from capi.config.schema import Config
from capi.method.masking import PatchGrid
from capi.models.costs import ActivationPolicy, Checkpointing, Counts
from capi.train.build import build_learner, mask_sampler
from capi.train.cost.activations import Activations, student_activations
from capi.train.cost.step import random_batch
from capi.train.recomputation import recompute
from capi.train.step import Learner
from tests.train.saved_bytes import saved_bytes

SMALL = ["model.width=48", "model.heads=3", "model.depth=2", "clustering.prototypes=40", "optimization.batch_size=6"]


def counts_of(config: Config) -> Counts:
    visible, _, predicted = mask_sampler(config).counts(PatchGrid(*config.grid))
    return Counts(config.model.registers, PatchGrid(*config.grid).size, visible, predicted)


def planned(config: Config, learner: Learner, policy: ActivationPolicy) -> Activations:
    return student_activations(learner.student, counts_of(config), config.optimization.batch_size, policy)


def kept_by_autograd(config: Config, learner: Learner, precision: torch.dtype) -> int:
    """Bytes of all storages that the backward pass of the student's loss would read, weights left out."""
    batch = random_batch(
        masks=mask_sampler(config),
        grid=PatchGrid(*config.grid),
        image_shape=(config.model.channels, *config.data.height_and_width),
        batch_size=config.optimization.batch_size,
        seed=0,
        device=torch.device("cpu"),
    )

    def loss() -> Tensor:
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            outputs = learner.student(batch.images, batch.visible_index, batch.predict_index)
        return learner.target.student_loss(outputs, torch.rand(outputs.shape))

    return saved_bytes(loss, learner.student.parameters())[0]


@pytest.mark.parametrize("drop", [0.0, 0.3])
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["optimization.batch_size=17"],
        ["model.width=96", "model.predictor.width=64", "model.predictor.heads=4"],
        ["model.depth=5"],
        ["data.image_size=96", "masking.predict=9"],
        ["model.registers=0", "model.mlp_ratio=2.5", "clustering.prototypes=700"],
        ["model.predictor.kind=self"],
        ["model.predictor.kind=self", "model.predictor.mask_tokens=masked", "model.predictor.width=24"],
        ["model.predictor.kind=fused"],
        ["model.head=mlp"],
        ["model.positions=learned"],
        ["target.kind=features"],
    ],
    ids=lambda overrides: " ".join(overrides) or "as it is",
)
def test__the_count_is_what_autograd_keeps(overrides: list[str], drop: float) -> None:
    config = load_config("demo", [*SMALL, *overrides, f"model.stochastic_depth={drop}"])
    learner = build_learner(config)
    for precision, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        count = sum(planned(config, learner, ActivationPolicy(compute_bytes=size)))
        assert count == pytest.approx(kept_by_autograd(config, learner, precision), rel=0.005), precision


def test__what_is_recomputed_is_not_saved() -> None:
    config = load_config("vits16", ["optimization.batch_size=64", "model.stochastic_depth=0.2"])
    with torch.device("meta"):
        learner = build_learner(config, "meta")
    planned_bytes = [planned(config, learner, ActivationPolicy(2, mode)) for mode in ("off", "selective", "full")]
    assert planned_bytes[0].encoder > 1.5 * planned_bytes[1].encoder > 3 * planned_bytes[2].encoder
    assert (planned_bytes[0].recomputed_encoder, planned_bytes[0].weight_copies > 0) == (0, True)
    # All that a block keeps comes back for one block at a time; there are twelve.
    assert planned_bytes[2].recomputed_encoder == pytest.approx(
        (planned_bytes[0].encoder + planned_bytes[0].weight_copies * 12 / 18) / 12, rel=0.05
    )
    assert 0 < planned_bytes[1].recomputed_encoder < planned_bytes[2].recomputed_encoder


@pytest.mark.parametrize("mode", ["full", "selective"])
def test__checkpointing_keeps_what_is_counted(mode: Checkpointing) -> None:
    config = load_config("demo", [*SMALL, "model.depth=4", "model.stochastic_depth=0.3"])
    learner = build_learner(config)
    plain = kept_by_autograd(config, learner, torch.float32)
    recompute((*learner.student.encoder.blocks, *learner.student.predictor.blocks), mode)
    saved = kept_by_autograd(config, learner, torch.float32)
    count = planned(config, learner, ActivationPolicy(checkpointing=mode))
    assert saved < plain / (2 if mode == "full" else 1.2)
    assert sum(count[:-2]) == pytest.approx(saved, rel=0.005)
