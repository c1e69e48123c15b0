"""Rules for a learning rate: how it scales with the batch, and how to correct the momentum when it changes."""

from __future__ import annotations

import math
from typing import Literal

from bigstep.errors import require

__all__ = ["momentum_correction", "scale_lr"]


def scale_lr(
    base: float, batch: int, base_batch: int = 256, rule: Literal["linear", "sqrt", "none"] = "linear"
) -> float:
    """Scale a learning rate from the batch it was tuned for to another batch.

    ::

        linear: base * batch / base_batch      sqrt: base * sqrt(batch / base_batch)      none: base

    Args:
        base: The rate at `base_batch`.
        batch: Global batch: workers x local batch.
        base_batch: The batch that `base` was tuned for.
        rule: How the rate grows with the batch.

    Returns:
        The rate for `batch`.

    >>> scale_lr(0.1, batch=8192)
    3.2
    >>> round(scale_lr(0.1, batch=8192, rule="sqrt"), 3)
    0.566

    Reference: Goyal et al., Accurate, Large Minibatch SGD, 2017, section 2.1 (linear; table 2 compares the rules).
    """
    require(batch > 0 and base_batch > 0, f"Batches must be greater than 0, but are {batch} and {base_batch}.")
    ratio = batch / base_batch
    factors = {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}
    require(rule in factors, f"The scaling rule is {rule!r}, but it must be linear, sqrt or none.")
    return base * factors[rule]


def momentum_correction(lr: float, previous_lr: float) -> float:
    """Factor for the momentum of a step whose learning rate differs from the last step's: lr / previous_lr.

    If the rate is inside the velocity, v <- m * v + lr * g, the old velocity still contains the old rate. For one
    step, multiply the momentum by this factor: v <- m * (lr / previous_lr) * v + lr * g. LARS has that form and is
    published without the correction; torch.optim.SGD keeps the rate outside its velocity and needs none.

    Args:
        lr: Rate of this step.
        previous_lr: Rate of the previous step.

    Returns:
        The factor; 1 if the previous rate was 0, since the velocity then contains nothing to correct.

    >>> momentum_correction(lr=0.25, previous_lr=2.5)  # a drop by 10 shrinks the old velocity by 10
    0.1

    Reference: Goyal et al., Accurate, Large Minibatch SGD, 2017, section 3, remark 2 and equation 10.
    """
    return lr / previous_lr if previous_lr else 1.0
