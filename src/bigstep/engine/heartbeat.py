"""Who hangs, and where: every rank leaves a sign of life in the store that joined the ranks, or in a file beside it.

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
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from bigstep.engine.ranks import STORE_VARIABLE, Ranks
from bigstep.records import write_atomically

__all__ = ["Heartbeat", "beating", "innermost"]

_SECONDS_BETWEEN_BEATS = 1.0
_ASKING = "looking for missing ranks"
_MOST_NAMED = 8
"""Ranks that a sentence names one by one: a host's, as a rule. Of a thousand that wait for it, the number is enough."""


class Heartbeat:
    """This rank's sign of life; `at` says what it is about to do."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self.step = 0
        self.doing = "starting"

    def at(self, step: int, doing: str) -> None:
        """Set the step and what this rank is doing in it."""
        self.step, self.doing = step, doing

    def missing(self) -> str:
        """Name the ranks that are silent or stand still, with where they were last seen; empty if none is."""
        if self._ranks.size == 1:
            return ""
        self.doing = _ASKING
        first = self._read()
        time.sleep(2.5 * _SECONDS_BETWEEN_BEATS)  # the interval of the others' signs, not a synchronisation
        second = self._read()
        silent, standing = [], []
        for rank in range(self._ranks.size):
            sign = second.get(rank)
            if rank == self._ranks.rank:
                continue
            if sign is None:
                silent.append(f"rank {rank} was never heard of")
            elif first.get(rank, {}).get("beats") == sign["beats"]:
                silent.append(f"rank {rank} is silent, last heard of at step {sign['step']} in {sign['doing']}")
            elif sign["doing"] != _ASKING:  # it has noticed nothing: the others wait for it, or it waits as well
                standing.append(f"rank {rank} stands at step {sign['step']} in {sign['doing']} ({sign['stack']})")
        return "; ".join([*_first_of(silent, "are silent"), *_first_of(standing, "wait or compute elsewhere")])

    def _read(self) -> dict[int, dict[str, Any]]:
        with contextlib.suppress(Exception):  # a store whose host is gone does not answer, which is no new error
            return {rank: json.loads(sign) for rank, sign in _signs(self._ranks.size).items()}
        return {}


def _first_of(sentences: list[str], what: str) -> list[str]:
    """Shorten a list that nobody would read to its end.

    >>> _first_of([f"rank {rank} is silent" for rank in range(1_000)], "are silent")[-2:]
    ['rank 7 is silent', '992 others are silent']
    """
    left = len(sentences) - _MOST_NAMED
    return [*sentences[:_MOST_NAMED], f"{left:,} others {what}"] if left > 1 else sentences


def _leave_sign(rank: int, sign: str) -> None:
    if (file := _file(rank)) is not None:
        write_atomically(file, sign.encode(), sync=False)
    else:
        _store().set(_key(rank), sign)


def _signs(size: int) -> dict[int, str | bytes]:
    """Read the existing signs, all at once: thousands of ranks that ask for each one would keep the store busy."""
    if _file(0) is not None:
        files = {rank: file for rank in range(size) if (file := _file(rank)) is not None and file.exists()}
        return {rank: file.read_bytes() for rank, file in files.items()}
    store, there = _store(), list(range(size))
    if not store.check([_key(rank) for rank in there]):
        there = [rank for rank in there if store.check([_key(rank)])]
    return dict(zip(there, store.multi_get([_key(rank) for rank in there]), strict=True))


def _file(rank: int) -> Path | None:
    """Return where a rank of `bigstep train --procs` leaves its signs: the file that joins these only ever grows."""
    store = os.environ.get(STORE_VARIABLE)
    return Path(f"{store}-heartbeat-{rank}") if store else None


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _key(rank: int) -> str:
    return f"bigstep/heartbeat/{rank}"


def innermost(thread: int, scratch: IO[bytes]) -> list[str]:
    """Return where a thread of this process is: its two innermost frames, the innermost first.

    Hazard: frames of a running thread may be destroyed while they are walked (Python 3.11 then crashes), so this is
    left to `faulthandler`, which walks all of them before any other thread continues.

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
    """Return a file that takes no space on a disk, if the system offers such files."""
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
                    with contextlib.suppress(OSError):  # of a file: a full disk may have room for the next sign
                        _leave_sign(ranks.rank, json.dumps(sign))
                except RuntimeError:
                    return  # the store is gone with its host; the collective will report that

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield heartbeat
    finally:
        done.set()
        thread.join()
