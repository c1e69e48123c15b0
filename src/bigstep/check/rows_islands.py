"""Islands: cases in which their equations reduce to something known, and a path computed by hand."""

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
"""For plain SGD in place of the run's own optimizer, whose rate may be of another order of magnitude."""


def averaging_is_synchronous(lab: Laboratory) -> Verdict:
    """With plain SGD, averaging the weights after each step equals taking the step with the mean gradient."""
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
        remedy="weight islands by the samples they have seen, and give every island the mean itself.",
    )


def one_island_is_training(lab: Laboratory) -> Verdict:
    """One island with an outer rate of 1 and no momentum takes the path of ordinary training."""
    if reason := _why_not(lab):
        return not_applicable(reason)
    every = lab.trial.config.islands.every
    alone = IslandsConfig(every=every, outer=OuterConfig(name="sgd", lr=1.0))
    return hold(
        journey_on(lab, _with(lab.lossless, alone), 1)[0],
        journey_on(lab, lab.synchronous, 1)[0],
        PATH_BOUND,
        "relative difference between one island and ordinary training",
        words=f"outer rate 1, no momentum, H = {every}",
        fault="a meeting without other islands changes the weights",
        remedy="the outer gradient is the weights at the start of the round minus the present ones; subtract it, and "
        "start the next round from the result.",
    )


def islands_are_their_parts(lab: Laboratory) -> Verdict:
    """Islands take the path of as many separate runs that are averaged by hand."""
    if reason := _why_not(lab):
        return not_applicable(reason)
    islands = lab.lossless.config.islands
    plain = IslandsConfig(count=islands.count, every=islands.every, outer=islands.outer, begin=islands.begin)
    trial = _with(lab.lossless, plain)
    return hold(
        journey_on(lab, trial, 1)[0],
        lab.see(islands_by_hand, trial, 1)[0],
        PATH_BOUND,
        "relative difference between islands and as many runs averaged by hand",
        words=f"{plain.count} islands, H = {plain.every}, outer {plain.outer.name}; one fragment, no overlap",
        fault="islands take a different path from the runs they are made of",
        remedy="average nothing but weights: optimizer state, loss scale and batch-norm statistics stay with their "
        "island, which begins with a copy of all of it and starts each round from the weights agreed on last.",
    )


def _why_not(lab: Laboratory) -> str | None:
    if lab.trial.config.islands.count == 1:
        return "all workers are one island"
    return "the loop is given in pieces only" if lab.subject.train is None else None


def _with(trial: Trial, islands: IslandsConfig) -> Trial:
    return replace(trial, config=replace(trial.config, islands=islands))
