"""GPT in named sizes: a causal transformer with the norm before each branch, as in GPT-2.

    x = tokens(ids) + positions
    x = x + attention(norm(x));  x = x + mlp(norm(x))      for each block
    logits = head(norm(x))

Reference: Vaswani et al., "Attention Is All You Need", 2017; Radford et al., "Language Models are Unsupervised
Multitask Learners", 2019, section 2.3 (norm before the branch, one more at the end, branches scaled at the start);
Press and Wolf, "Using the Output Embedding to Improve Language Models", 2016 (the head shares the token embedding).

Differs from the papers: dropout is 0 unless asked for, since a language model sees most of its text once; GELU in its
tanh form, as in the released code.
"""

from __future__ import annotations

import functools
import math

from torch import Tensor, nn
from torch.nn import functional

from bigstep.errors import ConfigError

__all__ = ["GPT", "gpt_10m", "gpt_10m_untied", "gpt_124m", "gpt_124m_untied", "gpt_25m", "gpt_25m_untied", "gpt_mini",
           "gpt_mini_untied"]  # fmt: skip


class Attention(nn.Module):
    """Causal self-attention: each token attends to itself and to those before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return softmax(QK' / sqrt(d)) V of each head, combined by the output projection."""
        batch, length, width = x.shape
        projected = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)
        seen = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        return self.out(seen.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a two-layer network, each beside a shortcut."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return x + attention(norm(x)), then the same with the two-layer network."""
        x = x + self.drop(self.attention(self.attention_norm(x)))
        return x + self.drop(self.mlp(self.mlp_norm(x)))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Map tokens to logits over the vocabulary at each position.

    Args:
        vocabulary: Number of different tokens.
        length: Longest sequence, in tokens.
        depth: Blocks.
        width: Size of a token's embedding.
        heads: Heads of each attention; they share the width.
        dropout: Fraction of activations that training drops, drawn from torch's generator.
        tied: The head shares the weights of the token embedding instead of having its own.

    >>> import torch
    >>> gpt_mini(vocabulary=256, length=64)(torch.zeros(2, 64, dtype=torch.int64)).shape
    torch.Size([2, 64, 256])
    >>> with torch.device("meta"):  # GPT-2's own vocabulary and length give its own size
    ...     sum(p.numel() for p in gpt_124m(vocabulary=50257, length=1024).parameters())
    124439808
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        length: int,
        depth: int,
        width: int,
        heads: int,
        dropout: float = 0.0,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.length = length
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = None if tied else nn.Linear(width, vocabulary, bias=False)
        self._initialise(depth)

    def forward(self, ids: Tensor) -> Tensor:
        """Return batch x length x vocabulary logits for batch x length ids."""
        length = ids.shape[1]
        if length > self.length:
            raise ConfigError(
                f"The sequence has {length} tokens, but this GPT has positions for {self.length}; "
                "build it with a larger length or cut the sequence."
            )
        x = self.drop(self.tokens(ids) + self.positions.weight[:length])
        for block in self.blocks:
            x = block(x)
        table = self.tokens.weight if self.head is None else self.head.weight
        return functional.linear(self.norm(x), table)

    def _initialise(self, depth: int) -> None:
        """Draw weights as GPT-2 does: N(0, 0.02^2), N(0, 0.01^2) for positions.

        Each of the 2 depth branches adds to x, whose variance would grow with the depth: so the deviation at the end of
        a branch is 0.02 / sqrt(2 depth).
        """
        ends = {block.attention.out for block in self.blocks} | {block.mlp[2] for block in self.blocks}  # type: ignore[union-attr, index]
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * depth) if module in ends else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.positions.weight, std=0.01)


gpt_mini = functools.partial(GPT, depth=3, width=128, heads=4)
"""0.6 M parameters: two CPU cores train it in two minutes."""
gpt_10m = functools.partial(GPT, depth=6, width=384, heads=6)
"""10.6 M parameters in its blocks."""
gpt_25m = functools.partial(GPT, depth=8, width=512, heads=8)
"""25.2 M parameters in its blocks."""
gpt_124m = functools.partial(GPT, depth=12, width=768, heads=12)
"""The smallest GPT-2: 85.1 M parameters in its blocks, 124.4 M with its vocabulary of 50,257."""

gpt_mini_untied, gpt_10m_untied, gpt_25m_untied, gpt_124m_untied = (
    functools.partial(size, tied=False) for size in (gpt_mini, gpt_10m, gpt_25m, gpt_124m)
)
