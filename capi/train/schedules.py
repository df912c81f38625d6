"""Learning rate and teacher momentum as functions of the step, so that resuming needs one integer."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """A linear warm-up from 0 to a peak, both ends included, then a cosine of which the last part is cut off.

    With `decay_steps` the rate stays at its peak instead, and falls in so many last steps in a straight line that would
    reach 0 in the step after the last one (warmup-stable-decay). Steps count from 0; a step beyond the last one,
    `total_steps - 1`, has the last one's values.
    """

    total_steps: int
    warmup_steps: int
    cosine_kept: float = 0.8
    decay_steps: int | None = None

    def learning_rate(self, step: int, *, peak: float) -> float:
        """The rate at a step; `peak` is where the warm-up ends and the cosine begins."""
        step = min(step, max(self.total_steps - 1, 0))
        if step < self.warmup_steps:
            return peak * step / max(self.warmup_steps - 1, 1)
        if self.decay_steps is not None:
            return peak * min((self.total_steps - step) / max(self.decay_steps, 1), 1.0)
        progress = (step - self.warmup_steps) / max(self.total_steps - self.warmup_steps, 1)
        return peak * 0.5 * (1 + math.cos(math.pi * self.cosine_kept * progress))

    def teacher_momentum(self, step: int, *, peak: float) -> float:
        """1 - momentum follows the learning rate's curve, so a warm-up starts with a constant teacher."""
        return 1 - self.learning_rate(step, peak=1 - peak)
