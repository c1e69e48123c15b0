"""Asynchronous training from Python: any module, any map-style data set, as `bigstep.train.fit` takes them."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from torch import nn

from bigstep.asynchronous.engine import run_asynchronously
from bigstep.asynchronous.gate import Rendezvous, shared_secret, split_address
from bigstep.config import RunConfig
from bigstep.engine.build import Own
from bigstep.engine.learner import Loss
from bigstep.engine.observers.progress import Progress
from bigstep.engine.ranks import DeviceChoice, joined_ranks
from bigstep.engine.run import FitResult, Order
from bigstep.engine.scratch import scratch_folder
from bigstep.errors import ConfigError

__all__ = ["join_downpour", "serve_downpour", "train_downpour", "train_hogwild", "train_locked"]


def train_locked(
    config: RunConfig,
    model: nn.Module | None = None,
    data: tuple[Any, Any] | None = None,
    loss: Loss | None = None,
    *,
    out: Path | str | None = None,
    max_steps: int | None = None,
    device: DeviceChoice = "auto",
    progress: bool = False,
) -> FitResult:
    """Train with processes that take turns on shared weights: lock, read, gradient, update, release.

    w <- w - lr * g(w, share k) for k = 0, 1, 2, ..., one at a time: the result is that of a serial run in the same
    order, bit for bit, whatever `config.asynchronous.replicas` is. It is what Hogwild! is compared to.

    Args:
        config: The run; `asynchronous.method` is set to locked here.
        model: Your own module instead of the one that `config` names; trained in place. It, `data` and `loss` must be
            picklable, since other processes work on them.
        data: (training set, evaluation set), each with `__len__` and `__getitem__` returning (input, target).
        loss: (output, target) -> mean loss over the samples.
        out: The run folder; None keeps no records.
        max_steps: Stop after this many updates.
        device: cpu, cuda, or auto for a GPU where there is one.
        progress: Show a live line.

    Returns:
        What `fit` returns; `facts` adds updates, updates_per_s, lost_updates and staleness.

    Starts processes, so it runs in the tests instead of here:

    >>> result = train_locked(config, model, (train_set, test_set), loss)  # doctest: +SKIP
    >>> print(result.accuracy, result.facts["staleness"])  # doctest: +SKIP

    Reference: Langford, Smola, Zinkevich, "Slow Learners are Fast", 2009 (locking); Niu, Recht, Re, Wright,
    "Hogwild!", 2011, section 1, which sets out to do without.

    Differs from the papers: the gradient is of a worker's share, not of one example, and the lock is held through
    the gradient as well, so that nothing is ever stale.
    """
    return _train(_with_method(config, "locked"), model, data, loss, out, max_steps, device, progress)


def train_hogwild(
    config: RunConfig,
    model: nn.Module | None = None,
    data: tuple[Any, Any] | None = None,
    loss: Loss | None = None,
    *,
    out: Path | str | None = None,
    max_steps: int | None = None,
    device: DeviceChoice = "auto",
    progress: bool = False,
) -> FitResult:
    """Train with processes that read and update shared weights without a lock.

    w <- w - lr * g(w', share k), where w' is whatever the weights were while the gradient was computed. With one
    replica the result is that of a serial run, bit for bit.

    Args:
        config: The run; `asynchronous.method` is set to hogwild here.
        model: As in `train_locked`.
        data: As in `train_locked`.
        loss: As in `train_locked`.
        out: The run folder; None keeps no records.
        max_steps: Stop after this many updates.
        device: cpu, cuda, or auto for a GPU where there is one.
        progress: Show a live line.

    Returns:
        What `fit` returns; `facts` adds updates, updates_per_s, lost_updates (those whose write overlapped another's,
        so that sums may have been lost) and staleness (how many updates came between read and write).

    Starts processes, so it runs in the tests instead of here:

    >>> result = train_hogwild(config, model, (train_set, test_set), loss)  # doctest: +SKIP
    >>> print(result.accuracy, result.facts["staleness"])  # doctest: +SKIP

    Reference: Niu, Recht, Re, Wright, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent",
    2011, algorithm 1.

    Differs from the paper: a network's gradient is dense, so it lacks the sparsity that the paper's proof needs; whole
    tensors are added without atomic operations, so that elements of overlapping writes can be lost.
    """
    return _train(_with_method(config, "hogwild"), model, data, loss, out, max_steps, device, progress)


def train_downpour(
    config: RunConfig,
    model: nn.Module | None = None,
    data: tuple[Any, Any] | None = None,
    loss: Loss | None = None,
    *,
    out: Path | str | None = None,
    resume: bool = False,
    max_steps: int | None = None,
    device: DeviceChoice = "auto",
    progress: bool = False,
    listen: str = "127.0.0.1:0",
    shards_elsewhere: int = 0,
    replicas_elsewhere: int = 0,
) -> FitResult:
    """Train with a parameter server: shards hold the weights, replicas push gradients and fetch weights.

    On shard s, for each push g that arrives:  sum <- sum + g^2,  w <- w - gamma * g / (sqrt(sum) + eps)  (AdaGrad,
    optimizer.name = adagrad), or  v <- m * v + g,  w <- w - lr * v  (optimizer.name = sgd). No replica waits for
    another: replicas may join late, leave or die, and shards are restarted from their checkpoints. With one replica and
    push_every = fetch_every = 1 the result is that of a serial run, bit for bit.

    Args:
        config: The run; `asynchronous.method` is set to downpour here.
        model: As in `train_locked`.
        data: As in `train_locked`.
        loss: As in `train_locked`.
        out: The run folder, with the shards' checkpoints; None keeps neither.
        resume: Go on with the run in `out` from its shards' checkpoints.
        max_steps: Stop after this many shares.
        device: Where replicas compute: cpu, cuda, or auto for a GPU where there is one. Shards are on CPUs.
        progress: Show a live line.
        listen: HOST:PORT of this machine at which others reach the run; port 0 takes a free one.
        shards_elsewhere: How many of `asynchronous.shards` `serve_downpour` runs on other machines.
        replicas_elsewhere: How many of `asynchronous.replicas` `join_downpour` brings before the run begins; more may
            join at any time.

    Returns:
        What `fit` returns; `facts` adds updates, updates_per_s, lost_updates (refused, or lost with a process) and
        staleness, as each shard counted it.

    Starts processes, so it runs in the tests instead of here:

    >>> result = train_downpour(config, model, (train_set, test_set), loss)  # doctest: +SKIP
    >>> print(result.accuracy, result.facts["lost_updates"])  # doctest: +SKIP

    Reference: Dean et al., "Large Scale Distributed Deep Networks", 2012, section 4.1 and algorithm 7.1.

    Differs from the paper: shares are drawn from one counter instead of data being divided among replicas, so that a
    dead replica's data is not lost; batch norm's averages travel with the weights; between fetches a replica steps by
    itself only under sgd, since it does not know AdaGrad's rates.
    """
    if resume and out is None:
        raise ConfigError("train_downpour(resume=True) needs out=…, the folder of the run to go on with.")
    more = {"listen": listen, "elsewhere": (shards_elsewhere, replicas_elsewhere)}
    config = _with_method(config, "downpour")
    return _train(config, model, data, loss, out, max_steps, device, progress, more, resume=resume)


def join_downpour(
    address: str,
    model: nn.Module | None = None,
    data: tuple[Any, Any] | None = None,
    loss: Loss | None = None,
    *,
    device: DeviceChoice = "auto",
    timeout_s: float = 30.0,
) -> int:
    """Take part in a Downpour run as one more replica, from its beginning or in the middle of it.

    Args:
        address: HOST:PORT of the run, as its first note tells.
        model: The model, where the run was started with one of its own; likewise data and loss.
        data: (training set, evaluation set).
        loss: (output, target) -> mean loss over the samples.
        device: cpu, cuda, or auto for a GPU where there is one.
        timeout_s: How long to try to reach the run.

    Returns:
        The pushes that this replica made.
    """
    from bigstep.asynchronous.replica import take_part

    with joined_ranks(device) as ranks:
        return take_part(_rendezvous(address), ranks.device, Own(model, data, loss), timeout_s)


def serve_downpour(address: str, folder: Path | str, *, timeout_s: float = 30.0) -> None:
    """Serve one shard of a Downpour run that was started with `shards_elsewhere`; returns when the run ends.

    Args:
        address: HOST:PORT of the run, as its first note tells.
        folder: Where the shard keeps its checkpoints; started again with the same folder, it goes on from them.
        timeout_s: How long to try to reach the run.
    """
    from bigstep.asynchronous.server import offer_shard

    offer_shard(_rendezvous(address), Path(folder), timeout_s)


def _rendezvous(address: str) -> Rendezvous:
    """Return where a run elsewhere is, with the secret that it shares with this machine."""
    split_address(address)
    if (secret := shared_secret()) is None:
        raise ConfigError(
            f"To take part in the run at {address} this machine needs its secret: set BIGSTEP_SECRET, or "
            "BIGSTEP_SECRET_FILE to a file that holds it, as for the run itself."
        )
    return Rendezvous(address, secret)


def _with_method(config: RunConfig, method: str) -> RunConfig:
    return dataclasses.replace(config, asynchronous=dataclasses.replace(config.asynchronous, method=method))


def _train(
    config: RunConfig,
    model: nn.Module | None,
    data: tuple[Any, Any] | None,
    loss: Loss | None,
    out: Path | str | None,
    max_steps: int | None,
    device: DeviceChoice,
    progress: bool,
    more: dict[str, Any] | None = None,
    *,
    resume: bool = False,
) -> FitResult:
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(joined_ranks(device))
        folder = Path(out or stack.enter_context(scratch_folder()))
        order = Order(config=config, folder=folder, resume=resume, max_steps=max_steps)
        shown = [stack.enter_context(Progress(config.recipe, config.epochs))] if progress else []
        facts = run_asynchronously(order, ranks, shown, Own(model, data, loss), **(more or {}))
    return FitResult.of(facts)
