"""Text with windows of unequal length: only these expose code that divides by samples instead of by tokens.

A text that is cut into windows has one short window at its end, which may fall into a step that no row looks at. In a
check most windows end in padding, as sentences do in a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from bigstep.data.device_memory import Take
from bigstep.data.sources.base import PADDING
from bigstep.data.sources.text import TokenWindows
from bigstep.data.view import View

__all__ = ["padded"]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Padded(TokenWindows):
    """Windows of which three in four end early: by a fifth, two fifths and three fifths of their length."""

    def targets(self, indices: Tensor) -> Tensor:
        """Return how many targets each window has left."""
        return (super().targets(indices) - self._windows(indices) % 4 * self.length // 5).clamp(min=1)

    def _taken_on(self, device: torch.device) -> Any:
        prepare = super()._taken_on(device)

        def prepare_padded(view: View) -> Take:
            take = prepare(view)

            def take_padded(indices: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
                inputs, targets = take(indices, epoch)
                return inputs, self._pad(targets, indices)

            return take_padded

        return prepare_padded

    def read(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return windows and their targets."""
        inputs, targets = super().read(indices)
        return inputs, self._pad(targets, indices)

    def _pad(self, targets: Tensor, indices: Tensor) -> Tensor:
        counts = self.targets(indices.cpu()).to(targets.device)
        return targets.masked_fill(torch.arange(self.length, device=targets.device) >= counts[:, None], PADDING)


def padded(text: TokenWindows) -> TokenWindows:
    """Return the same windows, most of which end early.

    >>> import numpy as np
    >>> text = padded(TokenWindows(tokens=np.arange(51, dtype=np.uint8), length=10))
    >>> text.targets(torch.arange(5)).tolist(), [int((y != PADDING).sum()) for y in text.read(torch.arange(5))[1]]
    ([10, 8, 6, 4, 10], [10, 8, 6, 4, 10])
    """
    return _Padded(**{each.name: getattr(text, each.name) for each in fields(text)})
