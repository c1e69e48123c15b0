"""The values that all processes of a run see: a dictionary in the coordinator, behind a gate.

Counters number the replicas and hand out shares; flags tell that the run began, that the warm start is over, or that a
peer is gone. No request blocks in the store: a process that has to wait asks again a little later.

On the wire a request is a JSON list [operation, key, value] and its answer a JSON value, each preceded by its length in
four bytes.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from bigstep.asynchronous.gate import Gate, Rendezvous, connect, new_secret, receive, shared_secret, split_address
from bigstep.errors import ConfigError, RunError

__all__ = ["HostedStore", "Store", "StoreGoneError", "connect_store", "host_store", "or_gone"]

CONNECT_S = 30.0
"""How long a server may take to answer before it counts as not there."""

_TRY_S = 5.0
"""Of that, the time for one attempt: one that a full queue has lost is never answered, however long one waits."""

_REPLY_S = 300.0
"""How long a coordinator may take to reply once connected: it may be evaluating, or suspended for a while."""

_LONGEST = 1 << 26
"""Most bytes of a message; rows of a run take far fewer."""

_LOOPBACK = ("127.", "localhost", "::1")


class StoreGoneError(RuntimeError):
    """The coordinator does not answer any more."""


class Store(Protocol):
    """What every process can do with the values of a run."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it."""

    def set(self, key: str, value: str) -> None:
        """Set a value."""

    def get(self, key: str) -> str:
        """Return a value; raises RunError if there is none."""

    def find(self, key: str) -> str | None:
        """Return a value, or None if there is none: for one that may be deleted at any time."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was there."""

    def close(self) -> None:
        """Disconnect from the store, or, where it is hosted, accept no more processes."""


class HostedStore:
    """The dictionary itself; safe to call from several threads."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._counters: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it."""
        with self._lock:
            self._counters[key] = self._counters.get(key, 0) + int(amount)
            return self._counters[key]

    def set(self, key: str, value: str) -> None:
        """Set a value."""
        with self._lock:
            self._values[key] = str(value)

    def get(self, key: str) -> str:
        """Return a value; raises RunError if there is none."""
        return _given(key, self.find(key))

    def find(self, key: str) -> str | None:
        """Return a value, or None if there is none."""
        with self._lock:
            return self._values.get(key)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        with self._lock:
            return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was there."""
        with self._lock:
            return self._values.pop(key, None) is not None

    def listen(self, host: str, port: int, secret: bytes) -> Rendezvous:
        """Accept other processes; return where they connect."""

        def admit(line: socket.socket) -> None:
            threading.Thread(target=self._serve, args=(line,), name="store", daemon=True).start()

        self._gate = Gate(host, port, secret, admit)
        return Rendezvous(self._gate.address, secret)

    def close(self) -> None:
        """Accept no more processes."""
        self._gate.close()

    def _serve(self, line: socket.socket) -> None:
        """Answer one process until it leaves."""
        left: set[str] = set()
        operations: dict[str, Callable[..., Any]] = {
            "add": self.add, "set": self.set, "get": self.find, "check": self.check, "delete_key": self.delete_key,
            "leave": left.add,
        }  # fmt: skip
        with line, contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            while True:
                operation, *arguments = json.loads(_read(line))
                _write(line, operations[operation](*arguments))
        for key in left:
            self.set(key, "")


class _RemoteStore:
    """The store of a coordinator elsewhere; safe to call from several threads."""

    def __init__(self, line: socket.socket):
        self._line, self._lock = line, threading.Lock()
        line.settimeout(_REPLY_S)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(int, "add", key, amount))

    def set(self, key: str, value: str) -> None:
        self._ask(type(None), "set", key, value)

    def get(self, key: str) -> str:
        return _given(key, self.find(key))

    def find(self, key: str) -> str | None:
        found: str | None = self._ask((str, type(None)), "get", key)
        return found

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(bool, "check", keys))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(bool, "delete_key", key))

    def close(self) -> None:
        self._line.close()

    def leave(self, key: str) -> None:
        """Have a key set when this process disconnects, however it ends."""
        self._ask(type(None), "leave", key)

    def _ask(self, kind: Any, *request: Any) -> Any:
        try:
            with self._lock:
                _write(self._line, request)
                answer = json.loads(_read(self._line))
        except (OSError, ValueError, RecursionError) as error:
            raise StoreGoneError(str(error)) from None
        if not isinstance(answer, kind):
            raise StoreGoneError(f"it answers {request[0]} with {answer!r:.60}")
        return answer


def _given(key: str, value: str | None) -> str:
    if value is None:
        raise RunError(f"The run has no value {key!r:.60}; its processes seem to be of different versions.")
    return value


def _write(line: socket.socket, value: Any) -> None:
    text = json.dumps(value).encode()
    line.sendall(len(text).to_bytes(4, "big") + text)


def _read(line: socket.socket) -> bytes:
    length = int.from_bytes(receive(line, 4), "big")
    if length > _LONGEST:
        raise ValueError(f"a message of {length} bytes")
    return receive(line, length)


def host_store(listen: str, *, alone: bool = True) -> tuple[HostedStore, Rendezvous]:
    """Open the store of a run; return it with where others reach it (port 0 takes a free one).

    Args:
        listen: HOST:PORT of this machine.
        alone: Whether no process joins from elsewhere: then the secret may be a new one, given to own processes only.
    """
    host, port = split_address(listen)
    secret = shared_secret()
    if secret is None and not (alone and host.startswith(_LOOPBACK)):
        raise ConfigError(
            "Processes on other machines need a secret that the whole run shares: set BIGSTEP_SECRET, or "
            "BIGSTEP_SECRET_FILE to a file that holds it, for each of them; make one with `openssl rand -hex 32`."
        )
    if host in ("0.0.0.0", "::"):
        raise ConfigError(f"The server cannot be reached at {listen}; give the address that the others know it by.")
    store = HostedStore()
    return store, store.listen(host, port, secret or new_secret())


def connect_store(where: Rendezvous, timeout_s: float = CONNECT_S) -> _RemoteStore:
    """Join the store of a run; raises RunError if nobody answers there."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _RemoteStore(connect(where, min(_TRY_S, timeout_s)))
        except OSError as error:
            if time.monotonic() >= deadline or isinstance(error, socket.gaierror):
                reason = error.strerror or str(error)
                raise RunError(
                    f"No parameter server answers at {where.address} within {timeout_s:g} s ({reason}); start "
                    "`bigstep train downpour` there first, or correct the address."
                ) from None
            time.sleep(0.1)  # it may be starting, or its queue may have been full


@contextlib.contextmanager
def or_gone(address: str) -> Iterator[None]:
    """Turn the socket error of a store into one sentence: the coordinator is gone."""
    try:
        yield
    except StoreGoneError as error:
        raise RunError(f"The Downpour run at {address} is gone ({error}).") from None
