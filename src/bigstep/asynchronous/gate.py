"""Who may talk to a run: a secret, a port that admits only those who know it, and how they connect to it.

Everything that a run listens on stands behind a `Gate`. Before a stranger is told or asked anything, both sides prove
that they know the run's secret, which itself never travels:

    server -> client   8 bytes of greeting, a random number s
    client -> server   a random number c, HMAC(secret, "client", s, c)
    server -> client   HMAC(secret, "server", c, s), or zeros if that was wrong

A connection that sends nothing, too much or anything else takes one of a few places for some seconds, and no thread.
torch's TCPStore and Gloo have no such proof, and `multiprocessing.connection` waits for a silent stranger for ever.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import selectors
import socket
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bigstep.errors import ConfigError, RunError

__all__ = ["Gate", "Rendezvous", "connect", "new_secret", "receive", "shared_secret", "split_address"]

_GREETING = b"bigstep1"
_WORD = 32
"""Bytes of a random number and of a proof."""

_PROOF_S = 5.0
"""How long a connection may take to prove that it knows the secret."""

_WAITING = 64
"""How many connections without a proof are kept; one more replaces the oldest."""

_AT_ONCE, _PAUSE_S = 4, 0.02
"""Connections accepted in a row before a pause, and its seconds: 200 a second, one or two hundredths of a core."""

_SHORTEST = 16
"""Fewest characters of a secret that people choose."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the processes of a run meet, and the secret by which they know each other."""

    address: str
    """HOST:PORT"""
    secret: bytes = field(repr=False)

    @property
    def host(self) -> str:
        """The host alone."""
        return split_address(self.address)[0]

    def near(self) -> str:
        """Return the address of this machine on the route to the rendezvous, where others of the run can reach it."""
        host, port = split_address(self.address)
        with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
            probe.connect((host, port or 1))  # sends nothing: asks the kernel for the route
            return str(probe.getsockname()[0])


def split_address(address: str) -> tuple[str, int]:
    """Read HOST:PORT.

    >>> split_address("10.0.0.1:29500")
    ('10.0.0.1', 29500)
    >>> split_address("[::1]:29500")
    ('::1', 29500)
    """
    host, _, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{address!r:.100} is not an address; write HOST:PORT, as in 10.0.0.1:29500.")
    return host, int(port)


def new_secret() -> bytes:
    """Return a new random secret."""
    return secrets.token_bytes(_WORD)


def shared_secret() -> bytes | None:
    """Return the secret that the machines of a run share, from BIGSTEP_SECRET or the file BIGSTEP_SECRET_FILE."""
    if text := os.environ.get("BIGSTEP_SECRET", ""):
        return _secret_of(text, "BIGSTEP_SECRET")
    if not (name := os.environ.get("BIGSTEP_SECRET_FILE", "")):
        return None
    try:
        if stat.S_IMODE(Path(name).stat().st_mode) & 0o077:
            raise ConfigError(f"BIGSTEP_SECRET_FILE names {name:.200}, which others may read; run chmod 600 on it.")
        return _secret_of(Path(name).read_text(encoding="utf-8").strip(), "BIGSTEP_SECRET_FILE")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"BIGSTEP_SECRET_FILE names {name:.200}, which cannot be read ({error}).") from None


def _secret_of(text: str, where: str) -> bytes:
    if len(text) < _SHORTEST:
        raise ConfigError(
            f"{where} has {len(text)} characters, but a secret needs {_SHORTEST} or more; make one with "
            "`openssl rand -hex 32`."
        )
    return hashlib.sha256(text.encode()).digest()


def receive(line: socket.socket, count: int) -> bytes:
    """Return exactly `count` bytes; raises OSError if the connection ends before."""
    parts = bytearray()
    while len(parts) < count:
        part = line.recv(count - len(parts))
        if not part:
            raise ConnectionError("the other side closed the connection")
        parts += part
    return bytes(parts)


