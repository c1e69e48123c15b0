"""From a configuration to the method of a run: which pass computes, who exchanges with whom, on how many islands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bigstep.config import RunConfig, require
from bigstep.data.feed import Feed, Request
from bigstep.data.sampler import Sampler, hosted_workers
from bigstep.engine.exact import ExactSum
from bigstep.engine.fusing import Kernels, why_open
from bigstep.engine.learner import Learner
from bigstep.engine.methods.base import Method
from bigstep.engine.methods.crews import Crews, Resting
from bigstep.engine.methods.eager import Eager
from bigstep.engine.methods.exact import ExactEager
from bigstep.engine.methods.forwards import Forwards
from bigstep.engine.methods.graphed import Graphed
from bigstep.engine.methods.islands import Islands
from bigstep.engine.methods.meeting import Transport
from bigstep.engine.methods.parallel import Parallel, make_exchange
from bigstep.engine.methods.synchronous import Pass, Synchronous
from bigstep.engine.precision import Precision
from bigstep.engine.ranks import Ranks
from bigstep.engine.state import State
from bigstep.exchange.groups import borrow, offer
from bigstep.gpu.loss_scale import LossScale
from bigstep.norm import ExactStatistics, WorkerStatistics
from bigstep.tables.codecs import CODECS

__all__ = ["Emulation", "Setting", "make_method"]

_CUT_EVERY = {"images": 51_200, "sequences": 6_400}
"""Samples between two measurements of the noise scale, which run a step without its graph; text runs see far fewer."""
_EXAMPLE = 8
"""Samples of a trial forward whose results are thrown away."""


@dataclass(frozen=True)
class Emulation:
    """What a machine without a GPU emulates of one, so that it can be tested there."""

    graphs: bool = False
    """Run steps as graphs, recorded on a tape."""
    loss_scale: bool = False
    """Scale the loss as fp16 does, whatever the precision; a power of two changes nothing else."""


@dataclass(frozen=True)
class Setting:
    """What a method is made from."""

    config: RunConfig
    ranks: Ranks
    precision: Precision
    learner: Learner
    sampler: Sampler
    feed: Feed
    state: State
    samples_per_forward: int
    kernels: Kernels | None
    own_model: bool
    emulation: Emulation
    example: tuple[Any, Any] | None = None
    """A small batch, taken beforehand if an exchange may be made while the feed is busy with an epoch."""

    def forwards(self, ranks: Ranks) -> Forwards:
        """Return the forwards of steps that some ranks share."""
        return Forwards(
            self.sampler,
            lambda step: hosted_workers(step.workers, ranks.rank, ranks.size),
            self.samples_per_forward,
            self.feed.source.targets,
            measured=self.config.growth.measured if self.config.plan == "auto" else 0,
            cut_every=_CUT_EVERY["sequences" if self.feed.length else "images"],
        )


def make_method(setting: Setting) -> Method:
    """Return the method that the configuration asks for; every rank must call this."""
    islands = setting.config.islands
    if islands.meets:
        return _islands(setting)
    if setting.ranks.size <= min(stage.workers for stage in setting.sampler.plan.stages):
        return _synchronous(setting, setting.ranks)
    state, sampler = setting.state, setting.sampler
    setting = replace(setting, example=_example(setting.feed))
    return Crews(partial(_crew, setting), setting.ranks, lambda: sampler.step_at(state.position).workers)


def _crew(setting: Setting, crew: Ranks, *, member: bool) -> Synchronous:
    """Return the method of some of the ranks, or of one that waits for them."""
    config, exchange = setting.config, setting.config.exchange
    if crew.size < setting.ranks.size and exchange.grid != "auto":  # a configured grid is that of all ranks
        setting = replace(setting, config=replace(config, exchange=replace(exchange, grid="auto")))
    if member:
        return _synchronous(setting, crew, hosts=setting.ranks)
    parts = _count_parts(config)
    gives_mean = parts > 0 or make_exchange(exchange).gives_the_mean
    resting = Resting(crew.device, gives_mean=gives_mean)
    forwards, measure = setting.forwards(setting.ranks), config.measure_noise
    return Synchronous(setting.learner, resting, forwards, crew, config.seed, measure=measure)


def _synchronous(setting: Setting, ranks: Ranks, *, measure: bool = True, hosts: Ranks | None = None) -> Synchronous:
    """Return the method of workers that some ranks share and that wait for one another.

    `hosts` are the ranks that workers are spread over, if some stage has fewer workers than ranks.
    """
    config, learner = setting.config, setting.learner
    enabled = setting.precision.scales_loss or setting.emulation.loss_scale
    scale, clip = LossScale(ranks.device, enabled=enabled), config.optimizer.clip
    if _takes_graphs(setting, ranks) or setting.emulation.graphs:
        emulate, compiled = setting.emulation.graphs, config.compile
        passes: Pass = Graphed(learner, config.precision, scale, clip=clip, compiled=compiled, emulate=emulate)
    else:
        if config.compile:
            learner.model.compile()  # in place: names in checkpoints stay as they are
        skip, parts = config.nonfinite == "skip", _count_parts(config)
        parallel = _parallel(setting, ranks, parts)
        common = learner, ranks, setting.precision, scale, parallel
        if parts:
            passes = ExactEager(*common, parts=parts, skip_nonfinite=skip, clip=clip)
            setting = replace(setting, samples_per_forward=0)  # one worker a forward
            add_up, keep = ExactSum(ranks, config.exchange, parts), learner.statistics.keep
            statistics = ExactStatistics(learner.model, keep, add_up, first=ranks.first)
            learner = replace(learner, statistics=statistics)
        else:
            share = config.optimizer.shares_update
            passes = Eager(*common, skip_nonfinite=skip, clip=clip, share_update=share)
    weigh = config.optimizer.batch_rule == "linear"  # otherwise the learning rate is scaled instead: see Rates
    forwards = setting.forwards(hosts or ranks)
    measure = measure and config.measure_noise
    return Synchronous(learner, passes, forwards, ranks, config.seed, measure=measure, weigh=weigh)


def _count_parts(config: RunConfig) -> int:
    """Return the most workers of any step if each adds a part of its own to the gradient, else 0."""
    if not CODECS[config.exchange.codec].orderless:
        return 0
    return max([config.workers.count, *(stage.count for stage in config.stages)])


def _takes_graphs(setting: Setting, ranks: Ranks) -> bool:
    """Whether a GPU has whole steps to itself, so that each can be a graph; if not, record the reason."""
    kernels = setting.kernels
    if kernels is None or why_open(setting.config, own=setting.own_model) is not None:
        return False
    reason = _why_no_graphs(setting.config, ranks, setting.learner)
    kernels.graphs = reason is None
    if reason is not None and (said := f"no graphs, since {reason}") not in kernels.reasons:
        kernels.reasons.append(said)
    return kernels.graphs


def _why_no_graphs(config: RunConfig, ranks: Ranks, learner: Learner) -> str | None:
    if ranks.size > 1:
        return "several ranks exchange gradients within a step"
    if config.asynchronous.method != "none":
        return "gradients go elsewhere before they update weights"
    if CODECS[config.exchange.codec].orderless:
        return "exact sums take every worker's gradient by itself"
    if config.nonfinite == "skip":
        return "nonfinite=skip looks at every gradient"
    if learner.rank_adagrad is not None:
        return "something is done to gradients between backward and update"
    return None


def _parallel(setting: Setting, ranks: Ranks, parts: int) -> Parallel | None:
    """Return what lets several ranks exchange gradients; None for a single rank."""
    if ranks.size == 1:
        return None
    example, state = setting.example or _example(setting.feed), setting.state
    config, steps_taken = setting.config.exchange, lambda: state.position.step
    return Parallel(setting.learner, ranks, setting.precision, config, example, steps_taken, parts)


def _example(feed: Feed) -> tuple[Any, Any]:
    return next(iter(feed([Request(0, torch.arange(min(_EXAMPLE, len(feed))))])))


def _islands(setting: Setting) -> Islands:
    config, ranks = setting.config, setting.ranks
    count = config.islands.count
    inside, outer = _divide(count, ranks)
    hosted = hosted_workers(count, outer.rank, outer.size)
    keep = setting.learner.statistics.keep
    if config.islands.begin and inside.size > 1:  # islands are made in the middle of a run, while the feed is busy
        setting = replace(setting, example=_example(setting.feed))

    def make_island(number: int) -> Synchronous:
        learner = replace(setting.learner, statistics=WorkerStatistics(setting.learner.model, keep))
        return _synchronous(replace(setting, learner=learner), inside, measure=False)

    return Islands(
        config.islands,
        setting.learner,
        make_island,
        {number: setting.forwards(inside) for number in hosted},
        _synchronous(setting, ranks) if config.islands.begin else None,
        Transport(count, outer, config.exchange, config.islands.codec),
        ExactSum(outer, config.exchange, count),
        ranks,
        outer,
        setting.sampler,
        config.seed,
        keeps=config.checkpoint.meetings,
    )


def _divide(count: int, ranks: Ranks) -> tuple[Ranks, Ranks]:
    """Return the ranks of this rank's island, and the ranks that it meets: those with its place in other islands.

    With at most one rank per island, a rank hosts whole islands and meets all others; with more, an island spans ranks.
    """
    everyone, purpose = range(ranks.size), f"{count} islands"
    if ranks.size == 1:
        return ranks, ranks
    if ranks.size <= count:
        groups = borrow(purpose, everyone, None, ranks.gather(offer(purpose, everyone, None)))
        return replace(ranks, rank=0, size=1, group=None), replace(ranks, group=groups.take(everyone))
    require(
        ranks.size % count == 0,
        f"{ranks.size} ranks were started for {count} islands, but each island needs the same number of ranks: start "
        f"{count * (ranks.size // count)} ranks, or at most {count}.",
    )
    span = ranks.size // count
    island, place = divmod(ranks.rank, span)
    groups = borrow(purpose, everyone, None, ranks.gather(offer(purpose, everyone, None)))
    within = groups.take(range(island * span, (island + 1) * span))
    across = groups.take(range(place, ranks.size, span))
    return (
        replace(ranks, rank=place, size=span, group=within),
        replace(ranks, rank=island, size=count, group=across),
    )
