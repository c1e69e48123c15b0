"""The coordinator of a Downpour run: starts shards and replicas, watches them, evaluates snapshots, sums up.

It carries no gradients. A replica that dies is named in the notes, and its unfinished share is given to no other: an
update computed on weights long replaced would be the stalest of all. A shard that dies is started again from its
checkpoint, while replicas wait for it.
"""

from __future__ import annotations

import functools
import json
import math
import os
import secrets
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from bigstep.asynchronous.averages import set_averages
from bigstep.asynchronous.client import Client
from bigstep.asynchronous.gate import Rendezvous
from bigstep.asynchronous.layout import Layout, load_vector, weight_vector
from bigstep.asynchronous.ledger import Ledger
from bigstep.asynchronous.processes import Processes
from bigstep.asynchronous.replica import replicate
from bigstep.asynchronous.reports import LOOK_S, START_S, Reports, wait_until
from bigstep.asynchronous.resume import Progress
from bigstep.asynchronous.server import serve_shard, stop_shard
from bigstep.asynchronous.shares import Shares
from bigstep.asynchronous.store import Store, host_store
from bigstep.config import require
from bigstep.config.text import config_to_mapping
from bigstep.engine.build import Own, Run
from bigstep.engine.interruption import StoppedError, StopRequest
from bigstep.engine.run import Order
from bigstep.errors import RunError

__all__ = ["train_sharded"]

T = TypeVar("T")

_SILENT_S = 600.0
"""How long the run waits for a replica that says nothing when all others have ended."""

_SAVE_S = 20.0
"""How long shards may take to save when the run is to stop; schedulers often wait for 30 seconds before they kill."""

_RESTARTS = 5
"""How often a shard is started again before the run is given up."""


def train_sharded(
    order: Order,
    built: Run,
    ledger: Ledger,
    own: Own,
    saved: Progress | None,
    request: StopRequest,
    *,
    listen: str,
    elsewhere: tuple[int, int],
) -> dict[str, Any]:
    """Run a Downpour run, or go on with a saved one, and return its result; `built` ends with the final weights."""
    config = order.config
    checkpoints = order.folder / "checkpoints"
    require(
        order.resume or not checkpoints.exists(),
        f"{checkpoints} holds the checkpoints of another run, which shards would start from; choose another folder.",
    )
    require(
        not (order.resume and elsewhere[0]),
        "A run with shards on other machines cannot be resumed: their checkpoints are there; start it anew.",
    )
    store, where = host_store(listen, alone=not any(elsewhere))
    shares_per_epoch = built.sampler.size / config.workers.local_batch
    layout = Layout.of(built, shares_per_epoch)
    store.set("layout", layout.to_json())
    store.set("run", secrets.token_hex(16))  # tells it from other runs at this address
    store.set("data", built.state.parts["data"].state_dict())
    store.set("shards_elsewhere", str(elsewhere[0]))
    store.set("order", json.dumps({"config": config_to_mapping(config), "max_shares": order.max_steps}))
    processes = Processes(where)
    coordinator = _Coordinator(order, built, ledger, own, saved, request, store, where, layout, processes, elsewhere)
    try:
        return coordinator.run()
    except _StopAskedError:
        raise coordinator.stop() from None
    finally:
        if coordinator.client is not None:
            coordinator.client.give_up()
        processes.kill()
        store.close()


class _StopAskedError(Exception):
    """A signal asks the run to save itself and leave."""


