"""bigstep's own training loop as a `Subject`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bigstep.check.subject import Own, Subject, Trial
from bigstep.data.catalog import open_data
from bigstep.data.feed import Request
from bigstep.data.pair import DataPair
from bigstep.data.sampler import Position, Step
from bigstep.data.sources.base import Source
from bigstep.data.sources.given import as_source
from bigstep.engine.build import Parts, assemble
from bigstep.engine.checkpoint import load_latest, save_checkpoint
from bigstep.engine.connect import connect, make_exchange
from bigstep.engine.evaluate import evaluate
from bigstep.engine.loop import resize, set_rates
from bigstep.engine.methods.synchronous import gradient_of, requests_of
from bigstep.engine.ranks import Ranks
from bigstep.engine.run import capture, restore
from bigstep.errors import RunError
from bigstep.exchange import Exchange
from bigstep.exchange.error_feedback import owed
from bigstep.norm import WorkerStatistics

__all__ = ["bigstep_loop"]


def bigstep_loop() -> Subject:
    """Return the loop that `bigstep train` and `fit` run."""
    return Subject(
        start=_start,
        connect=connect,
        model=_model,
        sizes=_sizes,
        steps=_steps,
        samples=_samples,
        batch=_batch,
        objective=_objective,
        learning_rate=set_rates,
        gradient=_gradient,
        update=_update,
        evaluate=evaluate,
        save=_save,
        load=_load,
        exchange=make_exchange,
        owed=_owed,
        finish=_finish,
    )


def _start(own: Own, trial: Trial, ranks: Ranks) -> Parts:
    config = trial.config
    model = own.model
    if model is not None:
        torch.manual_seed(config.seed)
        model = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
    parts = assemble(config, ranks, model=model, data=_data(own, trial), loss=own.loss)
    if trial.independent:
        parts.model = parts.objective.model = _without_statistics(parts.model)
        parts.statistics = WorkerStatistics(parts.model, parts.statistics.keep)
    if own.optimizer is not None:
        parts.optimizer = own.optimizer(parts.model.parameters())
    elif trial.independent:
        # the parameters of the norms are new objects, so the optimizer's are stale; no property updates them
        parts.optimizer = torch.optim.SGD(parts.model.parameters(), 1.0)
    if trial.independent or not trial.dropout:
        for module in parts.model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
    parts.model.train()
    return parts


def _model(parts: Parts) -> nn.Module:
    return parts.model


def _sizes(parts: Parts) -> tuple[int, int]:
    return len(parts.train_feed), len(parts.test_feed)


def _steps(parts: Parts, begin: Position) -> Iterator[Step]:
    return parts.sampler.steps(parts.config.epochs, begin)


def _samples(parts: Parts, step: Step) -> list[int]:
    return [int(index) for request in requests_of(parts, [step]) for index in request.indices]


def _batch(parts: Parts, epoch: int, indices: list[int]) -> tuple[Any, Any]:
    resize(parts, epoch)
    return next(iter(parts.train_feed([Request(epoch, torch.tensor(indices))])))


def _objective(parts: Parts, inputs: Any, target: Any) -> Tensor:
    return parts.objective(inputs, target, 1.0)  # type: ignore[no-any-return]  # modules are untyped in torch


def _gradient(parts: Parts, step: Step) -> float:
    resize(parts, step.position.epoch)
    loss, _ = gradient_of(parts, step, iter(parts.train_feed(requests_of(parts, [step]))))
    return float(loss)


def _update(parts: Parts) -> None:
    parts.scaler.step(parts.optimizer)
    parts.scaler.update()
    parts.optimizer.zero_grad()


def _save(parts: Parts, position: Position, folder: Path) -> None:
    state = capture(parts, position, seconds=0.0)  # every rank takes part
    if parts.ranks.first:
        save_checkpoint(folder, position.step, state, keep=1)


def _load(parts: Parts, folder: Path) -> Position:
    state, problems = load_latest(folder)
    if state is None:
        raise RunError(problems[0] if problems else f"{folder} holds no checkpoint.")
    position, _ = restore(parts, state)
    return position


def _owed(exchange: Exchange) -> dict[str, Tensor]:
    state = exchange.gather_state()  # every rank takes part; rank 0 gets it
    return {} if state is None else owed(state)


def _finish(parts: Parts) -> None:
    if parts.exchange is not None:
        parts.exchange.close()


def _data(own: Own, trial: Trial) -> DataPair:
    data = own.data
    if data is None:
        where = trial.config.data
        pair = _opened(where.name, where.path, where.holdout, trial.config.seed)
        data = pair.train, pair.test
    elif isinstance(data, type) or not hasattr(data, "__getitem__"):  # a class, or a function: what makes a data set
        data = data()
    train, test = data if isinstance(data, tuple) else (data, data)
    return DataPair(_first(train, trial.train_samples), _first(test, trial.test_samples))


_opened = functools.cache(open_data)  # decoding a set takes longer than the trial that uses it


def _first(given: Any, count: int) -> Source:
    source = as_source(given)
    return source.subset(torch.arange(min(count, len(source))))


class _Affine(nn.Module):
    """What is left of a batch norm without statistics: gamma * x + beta, for each channel."""

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__()
        size = norm.num_features
        self.weight = nn.Parameter(torch.ones(size).double() if norm.weight is None else norm.weight.detach().clone())
        self.bias = nn.Parameter(torch.zeros(size).double() if norm.bias is None else norm.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1) + (1,) * (x.ndim - 2)
        return x * self.weight.view(shape) + self.bias.view(shape)


def _without_statistics(model: nn.Module) -> nn.Module:
    if isinstance(model, nn.modules.batchnorm._BatchNorm):
        return _Affine(model)
    for name, child in model.named_children():
        setattr(model, name, _without_statistics(child))
    return model
