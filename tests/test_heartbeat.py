"""Signs of life at scale: they take no room that grows, few requests to the store, and a sentence that can be read."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from bigstep.engine import heartbeat
from bigstep.engine.heartbeat import Heartbeat, beating
from bigstep.engine.ranks import STORE_VARIABLE, Ranks
from worlds import forked_context

RANKS = 300


class Counting:
    """A store that counts what it is asked."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.requests = store, 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.requests += 1
        return getattr(self.store, name)  # type: ignore[no-any-return]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    """A real store, as torchrun has it, in which every rank but the last has left its sign and is gone."""
    counting = Counting(dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False))
    sign = json.dumps({"beats": 1, "step": 7, "doing": "forward and backward", "stack": "somewhere"})
    for rank in range(RANKS - 1):
        counting.store.set(f"bigstep/heartbeat/{rank}", sign)
    monkeypatch.setattr(heartbeat, "_store", lambda: counting)
    monkeypatch.setattr(heartbeat, "_SECONDS_BETWEEN_BEATS", 0.01)
    return counting


def test_whoever_asks_for_missing_ranks_asks_the_store_once_for_all(store: Counting) -> None:
    asking = Heartbeat(Ranks(0, RANKS - 1))
    asking.missing()
    assert store.requests <= 4, "all ranks ask when one is lost: a request a rank each is the square of them"


def test_a_sentence_names_a_hosts_ranks_and_counts_the_others(store: Counting) -> None:
    said = Heartbeat(Ranks(0, RANKS)).missing().split("; ")
    assert said[0] == "rank 1 is silent, last heard of at step 7 in forward and backward"
    assert said[-1] == "291 others are silent"
    assert len(said) == 9
    assert Heartbeat(Ranks(0, 4)).missing().count("is silent") == 3


def test_a_rank_that_never_came_is_told_from_one_that_went(store: Counting) -> None:
    said = Heartbeat(Ranks(RANKS - 2, RANKS)).missing()
    assert "never heard of" not in said  # it is among those that are counted
    store.store.delete_key("bigstep/heartbeat/1")
    assert "rank 1 was never heard of; rank 2 is silent" in Heartbeat(Ranks(0, 4)).missing()


def beat_beside(path: str, answers: Any) -> None:
    """Beat fifty times as a rank that `bigstep train --procs` started, and tell by how much the store has grown."""
    heartbeat._SECONDS_BETWEEN_BEATS = 0.005
    os.environ[STORE_VARIABLE] = path
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    before = os.path.getsize(path)
    with beating(Ranks(0, 2)) as beats:
        deadline = time.monotonic() + 40
        while beats._read().get(0, {"beats": 0})["beats"] < 50 and time.monotonic() < deadline:
            time.sleep(0.01)
        seen = beats._read()
    answers.put((seen[0]["beats"], sorted(seen), os.path.getsize(path) - before))


def test_the_store_of_a_machine_does_not_grow_with_the_length_of_a_run(tmp_path: Path) -> None:
    context = forked_context()
    answers = context.Queue()
    process = context.Process(target=beat_beside, args=(str(tmp_path / "store"), answers))
    process.start()
    beats, seen, grown = answers.get(timeout=60)
    process.join()
    assert beats >= 50
    assert seen == [0], "the other rank has left no sign"
    assert grown == 0, "a file store appends whatever is set, and a run may take weeks"


def test_a_disk_that_is_full_for_a_while_silences_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run goes on without the checkpoint that did not fit, and whoever is asked about later must be alive then."""
    write, refused = heartbeat.write_atomically, list[Path]()

    def once_there_is_room(path: Path, *arguments: Any, **options: Any) -> None:
        if len(refused) < 3:
            refused.append(path)
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, *arguments, **options)

    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path / "store"))
    monkeypatch.setattr(heartbeat, "_SECONDS_BETWEEN_BEATS", 0.01)
    monkeypatch.setattr(heartbeat, "write_atomically", once_there_is_room)
    deadline = time.monotonic() + 10
    with beating(Ranks(0, 2)) as beats:
        while not (seen := beats._read()) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert seen[0]["beats"] > len(refused) == 3
