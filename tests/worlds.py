"""A pool of rank processes for tests: started once, reused by every test, replaced after a failure.

A rank that imports torch for itself costs seconds; these are forked from a server that has done so. `world(n)` takes
the first n processes of the pool and gives them a Gloo group of their own.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

COLLECTIVE_TIMEOUT_S = 20
RUNS_IN_A_GROUP = 6
"""After so many, ranks join a new group: what runs have made inside the old one ends with it, and so do its threads,
each of which wakes a hundred times a second."""


_WORLDS = itertools.count()


def forked_context() -> Any:
    """Multiprocessing whose processes are forked from a server that has imported what most of them need."""
    _start_server()
    return multiprocessing.get_context("forkserver")


@functools.cache
def _start_server() -> None:
    multiprocessing.set_forkserver_preload(["preloaded"])
    with pytest.MonkeyPatch.context() as patch:  # the server looks for modules where the environment says
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        forkserver.ensure_running()


class WarmContext:
    """Stands for `multiprocessing.get_context("spawn")`: its processes need not import torch, and are else the same.

    What they get travels by pickle, their environment is that of whoever starts them, and they end with this process,
    through the server between them. Processes that other programs of the tests start are spawned.
    """

    def Process(self, *, target: Callable[..., Any], args: tuple[Any, ...] = (), **more: Any) -> Any:  # noqa: N802
        return forked_context().Process(target=_as_spawned, args=(dict(os.environ), os.getpid(), target, args), **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(forked_context(), name)


def _as_spawned(environment: Mapping[str, str], parent: int, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.getppid = lambda: parent  # a process that ends with its parent asks who that is
    target(*args)


def _serve(connection: Connection) -> None:
    """What a rank process does: join the group it is told to, run functions, send back results."""
    assert "preloaded" in sys.modules, "the server, which says nothing of it, could not import what it should"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    from bigstep.check.pool import tidy

    torch.set_num_threads(1)
    calls = 0
    while True:
        message = connection.recv()
        if message is None:
            break
        try:
            if message[0] == "leave":
                if dist.is_initialized():
                    dist.destroy_process_group()
                tidy(calls := calls + 1)
                connection.send(("ok", None))
            elif message[0] == "join":
                _, rank, size, port, name = message
                if dist.is_initialized():
                    dist.destroy_process_group()
                dist.init_process_group(
                    "gloo",
                    store=dist.PrefixStore(name, _store_at(port)),
                    rank=rank,
                    world_size=size,
                    timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S),
                )
                connection.send(("ok", None))
            else:
                _, function, args = message
                connection.send(("ok", function(*args)))
                del function, args
                tidy(calls := calls + 1)
        except BaseException:
            connection.send(("error", traceback.format_exc()))
    if dist.is_initialized():
        dist.destroy_process_group()


@functools.cache
def _store_at(port: int, *, hosted: bool = False) -> Any:
    """Through it ranks find each other; unlike a file it wakes whoever waits for it."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", port, is_master=hosted, wait_for_workers=False)


@dataclass
class Pool:
    """Rank processes, grown as wider worlds are asked for."""

    ranks: list[tuple[BaseProcess, Connection]] = field(default_factory=list)
    size: int = 0  # of the group that the first `size` processes are in now; 0 for none
    runs: int = 0  # in the present group

    def world(self, size: int) -> World:
        context = forked_context()
        while len(self.ranks) < size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.ranks.append((process, ours))
        if self.size != size or self.runs >= RUNS_IN_A_GROUP:
            joined, self.runs = self.size, 0
            place = (_store_at(0, hosted=True).port, f"world-{next(_WORLDS)}")
            self.size = size
            World(self, size).call([("join", rank, size, *place) for rank in range(size)], timeout=60)
            for _, connection in self.ranks[size:joined]:
                connection.send(("leave",))
                connection.recv()
        return World(self, size)

    def replace(self) -> None:
        """End every process; the next world starts fresh ones."""
        for process, connection in self.ranks:
            connection.close()
            process.kill()
            process.join()
        self.ranks.clear()
        self.size = 0

    def close(self) -> None:
        for _, connection in self.ranks:
            connection.send(None)
        for process, _ in self.ranks:
            process.join(timeout=10)
            process.kill()


@dataclass
class World:
    """The first `size` processes of a pool, joined in one group."""

    pool: Pool
    size: int

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 45) -> list[Any]:
        """Run `function(*args)` on every rank; the function must be importable (defined at the top of a module)."""
        return self.call([("run", function, args)] * self.size, timeout)

    def run_each(self, function: Callable[..., Any], args: list[tuple[Any, ...]], timeout: float = 45) -> list[Any]:
        """Run `function` on every rank, each with its own arguments."""
        return self.call([("run", function, mine) for mine in args], timeout)

    def call(self, messages: list[Any], timeout: float) -> list[Any]:
        self.pool.runs += 1
        try:
            return self._ask(messages, timeout)
        except BaseException:  # also what ends a test from outside: an answer that comes late is not for the next one
            self.pool.replace()
            raise

    def _ask(self, messages: list[Any], timeout: float) -> list[Any]:
        members = self.pool.ranks[: self.size]
        for (_, connection), message in zip(members, messages, strict=True):
            connection.send(message)
        results, errors = [], []
        for rank, (process, connection) in enumerate(members):
            try:
                if not connection.poll(timeout):
                    errors.append(f"rank {rank} did not answer within {timeout} s")
                    break
                status, value = connection.recv()
            except (EOFError, ConnectionResetError):
                process.join(5)
                status, value = "error", f"the process died with status {process.exitcode}"
            if status == "error":
                errors.append(f"rank {rank}:\n{value}")
            results.append(value)
        if errors:
            raise AssertionError("\n".join(errors))
        return results
