"""A shard's process: answers calls, each replica in a thread of its own, and keeps checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bigstep.asynchronous.gate import Gate, Rendezvous
from bigstep.asynchronous.layout import Layout
from bigstep.asynchronous.line import CALL_WORDS, FETCH, LEAVE, PUSH, PUT, Call, receive_into, view_of
from bigstep.asynchronous.reports import LOOK_S, START_S, wait_until
from bigstep.asynchronous.shard import Receipt, Shard
from bigstep.asynchronous.store import Store, StoreGoneError, connect_store, or_gone
from bigstep.engine.checkpoint import load_latest, save_checkpoint
from bigstep.errors import ConfigError, RunError
from bigstep.records import locked, write_atomically

__all__ = ["offer_shard", "serve_shard", "stop_shard"]

_IDLE_S = 600.0
"""After this long without a call a replica counts as gone; one that was only slow calls again."""

_LAST_S = 30.0
"""How long a shard that is to end waits for the exchanges that are under way."""


class _Keeper:
    """Writes the checkpoints of a shard, one at a time."""

    def __init__(self, shard: Shard, folder: Path):
        self._shard, self._folder, self._lock = shard, folder, threading.Lock()
        self._saved = -1

    def restore(self) -> bool:
        """Load the newest whole checkpoint, if there is one."""
        state, problems = load_latest(self._folder)
        for problem in problems:
            print(f"bigstep: {problem} The one before it is used.", file=sys.stderr)
        if state is None:
            return False
        self._shard.load_state_dict(state)
        self._saved = self._shard.version
        return True

    def keep(self, *, force: bool = False) -> None:
        """Write a checkpoint if one is due."""
        layout = self._shard.layout
        due = layout.save_every and self._shard.version // layout.save_every > max(self._saved, 0) // layout.save_every
        if not force and not due:
            return
        with self._lock:
            if not force and self._shard.version // layout.save_every <= max(self._saved, 0) // layout.save_every:
                return  # another thread was faster
            state = self._shard.state_dict()
            save_checkpoint(self._folder, state["version"], state, layout.keep_checkpoints)
            self._saved = state["version"]


def serve_shard(store: Store, where: Rendezvous, index: int, folder: Path) -> None:
    """Serve shard `index` of the run whose store this is, until the coordinator says stop."""
    torch.set_num_threads(1)
    shard = Shard(Layout.from_json(store.get("layout")), index)
    keeper = _Keeper(shard, folder)
    if keeper.restore():
        if store.add(f"served/{index}", 0) == 0:  # the whole run is resumed: its replicas are new
            shard.forget_replicas()
            keeper.keep(force=True)
        else:  # an earlier process of this shard has answered replicas
            store.set(f"restored/{index}", str(shard.version))
    lines = _Lines(store, shard, keeper)
    gate = Gate(where.near(), 0, where.secret, lines.admit)
    store.set(f"shard/{index}", gate.address)
    while not store.check([f"stop/{index}"]):
        time.sleep(LOOK_S)
    gate.close()
    lines.close()
    keeper.keep(force=True)
    facts = {
        "updates": shard.version,
        "shares": shard.shares,
        "samples": shard.samples,
        "refused": shard.refused,
        "staleness": {str(lag): count for lag, count in shard.staleness.items()},
    }
    store.set(f"final/{index}", json.dumps(facts))


def stop_shard(store: Store, index: int) -> None:
    """Ask a shard to end the exchanges under way, to write its last checkpoint and its figures, and to end."""
    store.set(f"stop/{index}", "")


def offer_shard(where: Rendezvous, folder: Path, timeout_s: float) -> None:
    """Serve the next free shard of a run that awaits shards from elsewhere."""
    with or_gone(where.address), contextlib.closing(connect_store(where, timeout_s)) as store:
        wait_until(lambda: store.check(["order"]), START_S, f"The run at {where.address} does not begin.")
        with locked(folder, option="--shard"):
            serve_shard(store, where, _claim(store, where.address, folder), folder)


def _claim(store: Store, address: str, folder: Path) -> int:
    """Return the number of the shard that this folder keeps, or take the next free one."""
    own, run = folder / "shard.json", store.get("run")
    try:
        kept = json.loads(own.read_text())
        if kept["run"] == run:  # started again: the same shard
            return int(kept["index"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # the folder keeps no shard, or one of another run
    if own.exists() or any(folder.glob("step-*.ckpt")):
        raise ConfigError(
            f"{folder} keeps a shard of another run, which this one would start from; choose another folder."
        )
    left = int(store.get("shards_elsewhere"))
    taken = store.add("shards_taken", 1)
    if taken > left:
        raise RunError(
            f"The run at {address} has all of its {left} shards from elsewhere already: join it as a replica."
        )
    index = Layout.from_json(store.get("layout")).shards - taken
    write_atomically(own, json.dumps({"run": run, "index": index}).encode())
    return index


class _Lines:
    """Answers replicas, each in a thread of its own."""

    def __init__(self, store: Store, shard: Shard, keeper: _Keeper):
        self._store, self._shard, self._keeper = store, shard, keeper
        self._under_way, self._open, self._changed = 0, True, threading.Condition()

    def admit(self, line: socket.socket) -> None:
        """Begin to answer a replica."""
        threading.Thread(target=self._answer, args=(line,), daemon=True).start()

    def close(self) -> None:
        """Let no other exchange begin, and wait for those under way: a push is applied as a whole."""
        with self._changed:
            self._open = False
            self._changed.wait_for(lambda: self._under_way == 0, _LAST_S)

    @contextlib.contextmanager
    def _one_exchange(self) -> Iterator[None]:
        with self._changed:
            if not self._open:
                raise ConnectionError("the shard is ending")
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def _answer(self, line: socket.socket) -> None:
        """Serve one replica until it leaves, dies or is silent for too long."""
        replica = -1
        try:
            with line:
                line.settimeout(_IDLE_S)
                self._store.add(f"served/{self._shard.index}", 1)
                vector = torch.zeros_like(self._shard.fetch()[0])
                while True:
                    words = torch.zeros(CALL_WORDS, dtype=torch.float64)
                    receive_into(line, words)
                    call = Call.decode(words)
                    if call.wants & LEAVE:
                        return
                    replica = max(replica, call.push.replica)
                    with self._one_exchange():
                        self._exchange(line, call, vector)
                    self._keep()
        except (OSError, ValueError, OverflowError, StoreGoneError):  # the line broke, or no replica speaks on it
            if replica >= 0:
                with contextlib.suppress(StoreGoneError):  # the coordinator may be gone as well
                    self._store.set(f"gone/{replica}", "")
        except BaseException as error:
            _give_up(self._shard.index, error)

    def _exchange(self, line: socket.socket, call: Call, vector: Tensor) -> None:
        """Take what a call brings and send what it wants, chunk by chunk.

        Weights travel back while the rest of the gradient still arrives: both directions of the link are busy at once.
        """
        shard = self._shard
        receipt = Receipt(True, 0, shard.version)
        for number, (first, last) in enumerate(shard.spans):
            if call.wants & (PUSH | PUT):
                receive_into(line, vector[first:last])
            if call.wants & PUSH:
                told = shard.push_chunk(call.push, number, vector[first:last])
                receipt = told if number == 0 else receipt
            if call.wants & FETCH:
                weights, version = shard.fetch_chunk(number)
                receipt = replace(receipt, version=version) if number == 0 else receipt
                line.sendall(view_of(weights))
        if call.wants & PUT:
            shard.put(vector)
            self._keep(force=True)
        reply = torch.tensor([receipt.accepted, receipt.staleness, receipt.version], dtype=torch.float64)
        line.sendall(view_of(reply))

    def _keep(self, *, force: bool = False) -> None:
        try:
            self._keeper.keep(force=force)
        except BaseException as error:  # a full disk, say: a shard that cannot save must not go on
            _give_up(self._shard.index, error)


def _give_up(index: int, error: BaseException) -> None:
    print(f"bigstep: Shard {index} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)
