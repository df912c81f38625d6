"""What a run would cost, from its config alone: nothing is trained, and no memory is taken for weights."""

from typing import NamedTuple

from capi.config.schema import Config
from capi.train.cost.plan import flop_of, networks


class PlannedCost(NamedTuple):
    """The size of the networks and the work of a whole run."""

    encoder_parameters: int
    trained_parameters: int
    flop_an_image: float
    images_seen: int

    @property
    def flop(self) -> float:
        return self.flop_an_image * self.images_seen


def planned_cost(config: Config) -> PlannedCost:
    """Parameters, FLOP of one image in one iteration, and how many images the run sees, repetitions included."""
    planned, optimization = networks(config), config.optimization
    return PlannedCost(
        encoder_parameters=planned.encoder_parameters,
        trained_parameters=planned.trained_parameters,
        flop_an_image=sum(flop_of(planned, optimization.batch_size // optimization.micro_batches)),
        images_seen=optimization.batch_size * optimization.steps,
    )
