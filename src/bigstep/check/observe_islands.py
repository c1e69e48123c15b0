"""Islands computed by hand: a separate run for each, and torch's SGD for the outer step."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from bigstep.check.observe import Journey, journey_of
from bigstep.check.shrink import one_island
from bigstep.check.subject import Own, Subject, Trial
from bigstep.config import OuterConfig
from bigstep.data.sampler import Position
from bigstep.engine.methods.island import part_of
from bigstep.engine.ranks import Ranks

__all__ = ["islands_by_hand"]


def islands_by_hand(subject: Subject, own: Own, trial: Trial) -> Journey:
    """Let every island take its part of each step as an ordinary run would, and average how far they moved.

    Runs on one rank. Each island is a separate run with its own optimizer; every H steps, the mean over islands of how
    far they moved becomes the gradient of the `agreed` parameters. Until the islands begin, each run takes the steps of
    all workers, so that it enters its island with the optimizer state of a synchronous run.
    """
    islands = trial.config.islands
    runs = [subject.start(own, one_island(trial), Ranks()) for _ in range(islands.count)]
    models = [subject.model(run) for run in runs]
    agreed = [nn.Parameter(parameter.detach().clone()) for parameter in models[0].parameters()]
    outer = _outer_step(agreed, islands.outer)
    seen, path, taken, size = [0] * islands.count, [], 0, subject.sizes(runs[0])[0]
    for step in subject.steps(runs[0], Position()):
        loss = rate = 0.0
        if step.position.epoch + step.position.offset / size < islands.begin:
            for run in runs:
                rate = subject.learning_rate(run, step)
                loss = subject.gradient(run, step)
                subject.update(run)
            _copy(models[0], agreed)
            path.append((loss, rate))
            continue
        taken += 1
        for island, run in enumerate(runs):
            part = part_of(step, island, islands.count)
            rate = subject.learning_rate(run, step)
            if part.size:
                loss += subject.gradient(run, part) * part.size / step.size
                subject.update(run)
                seen[island] += part.size
        path.append((loss, rate))
        if taken % islands.every == 0:
            _meet(agreed, models, seen, outer)
            seen = [0] * islands.count
    if any(seen):
        _meet(agreed, models, seen, outer)
    for run in runs[1:]:
        subject.finish(run)
    return journey_of(replace(subject, evaluate=None), runs[0], path)


def _outer_step(agreed: list[nn.Parameter], rule: OuterConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(agreed, lr=rule.lr, momentum=rule.momentum, nesterov=rule.name == "nesterov")


@torch.no_grad()
def _copy(model: nn.Module, agreed: list[nn.Parameter]) -> None:
    for parameter, weight in zip(model.parameters(), agreed, strict=True):
        weight.copy_(parameter)


@torch.no_grad()
def _meet(agreed: list[nn.Parameter], models: list[nn.Module], seen: list[int], outer: torch.optim.Optimizer) -> None:
    shares = [count / sum(seen) for count in seen]
    for number, weight in enumerate(agreed):
        theirs = [list(model.parameters())[number] for model in models]
        weight.grad = sum((share * (weight - own) for share, own in zip(shares, theirs, strict=True)), start=0 * weight)
    outer.step()
    for model in models:
        for parameter, weight in zip(model.parameters(), agreed, strict=True):
            parameter.copy_(weight)
