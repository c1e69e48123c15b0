"""A pool of rank processes for tests: started once, reused by every test, replaced after a failure.

A rank that imports torch for itself costs seconds; these are forked from a server that has done so. `world(n)` takes
the first n processes of the pool and gives them a Gloo group of their own.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

COLLECTIVE_TIMEOUT_S = 20
RUNS_IN_A_GROUP = 6
"""After so many, ranks join a new group: what runs have made inside the old one ends with it, and so do its threads,
each of which wakes a hundred times a second."""


def forked_context() -> Any:
    """Multiprocessing whose processes are forked from a server that has imported what most of them need."""
    context = multiprocessing.get_context("forkserver")
    # importing these starts no threads and looks for no GPU, so that a fork is whole
    context.set_forkserver_preload(["pytest", "torch._dynamo", "numba", "bigstep.train", "bigstep.check"])
    return context


def _serve(connection: Connection) -> None:
    """What a rank process does: join the group it is told to, run functions, send back results."""
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
                _, rank, size, store = message
                if dist.is_initialized():
                    dist.destroy_process_group()
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{store}",
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


@dataclass
class Pool:
    """Rank processes, grown as wider worlds are asked for."""

    ranks: list[tuple[BaseProcess, Connection]] = field(default_factory=list)
    size: int = 0  # of the group that the first `size` processes are in now; 0 for none
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="bigstep-worlds-")))
    groups: int = 0
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
            joined, self.groups, self.runs = self.size, self.groups + 1, 0
            store = str(self.folder / f"store-{self.groups}")
            self.size = size
            World(self, size).call([("join", rank, size, store) for rank in range(size)], timeout=60)
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
        for path in self.folder.glob("*"):
            path.unlink()
        self.folder.rmdir()


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
        connections = [connection for _, connection in self.pool.ranks[: self.size]]
        for connection, message in zip(connections, messages, strict=True):
            connection.send(message)
        results, errors = [], []
        for rank, connection in enumerate(connections):
            try:
                if not connection.poll(timeout):
                    errors.append(f"rank {rank} did not answer within {timeout} s")
                    break
                status, value = connection.recv()
            except (EOFError, ConnectionResetError):
                status, value = "error", "the process died"
            if status == "error":
                errors.append(f"rank {rank}:\n{value}")
            results.append(value)
        if errors:
            self.pool.replace()
            raise AssertionError("\n".join(errors))
        return results
