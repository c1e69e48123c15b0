"""LSTM language models: recurrent networks on the same tokens as the transformers in `gpt`.

Reference: Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997; Gers, Schmidhuber and Cummins, "Learning to
Forget", 2000; Zaremba, Sutskever and Vinyals, "Recurrent Neural Network Regularization", 2014 (dropout between layers
only).

Differs from the papers: every sequence starts from a state of zeros, so that windows are independent of one another and
any worker may take any of them; the head shares the weights of the token embedding.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["LSTM", "lstm", "lstm_mini"]


class LSTM(nn.Module):
    """Map tokens to logits over the vocabulary at each position.

    Args:
        vocabulary: Number of different tokens.
        length: Not used; any length is accepted.
        depth: Layers.
        width: Size of a token's embedding, and units of each layer.
        dropout: Fraction of activations that training drops before, between and after the layers, drawn from torch's
            generator.

    >>> lstm_mini(vocabulary=256)(torch.zeros(2, 64, dtype=torch.int64)).shape
    torch.Size([2, 64, 256])
    """

    def __init__(self, *, vocabulary: int, length: int = 0, depth: int, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(depth))
        self.bias = nn.Parameter(torch.empty(vocabulary))
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self._initialise(width)

    def forward(self, ids: Tensor) -> Tensor:
        """Return batch x length x vocabulary logits for batch x length ids."""
        x = self.drop(self.tokens(ids))
        for layer in self.layers:
            x = self.drop(layer(x)[0])
        return functional.linear(x, self.tokens.weight, self.bias)

    def _initialise(self, width: int) -> None:
        """Draw U(-1/sqrt(width), 1/sqrt(width)); the bias of the forget gate is 1, so that a fresh cell remembers."""
        bound = width**-0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)
        for layer in self.layers:
            nn.init.zeros_(layer.bias_hh_l0)  # type: ignore[arg-type]  # gates: input, forget, cell, output
            nn.init.ones_(layer.bias_hh_l0[width : 2 * width])  # type: ignore[index]
        nn.init.zeros_(self.bias)


lstm = functools.partial(LSTM, depth=2, width=512)
"""Two layers of 512 units: 4.2 M parameters and the token embedding."""
lstm_mini = functools.partial(LSTM, depth=1, width=256)
"""One layer of 256 units, for two CPU cores."""
