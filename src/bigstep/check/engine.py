"""bigstep's own training loop as a `Subject`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bigstep.check.padding import padded
from bigstep.check.subject import Own, Subject, Trial
from bigstep.data.catalog import open_data
from bigstep.data.feed import Request
from bigstep.data.pair import DataPair
from bigstep.data.sampler import Position, Step
from bigstep.data.sources.base import Source
from bigstep.data.sources.given import as_source
from bigstep.data.sources.text import TokenWindows
from bigstep.engine import build as engine
from bigstep.engine.build import Run, build
from bigstep.engine.checkpoint import load_latest, save_checkpoint
from bigstep.engine.evaluate import Evaluation
from bigstep.engine.loop import train
from bigstep.engine.methods.island import Part
from bigstep.engine.methods.parallel import make_exchange
from bigstep.engine.methods.synchronous import Synchronous
from bigstep.engine.observers.base import Audience, Observer
from bigstep.engine.ranks import Ranks
from bigstep.errors import RunError
from bigstep.exchange import Exchange, sum_owed

__all__ = ["bigstep_loop"]


def bigstep_loop() -> Subject:
    """Return the loop that `bigstep train` and `fit` run."""
    return Subject(
        start=_start,
        connect=_connect,
        model=_model,
        sizes=_sizes,
        steps=_steps,
        samples=_samples,
        batch=_batch,
        objective=_objective,
        learning_rate=_learning_rate,
        gradient=_gradient,
        update=_update,
        train=_train,
        evaluate=_evaluate,
        save=_save,
        load=_load,
        exchange=make_exchange,
        owed=_owed,
        finish=_finish,
    )


def _start(own: Own, trial: Trial, ranks: Ranks) -> Run:
    config = trial.config
    model = own.model
    if model is not None:
        torch.manual_seed(config.seed)
        model = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
    change = functools.partial(_change, independent=trial.independent, dropout=trial.dropout)
    emulation = engine.Emulation(graphs=trial.graphs, loss_scale=trial.loss_scale)
    return build(config, ranks, engine.Own(model, _data(own, trial), own.loss, own.optimizer, change=change), emulation)


def _change(model: nn.Module, *, independent: bool, dropout: bool) -> nn.Module:
    if independent:
        model = _without_statistics(model)
    if independent or not dropout:
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
    return model


def _connect(run: Run) -> None:
    """Do nothing: a run is connected when it is built."""


def _model(run: Run) -> nn.Module:
    return run.learner.model


def _sizes(run: Run) -> tuple[int, int]:
    return len(run.train_feed), len(run.evaluator.feed)


def _steps(run: Run, begin: Position) -> Iterator[Step]:
    return run.sampler.steps(run.config.epochs, begin)


def _samples(run: Run, step: Step) -> list[int]:
    return [int(index) for request in run.method.requests([step]) for index in request.indices]


def _batch(run: Run, epoch: int, indices: list[int]) -> tuple[Any, Any]:
    run.begin_epoch(epoch)
    return next(iter(run.train_feed([Request(epoch, torch.tensor(indices))])))


def _objective(run: Run, inputs: Any, target: Any) -> Tensor:
    return run.learner.objective(inputs, target, 1.0)  # type: ignore[no-any-return]  # modules are untyped in torch


def _learning_rate(run: Run, step: Step) -> float:
    return run.rates.set(step)


def _gradient(run: Run, step: Step) -> float:
    assert isinstance(run.method, Synchronous)
    run.begin_epoch(step.position.epoch)
    run.method.first_worker = step.first_worker if isinstance(step, Part) else 0
    return float(run.method.accumulate(step, iter(run.train_feed(run.method.requests([step])))).loss)


def _update(run: Run) -> None:
    assert isinstance(run.method, Synchronous)
    run.method.passes.update()


class _Path(Observer):
    """Loss and rate of every step, as the records would have them."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float]] = []

    def row(self, row: Mapping[str, Any]) -> None:
        self.rows.append((float(row["loss"]), float(row["lr"])))


def _train(run: Run, save_at: int, folder: Path | None) -> list[tuple[float, float]]:
    path = _Path()

    def save() -> None:
        if folder is not None and run.state.position.step == save_at:
            _save(run, run.state.position, folder)

    train(run, Audience([path]), save)
    return path.rows


def _evaluate(run: Run) -> Evaluation:
    return run.evaluate()


def _save(run: Run, position: Position, folder: Path) -> None:
    run.state.position = position
    captured = run.state.capture()  # every rank takes part
    if run.ranks.first:
        save_checkpoint(folder, position.step, captured, keep=1)


def _load(run: Run, folder: Path) -> Position:
    saved, problems = load_latest(folder)
    if saved is None:
        raise RunError(problems[0] if problems else f"{folder} holds no checkpoint.")
    run.state.restore(saved, run.sampler.size)
    return run.state.position


def _owed(exchange: Exchange) -> dict[str, Tensor]:
    state = exchange.gather_state()  # every rank takes part; rank 0 gets it
    return {} if state is None else sum_owed(state)


def _finish(run: Run) -> None:
    run.close()


def _data(own: Own, trial: Trial) -> DataPair:
    data = own.data
    if data is None:
        where = trial.config.data
        pair = _opened(
            where.name, where.path, where.holdout, trial.config.seed, length=where.length, vocabulary=where.vocabulary
        )
        data = pair.train, pair.test
    elif isinstance(data, type) or not hasattr(data, "__getitem__"):  # a class or a function that makes a data set
        data = data()
    train, test = data if isinstance(data, tuple) else (data, data)
    return DataPair(_first(train, trial.train_samples, trial.padded), _first(test, trial.test_samples, trial.padded))


_opened = functools.cache(open_data)  # decoding a set takes longer than the trial that uses it


def _first(given: Any, count: int, pad: bool) -> Source:
    source = as_source(given)
    source = source.subset(torch.arange(min(count, len(source))))
    return padded(source) if pad and isinstance(source, TokenWindows) else source


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
