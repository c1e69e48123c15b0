"""Who hangs, and where: every rank leaves a sign of life in the store that joined the ranks.

A thread writes (beats, step, what the rank is doing, innermost frames of its main thread). When a collective fails
or times out, the others read the signs: a rank that stopped beating is dead, stopped or unplugged; one that beats at
its step is stuck where its stack says.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import IO, Any

import torch.distributed as dist

from bigstep.engine.ranks import Ranks

__all__ = ["Heartbeat", "beating", "innermost"]

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


def innermost(thread: int, scratch: IO[bytes]) -> list[str]:
    """Return where a thread of this process stands: its two innermost frames, the innermost first.

    Hazard: frames of a thread that runs may be taken apart while they are walked (Python 3.11 then crashes), so this
    is left to `faulthandler`, which walks all of them before any other thread goes on.

    Args:
        thread: As `threading.get_ident` names it.
        scratch: A file that this may overwrite.
    """
    scratch.seek(0)
    scratch.truncate()
    faulthandler.dump_traceback(scratch, all_threads=True)
    scratch.seek(0)
    found = re.search(rf"^Thread 0x0*{thread:x}\b.*:\n((?:  File .*\n)*)", scratch.read().decode(), re.MULTILINE)
    frames = re.findall(r", line (\S+) in (.*)", found[1]) if found else []
    return [f"{name} line {line}" for line, name in frames[:2]]


def _memory_file() -> IO[bytes]:
    """A file that needs no room on a disk, where the system has such."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("heartbeat"), "w+b")
    return tempfile.TemporaryFile()


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
        with _memory_file() as scratch:
            while not done.wait(_SECONDS_BETWEEN_BEATS if beats else 0.0):
                beats += 1
                stack = " < ".join(innermost(main, scratch))
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
