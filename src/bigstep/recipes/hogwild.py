"""Hogwild!: processes read and update shared weights without a lock (Niu et al. 2011).

Evidence
    Niu, Recht, Re, Wright, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent", 2011
    (arXiv 1106.5730).

    | problem (10 cores)          | rho, Delta     | Hogwild! | RR (locked) | over serial |
    |-----------------------------|----------------|----------|-------------|-------------|
    | SVM on RCV1                 | 0.44, 1.0      | 9.5 s    | 61.8 s      | about 3x    |
    | matrix completion, Netflix  | 2.5e-3, 2.3e-3 | 301.0 s  | 2,569.1 s   | figure only |
    | cuts, DBLife                | 8.6e-3, 4.2e-3 | 230.0 s  | 413.5 s     | 9x          |

    Networks: PyTorch's own example shares the weights of a small network between processes (batch 64, rate 0.01,
    momentum 0.5, an optimizer for each process).

Launch
    bigstep train hogwild
    bigstep train hogwild --data FILE.svm

Batch
    mini: updates of 32 samples; 375 shares an epoch of 12,000 images, drawn by two processes.

Known
    Sample, read, gradient, update; no locks. The proof needs sparse gradients, so that updates rarely collide (small
    rho and Delta). The experiments draw the data without replacement, and multiply the step by 0.9 each epoch.

Chosen
    mini: momentum SGD with the rate of `plain` for 32 samples (0.2 for 256, scaled by the batch), its weight decay, and
    linear decay to zero; each process has its own velocity, as in PyTorch's example. There is no preset `paper`: the
    paper trains no networks; its sparse problems run with --data FILE.svm, in threads, with `bigstep.sparse`.

Differs
    A network's gradient is dense: every update collides with every other, and it works only because few processes run,
    a few updates apart. The run counts both: the staleness of each update, and the writes that overlapped. Tensors are
    added without atomic operations. Batch norm uses each share's own statistics; the moving averages are shared like
    weights.
"""

from __future__ import annotations

from dataclasses import replace

from bigstep.config import AsynchronousConfig, Published, RunConfig
from bigstep.recipes import locked

__all__ = ["PUBLISHED", "SUMMARY", "TECHNIQUES", "mini"]

SUMMARY = "Niu et al. 2011: processes that read and update shared weights without a lock"
TECHNIQUES = ("shared weights", "no locks", "asynchronous")
PUBLISHED = Published(
    system="Hogwild!",
    source="Niu, Recht, Re, Wright, Hogwild!, 2011, arXiv 1106.5730",
    hardware="2 x 6 Xeon cores, 10 threads",
    batch="1 example an update",
    accuracy=None,
    seconds=9.5,
    data="RCV1",
    note="SVM on RCV1, 20 epochs; locked in turns 61.8 s. No networks in the paper.",
)


def mini() -> RunConfig:
    """The embedded data on two CPU cores: the run of `locked`, without the lock."""
    return replace(locked.mini(), asynchronous=AsynchronousConfig(method="hogwild", replicas=2))
