"""Residual branches that start at zero."""

from __future__ import annotations

from torch import nn

__all__ = ["zero_gamma"]


def zero_gamma(model: nn.Module) -> int:
    """Set gamma = 0 in the last norm of each residual branch, so that every block starts as its shortcut.

    ::

        block(x) = relu(shortcut(x) + gamma * normalised(branch(x)) + beta),  with gamma = 0 at the start

    A residual block is recognised by its structure, not by its class. If a module has an attribute `last_norm`, this is
    the norm. If it has an attribute `downsample` (which may be None), as the BasicBlock and Bottleneck of torchvision
    and timm do, the norm is bn3, or bn2 if there is no bn3. A module with neither attribute is left alone, because
    gamma = 0 in a chain without a shortcut would cut the network in two.

    Args:
        model: Any module; call it after the weights are initialised.

    Returns:
        How many norms were changed; 0 means that no residual block was recognised.

    >>> import torch
    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
    ...         self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
    ...         self.downsample = None
    ...     def forward(self, x):
    ...         return (x + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))).relu()
    >>> block, x = Block(), torch.rand(8, 4, 5, 5)
    >>> zero_gamma(block), torch.equal(block(x), x)
    (1, True)

    Reference: Goyal et al., Accurate, Large Minibatch SGD, 2017, section 5.1.

    Differs from the paper: in nothing.
    """
    gammas = {gamma for module in model.modules() if (gamma := _last_gamma(module)) is not None}
    for gamma in gammas:
        nn.init.zeros_(gamma)
    return len(gammas)


def _last_gamma(block: nn.Module) -> nn.Parameter | None:
    norm = getattr(block, "last_norm", None)
    if norm is None and hasattr(block, "downsample"):
        norm = getattr(block, "bn3", None) or getattr(block, "bn2", None)
    gamma = getattr(norm, "weight", None)
    return gamma if isinstance(gamma, nn.Parameter) else None
