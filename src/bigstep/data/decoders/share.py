"""How much of the decoding the device does, beside cores that may help: all of it, unless a run waits for it."""

from __future__ import annotations

__all__ = ["Share"]

_STEP = 0.01 / 256
"""How far the share moves where the run waits, for each image of a batch."""
_BACK = 0.001 / 256
"""How far it rises where nobody waits: cores that need not help are free for others."""


class Share:
    """Divides images between the device and the cores.

    Args:
        share: The part that the device decodes at first.
        least: The part that it always decodes: cores that are given more than they can do slow all of it down.
        fixed: Keep it so.

    >>> share = Share(1.0)
    >>> share.heed(256, loaders_s=0.0, device_s=0.03, starving=True)
    >>> share.value
    0.99
    """

    def __init__(self, share: float, *, least: float = 0.0, fixed: bool = False) -> None:
        self._least = min(max(least, 0.0), 1.0)
        self.value, self._fixed = min(max(share, self._least), 1.0), fixed

    def heed(self, images: int, loaders_s: float, device_s: float, *, starving: bool) -> None:
        """Move the share after a batch.

        Args:
            images: In the batch.
            loaders_s: How long the batch was waited for until it was read and the cores had their part.
            device_s: How long the device took for its part.
            starving: Whether the run was waiting for the batch when it was ready.
        """
        if self._fixed:
            return
        step = _BACK
        if starving:
            step = _STEP if loaders_s > device_s else -_STEP
        self.value = min(max(self.value + images * step, self._least), 1.0)
