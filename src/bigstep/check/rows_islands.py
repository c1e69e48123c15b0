"""Islands: what their equations promise where they come down to something known, and a path put together by hand."""

from __future__ import annotations

from dataclasses import replace

from bigstep.check.laboratory import Laboratory
from bigstep.check.observe_islands import islands_by_hand
from bigstep.check.rows_path import hold, journey_on
from bigstep.check.shrink import one_island
from bigstep.check.subject import Trial
from bigstep.check.verdict import PATH_BOUND, Verdict, not_applicable
from bigstep.config import IslandsConfig, OuterConfig
from bigstep.tables.optimizers import SgdSettings

__all__ = ["averaging_is_synchronous", "islands_are_their_parts", "one_island_is_training"]

PLAIN_RATE = 0.02
"""For plain SGD in place of the run's own optimizer, whose rate may be of another order."""


def averaging_is_synchronous(lab: Laboratory) -> Verdict:
    """With plain SGD the mean of weights after one step is the step with the mean gradient."""
    if reason := _why_not(lab):
        return not_applicable(reason)
    if lab.own.optimizer is not None:
        return not_applicable("the optimizer is your own, and the equality holds for plain SGD")
    config = lab.lossless.config
    plain = replace(config, optimizer=SgdSettings(momentum=0.0), lr=replace(config.lr, base=PLAIN_RATE, scaling="none"))
    trial = replace(lab.lossless, config=plain)
    return hold(
        journey_on(lab, _with(trial, IslandsConfig(count=config.islands.count)), 1)[0],
        journey_on(lab, one_island(trial), 1)[0],
        PATH_BOUND,
        "relative difference between averaging every step and a synchronous run",
        words=f"{config.islands.count} islands, H = 1, plain SGD",
        fault="averaging every step is not synchronous SGD",
        remedy="weigh islands by the samples they have seen, and give every island the mean itself.",
    )


def one_island_is_training(lab: Laboratory) -> Verdict:
    """One island with an outer rate of 1 and no momentum goes where it would have gone alone."""
    if reason := _why_not(lab):
        return not_applicable(reason)
    every = lab.trial.config.islands.every
    alone = IslandsConfig(every=every, outer=OuterConfig(name="sgd", lr=1.0))
    return hold(
        journey_on(lab, _with(lab.lossless, alone), 1)[0],
        journey_on(lab, lab.synchronous, 1)[0],
        PATH_BOUND,
        "relative difference between one island that goes all the way and ordinary training",
        words=f"outer rate 1, no momentum, H = {every}",
        fault="a meeting with nobody moves the island",
        remedy="the outer gradient is where the island started less where it is; subtract it, and start the next "
        "round from what was agreed on now.",
    )


def islands_are_their_parts(lab: Laboratory) -> Verdict:
    """Islands take the path of as many runs by themselves that meet by hand."""
    if reason := _why_not(lab):
        return not_applicable(reason)
    islands = lab.lossless.config.islands
    plain = IslandsConfig(count=islands.count, every=islands.every, outer=islands.outer, begin=islands.begin)
    trial = _with(lab.lossless, plain)
    return hold(
        journey_on(lab, trial, 1)[0],
        lab.see(islands_by_hand, trial, 1)[0],
        PATH_BOUND,
        "relative difference between islands and as many runs that meet by hand",
        words=f"{plain.count} islands, H = {plain.every}, outer {plain.outer.name}; one fragment, nothing on the way",
        fault="islands take another path than the runs they are made of",
        remedy="let nothing but weights meet: optimizer state, loss scale and batch-norm statistics stay with their "
        "island, every island starts from what was agreed on last, and with a copy of all that was carried before.",
    )


def _why_not(lab: Laboratory) -> str | None:
    if lab.trial.config.islands.count == 1:
        return "all workers are one island"
    return "the loop gives its pieces only" if lab.subject.train is None else None


def _with(trial: Trial, islands: IslandsConfig) -> Trial:
    return replace(trial, config=replace(trial.config, islands=islands))
