"""SIGTERM, SIGHUP and SIGINT as requests: the run saves its state and ends with a sentence."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from bigstep.engine.ranks import AgreedError

__all__ = ["StoppedError", "StopRequest", "listening"]


_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""What asks a run to save its state and stop, the most urgent first."""


class StoppedError(AgreedError):
    """A run that was asked to stop, and did so in a state from which it can be resumed."""

    def __init__(self, number: int, step: int, *, saved: bool = True, state: str = ""):
        """`state` says what became of a run that cannot be resumed."""
        self.exit_status = 128 + number  # as a shell reports a process that a signal ended
        self.number, self.step = number, step
        kept = "its state is saved" if saved else "its state could not be saved, but an earlier one may be there"
        state = state or f"{kept}: continue with --resume"
        super().__init__(f"Stopped by {signal.Signals(number).name} after step {step}; {state}.")


class StopRequest:
    """Remembers a signal until the loop asks; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.number = 0

    def votes(self) -> list[float]:
        """Return this rank's votes for `agree` to decide on; some ranks may not have received the signal yet."""
        return [float(self.number == number) for number in _SIGNALS]

    @staticmethod
    def agree(votes: list[float]) -> int:
        """Return the signal that all ranks obey, from the sum of their votes; 0 for none."""
        return next((int(number) for number, count in zip(_SIGNALS, votes, strict=True) if count), 0)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number


@contextlib.contextmanager
def listening() -> Iterator[StopRequest]:
    """Catch these signals during a run; outside the main thread, leave them alone."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    # a signal that is ignored stays so: SIGHUP under nohup
    heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, request) for number in heard}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
