"""Faults that people have really made on text, each planted in one piece of the real run, as in `faults`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigstep.check import Own, Trial
from bigstep.data.feed import Feed
from bigstep.data.sources.text import TokenWindows
from bigstep.engine.build import Run
from bigstep.engine.ranks import Ranks
from bigstep.models import GPT
from faults import LOOP, _weigh, method_of


def small_gpt() -> nn.Module:
    return GPT(vocabulary=256, length=16, depth=1, width=16, heads=2)


def mean_of_means_over_unequal_tokens(own: Own, trial: Trial, ranks: Ranks) -> Run:
    """Each forward counts by its sequences, though some of them are mostly padding."""
    return _weigh(LOOP.start(own, trial, ranks), lambda step, forward: forward.size / step.size)


def clipping_before_the_exchange(own: Own, trial: Trial, ranks: Ranks) -> Run:
    """Each rank clips the gradient of its own workers by its own norm, and the means are taken of what is left."""
    run = LOOP.start(own, trial, ranks)
    passes, trained = method_of(run).passes, run.learner.trained
    add = passes.add

    def wrong(inputs: Any, target: Any, weight: float, *, last: bool, keep: bool) -> Tensor:
        loss = add(inputs, target, weight, last=False, keep=keep)
        if last:
            nn.utils.clip_grad_norm_(trained, 0.02)
            for parameter in trained:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
                parameter.grad /= ranks.size
        return loss

    if ranks.size > 1:  # one rank clips its own gradient either way
        passes.add = wrong  # type: ignore[method-assign]
    return run


def _fed_by(run: Run, source: TokenWindows) -> Run:
    return dataclasses.replace(run, train_feed=Feed(source, train=True, seed=run.config.seed, dtype=torch.float64))


class Overlapping(TokenWindows):
    """Windows that begin where the last one was half over."""

    def _taken_on(self, device: torch.device) -> Any:
        tokens, length = torch.from_numpy(self.tokens.copy()).long(), self.length

        def take(indices: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
            places = self._windows(indices)[:, None] * (length // 2) + torch.arange(length)
            return tokens[places], tokens[places + 1]

        return lambda view: take


def windows_that_overlap_between_workers(own: Own, trial: Trial, ranks: Ranks) -> Run:
    run = LOOP.start(own, trial, ranks)
    source = run.train_feed.source
    assert isinstance(source, TokenWindows)
    known = {each.name: getattr(source, each.name) for each in dataclasses.fields(source)}
    return _fed_by(run, Overlapping(**known))


def windows_cut_by_each_rank(own: Own, trial: Trial, ranks: Ranks) -> Run:
    """Each rank begins a few tokens further on, so that what one predicts another has in its inputs."""
    run = LOOP.start(own, trial, ranks)
    source = run.train_feed.source
    assert isinstance(source, TokenWindows)
    return _fed_by(run, dataclasses.replace(source, tokens=source.tokens[7 * ranks.rank :]))
