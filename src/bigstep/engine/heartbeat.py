"""Who hangs, and where: every rank leaves a sign of life in the store that joined the ranks.

A thread writes (beats, step, what the rank is doing, innermost frames of its main thread). When a collective fails
or times out, the others read the signs: a rank that stopped beating is dead, stopped or unplugged; one that beats at
its step is stuck where its stack says.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from bigstep.engine.ranks import Ranks

__all__ = ["Heartbeat", "beating"]

_SECONDS_BETWEEN_BEATS = 1.0
_ASKING = "looking for missing ranks"


class Heartbeat:
    """This rank's sign of life; `at` says what it is about to do."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self.step = 0
        self.doing = "starting"

    def at(self, step: int, doing: str) -> None:
        """Note the step and what this rank is doing in it."""
        self.step, self.doing = step, doing

    def missing(self) -> str:
        """Name the ranks that are silent or stand still, with where they were last seen; empty if none is."""
        if self._ranks.size == 1:
            return ""
        self.doing = _ASKING
        first = self._read()
        time.sleep(2.5 * _SECONDS_BETWEEN_BEATS)  # the interval of the others' signs, not a synchronisation
        second = self._read()
        sentences = []
        for rank in range(self._ranks.size):
            sign = second.get(rank)
            if rank == self._ranks.rank:
                continue
            if sign is None:
                sentences.append(f"rank {rank} was never heard of")
            elif first.get(rank, {}).get("beats") == sign["beats"]:
                sentences.append(f"rank {rank} is silent, last heard of at step {sign['step']} in {sign['doing']}")
            elif sign["doing"] != _ASKING:  # it has noticed nothing: it is what the others wait for, or waits as well
                sentences.append(f"rank {rank} stands at step {sign['step']} in {sign['doing']} ({sign['stack']})")
        return "; ".join(sentences)

    def _read(self) -> dict[int, dict[str, Any]]:
        store, signs = _store(), {}
        for rank in range(self._ranks.size):
            with contextlib.suppress(Exception):  # a store whose host is gone tells nothing, and that is no new error
                if store.check([_key(rank)]):
                    signs[rank] = json.loads(store.get(_key(rank)))
        return signs


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _key(rank: int) -> str:
    return f"bigstep/heartbeat/{rank}"


@contextlib.contextmanager
def beating(ranks: Ranks) -> Iterator[Heartbeat]:
    """Beat in the background until the run ends."""
    heartbeat = Heartbeat(ranks)
    if ranks.size == 1:
        yield heartbeat
        return
    done = threading.Event()
    main = threading.get_ident()

    def beat() -> None:
        beats = 0
        while not done.wait(_SECONDS_BETWEEN_BEATS if beats else 0.0):
            beats += 1
            frames = traceback.extract_stack(sys._current_frames().get(main))[-2:]
            stack = " < ".join(f"{frame.name} line {frame.lineno}" for frame in reversed(frames))
            sign = {"beats": beats, "step": heartbeat.step, "doing": heartbeat.doing, "stack": stack}
            try:
                _store().set(_key(ranks.rank), json.dumps(sign))
            except (RuntimeError, OSError):
                return  # the store went with its host; the collective will say so

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield heartbeat
    finally:
        done.set()
        thread.join()
