"""What a run would cost, from its config alone: nothing is trained, and no memory is taken for weights."""

from typing import NamedTuple

import torch

from capi.build import build_learner, mask_sampler
from capi.config.schema import Config
from capi.method.masking import Grid
from capi.train.flop import iteration_flop


class PlannedCost(NamedTuple):
    """The size of the networks and the work of a whole run."""

    encoder_parameters: int
    trained_parameters: int
    flop_an_image: float
    images_seen: int

    @property
    def flop(self) -> float:
        return self.flop_an_image * self.images_seen


def plan(config: Config) -> PlannedCost:
    """Parameters, FLOP of one image in one iteration, and how many images the run sees, repetitions included."""
    # On the meta device tensors have shapes and no values, so that the largest model is built in a moment.
    with torch.device("meta"):
        learner = build_learner(config, "meta")
    optimization = config.optimization
    visible, _, predicted = mask_sampler(config).counts(Grid(*config.grid))
    flop = iteration_flop(
        learner.student,
        learner.target,
        batch_size=optimization.batch_size // optimization.micro_batches,
        patches=Grid(*config.grid).size,
        visible=visible,
        predicted=predicted,
    )
    trained = (*learner.student.parameters(), *learner.target.parameters())
    return PlannedCost(
        encoder_parameters=sum(parameter.numel() for parameter in learner.student.encoder.parameters()),
        trained_parameters=sum(parameter.numel() for parameter in trained),
        flop_an_image=sum(flop),
        images_seen=optimization.batch_size * optimization.steps,
    )
