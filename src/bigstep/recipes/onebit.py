"""1-bit SGD: gradients of one bit with error feedback (Seide et al. 2014).

Evidence
    Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
    Training of Speech DNNs", Interspeech 2014; read in full text.

    | Switchboard, 309 h, 46 M parameters    | word error | GPUs  | time  |
    |----------------------------------------|------------|-------|-------|
    | one GPU, AdaGrad on the raw gradient   | 16.2       | 1     | 35 h  |
    | AdaGrad on partial gradients, 1-bit    | 16.1       | 4 x 2 |       |
    | AdaGrad on the aggregate, 1-bit        | 15.8       | 4 x 2 | 8.1 h |
    | fastest: batch tuned, double buffering | 15.9       | 4 x 2 | 6.3 h |

    Speed on 8 GPUs of one machine: 3.6 times one GPU with batches of 2,880, 6.3 times with 16,384 (abstract).

Launch
    bigstep train onebit --procs 2
    bigstep train onebit --procs 2 --set optimizer.adagrad=before
    bigstep train onebit --procs 2 --set optimizer.adagrad=none --set optimizer.momentum=0.9 --set lr.base=0.8
    bigstep train onebit --procs 2 --set exchange.codec=none --set exchange.collective=ring
    torchrun --nproc-per-node 8 -m bigstep train onebit --preset paper --data /data/imagenet

Batch
    paper: 8 workers x 180 = 1,440; 889.7 steps an epoch. Double buffering exchanges each half of a minibatch by itself,
    so that two steps are one minibatch of 2,880, the smaller one of the abstract.
    mini: 32 workers x 32 = 1,024.
    cifar10: 16 workers x 32 = 512; --set workers.count=N takes any batch; the rate grows with its square root up to
    2,048.

Known
    Threshold 0; the two values of a column are the means of those that they replace; what is lost is carried into the
    next step; each node owns a slice, sums it, applies AdaGrad to the aggregate and then momentum, quantises again with
    a residual of its own; the first 24 of 309 hours are not quantised; double buffering. AdaGrad on each node's own
    gradient, before it is quantised, trains to a lower frame accuracy (57.4 against 59.1 %).

Chosen
    The corpus is not public, so the paper preset keeps the exchange, the batch and the order of operations and trains
    ResNet-50 on ImageNet for 90 epochs. 24 / 309 of a pass are 69 dense steps. Momentum 0.9 and AdaGrad's rate, 0.002
    with its inherent square-root decay and a line to zero, are conventions.
    mini: two dense epochs (24 steps), no double buffering. Searched on one rank, so without quantisation, judged on
    2,000 of 12,000 training images. With weight decay 2e-3: rate 0.006 75.8 %, 0.02 86.8 %, 0.06 88.6 %, 0.1 88.1 %;
    with 5e-4: 0.02 85.4 %, 0.06 87.1 % (one seed each).
    cifar10: three rates at a batch of 2,048 and of 16,384, one seed, judged on 5,000 of 50,000 training images. Best:
    0.03 at both, 91.1 and 49.7 %, the smallest that was tried; so the rate stays constant from 2,048 on.

Differs
    The paper's printed recursion omits the old residual; here it is carried along, as in the authors' CNTK. Every rank
    applies AdaGrad and momentum to the whole mean, after the second quantisation; mini has no momentum. Codes are per
    rank: with one rank nothing is quantised, and the path depends on the number of ranks, as the program says. Word
    error rates and hours cannot be reproduced here.
"""

from __future__ import annotations

from dataclasses import replace

from bigstep.config import ExchangeConfig, LrConfig, Piece, Published, RunConfig, WorkersConfig
from bigstep.recipes.presets import CIFAR10, EMBEDDED, IMAGENET
from bigstep.tables.optimizers import SgdSettings

__all__ = ["PUBLISHED", "SUMMARY", "TECHNIQUES", "cifar10", "mini", "paper"]

SUMMARY = "Seide et al. 2014: one bit a gradient, error feedback, AdaGrad after aggregation or before it"
TECHNIQUES = ("1-bit codes", "error feedback", "owner-per-slice exchange", "AdaGrad", "double buffering")
PUBLISHED = Published(
    system="1-bit SGD",
    source="Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014",
    hardware="8 K20X, InfiniBand",
    batch="1,440 to 8,192 frames a step, halves of minibatches that were chosen automatically",
    accuracy=None,
    seconds=6.3 * 3600,
    data="Switchboard",
    note="Speech: word error rate 15.9 % after 6.3 h, against 35 h on one GPU.",
)


def paper() -> RunConfig:
    """The system of the paper on ImageNet, with 8 workers."""
    return replace(
        IMAGENET,
        workers=WorkersConfig(count=8, local_batch=180),
        optimizer=SgdSettings(adagrad="after", momentum=0.9, weight_decay=1e-4, eps=1e-8),
        lr=LrConfig(base=0.002, scaling="none", schedule=(Piece(shape="linear", until=90, end=0.0),)),
        exchange=ExchangeConfig(collective="gather", codec="onebit", warmup_steps=69, double_buffer=True),
    )


def mini() -> RunConfig:
    """The embedded data on two CPU cores; start at least two ranks to see codes."""
    return replace(
        EMBEDDED,
        optimizer=SgdSettings(adagrad="after", momentum=0.0, weight_decay=2e-3, eps=1e-8),
        lr=LrConfig(base=0.06, scaling="none", schedule=(Piece(shape="linear", until=20, end=0.0),)),
        exchange=ExchangeConfig(collective="gather", codec="onebit", warmup_steps=24),
    )


def cifar10() -> RunConfig:
    """CIFAR-10 on one GPU; add workers for a larger batch (--set workers.count=512)."""
    return replace(
        CIFAR10,
        optimizer=SgdSettings(adagrad="after", momentum=0.0, weight_decay=5e-4, eps=1e-8),
        lr=replace(
            CIFAR10.lr,
            base=0.03,
            schedule=(Piece(shape="linear", until=30, end=0.0),),
        ),
        exchange=ExchangeConfig(collective="gather", codec="onebit", warmup_steps=24),
    )