def connect(where: Rendezvous, timeout_s: float) -> socket.socket:
    """Connect to a gate; each side proves to the other that it knows the secret.

    Raises OSError if there is no answer, or only part of one (as when strangers crowd the port); RunError if a stranger
    answers.
    """
    line = socket.create_connection(split_address(where.address), timeout=timeout_s)
    try:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if receive(line, len(_GREETING)) != _GREETING:
            raise RunError(f"What answers at {where.address} is not a run of this bigstep; correct the address.")
        theirs, ours = receive(line, _WORD), secrets.token_bytes(_WORD)
        line.sendall(ours + _proof(where.secret, b"client", theirs, ours))
        if not hmac.compare_digest(receive(line, _WORD), _proof(where.secret, b"server", ours, theirs)):
            raise RunError(
                f"The run at {where.address} has another secret; give both the same with BIGSTEP_SECRET or "
                "BIGSTEP_SECRET_FILE."
            )
        return line
    except BaseException:
        line.close()
        raise


def _proof(secret: bytes, side: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret, side + first + second, "sha256")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


@dataclass
class _Pending:
    number: bytes
    """The random number that it was given."""
    deadline: float
    said: bytearray = field(default_factory=bytearray)


class Gate:
    """Listens at a port in a thread of its own and hands on the connections that prove to know the secret."""

    def __init__(self, host: str, port: int, secret: bytes, admit: Callable[[socket.socket], None]):
        """Args:
        host: The interface to listen on.
        port: 0 takes a free one.
        secret: What a connection has to know.
        admit: Called with each connection that proved it; must return at once.
        """
        try:
            self._listener = socket.create_server((host, port), family=_family(host), backlog=128)
        except OSError as error:
            raise ConfigError(
                f"The server cannot listen at {host}:{port} ({error.strerror}); give an address of this machine and a "
                "free port."
            ) from None
        self._listener.setblocking(False)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._secret, self._admit = secret, admit
        self._pending: dict[socket.socket, _Pending] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting connections."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.is_set():
            for key, _ in self._selector.select(timeout=0.2):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read_proof(key.fileobj)  # type: ignore[arg-type]  # a socket: nothing else is registered
            now = time.monotonic()
            for late in [line for line, stranger in self._pending.items() if stranger.deadline < now]:
                self._reject(late)
        for line in list(self._pending):
            self._reject(line)
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                line, _ = self._listener.accept()
            except BlockingIOError:  # nobody else waits: a pause here would only keep friends waiting
                return
            except OSError:  # it left again, or this process has no free descriptor just now
                break
            number = secrets.token_bytes(_WORD)
            line.setblocking(False)
            self._pending[line] = _Pending(number, time.monotonic() + _PROOF_S)
            self._selector.register(line, selectors.EVENT_READ)
            try:
                line.send(_GREETING + number)  # a new connection has room for 40 bytes
            except OSError:
                self._reject(line)
            if len(self._pending) > _WAITING:
                self._reject(next(iter(self._pending)))
        time.sleep(_PAUSE_S)

    def _read_proof(self, line: socket.socket) -> None:
        stranger = self._pending.get(line)
        if stranger is None:  # rejected a moment ago
            return
        try:
            said = line.recv(2 * _WORD - len(stranger.said))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        stranger.said += said
        if not said:
            self._reject(line)
        elif len(stranger.said) == 2 * _WORD:
            ours, told = bytes(stranger.said[:_WORD]), bytes(stranger.said[_WORD:])
            if not hmac.compare_digest(told, _proof(self._secret, b"client", stranger.number, ours)):
                with contextlib.suppress(OSError):  # a friend with another secret should learn why
                    line.send(bytes(_WORD))
                self._reject(line)
                return
            self._forget(line)
            with contextlib.suppress(OSError, RuntimeError):  # it left again, or no more threads can be started
                line.setblocking(True)
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                line.sendall(_proof(self._secret, b"server", ours, stranger.number))
                self._admit(line)

    def _forget(self, line: socket.socket) -> None:
        del self._pending[line]
        self._selector.unregister(line)

    def _reject(self, line: socket.socket) -> None:
        self._forget(line)
        line.close()
