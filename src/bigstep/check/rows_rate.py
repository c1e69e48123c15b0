"""The learning rate: a function of samples seen, and of the global batch by a stated rule."""

from __future__ import annotations

import math
from dataclasses import replace

from bigstep.check.laboratory import Laboratory
from bigstep.check.observe import beginning, rates
from bigstep.check.shrink import with_batch
from bigstep.check.subject import Trial
from bigstep.check.verdict import Verdict, judged
from bigstep.config import Stage
from bigstep.schedules import scale_lr

__all__ = ["rate_follows_batch", "rate_in_samples"]

BOUND = 1e-12
"""Relative; the rate is the same formula everywhere."""


def rate_in_samples(lab: Laboratory) -> Verdict:
    """After the same number of samples the rate is the same, however many ranks, microbatches or steps it took."""
    trial = lab.synchronous  # no islands: they need workers in equal shares, and the rate does not depend on them
    usual = dict(lab.see(rates, trial, 1)[0])
    variants: list[tuple[str, dict[int, float], dict[int, float]]] = []
    for ranks in lab.several:
        for rank, table in enumerate(lab.see(rates, trial, ranks)):
            variants.append((f"on rank {rank} of {ranks}", dict(table), usual))
    counts = [trial.config.workers.count, *(stage.count for stage in trial.config.stages)]
    if all(count % 2 == 0 for count in counts):
        regrouped = with_batch(trial, count=0.5, local_batch=2)
        variants.append(
            ("with half as many microbatches, twice as large,", dict(lab.see(rates, regrouped, 1)[0]), usual)
        )
    without, planned = _plans(trial)
    tables = [dict(lab.see(rates, each, 1)[0]) for each in (without, planned)]
    variants.append(("with a batch that doubles halfway", tables[1], tables[0]))

    peak = max(usual.values())
    worst, fault = 0.0, ""
    for name, table, reference in variants:
        for samples in sorted(table.keys() & reference.keys()):
            apart = abs(table[samples] - reference[samples]) / peak
            if not apart <= worst:  # NaN differs too
                worst = apart if apart == apart else math.inf
                fault = (
                    f"{name} the rate after {samples} samples is {table[samples]:.4g} instead of "
                    f"{reference[samples]:.4g}"
                )
    return judged(
        worst,
        BOUND,
        "difference of rates after the same number of samples, relative to the highest",
        words=f"{len(variants)} ways of taking the same samples",
        fault=fault,
        remedy="compute the rate from samples seen (epoch = samples / size of the training set); do not count calls of "
        "a scheduler, which come once a step, a rank or a microbatch.",
    )


def _plans(trial: Trial) -> tuple[Trial, Trial]:
    """The trial with a constant batch, and with one that doubles halfway; the rate does not follow the plan."""
    config = trial.config
    lr = replace(config.lr, follow_plan=False)
    later = Stage(epoch=config.epochs / 2, count=config.workers.count, local_batch=2 * config.workers.local_batch)
    return tuple(replace(trial, config=replace(config, lr=lr, plan=plan)) for plan in ((), (later,)))  # type: ignore[return-value]


def rate_follows_batch(lab: Laboratory) -> Verdict:
    """Doubling the global batch multiplies the rate by 2 under the linear rule, or by sqrt(2), or by 1."""
    # saturation and a longer warm-up are not part of the rule
    lr = replace(lab.synchronous.config.lr, saturation=0, beyond=0.0, warmup_batch=0)
    trial = replace(lab.synchronous, config=replace(lab.synchronous.config, lr=lr))
    double = with_batch(trial, local_batch=2)
    one, two = (dict(lab.see(rates, each, 1)[0]) for each in (trial, double))
    expected = scale_lr(1.0, 2, base_batch=1, rule=lr.scaling)
    size = lab.see(beginning, trial, 1)[0].sizes[0]
    # a warm-up from the unscaled rate starts at the same rate whatever the batch: the rule holds after it
    begins = size * max((piece.until for piece in lr.schedule if piece.start == "base"), default=0.0)
    peak = max(one.values())
    worst, fault = 0.0, ""
    for samples in sorted(samples for samples in one.keys() & two.keys() if samples >= begins):
        apart = abs(two[samples] - expected * one[samples]) / peak
        if not apart <= worst:
            worst = apart if apart == apart else math.inf
            fault = (
                f"after {samples} samples the rate is {one[samples]:.4g} at batch {trial.config.batch} and "
                f"{two[samples]:.4g} at batch {double.config.batch}, but the rule {lr.scaling!r} asks for a factor of "
                f"{expected:.4g}"
            )
    return judged(
        worst,
        BOUND,
        f"deviation from the rule {lr.scaling!r} when the batch doubles, relative to the highest rate",
        words="this recipe keeps its rate at every batch; tune it again when the batch changes"
        if lr.scaling == "none"
        else f"lr = base * f(global batch / {lr.base_batch})",
        fault=fault,
        remedy="scale by the global batch (workers x local batch), not by what one rank sees (schedules.scale_lr); or "
        "set lr.scaling=none to say that the rate is meant for one batch.",
    )
