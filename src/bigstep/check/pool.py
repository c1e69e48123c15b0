"""Rank processes that stay alive: started once, joined into worlds of any size, never left behind.

A new process takes seconds (it imports torch); joining live ones into another world takes milliseconds. So all
properties of a check share one pool. Most alternate between one rank and several: the world of one has a process of
its own, so that the others stay joined.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from bigstep.engine.launch import die_with_launcher
from bigstep.engine.launchers import LOOPBACK
from bigstep.engine.scratch import Scratch
from bigstep.errors import BigstepError, ConfigError, RunError

__all__ = ["Pool", "pickled"]

COLLECTIVE_TIMEOUT_S = 60.0
"""After this long, a rank gives up on a collective that its peers do not reach."""
CALL_TIMEOUT_S = 240.0
"""After this long, ranks that have not answered are killed and replaced."""

_Member = tuple[BaseProcess, Connection]


def pickled(content: Any) -> bytes:
    """Return what other processes can read, or refuse what cannot be sent to them."""
    try:
        return pickle.dumps(content)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"What is to be checked must reach other processes, but cannot be pickled ({error}); define models, "
            "losses, data sets and functions at the top level of a module, not inside a function or as a lambda."
        ) from None


class Pool:
    """Processes for Gloo worlds on this machine; a context manager that ends them all.

    Functions and their arguments are pickled, so a function must be importable: define it at the top level of a
    module; in a script, put only the call below `if __name__ == "__main__":`.

    >>> import operator
    >>> with Pool() as pool:
    ...     pool.run(1, operator.add, 2, 3)
    [5]
    """

    def __init__(self, *, call_timeout_s: float = CALL_TIMEOUT_S) -> None:
        self.call_timeout_s = call_timeout_s
        self._scratch = Scratch()
        self.folder = self._scratch.path
        """For files that ranks share; removed with the pool."""
        self._alone: list[_Member] = []
        self._together: list[_Member] = []
        self._joined = 0  # size of the current world of several ranks; 0 for none
        self._worlds = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `function(*args)` on every rank of a world and return what each returned.

        Args:
            ranks: Size of the world; its processes are joined in one Gloo group, except a world of one, which has none.
            function: What to run.
            args: Its arguments, the same on every rank.

        Raises:
            RunError: naming the rank that raised, died, or did not answer in time. The next call gets a fresh world.
        """
        message = pickled(("run", function, args))
        return self._ask(self._join(ranks), [message] * ranks)

    def start(self, ranks: int) -> None:
        """Start the processes for worlds of up to `ranks`, without waiting: they import torch in parallel."""
        self._start(self._alone, 1)
        if ranks > 1:
            self._start(self._together, ranks)

    def close(self) -> None:
        """End every process and remove the folder; harmless when called twice."""
        self._end()
        self._scratch.close()

    def _start(self, members: list[_Member], count: int) -> list[_Member]:
        context = multiprocessing.get_context("spawn")
        while len(members) < count:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
            with _leaving_interrupts():
                process.start()
            theirs.close()
            members.append((process, ours))
        return members[:count]

    def _join(self, ranks: int) -> list[_Member]:
        """Return the processes of a world, and join them if they are not joined yet."""
        if ranks == 1:
            return self._start(self._alone, 1)
        members = self._start(self._together, ranks)
        if self._joined != ranks:
            self._worlds += 1
            store = str(self.folder / f"store-{self._worlds}")
            self._ask(members, [pickle.dumps(("join", rank, ranks, store)) for rank in range(ranks)])
            self._joined = ranks
        return members

    def _ask(self, members: Sequence[_Member], messages: Sequence[bytes]) -> list[Any]:
        """Send each rank its message and collect all answers, or raise the error that came first."""
        answers: dict[int, Any] = {}
        problems: dict[int, tuple[float, BaseException | str]] = {}
        deadline = time.monotonic() + self.call_timeout_s
        dead = False
        for rank, (_, connection) in enumerate(members):
            with contextlib.suppress(OSError):  # a process that died is reported below
                connection.send_bytes(messages[rank])
        for rank, (process, connection) in enumerate(members):
            try:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    problems[rank] = (float("inf"), f"did not answer within {self.call_timeout_s:.0f} s")
                    dead = True
                    continue
                when, ok, value = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                process.join(1.0)
                problems[rank] = (0.0, f"ended with status {process.exitcode}")
                dead = True
                continue
            if ok:
                answers[rank] = value
            else:
                problems[rank] = (when, value)
        if not problems:
            return [answers[rank] for rank in range(len(members))]
        self._joined = 0  # its collectives may be out of step: the next world is a new one
        if dead:
            self._end()
        # the others fail because one did: the first in time is the cause
        rank = min(problems, key=lambda r: problems[r][0])
        _, problem = problems[rank]
        if isinstance(problem, BigstepError):
            raise problem
        raise RunError(f"Rank {rank} of {len(members)}: {problem}")

    def _end(self) -> None:
        members = self._alone + self._together
        for _, connection in members:
            connection.close()  # an idle process then ends by itself; a busy one is killed
        for process, _ in members:
            process.join(0.2)
            if process.is_alive():
                process.kill()
            process.join()
        self._alone, self._together, self._joined = [], [], 0


@contextlib.contextmanager
def _leaving_interrupts() -> Any:
    """Ignore SIGINT while a process starts: it inherits that, so that only this process reacts to Ctrl-C."""
    try:
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # only the main thread can set signal handlers
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _serve(connection: Connection, launcher: int) -> None:
    """The main loop of a rank process: join worlds, run functions, send back what they return."""
    die_with_launcher(launcher)
    os.dup2(2, 1)  # standard output is for the report: what a model prints goes to standard error
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    import torch

    from bigstep.exchange.groups import lending

    torch.set_num_threads(1)
    calls = 0
    with contextlib.suppress(EOFError):
        while True:
            try:
                kind, *rest = pickle.loads(connection.recv_bytes())
                function, args = (_join, rest) if kind == "join" else rest
                with lending() if kind == "run" else contextlib.nullcontext():
                    value = function(*args)
                answer = pickle.dumps((time.time(), True, value))
                del function, args, value
                tidy(calls := calls + 1)
            except EOFError:
                raise
            except BigstepError as error:
                answer = pickle.dumps((time.time(), False, error))
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                first_line = (str(error).splitlines() or [""])[0]
                told = f"{type(error).__name__}: {first_line} ({Path(where.filename).name}, line {where.lineno})"
                answer = pickle.dumps((time.time(), False, told))
            connection.send_bytes(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a normal exit tears torch down, which takes longer than the pool waits


def tidy(calls: int) -> None:
    """Collect garbage every ten calls: a run is a reference cycle, and its process groups have threads.

    Without it a check leaves sixty threads in a process. Modules live as long as the process, so the collector scans
    them only once.
    """
    if calls % 10 == 1:
        gc.collect()
    if calls == 1:
        gc.freeze()


def _join(rank: int, ranks: int, store: str) -> None:
    import datetime

    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
