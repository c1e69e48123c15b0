"""Precision: half-precision gradients that vanish."""

from __future__ import annotations

from collections.abc import Iterator

from bigstep.doctor.facts import Update
from bigstep.doctor.finding import Case, Finding, Rule, Unseen

__all__ = ["RULES"]


def unscaled_half(case: Case) -> Iterator[Finding]:
    """float16 without a loss scale, or weights kept in float16."""
    world = case.many or case.one
    updates = [u for u in world.all(Update) if u.norms] if world else []
    if not updates:
        raise Unseen("no update was seen")
    first = updates[0]
    if first.half:
        yield Finding(
            name="unscaled-half",
            title="weights are kept and updated in float16",
            evidence=f"{first.optimizer} updates float16 parameters",
            cost="updates smaller than a thousandth of a weight are lost, and gradients under 6e-8 become zero",
            remedy="keep the model in float32 and use torch.autocast with a GradScaler, or bfloat16",
            likelihood=0.9,
            line=first.line,
        )
    elif any(u.autocast == "float16" for u in updates) and not any(u.scaled for u in updates):
        yield Finding(
            name="unscaled-half",
            title="float16 without a loss scale",
            evidence="the forward runs under autocast to float16, but no GradScaler steps the optimizer",
            cost="gradients under 6e-8 become zero: layers with small gradients stop learning",
            remedy="scaler = torch.amp.GradScaler(); scaler.scale(loss).backward(); scaler.step(optimizer); "
            "scaler.update(); or autocast to bfloat16",
            likelihood=0.9,
            line=first.line,
        )


RULES: tuple[Rule, ...] = (unscaled_half,)
