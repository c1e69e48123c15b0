"""The processes of an asynchronous run: started, watched, and never left behind."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from bigstep.asynchronous.gate import Rendezvous
from bigstep.asynchronous.reports import Reporter
from bigstep.asynchronous.store import connect_store
from bigstep.described import usable_cores
from bigstep.engine.launch import die_with_launcher
from bigstep.errors import ConfigError

__all__ = ["Processes", "share_cores"]

_END_S = 10.0
"""How long a process may take to end by itself once its work is done."""


@dataclass
class Processes:
    """Child processes by name."""

    where: Rendezvous
    """Where the store of the run is; each process receives it through a pipe that only it reads."""
    members: dict[str, BaseProcess] = field(default_factory=dict)

    def start(self, name: str, work: Callable[..., None], *arguments: Any) -> None:
        """Run `work(store, reporter, *arguments)` in a new process."""
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_enter, args=(os.getpid(), self.where, name, work, arguments), name=name)
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:  # before there is a process
            raise ConfigError(
                f"The model, data or loss cannot be sent to another process ({str(error).splitlines()[0]}); define its "
                "class or function at the top level of a module."
            ) from None
        self.members[name] = process

    def how_ended(self, name: str) -> str | None:
        """Return None while a process lives, then how it ended; an empty string if it ended well."""
        status = self.members[name].exitcode
        if status is None:
            return None
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"failed with status {status}" if status else ""

    def end(self) -> None:
        """Give every process some seconds to end, then kill those that are left."""
        for process in self.members.values():
            process.join(_END_S)
        self.kill()

    def kill(self) -> None:
        """Kill every process now."""
        for process in self.members.values():
            if process.is_alive():
                process.kill()
            process.join()


def share_cores(replicas: int) -> None:
    """Divide this machine's cores among its replicas, unless the user has decided with OMP_NUM_THREADS."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // replicas))


def _leave_it(number: int, frame: Any) -> None:
    """Do nothing: the parent decides. Not SIG_IGN, which processes started from here would inherit."""


def _enter(parent: int, where: Rendezvous, name: str, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """What a child does: die with its parent, leave signals to it, work, and tell why if it fails."""
    die_with_launcher(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a terminal or a scheduler sends them to all
        signal.signal(number, _leave_it)
    store = connect_store(where)
    reporter = Reporter(store, name)
    try:
        with reporter.telling_of_failure():
            work(store, reporter, *arguments)
    except BaseException:
        sys.exit(1)
