"""What processes tell the coordinator: numbered reports in the store, which it reads and deletes."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from bigstep.asynchronous.store import Store, StoreGoneError
from bigstep.errors import BigstepError, RunError

__all__ = ["LOOK_S", "START_S", "Reports", "Reporter", "wait_until"]

LOOK_S = 0.01
"""Seconds between two looks at a flag."""

START_S = 300.0
"""How long processes may take to load the program and the data."""


def wait_until(holds: Callable[[], bool], timeout_s: float, sentence: str) -> None:
    """Poll until `holds` returns true; raise RunError with `sentence` after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise RunError(sentence)
        time.sleep(LOOK_S)


class Reporter:
    """The sender's side: reports to the coordinator, in order."""

    def __init__(self, store: Store, sender: str):
        self._store, self._sender, self._sent = store, sender, 0

    def send(self, **report: Any) -> None:
        """Send plain values."""
        self._store.set(f"reports/{self._sender}/{self._sent}", json.dumps(report))
        self._sent += 1

    @contextlib.contextmanager
    def telling_of_failure(self) -> Iterator[None]:
        """Report the reason if the work inside fails."""
        try:
            yield
        except BaseException as error:
            known = isinstance(error, BigstepError)
            sentence = str(error) if known else f"{type(error).__name__}: {error}"
            details = "" if known else traceback.format_exc()
            with contextlib.suppress(StoreGoneError):
                self.send(kind="failed", text=sentence.splitlines()[0], details=details)
            raise


class Reports:
    """The coordinator's side."""

    def __init__(self, store: Store):
        self._store = store
        self._read: dict[str, int] = {}

    def collect(self, sender: str) -> list[dict[str, Any]]:
        """Return the reports of a sender that have come since the last look."""
        reports = []
        while self._store.check([key := f"reports/{sender}/{self._read.get(sender, 0)}"]):
            reports.append(json.loads(self._store.get(key)))
            self._store.delete_key(key)
            self._read[sender] = self._read.get(sender, 0) + 1
        return reports
