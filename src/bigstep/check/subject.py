"""What a check examines: a training loop as a handful of functions, bigstep's own by default."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bigstep.config import ExchangeConfig, RunConfig
from bigstep.data.sampler import Position, Step
from bigstep.engine.evaluate import Evaluation
from bigstep.engine.learner import Loss
from bigstep.engine.ranks import Ranks
from bigstep.exchange import Exchange

__all__ = ["Own", "Subject", "Trial"]


@dataclass(frozen=True)
class Own:
    """A user's own pieces; None takes the configuration's."""

    model: nn.Module | Callable[[], nn.Module] | None = None
    """A module (copied for each trial), or a function that builds one; only the latter can prove a common start."""
    loss: Loss | None = None
    """(output, target) -> the mean over the samples."""
    data: Any = None
    """(training set, evaluation set), one set for both, or a function that returns either."""
    optimizer: Callable[[Any], Any] | None = None
    """parameters -> torch optimizer; its rate is set at every step."""


@dataclass(frozen=True)
class Trial:
    """One small run that a property examines; hashable, so that it is run only once."""

    config: RunConfig
    """Workers, local batch, plan, rate, exchange, …; already shrunk."""
    train_samples: int
    """Size of the training set: its first samples."""
    test_samples: int
    """Size of the evaluation set, at most."""
    independent: bool = False
    """No dropout, and batch norms without statistics: then samples do not influence each other."""
    dropout: bool = True
    """Whether dropout layers are active."""
    graphs: bool = False
    """Whether steps are graphs, emulated where there is no GPU."""
    padded: bool = False
    """Whether most windows of a text end early, so that samples have unequal numbers of targets."""
    loss_scale: bool = False
    """Whether the loss is scaled as in fp16; by a power of two, which must not change anything."""


def _nothing_owed(exchange: Any) -> dict[str, Tensor]:
    return {}


def _nothing_to_do(run: Any) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A training loop as functions on a run, which is an object of the loop's own choice.

    `check` composes them as a loop would: for each of `steps`, `learning_rate`, then `gradient`, then `update`. If
    there is a `train`, whole runs use it, and must agree with the composition. To check a loop of your own, give
    `check(subject=…)` a Subject whose functions drive it; to see whether one piece of yours fits, replace that one:
    `dataclasses.replace(bigstep_loop(), gradient=mine)`. Every function runs on every rank of a world, in the same
    order, so it may use collectives unless it says otherwise. Functions must be importable. What a loop does not have
    (an evaluation, checkpoints, an exchange of its own) may be left out; the rows say so.
    """

    start: Callable[[Own, Trial, Ranks], Any]
    """Build the run on this rank: weights, optimizer, data. Nothing depends on other ranks yet."""
    connect: Callable[[Any], None]
    """Connect the ranks: wrap the model in DDP, attach the exchange."""
    model: Callable[[Any], nn.Module]
    """The module that is trained."""
    sizes: Callable[[Any], tuple[int, int]]
    """Samples of the training set and of the evaluation set (no collectives)."""
    steps: Callable[[Any, Position], Iterator[Step]]
    """The steps of the whole run from a position on; the same on every rank."""
    samples: Callable[[Any, Step], list[int]]
    """Which samples this rank trains on in a step, by index (no collectives)."""
    batch: Callable[[Any, int, list[int]], tuple[Any, Any]]
    """(inputs, target) of samples in an epoch, augmented as this rank would (no collectives)."""
    objective: Callable[[Any, Any, Any], Tensor]
    """(inputs, target) -> mean loss of one forward through the bare model (no collectives)."""
    learning_rate: Callable[[Any, Step], float]
    """Set the rate of a step in the optimizer and return it (no collectives)."""
    gradient: Callable[[Any, Step], float]
    """Leave the mean gradient over the whole batch in `.grad` on every rank; return this rank's part of the loss."""
    update: Callable[[Any], None]
    """Apply the gradient and clear it."""
    train: Callable[[Any, int, Path | None], list[tuple[float, float]]] | None = None
    """The loop itself: train from the run's position to its end, write a checkpoint into the folder when this many
    steps are done, and return (loss over all ranks, rate) of each step. Without it `check` composes those above."""
    evaluate: Callable[[Any], Evaluation] | None = None
    """Evaluate on the whole evaluation set; leaves in the model's buffers what an evaluation uses."""
    save: Callable[[Any, Position, Path], None] | None = None
    """Write a checkpoint into a folder that the ranks share."""
    load: Callable[[Any, Path], Position] | None = None
    """Read it into a fresh run, on any number of ranks."""
    exchange: Callable[[ExchangeConfig], Exchange] | None = None
    """How gradients travel, as an object with `attach(ddp)` and `close()`."""
    owed: Callable[[Any], dict[str, Tensor]] = _nothing_owed
    """What a lossy exchange still owes the mean gradient, by parameter; rank 0's answer counts."""
    finish: Callable[[Any], None] = _nothing_to_do
    """Release threads and the like."""
