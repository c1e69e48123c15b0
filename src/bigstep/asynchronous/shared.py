"""Locked SGD and Hogwild! on a network: processes of one machine that share its weights.

Every process draws the next share, computes its gradient on the weights as they are, and updates them in place. With
a lock around read, gradient and update the run equals a serial one in the same order, bit for bit. Without it
(Hogwild!) reads and writes of several processes mix freely.

Momentum: under the lock the velocity is shared as well; in Hogwild! each process has its own, as in PyTorch's example.
Batch norm: a forward uses the statistics of its own share; the moving averages are shared.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from bigstep.asynchronous.averages import batch_statistics
from bigstep.asynchronous.board import Board, adopt_state
from bigstep.asynchronous.ledger import Ledger
from bigstep.asynchronous.processes import Processes, share_cores
from bigstep.asynchronous.reports import LOOK_S, START_S, Reporter, Reports, wait_until
from bigstep.asynchronous.shares import Shares, batches_of, gradient_of
from bigstep.asynchronous.store import Store, host_store
from bigstep.config import RunConfig
from bigstep.engine.build import Own, Run, build
from bigstep.engine.interruption import StoppedError, StopRequest
from bigstep.engine.ranks import Ranks
from bigstep.engine.rates import learning_rate
from bigstep.engine.run import Order
from bigstep.errors import RunError

__all__ = ["train_shared"]

_SECONDS_BETWEEN_REPORTS = 0.2


@dataclass(frozen=True)
class _Task:
    """What a replica needs to know."""

    config: RunConfig
    number: int
    device: torch.device
    max_updates: int | None
    own: Own


def train_shared(order: Order, run: Run, ledger: Ledger, own: Own, request: StopRequest) -> dict[str, Any]:
    """Run the processes of a locked or Hogwild! run and return its result; `run` ends with the final weights."""
    config = order.config
    method, replicas = config.asynchronous.method, config.asynchronous.replicas
    board = Board.of(run.learner, replicas, locked=method == "locked")
    store, where = host_store("127.0.0.1:0")
    reports, processes = Reports(store), Processes(where)
    names = [f"replica-{number}" for number in range(replicas)]
    # gamma was set to zero before the weights were shared; to do it again would undo training
    quiet = replace(config, norm=replace(config.norm, zero_gamma=False))
    own = replace(own, model=None)  # replicas take it from the board
    try:
        for number, name in enumerate(names):
            task = _Task(quiet, number, run.ranks.device, order.max_steps, own)
            processes.start(name, _replicate, board, task)
        ready: set[str] = set()
        done: set[str] = set()
        while len(done) < replicas:
            if request.number:
                ledger.flush()
                ledger.save(order.folder, lambda: board.copy_into(run.learner))
                state = f"its weights are in {order.folder / 'checkpoints'}, but a {method} run cannot be resumed"
                raise StoppedError(request.number, ledger.updates, state=state)
            for name in names:
                _listen(reports, processes, ledger, name, ready, done)
            if len(ready) == replicas and not store.check(["begin"]):
                ledger.begin()
                store.set("begin", "")
            if ledger.evaluation_due:
                ledger.evaluate(lambda: board.copy_into(run.learner))
            if ledger.save_due:
                ledger.save(order.folder, lambda: board.copy_into(run.learner))
            time.sleep(LOOK_S)
        seconds = ledger.seconds
        processes.end()
        return ledger.finish(order, lambda: board.copy_into(run.learner), seconds)
    finally:
        processes.kill()
        store.close()


def _listen(reports: Reports, processes: Processes, ledger: Ledger, name: str, ready: set[str], done: set[str]) -> None:
    """Take in the reports of one replica; stop the run if it failed or died."""
    ended = processes.how_ended(name)  # asked first, so that all it wrote before it ended is read below
    for report in reports.collect(name):
        match report["kind"]:
            case "ready":
                ready.add(name)
            case "rows":
                ledger.take(report["rows"])
            case "done":
                done.add(name)
            case "failed":
                raise RunError(f"{name.replace('-', ' ').capitalize()} failed: {report['text']}")
    if ended is not None and name not in done:
        who = name.replace("-", " ").capitalize()
        raise RunError(
            f"{who} {ended or 'ended early'} while it shared the weights, which may be torn now: start the run again "
            "(a Downpour run survives this)."
        )


def _replicate(store: Store, reporter: Reporter, board: Board, task: _Task) -> None:
    """What the process of a replica does."""
    config = task.config
    if task.device.type == "cuda":
        torch.cuda.set_device(task.device)
    else:
        share_cores(config.asynchronous.replicas)
    _own_buffers(board.model)
    run = build(config, Ranks(device=task.device), replace(task.own, model=board.model))
    learner = run.learner
    if board.state is not None:
        adopt_state(learner.optimizer, board.state)
    keep = learner.statistics.keep
    rate = learning_rate(config.lr, config.workers.local_batch)
    shares = Shares(run.sampler, config.epochs, task.max_updates)
    batches = batches_of(run, shares, lambda: store.add("shares", 1) - 1)
    reporter.send(kind="ready")
    wait_until(lambda: store.check(["begin"]), START_S, "The other replicas did not start; look at the first failure.")
    rows: list[dict[str, Any]] = []
    reported = time.perf_counter()
    while True:
        started = time.perf_counter()
        with board.turn():
            waited = time.perf_counter()
            following = next(batches, None)  # drawn under the lock, so that updates keep the order of shares
            if following is None:
                break
            share, batch = following
            read_at, loaded = board.version, time.perf_counter()
            lr = rate(share.position.epoch + share.start / run.sampler.size, share.local_batch)
            for group in learner.optimizer.param_groups:
                group["lr"] = lr
            loss = gradient_of(run, share, batch)
            facts = board.write(task.number, read_at, learner.optimizer.step)
            learner.optimizer.zero_grad()
            board.averages.mul_(keep).add_(batch_statistics(learner.model), alpha=1 - keep)
        now = time.perf_counter()
        rows.append(
            {
                "replica": task.number,
                "accepted": True,
                "overlapped": int(facts.overlapped),
                "staleness": facts.staleness,
                "loss": loss,
                "lr": lr,
                "batch": share.size,
                "compute_s": now - loaded,
                "exchange_s": waited - started,  # for the lock
                "data_s": loaded - waited,
            }
        )
        if now - reported > _SECONDS_BETWEEN_REPORTS:
            reporter.send(kind="rows", rows=rows)
            rows, reported = [], now
    reporter.send(kind="rows", rows=rows)
    reporter.send(kind="done")


def _own_buffers(model: nn.Module) -> None:
    """Give this process buffers of its own: a forward writes its batch's statistics there."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.clone())
