"""PFN: ImageNet in 15 minutes with 1,024 GPUs (Akiba et al. 2017).

Evidence
    Akiba, Suzuki, Fukuda, "Extremely Large Minibatch SGD: Training ResNet-50 on ImageNet in 15 Minutes", 2017, arXiv
    1711.04325; abstract, slides and a public reimplementation of the optimizer were read, the paper itself was not.

    | batch  | processors | epochs | time            | top-1           | standing                             |
    |--------|------------|--------|-----------------|-----------------|--------------------------------------|
    | 32,768 | 1024 P100  | 90     | 15 min          | 74.9 %          | abstract, slides                     |
    | 32,768 | 1024 P100  | 90     | 897.9 +- 3.3 s  | 74.94 +- 0.09 % | five runs; remembered, not read here |

Launch
    bigstep train pfn
    torchrun --nnodes 128 --nproc-per-node 8 -m bigstep train pfn --preset paper --data /data/imagenet

Batch
    paper: 1024 workers x 32 = 32,768; rate 0.1 * 32768 / 256 = 12.8, of which the slow start uses at most half.
    mini: 32 workers x 32 = 1,024.
    cifar10: 16 workers x 32 = 512; --set workers.count=N takes any batch; the rate grows with its square root up to
    2,048.

Known
    RMSprop turns into SGD around epoch 10 over 5 epochs; mu2 0.99, eps 1e-8, RMSprop rate 3e-4. Rate factors 0.5,
    0.075, 0.01, 0.001 from epochs 0, 40, 70, 85: 6.4, 0.96, 0.128, 0.0128. Batch norm without moving averages:
    statistics of the last batch, averaged over workers before an evaluation. Gradients travel in fp16, everything else
    is fp32; one buffer for the whole gradient, not overlapped with backward.

Chosen
    Momentum 0.9, weight decay 1e-4 and zero gamma are Goyal's, which the paper names as its basis. bucket_mb 128 holds
    the whole gradient of 102 MB in one group.
    mini, cifar10: transition and drops at the same fractions of the run (center 10 of 90 becomes 2.2 of 20 and 3.3 of
    30). The searches below used drops at whole epochs near them, 9, 16, 19 of 20 and 13, 24, 28 of 30.
    Searched: 18 settings with three seeds each, judged on 2,000 of 12,000 training images: rate 0.05 to
    0.7 x RMSprop rate 3e-4, 1e-3, 3e-3. Best: 0.45 and 3e-4, 87.4 %.
    cifar10: three rates at a batch of 2,048 and of 16,384, one seed, judged on 5,000 of 50,000 training images. Best:
    1.6 at both, 92.1 and 55.2 %, the largest that was tried; so the rate stays constant from 2,048 on.

Differs
    The linear part of the transition rises with 1/period; the printed 2/period would overshoot to 1.5. ImageNet leaves
    3,215 of 32,768 samples over at the end of an epoch, on 101 of 1,024 workers. That step counts in proportion to its
    samples, and an evaluation uses the statistics of the last full batch. What ChainerMN did with the rest is not
    known; its iterators can continue into the next epoch instead. Communication times are only in a figure of the paper
    and are not compared.
"""

from __future__ import annotations

from dataclasses import replace

from bigstep.config import ExchangeConfig, LrConfig, NormConfig, Piece, Published, RunConfig, WorkersConfig
from bigstep.recipes.presets import CIFAR10, EMBEDDED, IMAGENET
from bigstep.tables.optimizers import RMSpropWarmupSettings

__all__ = ["PUBLISHED", "SUMMARY", "TECHNIQUES", "cifar10", "mini", "paper"]

SUMMARY = "Akiba et al. 2017: RMSprop warm-up, slow start, last-batch norms; 15 minutes"
TECHNIQUES = ("RMSprop warm-up", "slow-start LR", "last-batch statistics", "fp16 exchange")
PUBLISHED = Published(
    system="PFN",
    source="Akiba, Suzuki, Fukuda, Extremely Large Minibatch SGD, 2017, arXiv 1711.04325",
    hardware="1024 P100, InfiniBand FDR",
    batch="32,768",
    accuracy=0.749,
    seconds=15 * 60.0,
)


RULE = RMSpropWarmupSettings(
    momentum=0.9, weight_decay=1e-4, eps=1e-8, rms_decay=0.99, rms_lr=3e-4, blend_center=10.0, blend_period=5.0
)
NORM = NormConfig(statistics="last_batch", zero_gamma=True)
EXCHANGE = ExchangeConfig(collective="ring", codec="fp16", bucket_mb=128.0)


def paper() -> RunConfig:
    """ImageNet with 1,024 workers."""
    return replace(
        IMAGENET,
        workers=WorkersConfig(count=1024, local_batch=32),
        optimizer=RULE,
        lr=LrConfig(base=0.1, schedule=(Piece(shape="slow_start", until=90),)),
        norm=NORM,
        exchange=EXCHANGE,
    )


def mini() -> RunConfig:
    """The embedded data on two CPU cores."""
    return replace(
        EMBEDDED,
        optimizer=replace(RULE, blend_center=2.2, blend_period=1.1),
        lr=LrConfig(base=0.45, schedule=(Piece(shape="slow_start", until=20),)),
        norm=NORM,
        exchange=EXCHANGE,
    )


def cifar10() -> RunConfig:
    """CIFAR-10 on one GPU; add workers for a larger batch (--set workers.count=512)."""
    return replace(
        CIFAR10,
        optimizer=replace(RULE, weight_decay=5e-4, blend_center=3.3, blend_period=1.7),
        lr=replace(
            CIFAR10.lr,
            base=1.6,
            schedule=(Piece(shape="slow_start", until=30),),
        ),
        norm=NORM,
        exchange=EXCHANGE,
    )
