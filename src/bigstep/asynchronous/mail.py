"""How replicas, shards and the coordinator speak of other things than gradients: one TCPStore, a few keys.

The store lives in the coordinator. Counters number the replicas and hand out shares; reports are numbered letters
that the coordinator reads and deletes; flags tell that the run began, that the warm start is over, or that a peer is
gone. Nobody waits inside the store (a waiting client blocks its other threads, and torch logs every timeout): whoever
has to wait looks again a little later.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from bigstep.errors import ConfigError, RunError

__all__ = [
    "LOOK_S",
    "START_S",
    "Mailbox",
    "Post",
    "Store",
    "connect_store",
    "host_store",
    "or_gone",
    "split_address",
    "wait_until",
]

LOOK_S = 0.01
"""Seconds between two looks at a flag."""

START_S = 300.0
"""How long processes may take to load the program and the data."""

CONNECT_S = 30.0
"""How long a server may take to answer before it counts as not there."""


class Store(Protocol):
    """What is used of torch's stores, whose types torch does not export."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it."""

    def set(self, key: str, value: str) -> None:
        """Set a value."""

    def get(self, key: str) -> bytes:
        """Return a value."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""

    def delete_key(self, key: str) -> bool:
        """Forget a key."""


def split_address(address: str) -> tuple[str, int]:
    """Read HOST:PORT.

    >>> split_address("10.0.0.1:29500")
    ('10.0.0.1', 29500)
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{address!r} is no address of a server; write HOST:PORT, as in 10.0.0.1:29500.")
    return host, int(port)


def host_store(listen: str) -> tuple[Store, str]:
    """Open the store of a run; return it with the address that others reach it at (port 0 takes a free one)."""
    host, port = split_address(listen)
    try:
        # bound here, so that a port in use is one sentence and not torch's log
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(
            f"The server cannot listen at {listen} ({error.strerror}); give an address of this machine and a free port."
        ) from None
    port = listener.getsockname()[1]
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=CONNECT_S),
        master_listen_fd=listener.detach(),
    )
    return store, f"{host}:{port}"


def connect_store(address: str, timeout_s: float = CONNECT_S) -> Store:
    """Join the store at HOST:PORT, or say in one sentence that nobody answers there."""
    host, port = split_address(address)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=timeout_s).close()
            break
        except OSError as error:
            if time.monotonic() >= deadline or isinstance(error, socket.gaierror):
                reason = error.strerror or str(error)
                raise RunError(
                    f"No parameter server answers at {address} within {timeout_s:g} s ({reason}); start "
                    "`bigstep train downpour` there first, or correct the address."
                ) from None
            time.sleep(0.1)  # it may be starting
    limit = timedelta(seconds=CONNECT_S)
    store: Store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)  # type: ignore[attr-defined]
    return store


@contextlib.contextmanager
def or_gone(address: str) -> Iterator[None]:
    """Say in one sentence that the coordinator is gone, where torch would tell of a socket."""
    try:
        yield
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        raise RunError(f"The Downpour run at {address} is gone ({reason}).") from None


def wait_until(holds: Callable[[], bool], timeout_s: float, sentence: str) -> None:
    """Look again and again until something holds; give up with a sentence."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise RunError(sentence)
        time.sleep(LOOK_S)


class Post:
    """The sender's side: letters to the coordinator, in order."""

    def __init__(self, store: Store, sender: str):
        self._store, self._sender, self._sent = store, sender, 0

    def send(self, **letter: Any) -> None:
        """Send plain values."""
        self._store.set(f"mail/{self._sender}/{self._sent}", json.dumps(letter))
        self._sent += 1


class Mailbox:
    """The coordinator's side."""

    def __init__(self, store: Store):
        self._store = store
        self._read: dict[str, int] = {}

    def collect(self, sender: str) -> list[dict[str, Any]]:
        """Return the letters of a sender that have come since the last look."""
        letters = []
        while self._store.check([key := f"mail/{sender}/{self._read.get(sender, 0)}"]):
            letters.append(json.loads(self._store.get(key)))
            with contextlib.suppress(RuntimeError):  # stores that cannot delete keep what was read
                self._store.delete_key(key)
            self._read[sender] = self._read.get(sender, 0) + 1
        return letters
