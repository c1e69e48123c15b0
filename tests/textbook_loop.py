"""The loop of most tutorials (DDP, DistributedSampler, a mean loss), as something that `check` can look at.

Nothing of it is bigstep's. It has two faults that such loops have: its sampler pads, and its rate knows nothing of the
batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, default_collate

import faults
from bigstep.check import Own, Subject, Trial
from bigstep.data.sampler import Position, Step
from bigstep.engine.ranks import Ranks


@dataclass
class Run:
    """What the tutorial keeps in local variables."""

    trial: Trial
    ranks: Ranks
    data: faults.Pairs
    model: nn.Module
    parallel: nn.Module
    optimizer: torch.optim.Optimizer


def start(own: Own, trial: Trial, ranks: Ranks) -> Run:
    torch.manual_seed(trial.config.seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Run(trial, ranks, faults.Pairs(trial.train_samples), model, model, optimizer)


def connect(run: Run) -> None:
    if run.ranks.size > 1:
        run.parallel = DistributedDataParallel(run.model)


def sizes(run: Run) -> tuple[int, int]:
    return len(run.data), len(run.data)


def steps(run: Run, begin: Position) -> Iterator[Step]:
    """Complete batches of the configured size, and a last one with what is left."""
    batch, workers = run.trial.config.batch, run.trial.config.workers
    number = begin.step
    for epoch in range(begin.epoch, 2):
        for offset in range(begin.offset if epoch == begin.epoch else 0, len(run.data), batch):
            stop = min(offset + batch, len(run.data))
            yield Step(Position(epoch, offset, number), stop, workers.count, workers.local_batch)
            number += 1


def samples(run: Run, step: Step) -> list[int]:
    sampler: DistributedSampler[Any] = DistributedSampler(run.data, run.ranks.size, run.ranks.rank, shuffle=True)
    sampler.set_epoch(step.position.epoch)
    local = run.trial.config.batch // run.ranks.size
    index = step.position.offset // run.trial.config.batch
    return list(sampler)[index * local : (index + 1) * local]


def batch(run: Run, epoch: int, indices: list[int]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(epoch)
    inputs, target = default_collate([run.data[index] for index in indices])
    return inputs, target


def objective(run: Run, inputs: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(run.model(inputs), target)


def learning_rate(run: Run, step: Step) -> float:
    return float(run.optimizer.param_groups[0]["lr"])


def gradient(run: Run, step: Step) -> float:
    inputs, target = batch(run, step.position.epoch, samples(run, step))
    loss = nn.functional.cross_entropy(run.parallel(inputs), target)
    loss.backward()
    return float(loss.detach()) / run.ranks.size


def update(run: Run) -> None:
    run.optimizer.step()
    run.optimizer.zero_grad()


def model(run: Run) -> nn.Module:
    return run.model


TEXTBOOK = Subject(
    start=start,
    connect=connect,
    model=model,
    sizes=sizes,
    steps=steps,
    samples=samples,
    batch=batch,
    objective=objective,
    learning_rate=learning_rate,
    gradient=gradient,
    update=update,
)
