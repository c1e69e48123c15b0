"""Locked SGD and Hogwild! on a network: processes of one machine that share its weights.

Every process draws the next share, computes its gradient on the weights as they are, and updates them in place. With
a lock around read, gradient and update the run equals a serial one on the same order, bit for bit. Without it
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
from bigstep.asynchronous.crew import Crew, share_cores
from bigstep.asynchronous.ledger import Ledger
from bigstep.asynchronous.mail import LOOK_S, START_S, Mailbox, Post, Store, host_store, wait_until
from bigstep.asynchronous.shares import Shares, batches_of
from bigstep.config import RunConfig
from bigstep.engine.build import Parts, assemble, learning_rate
from bigstep.engine.methods.synchronous import gradient_of
from bigstep.engine.ranks import Ranks
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
    own: dict[str, Any]


def train_shared(order: Order, parts: Parts, ledger: Ledger, own: dict[str, Any]) -> dict[str, Any]:
    """Run the processes of a locked or Hogwild! run and return its result; `parts` ends with the final weights."""
    config = order.config
    method, replicas = config.asynchronous.method, config.asynchronous.replicas
    board = Board.of(parts, replicas, locked=method == "locked")
    store, address = host_store("127.0.0.1:0")
    mailbox, crew = Mailbox(store), Crew(address)
    names = [f"replica-{number}" for number in range(replicas)]
    # gamma was set to zero before the weights were shared; to do it again would undo training
    quiet = replace(config, norm=replace(config.norm, zero_gamma=False))
    own = {key: value for key, value in own.items() if key != "model"}
    try:
        for number, name in enumerate(names):
            task = _Task(quiet, number, parts.ranks.device, order.max_steps, own)
            crew.start(name, _replicate, board, task)
        ready: set[str] = set()
        done: set[str] = set()
        while len(done) < replicas:
            for name in names:
                _listen(mailbox, crew, ledger, name, ready, done)
            if len(ready) == replicas and not store.check(["begin"]):
                ledger.begin()
                store.set("begin", "")
            if ledger.evaluation_due:
                ledger.evaluate(lambda: board.copy_into(parts))
            if ledger.save_due:
                ledger.save(order.folder, lambda: board.copy_into(parts))
            time.sleep(LOOK_S)
        seconds = ledger.seconds
        crew.end()
        return ledger.finish(order, lambda: board.copy_into(parts), seconds)
    finally:
        crew.kill()


def _listen(mailbox: Mailbox, crew: Crew, ledger: Ledger, name: str, ready: set[str], done: set[str]) -> None:
    """Take in the letters of one replica; stop the run if it failed or died."""
    ended = crew.how_ended(name)  # asked first: what it wrote before it ended is read below
    for letter in mailbox.collect(name):
        match letter["kind"]:
            case "ready":
                ready.add(name)
            case "rows":
                ledger.take(letter["rows"])
            case "done":
                done.add(name)
            case "failed":
                raise RunError(f"{name.replace('-', ' ').capitalize()} failed: {letter['text']}")
    if ended is not None and name not in done:
        who = name.replace("-", " ").capitalize()
        raise RunError(
            f"{who} {ended or 'ended early'} while it shared the weights, which may be torn now: start the run again "
            "(a Downpour run survives this)."
        )


def _replicate(store: Store, post: Post, board: Board, task: _Task) -> None:
    """What a process does."""
    config = task.config
    if task.device.type == "cuda":
        torch.cuda.set_device(task.device)
    else:
        share_cores(config.asynchronous.replicas)
    _own_buffers(board.model)
    parts = assemble(config, Ranks(device=task.device), model=board.model, **task.own)
    parts.model.train()
    if board.state is not None:
        adopt_state(parts.optimizer, board.state)
    keep = parts.statistics.keep
    rate = learning_rate(config.lr, config.workers.local_batch)
    shares = Shares(parts.sampler, config.epochs, task.max_updates)
    batches = batches_of(parts, shares, lambda: store.add("shares", 1) - 1)
    post.send(kind="ready")
    wait_until(lambda: store.check(["begin"]), START_S, "The other replicas did not start; look at the first failure.")
    rows: list[dict[str, Any]] = []
    reported = time.perf_counter()
    while True:
        started = time.perf_counter()
        with board.turn():
            waited = time.perf_counter()
            following = next(batches, None)  # drawn under the lock, so that updates keep the order
            if following is None:
                break
            share, batch = following
            read_at, loaded = board.version, time.perf_counter()
            loss, _ = gradient_of(parts, share, iter([batch]))
            lr = rate((share.position.epoch + share.start / parts.sampler.size), share.local_batch)
            for group in parts.optimizer.param_groups:
                group["lr"] = lr
            landing = board.write(task.number, read_at, parts.optimizer.step)
            parts.optimizer.zero_grad()
            board.averages.mul_(keep).add_(batch_statistics(parts.model), alpha=1 - keep)
        now = time.perf_counter()
        rows.append(
            {
                "replica": task.number,
                "accepted": True,
                "overlapped": int(landing.overlapped),
                "staleness": landing.staleness,
                "loss": float(loss),
                "lr": lr,
                "batch": share.size,
                "compute_s": now - loaded,
                "exchange_s": waited - started,  # for the lock
                "data_s": loaded - waited,
            }
        )
        if now - reported > _SECONDS_BETWEEN_REPORTS:
            post.send(kind="rows", rows=rows)
            rows, reported = [], now
    post.send(kind="rows", rows=rows)
    post.send(kind="done")


def _own_buffers(model: nn.Module) -> None:
    """Give this process buffers of its own: a forward writes its batch's statistics there."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.clone())
