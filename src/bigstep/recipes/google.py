"""Google: grow the batch instead of decaying the rate (Smith et al. 2017), and a TPU pod (Ying et al. 2018).

Evidence
    Smith, Kindermans, Ying, Le, "Don't Decay the Learning Rate, Increase the Batch Size", 2017, arXiv 1711.00489; Ying,
    Kumar, Chen, Wang, Cheng, "Image Classification at Supercomputer Scale", 2018, arXiv 1811.06992; abstracts and
    Google's public ResNet code were read.

    | run   | batch           | processors  | time     | top-1  | standing                              |
    |-------|-----------------|-------------|----------|--------|---------------------------------------|
    | Smith | 8,192 -> 16,384 | TPU pod     | < 30 min | 76.1 % | abstract; batches from NVIDIA's table |
    | Ying  | 32,768          | 1024 TPU v3 | 2.2 min  | 76.3 % | abstract; batch remembered            |

Launch
    bigstep train google
    torchrun --nnodes 32 --nproc-per-node 8 -m bigstep train google --preset paper --data /data/imagenet
    torchrun --nnodes 128 --nproc-per-node 8 -m bigstep train google --preset paper_pod --data /data/imagenet

Batch
    paper: 256 workers x 32 = 8,192, then 256 x 64 = 16,384. The noise scale is g = rate * N / (batch * (1 - momentum)):
    doubling the batch halves it as halving the rate would.
    paper_pod: 1024 workers x 32 = 32,768.
    mini: 32 workers x 32 = 1,024, then 32 x 64 = 2,048.
    cifar10: 16 workers x 8, 16, then 32 = 512, a third of the run each; --set workers.count=512 ends at 16,384.

Known
    Smith: the batch grows where the rate would decay; it does so after epoch 30 (remembered). Ying: LARS, coefficient
    0.001, eps 0, rate from 0 to 34 over 12 epochs, then power 2 (Google's code for 32,768); batch norm over groups of
    replicas.

Chosen
    The number of workers: 32 images each, as in FAIR's run, from which this one starts, with its rate (3.2), warm-up,
    drops, momentum and decay. At epoch 30, where FAIR divides the rate by 10, the batch takes a factor of 2 of it and
    the rate the remaining 5; at 60 and 80 the rate falls by 10.
    mini: the same at epochs 7, 13 and 18 of 20.
    Searched: 18 settings with three seeds each, judged on 2,000 of 12,000 training images: rate 0.05 to
    0.7 x weight decay 1e-4, 5e-4, 2e-3. Best: 0.2 and 2e-3, 87.9 %.
    cifar10: three rates at a batch of 2,048 and of 16,384, one seed, judged on 5,000 of 50,000 training images. Best:
    0.8 at 2,048 (94.0 %) and 1.6 at 16,384 (88.7 %); so the rate follows the square root of the first batch up to
    2,048. In that search the number of workers grew; growing local batches, as here, were measured afterwards: 90.6
    against 89.9 % at 14,720 (one seed, warm-up of 5 epochs).

Differs
    paper_pod normalises each worker's 32 images alone; the groups of replicas of the original are not built.
    TPUs compute in bfloat16; so do both paper presets.
"""

from __future__ import annotations

from dataclasses import replace

from bigstep.config import ExchangeConfig, LrConfig, Piece, Published, RunConfig, Stage, WorkersConfig
from bigstep.recipes.presets import CIFAR10, EMBEDDED, IMAGENET
from bigstep.tables.optimizers import LarsSettings, SgdSettings

__all__ = ["PUBLISHED", "SUMMARY", "TECHNIQUES", "cifar10", "mini", "paper", "paper_pod"]

SUMMARY = "Smith et al. 2017: the batch grows in place of a decaying rate; 8,192 -> 16,384"
TECHNIQUES = ("growing batch", "linear LR scaling", "warm-up")
PUBLISHED = Published(
    system="Google",
    source="Smith et al., Don't Decay the Learning Rate, Increase the Batch Size, 2017, arXiv 1711.00489",
    hardware="TPU pod",
    batch="8,192 -> 16,384",
    accuracy=0.761,
    seconds=30 * 60.0,
    note="The time is an upper bound. Ying et al. 2018: 1024 TPU v3, 32,768, 76.3 % in 2.2 minutes.",
)


def paper() -> RunConfig:
    """ImageNet with 256 workers whose local batch doubles (Smith et al.)."""
    return replace(
        IMAGENET,
        workers=WorkersConfig(count=256, local_batch=32),
        plan=(Stage(epoch=30, count=256, local_batch=64),),
        optimizer=SgdSettings(momentum=0.9, nesterov=True, weight_decay=1e-4),
        lr=LrConfig(
            base=0.1,
            schedule=(
                Piece(shape="warmup", until=5, start="base"),
                Piece(shape="table", until=90, at=(30, 60, 80), values=(1.0, 0.2, 0.02, 0.002)),
            ),
        ),
        exchange=ExchangeConfig(collective="torus", codec="none", bucket_mb=8.0),
        precision="bf16",
    )


def paper_pod() -> RunConfig:
    """ImageNet with 1,024 workers and LARS (Ying et al.)."""
    return replace(
        paper(),
        workers=WorkersConfig(count=1024, local_batch=32),
        plan=(),
        optimizer=LarsSettings(momentum=0.9, weight_decay=1e-4, trust_coefficient=0.001, eps=0.0),
        lr=LrConfig(
            base=34.0,
            scaling="none",
            schedule=(Piece(shape="warmup", until=12, start=0.0), Piece(shape="polynomial", until=90, end=0.0)),
        ),
        exchange=ExchangeConfig(collective="torus", codec="none", bucket_mb=16.0),
    )


def mini() -> RunConfig:
    """The embedded data on two CPU cores."""
    return replace(
        EMBEDDED,
        plan=(Stage(epoch=7, count=32, local_batch=64),),
        optimizer=SgdSettings(momentum=0.9, nesterov=True, weight_decay=2e-3),
        lr=LrConfig(
            base=0.2,
            schedule=(
                Piece(shape="warmup", until=1, start="base"),
                Piece(shape="table", until=20, at=(7, 13, 18), values=(1.0, 0.2, 0.02, 0.002)),
            ),
        ),
        exchange=ExchangeConfig(collective="torus", codec="none", bucket_mb=8.0),
    )


def cifar10() -> RunConfig:
    """CIFAR-10 on one GPU; add workers for a larger batch (--set workers.count=512)."""
    return replace(
        CIFAR10,
        workers=WorkersConfig(count=16, local_batch=8),
        plan=(Stage(epoch=10, count=16, local_batch=16), Stage(epoch=20, count=16, local_batch=32)),
        optimizer=SgdSettings(momentum=0.9, nesterov=True, weight_decay=5e-4),
        lr=LrConfig(
            base=0.4,
            base_batch=128,
            scaling="sqrt",
            saturation=2048,
            schedule=(
                Piece(shape="warmup", until=2, start=0.0),
                Piece(shape="table", until=30, at=(24, 28), values=(1.0, 0.2, 0.04)),
            ),
        ),
    )
