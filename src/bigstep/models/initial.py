"""How the weights of networks for images start; those for text, GPT and LSTM, have ways of their own."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor, nn

__all__ = ["SeesImages", "he_initialise"]


@runtime_checkable
class SeesImages(Protocol):
    """A network that is initialised from training images: it is shown some once, the same on every rank."""

    def see(self, images: Tensor) -> None:
        """Set what depends on the images, which are network inputs without augmentation."""


def he_initialise(model: nn.Module) -> None:
    """Draw every weight of `model` afresh from torch's generator, in the order of `model.modules()`.

    Convolution: N(0, 2 / fan_out). Linear: N(0, 0.01^2), bias 0. Batch norm: gamma 1, beta 0. The order is fixed, so
    that equal seeds give equal weights on every rank without a broadcast.

    Args:
        model: changed in place.

    >>> import torch
    >>> layer = nn.Conv2d(8, 64, 3)
    >>> _ = torch.manual_seed(0)
    >>> he_initialise(layer)
    >>> abs(layer.weight.std().item() - (2 / (64 * 9)) ** 0.5) < 2e-3
    True

    Reference: He et al., "Delving Deep into Rectifiers", 2015, equation 14; N(0, 0.01^2) for the last layer after Goyal
    et al., "Accurate, Large Minibatch SGD", 2017, section 5.1.

    Differs from the paper: gamma of the last norm of a residual branch is 1 here; `bigstep.norm.zero_gamma` sets it to
    0 for the recipes that ask for it.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
