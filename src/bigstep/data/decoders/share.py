"""How much of the decoding the device does when cores can help: all of it, unless the run waits for it."""

from __future__ import annotations

__all__ = ["Share"]

_STEP = 0.01 / 256
"""How far the share moves per image of a batch if the run waits."""
_BACK = 0.001 / 256
"""How far it rises per image if the run does not wait: cores that need not help are free for other work."""


class Share:
    """Divides images between the device and the cores.

    Args:
        share: The part that the device decodes at first.
        least: The part that it always decodes: cores with more work than they can do would slow everything down.
        fixed: Never change the share.

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
            loaders_s: Seconds of waiting until the batch was read and the cores had done their part.
            device_s: Seconds that the device took for its part.
            starving: Whether the run was waiting for the batch when it was ready.
        """
        if self._fixed:
            return
        step = _BACK
        if starving:
            step = _STEP if loaders_s > device_s else -_STEP
        self.value = min(max(self.value + images * step, self._least), 1.0)
