"""A shard's process: answers calls, each replica in a thread of its own, and keeps checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bigstep.asynchronous.layout import Layout
from bigstep.asynchronous.mail import LOOK_S, Store, connect_store, or_gone
from bigstep.asynchronous.pairs import CALL_WORDS, FETCH, LEAVE, PUSH, PUT, Call, Pair, pair_group
from bigstep.asynchronous.shard import Receipt, Shard
from bigstep.engine.checkpoint import load_latest, save_checkpoint
from bigstep.errors import RunError

__all__ = ["offer_shard", "serve_shard", "stop_shard"]

_REPLICA = 1
"""The other rank of a pair."""

_IDLE_S = 600.0
"""After this long without a word a replica counts as gone; one that was only slow calls again."""


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


def serve_shard(store: Store, address: str, index: int, folder: Path) -> None:
    """Serve shard `index` of the run whose store this is, until the coordinator says stop."""
    torch.set_num_threads(1)
    shard = Shard(Layout.from_json(store.get("layout")), index)
    keeper = _Keeper(shard, folder)
    number = store.add(f"served/{index}", 0)  # calls that a shard before this one has answered
    if keeper.restore():
        if number == 0:  # the whole run goes on: its replicas are new
            shard.forget_replicas()
            keeper.keep(force=True)
        else:
            store.set(f"restored/{index}", str(shard.version))
    store.set(f"shard/{index}", "ready")
    while True:
        _wait_for_call(store, f"call/{index}/{number}")
        store.add(f"served/{index}", 1)
        if store.get(f"call/{index}/{number}") == b"stop":
            break
        threading.Thread(target=_answer, args=(address, shard, keeper, number), daemon=True).start()
        number += 1
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
    """Ask a shard to write its last checkpoint and its figures, and to end."""
    number = store.add(f"calls/{index}", 1) - 1
    store.set(f"call/{index}/{number}", "stop")


def offer_shard(address: str, folder: Path, timeout_s: float) -> None:
    """Serve the next free shard of a run that awaits shards from elsewhere."""
    store = connect_store(address, timeout_s)
    with or_gone(address):
        serve_shard(store, address, _claim(store, address, folder), folder)


def _claim(store: Store, address: str, folder: Path) -> int:
    """Return the number of the shard that this folder keeps, or take the next free one."""
    own = folder / "shard.json"
    if own.exists() and json.loads(own.read_text())["address"] == address:  # started again: the same shard
        index = int(json.loads(own.read_text())["index"])
    else:
        left = int(store.get("shards_elsewhere"))
        taken = store.add("shards_taken", 1)
        if taken > left:
            raise RunError(f"The run at {address} has all its shards already; it awaits {left} from elsewhere.")
        index = Layout.from_json(store.get("layout")).shards - taken
        folder.mkdir(parents=True, exist_ok=True)
        own.write_text(json.dumps({"address": address, "index": index}))
    return index


def _wait_for_call(store: Store, key: str) -> None:
    while not store.check([key]):
        time.sleep(LOOK_S)


def _exchange(group: Pair, shard: Shard, keeper: _Keeper, call: Call, vector: Tensor) -> None:
    """Take what a call brings and send what it wants, chunk by chunk.

    Weights travel back while the rest of the gradient still comes: both directions of the link are busy at once.
    """
    limit = timedelta(seconds=_IDLE_S)
    brings = call.wants & (PUSH | PUT)
    incoming = [group.recv([vector[a:b]], _REPLICA, 1) for a, b in shard.spans] if brings else []
    receipt = Receipt(True, 0, shard.version)
    outgoing: list[tuple[Any, Tensor]] = []  # with what is sent, which must live until it has travelled
    for number, (first, last) in enumerate(shard.spans):
        if brings:
            incoming[number].wait(limit)
        if call.wants & PUSH:
            told = shard.push_chunk(call.push, number, vector[first:last])
            receipt = told if number == 0 else receipt
        if call.wants & FETCH:
            weights, version = shard.fetch_chunk(number)
            receipt = replace(receipt, version=version) if number == 0 else receipt
            outgoing.append((group.send([weights], _REPLICA, 3), weights))
    if call.wants & PUT:
        shard.put(vector)
        keeper.keep(force=True)
    reply = torch.tensor([receipt.accepted, receipt.staleness, receipt.version], dtype=torch.float64)
    for work, _ in [*outgoing, (group.send([reply], _REPLICA, 2), reply)]:
        work.wait(limit)


def _answer(address: str, shard: Shard, keeper: _Keeper, number: int) -> None:
    """Serve one replica until it leaves, dies or is silent for too long."""
    replica = -1
    try:
        store = connect_store(address)
        group = pair_group(store, address, shard.index, number, side=0)
        vector = torch.zeros_like(shard.fetch()[0])
        while True:
            words = torch.zeros(CALL_WORDS, dtype=torch.float64)
            group.recv([words], _REPLICA, 0).wait(timedelta(seconds=_IDLE_S))
            call = Call.decode(words)
            if call.wants & LEAVE:
                return
            replica = max(replica, call.push.replica)
            _exchange(group, shard, keeper, call, vector)
            keeper.keep()
    except RuntimeError:  # the line broke, or never came to be
        if replica >= 0:
            with contextlib.suppress(RuntimeError):  # the coordinator may be gone as well
                store.set(f"gone/{replica}", "")
    except BaseException as error:
        # a disk that is full, say: a shard that cannot keep its promise must not go on
        print(f"bigstep: Shard {shard.index} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
