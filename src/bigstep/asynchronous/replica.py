"""A replica of Downpour: fetches weights, computes the gradient of a share, pushes it, waits for no other replica."""

from __future__ import annotations

import contextlib
import copy
import json
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bigstep.asynchronous.client import Answer, Client
from bigstep.asynchronous.gate import Rendezvous
from bigstep.asynchronous.layout import Layout, gradient_vector, load_vector
from bigstep.asynchronous.processes import share_cores
from bigstep.asynchronous.reports import START_S, Reporter, wait_until
from bigstep.asynchronous.shard import Push
from bigstep.asynchronous.shares import Shares, batches_of, gradient_of
from bigstep.asynchronous.store import Store, connect_store, or_gone
from bigstep.config.text import config_from_mapping
from bigstep.data.pair import DataPair
from bigstep.data.sampler import Step
from bigstep.engine.build import Own, Run, build
from bigstep.engine.ranks import Ranks
from bigstep.engine.rates import learning_rate
from bigstep.errors import DataError

__all__ = ["replicate", "take_part"]

_WARM_S = 7 * 86_400.0
"""How long a warm start may take."""


def take_part(where: Rendezvous, device: torch.device, own: Own, timeout_s: float) -> int:
    """Join a run from elsewhere and work until it ends; return the pushes made."""
    with or_gone(where.address), contextlib.closing(connect_store(where, timeout_s)) as store:
        if store.check(["finished"]):
            return 0
        wait_until(lambda: store.check(["order"]), START_S, f"The run at {where.address} does not begin.")
        number = store.add("replicas", 1) - 1
        store.leave(f"gone/{number}")  # set when this one disconnects: the run waits for all who joined
        reporter = Reporter(store, f"replica-{number}")
        with reporter.telling_of_failure():
            return _work(store, reporter, where, number, device, own)


def replicate(
    store: Store, reporter: Reporter, where: Rendezvous, number: int, device: torch.device, replicas: int, own: Own
) -> None:
    """What the process of a replica on this machine does."""
    share_cores(replicas)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    own = replace(own, model=copy.deepcopy(own.model))  # it came in shared memory; each needs its own weights
    _work(store, reporter, where, number, device, own)


def _work(store: Store, reporter: Reporter, where: Rendezvous, number: int, device: torch.device, own: Own) -> int:
    order = json.loads(store.get("order"))
    config = config_from_mapping(order["config"])
    run = build(config, Ranks(device=device), own)
    _require_data(run, store.get("data"))
    reporter.send(kind="ready")
    wait_until(lambda: store.check(["begin"]), START_S, "The Downpour run did not begin; look at its coordinator.")
    if number > 0:
        wait_until(lambda: store.check(["warm"]), _WARM_S, "The warm start did not end; look at replica 0.")
    client = Client(store, where.secret, Layout.from_json(store.get("layout")))
    replica = _Replica(run, client, reporter, number)
    shares = Shares(run.sampler, config.epochs, order["max_shares"])
    with contextlib.closing(run):
        replica.run(batches_of(run, shares, lambda: store.add("shares", 1) - 1))
    client.close()
    reporter.send(kind="done")
    return replica.pushes


def _require_data(run: Run, expected: str) -> None:
    """Refuse samples that differ from the run's, unless every reading draws new targets, so that hashes say nothing."""
    mine, data = run.state.parts["data"].state_dict(), DataPair(run.train_feed.source, run.evaluator.feed.source)
    if mine != expected and data.fingerprint() == mine:
        raise DataError(
            f"The samples here differ from those of the run (SHA-256 {mine:.12} instead of {expected:.12}): shares "
            "name samples by number, so give every machine a whole copy in the same order."
        )


@dataclass
class _Load:
    """Gradients summed since the last push, and what belongs to them."""

    vector: Tensor | None = None
    read_at: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    samples: int = 0
    lr: float = 0.0
    compute_s: float = 0.0
    data_s: float = 0.0


