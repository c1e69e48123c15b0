"""For a project's own tests: does its training take the same path on any number of ranks?

With bigstep installed, pytest has the fixture `same_on_ranks` and the marker `ranks` (`bigstep.testing.plugin`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # pytest loads this package at every start, and most sessions never ask for torch
    import torch
    from torch import nn

    from bigstep.check import Pool, Report, Row, Subject
    from bigstep.config import RunConfig
    from bigstep.engine.learner import Loss

__all__ = ["assert_same_on_ranks"]

_BATCH = "accumulation = big batch"
"""Random numbers drawn by rank break this row too, on their way to those that name them."""


def assert_same_on_ranks(
    model: nn.Module | Callable[[], nn.Module] | None = None,
    data: Any = None,
    loss: Loss | None = None,
    *,
    config: RunConfig | str | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    ranks: Sequence[int] = (1, 2, 3),
    only: Sequence[str] | None = None,
    subject: Subject | None = None,
    pool: Pool | None = None,
) -> Report:
    """Fail, in one sentence, unless a training takes one path on every number of ranks.

    Small real worlds train for a dozen steps in float64, and each property of `bigstep check` is held: start, samples,
    random numbers, gradient, path, statistics, evaluation, resumption. Model, loss and data must be importable, since
    other processes build them: defined at the top of a module.

    Args:
        model: A module, or better the function or class that builds it.
        data: (training set, evaluation set), one map-style set for both, or a function that returns either.
        loss: (output, target) -> mean over the samples; None is cross-entropy.
        config: What to train, or a recipe's name; None takes a plain run with momentum, warm-up and a decaying rate.
        optimizer: parameters -> torch optimizer; None takes that of `config`.
        ranks: Sizes of the worlds to compare; 1 is always among them.
        only: Names of properties, as `bigstep check` lists them; None for all.
        subject: A loop of your own as functions (`bigstep.check.Subject`); None takes bigstep's.
        pool: Processes to use again from call to call (`bigstep.check.Pool`); None starts some and ends them.

    Returns:
        The rows, all of which passed or do not apply.

    Raises:
        AssertionError: with the property that fails, what was seen and what to change.

    >>> report = assert_same_on_ranks(config="plain", ranks=[1], only=["same start on every rank"])
    >>> report.passed
    True
    """
    from bigstep import recipes
    from bigstep.check import check

    named = recipes.load(config) if isinstance(config, str) else config
    report = check(
        named,
        model=model,
        data=data,
        loss=loss,
        optimizer=optimizer,
        ranks=ranks,
        only=only,
        subject=subject,
        pool=pool,
    )
    failed = [row for row in report.rows if row.status == "fail"]
    if failed:
        raise AssertionError(_sentence(report, min(failed, key=lambda row: row.name == _BATCH)))
    return report


def _sentence(report: Report, row: Row) -> str:
    *most, last = map(str, report.ranks)
    worlds = f"{', '.join(most)} and {last} ranks" if most else "1 rank"
    figure = f" ({row.figure:.2g}, at most {row.bound:.2g})" if row.figure is not None and row.bound is not None else ""
    change = f"; what to change: {row.remedy.rstrip('.')}" if row.remedy else ""
    return f"Training on {worlds} is not one and the same: {row.name!r} fails, {row.words}{figure}{change}."
