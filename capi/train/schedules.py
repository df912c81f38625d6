"""Learning rate and teacher momentum as functions of the step, so that resuming needs one integer."""

import math


def learning_rate(step: int, *, peak: float, total_steps: int, warmup_steps: int, cosine_kept: float = 0.8) -> float:
    """A linear warm-up from 0 to `peak`, both ends included, then a cosine of which the last part is cut off."""
    if step < warmup_steps:
        return peak * step / max(warmup_steps - 1, 1)
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * cosine_kept * progress))


def teacher_momentum(
    step: int, *, peak: float, total_steps: int, warmup_steps: int, cosine_kept: float = 0.8
) -> float:
    """1 - momentum follows the curve of the learning rate; `peak` is the momentum where that curve is highest."""
    return 1 - learning_rate(
        step, peak=1 - peak, total_steps=total_steps, warmup_steps=warmup_steps, cosine_kept=cosine_kept
    )
