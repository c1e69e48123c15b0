"""LARS: a rate for each layer (You et al. 2017), 32,768 images a step.

Evidence
    You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks", 2017, arXiv 1708.03888 (the rule); You,
    Zhang, Hsieh, Demmel, Keutzer, "ImageNet Training in Minutes", 2017, arXiv 1709.05011 (the run).

    | batch  | processors | epochs | time   | top-1  | standing                                  |
    |--------|------------|--------|--------|--------|-------------------------------------------|
    | 32,768 | 2048 KNL   | 90     | 20 min | 75.4 % | quoted by Jia et al. 2018 in the abstract |
    | 32,768 | 2048 KNL   | 64     | 14 min | 74.9 % | abstract                                  |

Launch
    bigstep train lars
    torchrun --nnodes 256 --nproc-per-node 8 -m bigstep train lars --preset paper --data /data/imagenet

Batch
    paper: 2048 workers x 16 = 32,768; 39.1 steps an epoch, 3,519 in 90 epochs.
    mini: 32 workers x 32 = 1,024.
    cifar10: 16 workers x 32 = 512; --set workers.count=N takes any batch; the rate grows with its square root up to
    2,048.

Known
    The rule, trust coefficient 0.001, momentum 0.9, polynomial decay of power 2, warm-up.

Chosen
    Peak 34 after 12 epochs of warm-up: the papers' own rates for ResNet-50 were not found; these are the published
    settings of Google's LARS code for the same batch, with the same coefficient and power. Weight decay 1e-4 goes with
    them. The rate is not scaled: it belongs to this batch alone. Halving/doubling in groups of 16 MB: of the
    collectives here, the planner finds it the fastest for 2,048 workers (the paper names none).
    mini: searched 18 settings with three seeds each, judged on 2,000 of 12,000 training images: rate 0.5 to 16
    x coefficient 0.001, 0.005, 0.02. Best: 8 and 0.005, 89.9 %.
    cifar10: three rates at a batch of 2,048 and of 16,384, one seed, judged on 5,000 of 50,000 training images. Best: 6
    at both, 94.5 and 75.2 %, the largest that was tried; so the rate stays constant from 2,048 on.

Differs
    Biases and norm parameters are neither adapted nor decayed, as in every later system; the paper does not say so. The
    paper's table of accuracies by batch was not found, so nothing is claimed about it. In a public study (Nado et al.
    2021, arXiv 2102.06356) carefully tuned Nesterov SGD equals LARS at this batch: keep `plain` beside it.
"""

from __future__ import annotations

from dataclasses import replace

from bigstep.config import ExchangeConfig, LrConfig, Piece, Published, RunConfig, WorkersConfig
from bigstep.recipes.presets import CIFAR10, EMBEDDED, IMAGENET
from bigstep.tables.optimizers import LarsSettings

__all__ = ["PUBLISHED", "SUMMARY", "TECHNIQUES", "cifar10", "mini", "paper"]

SUMMARY = "You et al. 2017: layer-wise adaptive rates; 32,768 images a step"
TECHNIQUES = ("LARS", "warm-up", "polynomial decay")
PUBLISHED = Published(
    system="LARS",
    source="You et al., ImageNet Training in Minutes, 2017, arXiv 1709.05011",
    hardware="2048 Xeon Phi 7250",
    batch="32,768",
    accuracy=0.754,
    seconds=20 * 60.0,
    note="90 epochs; 64 epochs gave 74.9 % in 14 minutes.",
)


def paper() -> RunConfig:
    """ImageNet with 2,048 workers."""
    return replace(
        IMAGENET,
        workers=WorkersConfig(count=2048, local_batch=16),
        optimizer=LarsSettings(momentum=0.9, weight_decay=1e-4, trust_coefficient=0.001, eps=0.0),
        lr=LrConfig(
            base=34.0,
            scaling="none",
            schedule=(Piece(shape="warmup", until=12, start=0.0), Piece(shape="polynomial", until=90, end=0.0)),
        ),
        exchange=ExchangeConfig(collective="halving", codec="none", bucket_mb=16.0),
    )


def mini() -> RunConfig:
    """The embedded data on two CPU cores."""
    return replace(
        EMBEDDED,
        optimizer=LarsSettings(momentum=0.9, weight_decay=1e-4, trust_coefficient=0.005, eps=0.0),
        lr=LrConfig(
            base=8.0,
            scaling="none",
            schedule=(Piece(shape="warmup", until=3, start=0.0), Piece(shape="polynomial", until=20, end=0.0)),
        ),
        exchange=ExchangeConfig(collective="halving", codec="none", bucket_mb=16.0),
    )


def cifar10() -> RunConfig:
    """CIFAR-10 on one GPU; add workers for a larger batch (--set workers.count=512)."""
    return replace(
        CIFAR10,
        optimizer=LarsSettings(momentum=0.9, weight_decay=5e-4, trust_coefficient=0.005, eps=0.0),
        lr=replace(
            CIFAR10.lr,
            base=6.0,
            schedule=(Piece(shape="warmup", until=5, start=0.0), Piece(shape="polynomial", until=30, end=0.0)),
        ),
    )