@dataclass
class _Coordinator:
    order: Order
    built: Run
    ledger: Ledger
    own: Own
    saved: Progress | None
    request: StopRequest
    store: Store
    where: Rendezvous
    layout: Layout
    processes: Processes
    elsewhere: tuple[int, int]
    ready: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    dead: dict[int, str] = field(default_factory=dict)
    restarts: Counter[int] = field(default_factory=Counter)
    versions: list[int] = field(default_factory=list)
    heard: dict[int, float] = field(default_factory=dict)
    client: Client | None = None

    def run(self) -> dict[str, Any]:
        settings = self.order.config.asynchronous
        self.ledger.note(f"The parameter server of {settings.shards} shards is at {self.where.address}.")
        self.reports = Reports(self.store)
        self.versions = self.saved.versions if self.saved else [0] * settings.shards
        local_shards, local_replicas = settings.shards - self.elsewhere[0], settings.replicas - self.elsewhere[1]
        self.local = local_replicas
        self.store.add("replicas", local_replicas)
        for shard in range(local_shards):
            self._start_shard(shard)
        for number in range(local_replicas):
            self._start_replica(number)
        self.client = client = Client(self.store, self.where.secret, self.layout)
        if self.saved is None:
            self._wait_for(client.put(weight_vector(self.built.learner.model)))
        else:  # the shards have restored their weights
            self.store.add("shares", self.saved.shares)
        wait_until(self._all_ready, START_S, self._missing())
        self.ledger.begin()
        self.store.set("begin", "")
        warm_shares = math.ceil(settings.warm_start * self.built.sampler.size / self.order.config.workers.local_batch)
        while self._working():
            self._listen()
            self._watch_shards()
            if not self.store.check(["warm"]) and (
                self.store.add("shares", 0) >= warm_shares
                or 0 in self.dead
                or 0 in self.done  # --steps may end a run within its warm start
            ):
                self.store.set("warm", "")
            if self.ledger.evaluation_due:
                self.ledger.evaluate(self._take_snapshot)
            time.sleep(LOOK_S)
        seconds = self.ledger.seconds
        if not self.done:
            reason = "; ".join(f"replica {number} {how}" for number, how in self.dead.items())
            raise RunError(f"Every replica is gone ({reason}); the weights are in {self.order.folder / 'checkpoints'}.")
        return self._finish(seconds)

    def _finish(self, seconds: float) -> dict[str, Any]:
        self.store.set("finished", "")
        self._take_snapshot()
        finals = self._stop_shards(START_S)
        self.processes.end()
        staleness: Counter[int] = Counter()
        for final in finals:
            staleness.update({int(lag): count for lag, count in final["staleness"].items()})
        drawn = self._shares_drawn()
        return self.ledger.finish(
            self.order,
            lambda: None,
            seconds,
            steps=min(final["updates"] for final in finals),
            updates=min(final["updates"] for final in finals),
            samples=min(final["samples"] for final in finals),
            lost_updates=drawn - min(final["shares"] for final in finals),
            staleness=staleness,
        )

    def _stop_shards(self, within_s: float) -> list[dict[str, Any]]:
        """Let every shard write its last checkpoint and end; return their figures."""
        for shard in range(self.layout.shards):
            stop_shard(self.store, shard)
        finals = []
        for shard in range(self.layout.shards):
            ended = functools.partial(self.store.check, [f"final/{shard}"])
            wait_until(ended, within_s, f"Shard {shard} did not end within {within_s:g} s.")
            finals.append(json.loads(self.store.get(f"final/{shard}")))
        return finals

    def stop(self) -> StoppedError:
        """Let the shards save what they have, in whole updates, and return how far the run came."""
        if not self.store.check(["begin"]):  # a resumed run has its checkpoints, and a new one nothing to save
            return StoppedError(self.request.number, self.ledger.updates)
        try:
            updates, saved = min(final["updates"] for final in self._stop_shards(_SAVE_S)), True
        except RunError:
            updates, saved = self.ledger.updates, False
        self._read_reports()
        self.ledger.flush()
        return StoppedError(self.request.number, updates, saved=saved)

    def _shares_drawn(self) -> int:
        """Shares that were handed out; the counter itself goes on past the end of the run."""
        counted = self.store.add("shares", 0)
        shares = Shares(self.built.sampler, self.order.config.epochs, self.order.max_steps)
        return sum(1 for number in range(counted) if shares.at(number) is not None)

    def _start_shard(self, shard: int) -> None:
        folder = self.order.folder / "checkpoints" / f"shard-{shard}"
        self.processes.start(f"shard-{shard}", _serve, self.where, shard, folder)

    def _start_replica(self, number: int) -> None:
        device = self.built.ranks.device
        if device.type == "cuda":
            device = torch.device("cuda", number % torch.cuda.device_count())
        self.processes.start(f"replica-{number}", replicate, self.where, number, device, self.local, self.own)

    def _known(self) -> range:
        return range(self.store.add("replicas", 0))

    def _all_ready(self) -> bool:
        """Whether all replicas with which the run is to begin are ready, or dead."""
        self._listen()
        self._watch_shards()
        here = self.ready | set(self.dead)
        if not self.ready and len(self.dead) == self.order.config.asynchronous.replicas:
            return True
        return len(here) >= self.order.config.asynchronous.replicas

    def _missing(self) -> str:
        return f"Not all {self.order.config.asynchronous.replicas} replicas were ready after {START_S:g} s."

    def _working(self) -> bool:
        return any(number not in self.done and number not in self.dead for number in self._known())

    def _listen(self) -> None:
        if self.request.number:
            raise _StopAskedError
        self._read_reports()

    def _read_reports(self) -> None:
        for number in self._known():
            name = f"replica-{number}"
            self.heard.setdefault(number, time.monotonic())
            # asked first, so that all it wrote before it ended is read below
            if name in self.processes.members:
                ended = self.processes.how_ended(name)
            else:
                ended = "is gone: its connection broke" if self.store.delete_key(f"gone/{number}") else None
            reason = ""
            for report in self.reports.collect(name):
                self.heard[number] = time.monotonic()
                match report["kind"]:
                    case "ready":
                        self.ready.add(number)
                        if self.store.check(["begin"]):
                            self.ledger.note(f"Replica {number} joined at update {self.ledger.updates}.")
                    case "rows":
                        self.dead.pop(number, None)  # only its connection had broken
                        self.versions = [max(pair) for pair in zip(self.versions, report["versions"], strict=True)]
                        self.ledger.take(report["rows"])
                    case "done":
                        self.done.add(number)
                    case "failed":
                        reason = f"failed: {report['text']}"
            if self._is_last_and_silent(number):
                ended = f"said nothing for {_SILENT_S:g} s"
            if (ended is not None or reason) and number not in self.done and number not in self.dead:
                self.dead[number] = reason or ended or "ended early"
                self.ledger.note(
                    f"Replica {number} {self.dead[number]} at update {self.ledger.updates}; what it has not pushed is "
                    "lost, and the others go on."
                )

    def _is_last_and_silent(self, number: int) -> bool:
        others = set(self._known()) - {number}
        silent_s = time.monotonic() - self.heard[number]
        return others <= self.done | set(self.dead) and silent_s > _SILENT_S and bool(others)

    def _watch_shards(self) -> None:
        for name, process in list(self.processes.members.items()):
            if not name.startswith("shard-") or (ended := self.processes.how_ended(name)) is None:
                continue
            shard = int(name.removeprefix("shard-"))
            for report in self.reports.collect(name):
                ended = f"failed: {report['text']}" if report["kind"] == "failed" else ended
            process.join()
            self.store.delete_key(f"shard/{shard}")  # replicas wait for it to come back
            self.restarts[shard] += 1
            if self.restarts[shard] > _RESTARTS:
                raise RunError(f"Shard {shard} {ended or 'ended early'} for the {self.restarts[shard]}th time.")
            self.ledger.note(
                f"Shard {shard} {ended or 'ended early'} at update {self.versions[shard]} and is started again from "
                "its checkpoint; replicas wait for it."
            )
            self._start_shard(shard)
        for shard in [shard for shard in range(self.layout.shards) if self.store.check([f"restored/{shard}"])]:
            version = int(self.store.get(f"restored/{shard}"))
            self.store.delete_key(f"restored/{shard}")
            self.ledger.note(_tell_return(shard, self.versions[shard], version))

    def _wait_for(self, exchange: Future[T]) -> T:
        """Wait for the client, which may itself wait for a shard that is started again here.

        Shards must be started in this thread: the kernel kills a process that is to die with its parent as soon as the
        thread that started it ends.
        """
        while not exchange.done():
            if self.request.number:
                raise _StopAskedError
            self._watch_shards()
            time.sleep(LOOK_S / 10)
        return exchange.result()

    def _take_snapshot(self) -> None:
        """Load the weights that the shards have now."""
        assert self.client is not None
        answer = self._wait_for(self.client.fetch())
        assert answer.weights is not None
        load_vector(self.built.learner.model, answer.weights)
        set_averages(self.built.learner, answer.weights[self.layout.parameters :].to(self.built.ranks.device))


def _tell_return(shard: int, reported: int, version: int) -> str:
    """Say how far a shard was set back; the reported version may lag behind that of its checkpoint.

    >>> _tell_return(0, reported=11, version=8), _tell_return(0, reported=7, version=8)[-26:]
    ('Shard 0 is back at update 8; 3 updates were lost on it.', '0 updates were lost on it.')
    """
    lost = max(0, reported - version)
    return f"Shard {shard} is back at update {version}; {lost} updates were lost on it."


def _serve(store: Store, reporter: Any, where: Rendezvous, shard: int, folder: Any) -> None:
    """What the process of a shard does; it ends at once, since threads may still wait on unused connections."""
    serve_shard(store, where, shard, folder)
    os._exit(0)
