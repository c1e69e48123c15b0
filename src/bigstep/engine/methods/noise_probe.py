"""Two gradients of one step, over few of its samples and over all: what the noise scale is measured from.

The rank that hosts the first worker copies the gradient of its first forward and compares it with the gradient of the
whole step. Nothing else is computed, sent or waited for; the result stays on the device until the next flush.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Probe", "not_seen"]


def not_seen(device: torch.device) -> Tensor:
    """Return zeros, the contribution of a rank that did not measure: the sum over ranks is the measurement."""
    return torch.zeros(4, dtype=torch.float64, device=device)


class Probe:
    """Compares the gradient of a step's first forward with that of the whole step.

    What `compare` returns as |g_b|^2 is |g_B|^2 + |g_b - g_B|^2. It has the same mean: the first forward's samples are
    a random part of the step's, so that E[(g_b - g_B) . g_B] = 0. That product is left out because it would drown the
    rest if the batch is far larger than the noise scale.

    >>> probe = Probe([torch.tensor([3.0])], small=2, big=8, weight=0.25)  # a quarter of the batch has counted so far
    >>> probe.compare([torch.tensor([10.0])]).tolist()  # 10^2 + (3 / 0.25 - 10)^2 and 10^2
    [104.0, 2.0, 100.0, 8.0]

    Reference: McCandlish et al., An Empirical Model of Large-Batch Training, 2018, appendix A.1.

    Differs from the paper: it subtracts norms; here the norm of the difference is taken, at the price of one copy.
    """

    def __init__(self, gradients: Sequence[Tensor | None], small: int, big: int, weight: float):
        """Copy the gradient of the first forward.

        Args:
            gradients: Of all parameters, each `weight` times that of the mean loss over the forward; None is zero.
            small: Samples of the forward.
            big: Samples of the step.
            weight: The weight of the forward in this rank's sum.
        """
        copies = iter(torch._foreach_div([gradient for gradient in gradients if gradient is not None], weight))
        self._first = [None if gradient is None else next(copies) for gradient in gradients]
        self._small, self._big = small, big

    def compare(self, gradients: Sequence[Tensor | None], loss_scale: Tensor | float = 1.0) -> Tensor:
        """Compare with the gradient of the whole step.

        Args:
            gradients: Of all parameters, in the same order; None for a parameter that no forward used.
            loss_scale: The factor by which both gradients are too large.

        Returns:
            |g_b|^2, b, |g_B|^2 and B in float64, on the device.
        """
        pairs = [(f, g) for f, g in zip(self._first, gradients, strict=True) if g is not None]
        whole = [g for _, g in pairs]
        first = [torch.zeros_like(g) if f is None else f for f, g in pairs]
        torch._foreach_sub_(first, whole)
        away, big = (_norm(tensors).div(loss_scale).square() for tensors in (first, whole))
        return torch.stack([big + away, torch.full_like(big, self._small), big, torch.full_like(big, self._big)])


def _norm(tensors: list[Tensor]) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)).double())
    return norm