class _Replica:
    """What a replica knows between two steps."""

    def __init__(self, run: Run, client: Client, reporter: Reporter, number: int):
        self._run, self._client, self._reporter, self._number = run, client, reporter, number
        self._rate = learning_rate(run.config.lr, run.config.workers.local_batch)
        self._load = _Load()
        self._flight: tuple[Future[Answer], _Load | None] | None = None
        self._waited_s = self._lr = 0.0
        self.pushes = 0
        first = client.fetch().result()
        self._read_at = first.versions
        assert first.weights is not None
        load_vector(run.learner.model, first.weights)

    def run(self, batches: Iterable[tuple[Step, tuple[Any, Any]]]) -> None:
        """Work through shares until none is left."""
        settings = self._run.config.asynchronous
        walks = settings.fetch_every > 1 and self._run.config.optimizer.name == "sgd"
        asked = time.perf_counter()
        for steps, (share, batch) in enumerate(batches, start=1):
            self._compute(share, batch, asked)
            push, fetch = steps % settings.push_every == 0, steps % settings.fetch_every == 0
            if push or fetch:
                self._send(push=push, fetch=fetch)
            if walks:
                self._step_alone()  # after a fetch too: the velocity has to go on
            if fetch and not settings.overlap:
                self._settle()
            self._run.learner.optimizer.zero_grad()
            asked = time.perf_counter()
        self._send(push=True, fetch=False)
        self._settle()

    def _compute(self, share: Step, batch: tuple[Any, Any], asked: float) -> None:
        """Add the gradient of a share to the load."""
        load, began = self._load, time.perf_counter()
        self._lr = load.lr = self._rate(share.position.epoch + share.start / self._run.sampler.size, share.local_batch)
        for group in self._run.learner.optimizer.param_groups:
            group["lr"] = self._lr
        loss = gradient_of(self._run, share, batch)
        vector = gradient_vector(self._run.learner.model)
        if load.vector is None:
            load.vector, load.read_at = vector, self._read_at
        else:
            load.vector.add_(vector)
        load.losses.append(loss)
        load.samples += share.size
        load.compute_s += time.perf_counter() - began
        load.data_s += began - asked

    def _send(self, *, push: bool, fetch: bool) -> None:
        """Give the load to the client, once its last exchange has ended."""
        self._settle()
        load = self._load if push and self._load.vector is not None else None
        if load is not None:
            self.pushes += 1
            facts = Push(self._number, self.pushes, 0, load.lr, len(load.losses), load.samples)
            self._load = _Load()
            exchange = self._client.exchange(facts, load.read_at, load.vector, fetch=fetch)
        elif fetch:
            exchange = self._client.exchange(None, self._read_at, None, fetch=True)
        else:
            return
        self._flight = exchange, load

    def _settle(self) -> None:
        """Wait for the client, take the weights it brings, and report what became of the push."""
        if self._flight is None:
            return
        (exchange, load), self._flight = self._flight, None
        began = time.perf_counter()
        answer = exchange.result()
        self._waited_s += time.perf_counter() - began
        if answer.weights is not None:
            load_vector(self._run.learner.model, answer.weights)
            self._read_at = answer.versions
        if load is not None:
            row = {
                "replica": self._number,
                "accepted": answer.accepted,
                "staleness": answer.staleness,
                "loss": sum(load.losses) / len(load.losses),
                "lr": load.lr,
                "batch": load.samples,
                "compute_s": load.compute_s,
                "exchange_s": self._waited_s,
                "data_s": load.data_s,
            }
            self._reporter.send(kind="rows", rows=[row], versions=answer.versions)
            self._waited_s = 0.0

    def _step_alone(self) -> None:
        """Between fetches, follow its own gradient (algorithm 7.1 of the paper), by the shard's rule and rate.

        Momentum and decay are the shard's; the velocity is the replica's own and holds no other replica's pushes. So a
        single replica that pushes every step always has the weights of its shards.
        """
        self._run.learner.optimizer.step()
