"""`bigstep check`: small worlds of real processes, a row for each property."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from bigstep.check.engine import bigstep_loop
from bigstep.check.laboratory import Laboratory
from bigstep.check.pool import Pool
from bigstep.check.report import Report, Row
from bigstep.check.rows_data import augmentation, epoch_once, evaluation_once
from bigstep.check.rows_gradient import accumulation_is_big_batch, exchange_is_mean, gradient_of_ranks
from bigstep.check.rows_islands import averaging_is_synchronous, islands_are_their_parts, one_island_is_training
from bigstep.check.rows_path import (
    graphs_are_steps,
    loop_is_its_steps,
    resume_elsewhere,
    resume_here,
    same_path,
    same_statistics,
    scale_changes_nothing,
    waiting_ranks_change_nothing,
)
from bigstep.check.rows_rate import rate_follows_batch, rate_in_samples
from bigstep.check.rows_start import random_streams, same_order, same_start
from bigstep.check.shrink import shrink
from bigstep.check.subject import Own, Subject
from bigstep.check.verdict import Verdict
from bigstep.config import LrConfig, Piece, RunConfig, WorkersConfig, require
from bigstep.engine.learner import Loss
from bigstep.errors import ConfigError, RunError, nearest

__all__ = ["PROPERTIES", "Property", "check"]


@dataclass(frozen=True)
class Property:
    """A named claim and the function that tests it."""

    name: str
    judge: Callable[[Laboratory], Verdict]
    needs: tuple[str, ...] = ()
    """Properties that must hold before this one can be tested."""


START, ORDER = "same start on every rank", "same parameter order on every rank"
_BOTH = (START, ORDER)

# later ones build on earlier ones: the first that fails is the cause
PROPERTIES = (
    Property(START, same_start),
    Property(ORDER, same_order, (START,)),
    Property("each sample once an epoch", epoch_once, (START,)),
    Property("augmentation follows the sample", augmentation, (START,)),
    Property("rate counted in samples", rate_in_samples, (START,)),
    Property("rate follows the batch", rate_follows_batch, (START,)),
    Property("random numbers follow the worker", random_streams, _BOTH),
    Property("accumulation = big batch", accumulation_is_big_batch, _BOTH),
    Property("gradient of P ranks = of one", gradient_of_ranks, _BOTH),
    Property("exchange = no exchange", exchange_is_mean, _BOTH),
    Property("loop = rate, gradient, update", loop_is_its_steps, _BOTH),
    Property("averaging every step = synchronous", averaging_is_synchronous, _BOTH),
    Property("one island = ordinary training", one_island_is_training, _BOTH),
    Property("islands = islands by hand", islands_are_their_parts, _BOTH),
    Property("path of P ranks = of one", same_path, _BOTH),
    Property("path with waiting ranks = of one", waiting_ranks_change_nothing, _BOTH),
    Property("steps as graphs = steps in the open", graphs_are_steps, _BOTH),
    Property("scaled loss = plain loss", scale_changes_nothing, _BOTH),
    Property("batch-norm statistics at evaluation", same_statistics, _BOTH),
    Property("each sample once an evaluation", evaluation_once, _BOTH),
    Property("resume = no interruption", resume_here, _BOTH),
    Property("resume on other ranks", resume_elsewhere, _BOTH),
)


def check(
    config: RunConfig | None = None,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    loss: Loss | None = None,
    data: Any = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    ranks: Sequence[int] = (1, 2, 3, 4),
    subject: Subject | None = None,
    only: Sequence[str] | None = None,
    pool: Pool | None = None,
    watch: Callable[[str, int, int], None] | None = None,
) -> Report:
    """Prove, property by property, that a run on several ranks equals the run on one, or say where it does not.

    For P ranks and one, with the same logical workers w of n_w samples in a batch of B::

        g = sum over w of (n_w / B) * grad loss_w      the same on 1, 2, 4 ranks, up to the order of the sums

    and so is everything that builds on it. The run is made small (some twelve steps of about two dozen samples, in
    float64) but keeps its structure: optimizer, schedule, batch plan, norms, exchange and augmentation. Ranks are
    processes joined by Gloo on this machine; in a script, call this below `if __name__ == "__main__":`.

    Args:
        config: What to check; None takes a plain configuration for pieces of your own.
        model: A module, or better the function that builds it; None builds the one that `config` names.
        loss: (output, target) -> mean over the samples.
        data: (training set, evaluation set), one map-style set for both, or a function that returns either.
        optimizer: parameters -> torch optimizer.
        ranks: Sizes of the worlds to compare; 1 is always among them.
        subject: A loop of your own, as functions; None checks bigstep's.
        only: Names of properties; None for all.
        pool: Processes to reuse from check to check; None starts some and ends them.
        watch: Called with the name, the number and the count of properties as each one begins.

    Returns:
        The rows; `report.passed` and `report.cause` sum them up, `report.print()` shows them.

    >>> from bigstep.config import LrConfig, WorkersConfig
    >>> config = RunConfig(model="mlp", workers=WorkersConfig(count=4, local_batch=4), epochs=2, lr=LrConfig(base=0.1))
    >>> report = check(config, ranks=[1], only=["same start on every rank", "rate follows the batch"])
    >>> report.row("rate follows the batch").status, report.row("rate follows the batch").bound
    ('pass', 1e-12)

    Reference: Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.3 (what goes wrong in distributed SGD) and
    section 3 (the mean over workers).
    """
    own = Own(model, loss, data, optimizer)
    config = _plain(optimizer) if config is None else config
    sizes = _sizes(ranks, config.islands.count)
    trial = shrink(config, sizes[-1])
    chosen = _chosen(only)
    started = time.perf_counter()
    workplace = pool or Pool()
    workplace.start(sizes[-1])
    rows: list[Row] = []
    lab = Laboratory(workplace, subject or bigstep_loop(), own, trial, sizes, config.precision)
    try:
        for number, each in enumerate(chosen, 1):
            if watch is not None:
                watch(each.name, number, len(chosen))
            rows.append(_row(each, lab, rows))
    finally:
        lab.close()
        if pool is None:
            workplace.close()
    title = config.recipe if config.preset == "custom" else f"{config.recipe} ({config.preset})"
    return Report(title=title, ranks=sizes, rows=tuple(rows), seconds=time.perf_counter() - started)


def _row(each: Property, lab: Laboratory, before: list[Row]) -> Row:
    failed = [row.name for row in before if row.status == "fail" and row.name in each.needs]
    if failed:
        return Row(name=each.name, status="not run", words=f"needs {failed[0]!r}, which fails")
    started = time.perf_counter()
    try:
        verdict = each.judge(lab)
    except RunError as error:
        # the world failed, and the run itself says why
        verdict = Verdict(
            status="fail", words=str(error), remedy="fix the error that the run itself reports, then check again."
        )
    return Row(name=each.name, seconds=time.perf_counter() - started, **vars(verdict))


def _sizes(ranks: Sequence[int], islands: int) -> tuple[int, ...]:
    """Return the sizes of worlds to compare; above one rank per island, all islands need equally many ranks."""
    require(
        bool(ranks) and all(isinstance(size, int) and 1 <= size <= 16 for size in ranks),
        f"ranks is {list(ranks)}, but it must be numbers between 1 and 16, such as 1,2,4.",
    )
    return tuple(sorted(size for size in {1, *ranks} if size <= islands or size % islands == 0))


def _chosen(only: Sequence[str] | None) -> list[Property]:
    names = [each.name for each in PROPERTIES]
    for name in only or ():
        if name not in names:
            raise ConfigError(f"There is no property {name!r}: {nearest(name, names)}")
    return [each for each in PROPERTIES if only is None or each.name in only]


def _plain(optimizer: Callable[[Any], torch.optim.Optimizer] | None) -> RunConfig:
    """A run around pieces of a user's own: their optimizer's rate, a warm-up, augmentation left to their data set."""
    base = 0.1
    if optimizer is not None:
        base = float(optimizer([nn.Parameter(torch.zeros(1))]).defaults["lr"])
    schedule = (Piece(shape="warmup", until=1, start=0.1), Piece(shape="cosine", until=3, end=0.0))
    return replace(
        RunConfig(
            workers=WorkersConfig(count=8, local_batch=4),
            epochs=3,
            lr=LrConfig(base=base, scaling="linear", base_batch=32, schedule=schedule),
        ),
        recipe="your own",
    )
