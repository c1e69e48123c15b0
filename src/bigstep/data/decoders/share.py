"""How much of the decoding the device does, beside the loader processes: just so much that a run need not wait."""

from __future__ import annotations

__all__ = ["Share"]

_TOWARDS = 0.02
"""How far the share moves where the run waits, in each batch."""
_BACK = 0.002
"""How far it falls where nobody waits: what the device decodes costs the model time."""
_GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it, modulo 1, fill an interval evenly and with no period: chunks go round the loader processes, and a
share of a quarter must not mean that every fourth of four decodes all."""


class Share:
    """Deals out chunks between the device and the loader processes.

    Args:
        share: The part of the chunks that the device decodes at first.
        fixed: Keep it so.

    >>> share = Share(0.25, fixed=True)
    >>> [share.next() for _ in range(9)]
    [False, True, False, False, True, False, False, False, False]
    """

    def __init__(self, share: float, *, fixed: bool = False) -> None:
        self.value, self._fixed = min(max(share, 0.0), 1.0), fixed
        self._place = 0.0

    def next(self) -> bool:
        """Whether the next chunk is for the device; chunks of both kinds are evenly mixed."""
        self._place = (self._place + _GOLDEN) % 1.0
        return self._place < self.value

    def heed(self, loaders_s: float, device_s: float, *, starving: bool) -> None:
        """Move the share after a batch.

        Args:
            loaders_s: How long the batch was waited for until the loader processes had their part.
            device_s: How long the device took for its part.
            starving: Whether the run was waiting for the batch when it was ready.
        """
        if self._fixed:
            return
        step = -_BACK
        if starving:
            step = _TOWARDS if loaders_s > device_s else -_TOWARDS
        self.value = min(max(self.value + step, 0.0), 1.0)
