"""Locked SGD: processes take turns on shared weights; the baseline of Hogwild!.

Evidence
    Langford, Smola, Zinkevich, "Slow Learners are Fast", 2009, and the baselines of Niu, Recht, Re, Wright, "Hogwild!",
    2011 (arXiv 1106.5730), where threads take turns in a fixed order (RR, as in Vowpal Wabbit).

    | problem (10 cores)          | Hogwild! | RR        |
    |-----------------------------|----------|-----------|
    | SVM on RCV1                 | 9.5 s    | 61.8 s    |
    | matrix completion, Netflix  | 301.0 s  | 2,569.1 s |
    | cuts, DBLife                | 230.0 s  | 413.5 s   |

    The paper finds RR as good as Hogwild! only where one gradient takes more than about a millisecond.

Launch
    bigstep train locked

Batch
    mini: updates of 32 samples; 375 shares an epoch of 12,000 images, taken by two processes.

Known
    Take the lock, read, compute the gradient, update, release: nothing is ever stale, and with any number of processes
    the result is that of a serial run in the same order, bit for bit.

Chosen
    mini: momentum SGD with the rate of `plain` for 32 samples (0.2 for 256, scaled by the batch), its weight decay, and
    linear decay to zero. There is no preset `paper`: the paper trains no networks. Its sparse problems run with
    `bigstep train locked --data FILE.svm`.

Differs
    An update is the gradient of 32 samples, not of one. The lock is held while the gradient is computed too, so more
    processes are not faster; that is the point of the comparison.
"""

from __future__ import annotations

from dataclasses import replace

from bigstep.config import AsynchronousConfig, LrConfig, Piece, Published, RunConfig, WorkersConfig
from bigstep.recipes.presets import EMBEDDED
from bigstep.tables.optimizers import SgdSettings

__all__ = ["PUBLISHED", "SUMMARY", "TECHNIQUES", "mini"]

SUMMARY = "Processes that take turns on shared weights: serial SGD, and what Hogwild! is measured against"
TECHNIQUES = ("shared weights", "lock from read to write", "asynchronous")
PUBLISHED = Published(
    system="RR (locked)",
    source="Niu et al., Hogwild!, 2011, arXiv 1106.5730",
    hardware="2 x 6 Xeon cores, 10 threads",
    batch="1 example an update",
    accuracy=None,
    seconds=61.8,
    data="RCV1",
    note="SVM on RCV1, 20 epochs; Hogwild! takes 9.5 s. No networks in the paper.",
)


def mini() -> RunConfig:
    """The embedded data on two CPU cores."""
    return replace(
        EMBEDDED,
        workers=WorkersConfig(count=2, local_batch=32),
        epochs=10,
        optimizer=SgdSettings(momentum=0.9, weight_decay=2e-3),
        lr=LrConfig(base=0.2, schedule=(Piece(shape="linear", until=10, end=0.0),)),
        asynchronous=AsynchronousConfig(method="locked", replicas=2),
    )
