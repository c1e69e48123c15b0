"""The rules, by family: each looks for one cause in the facts of a program's runs."""

from __future__ import annotations

from bigstep.doctor.finding import Rule
from bigstep.doctor.findings import (
    accumulation,
    checkpoint,
    gradients,
    loading,
    order,
    precision,
    rate,
    samples,
    state,
    time,
)

__all__ = ["RULES"]

RULES: dict[str, tuple[Rule, ...]] = {
    "samples": (*samples.RULES, *loading.RULES),
    "gradients": (*gradients.RULES, *accumulation.RULES),
    "rate": rate.RULES,
    "randomness": state.RANDOMNESS,
    "state": state.STATE,
    "checkpoint": checkpoint.RULES,
    "time": time.RULES,
    "precision": precision.RULES,
    "order": order.RULES,
}
