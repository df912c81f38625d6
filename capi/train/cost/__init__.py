"""What a run would cost, from its config alone: parameters, FLOP, memory, hours; and what to choose for some images."""

from capi.train.cost.summary import PlannedCost, plan

__all__ = ["PlannedCost", "plan"]
