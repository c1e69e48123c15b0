"""LAMB: Adam's direction with LARS's length for each layer, made for huge batches of text (You et al. 2019).

Evidence
    You, Li, Reddi, Hseu, Kumar, Bhojanapalli, Song, Demmel, Keutzer, Hsieh, "Large Batch Optimization for Deep
    Learning: Training BERT in 76 minutes", 2019 (arXiv 1904.00962).

    | model | batch         | processors       | time   | standing |
    |-------|---------------|------------------|--------|----------|
    | BERT  | 32K sequences | a TPU v3 Pod     | 76 min | abstract |

    In a public study (Nado et al. 2021, arXiv 2102.06356) tuned Adam equals LAMB there: keep `adamw` beside it.

Launch
    bigstep train lamb
    bigstep train lamb --preset books --data books.txt --device cuda

Batch
    mini: 4 workers x 4 sequences of 64 bytes = 16, 1,024 tokens; 981 steps an epoch on Shakespeare.
    books: 8 workers x 8 sequences of 256 bytes = 64, 16,384 tokens; --set workers.count=N takes any batch; the rate
    grows with its square root without limit, as in the paper.

Known
    The rule; a rate that grows with the square root of the batch; warm-up; no adaptation of biases and norms.

Chosen
    Betas 0.9 and 0.95, decay 0.1, clipping at 1 and the cosine of `adamw`, so that the two differ in one thing. The
    norm of a layer's weights is used as it is: phi is the identity.
    mini: judged as `adamw`, one seed, on a quarter of the tokens (benchmarks/sequence/mini.py): rate 0.005 3.56 bits
    per byte, 0.01 3.40, 0.02 3.32, 0.04 3.50; `adamw` reaches 3.14 there.
    books: not searched; four times the rate of `adamw` there, as against two and a half times in mini.

Differs
    BERT's masked words are not built here: the presets predict the next byte.
"""

from __future__ import annotations

from dataclasses import replace

from bigstep.config import Published, RunConfig
from bigstep.recipes.presets import BOOKS, SHAKESPEARE
from bigstep.tables.optimizers import LambSettings

__all__ = ["PUBLISHED", "SUMMARY", "TECHNIQUES", "books", "mini"]

SUMMARY = "You et al. 2019: Adam's direction, a length for each layer; made for huge batches of text"
TECHNIQUES = ("LAMB", "square-root LR scaling", "gradient clipping", "warm-up")
PUBLISHED = Published(
    system="LAMB",
    source="You et al., Large Batch Optimization for Deep Learning, 2019, arXiv 1904.00962",
    hardware="a TPU v3 Pod",
    batch="32K sequences",
    accuracy=None,
    seconds=76 * 60.0,
    note="BERT, whose task is not that of the presets.",
)


def mini() -> RunConfig:
    """Shakespeare as bytes on two CPU cores."""
    return replace(
        SHAKESPEARE,
        optimizer=LambSettings(betas=(0.9, 0.95), weight_decay=0.1, clip=1.0),
        lr=replace(SHAKESPEARE.lr, base=2e-2),
    )


def books() -> RunConfig:
    """Books as bytes on one GPU, one pass; add workers for a larger batch (--set workers.count=64)."""
    return replace(
        BOOKS,
        optimizer=LambSettings(betas=(0.9, 0.95), weight_decay=0.1, clip=1.0),
        lr=replace(BOOKS.lr, base=4e-3, saturation=0),
    )
