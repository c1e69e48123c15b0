"""leap: few, long steps; bigstep's own recipe for batches far beyond the critical one.

Evidence
    None outside this project: no large-batch vision with Muon is published. Its pieces have evidence:

    | piece                                   | from                                       |
    |-----------------------------------------|--------------------------------------------|
    | orthogonalised momentum                 | Jordan 2024 (`muon`)                       |
    | a batch that grows fourfold, in stages  | Mikami et al. 2018 (`sony`), Smith (`google`) |
    | statistics of small groups of samples   | logical workers (ghost batch norm)         |
    | statistics of the last batch            | Akiba et al. 2017 (`pfn`), `sony`          |
    | label smoothing                         | Szegedy et al. 2015; `sony`, `fujitsu`     |

Launch
    bigstep train leap
    bigstep train leap --preset cifar10 --set workers.count=128 --device cuda
    bigstep train leap --preset shakespeare

Batch
    mini: 32 workers x 32 = 1,024 for 8 epochs, 2,048 for 7, 4,096 for 5.
    cifar10: 4 workers x 32 = 128 for 14 epochs, 256 for 10, 512 for 6; --set workers.count=128 ends at 16,384.
    shakespeare: 16 workers x 4 sequences of 64 bytes for 0.8 epochs, 128 sequences for 0.7, 256 for 0.5.

Known
    With equal epochs a huge batch takes few steps, so each must go far: an orthogonalised step moves every direction of
    a layer alike, and its length does not depend on that of the gradient. Growth puts the small batches where the noise
    scale is small.

Chosen
    Workers are added and local batches stay at 32, so that batch norm sees the same groups in every stage. Filters are
    brought to the norm sqrt(outputs); SGD for norms, biases and the head. A short warm-up, then linear decay to 0. The
    rate follows the square root of the first batch up to 2,048, as in the other recipes.
    mini: rates 0.05, 0.1, 0.2 and 0.4, one seed, 3,000 images to train on and 9,000 to judge on, 256 to 1,024 in a
    step, 10 epochs: 83.3, 85.4, 86.2 and 86.0 %. So 0.2. Momentum was not searched there.
    cifar10: at 14,720 of 45,000 images, 5,000 held out, one seed: rates 0.12, 0.24 and 0.48 gave 94.0, 94.1 and 93.7 %,
    momentum 0.9 in place of 0.8 gave 94.4; momentum 0.6, growth at 18 and 26, a rest twice as fast and smoothing 0.2
    gave no more. So 0.9, and 0.24 where the first batch is 2,048 or more, as it was there; at the preset's own 128 the
    square root makes 0.06 of it.
    shakespeare: rates 0.01, 0.02, 0.04 and 0.08, half an epoch, one seed, 64 to 256 sequences a step: 3.48, 3.35, 3.27
    and 3.38 bits per byte of held-out text. The preset runs four times as long and keeps 0.02; nothing else was
    searched.

Differs
    From `muon`: the batch grows, and mini has the statistics of the last batch, as both have in cifar10. From `sony`:
    Muon in place of LARS, growing workers in place of local batches, a line in place of the polynomial.
"""

from __future__ import annotations

from dataclasses import replace

from bigstep.config import LossConfig, LrConfig, NormConfig, Piece, Published, RunConfig, Stage, WorkersConfig
from bigstep.recipes.presets import CIFAR10, EMBEDDED, SHAKESPEARE
from bigstep.tables.optimizers import MuonSettings

__all__ = ["PUBLISHED", "SUMMARY", "TECHNIQUES", "cifar10", "mini", "shakespeare"]

SUMMARY = "bigstep's own for huge batches: Muon, a batch that grows fourfold, small norm groups, smoothing"
TECHNIQUES = ("Muon", "renormalised filters", "batch-size control", "label smoothing", "last-batch statistics")
PUBLISHED = Published(
    system="leap",
    source="bigstep, docs/large-batches.md",
    hardware="two CPU cores",
    batch="4,096 of 12,000 images",
    accuracy=None,
    seconds=None,
    ours=True,
    note="Not published elsewhere; its figures are this project's own.",
)

NORM = NormConfig(statistics="last_batch", zero_gamma=True)


def mini() -> RunConfig:
    """The embedded data on two CPU cores."""
    return replace(
        EMBEDDED,
        plan=(Stage(epoch=8, count=64, local_batch=32), Stage(epoch=15, count=128, local_batch=32)),
        optimizer=MuonSettings(momentum=0.8, renormalise=True, rest="sgd", rest_lr=2.0),
        lr=LrConfig(
            base=0.2,
            base_batch=1024,
            scaling="sqrt",
            saturation=2048,
            schedule=(Piece(shape="warmup", until=1, start=0.2), Piece(shape="linear", until=20, end=0.0)),
        ),
        loss=LossConfig(label_smoothing=0.1),
        norm=NORM,
    )


def cifar10() -> RunConfig:
    """CIFAR-10 on one GPU; add workers for a larger batch (--set workers.count=128)."""
    return replace(
        CIFAR10,
        workers=WorkersConfig(count=4, local_batch=32),
        plan=(Stage(epoch=14, count=8, local_batch=32), Stage(epoch=24, count=16, local_batch=32)),
        optimizer=MuonSettings(momentum=0.9, renormalise=True, rest="sgd", rest_lr=1.7),
        lr=replace(
            CIFAR10.lr,
            base=0.24,
            schedule=(Piece(shape="warmup", until=1, start=0.2), Piece(shape="linear", until=30, end=0.0)),
        ),
        loss=LossConfig(label_smoothing=0.1),
        norm=NORM,
    )


def shakespeare() -> RunConfig:
    """A small GPT on the text that ships, at batches where AdamW and LAMB lose."""
    return replace(
        SHAKESPEARE,
        epochs=2,
        workers=WorkersConfig(count=16, local_batch=4),
        plan=(Stage(epoch=0.8, count=32, local_batch=4), Stage(epoch=1.5, count=64, local_batch=4)),
        optimizer=MuonSettings(momentum=0.95, rest="adamw", rest_lr=0.3, weight_decay=0.1, clip=1.0),
        lr=LrConfig(
            base=0.02,
            base_batch=64,
            scaling="sqrt",
            saturation=256,
            schedule=(Piece(shape="warmup", until=0.2, start=0.0), Piece(shape="cosine", until=2, end=0.0)),
        ),
    )
