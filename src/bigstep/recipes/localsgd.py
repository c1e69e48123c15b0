"""Local SGD: islands take steps of their own with momentum SGD, and every H steps all take the mean of their weights.

Evidence
    Stich, "Local SGD Converges Fast and Communicates Little", 2018 (arXiv 1805.09767): for convex losses it converges
    as fast as mini-batch SGD, with fewer exchanges. Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2018
    (arXiv 1808.07217): the same for networks on images.

    | what                                             | standing                                              |
    |--------------------------------------------------|-------------------------------------------------------|
    | exchanges fall by H, the rate of convergence not | theorem for convex losses, H up to the root of steps  |
    | trades bytes against accuracy as H grows         | abstract of Lin et al.; no figure is repeated here    |

Launch
    bigstep train localsgd
    bigstep train localsgd --procs 2 --set islands.every=8
    bigstep train localsgd --preset cifar10 --data cifar10 --device cuda --set workers.count=512

Batch
    mini: 32 workers x 32 = 1,024 on 4 islands of 8 workers; 12 steps an epoch, a meeting every 4.
    cifar10: 16 workers x 32 = 512 on 8 islands; --set workers.count=N takes any batch; the rate as in `plain`.

Known
    Weights are averaged; momentum is not, and stays with its island (Lin et al.). The rate is that of the whole
    batch, with a warm-up.

Chosen
    Four islands and H = 4 in mini, eight and H = 4 on CIFAR-10, where a batch of 16,384 leaves three steps an epoch.
    Rates, decay and schedule are those of `plain`, so that a comparison shows the effect of the islands alone; not
    searched.

Differs
    Every island has batch-norm statistics of its own; an evaluation uses their mean. Islands are weighted by the
    samples that they have seen, which differ only in the last batch of an epoch.
"""

from __future__ import annotations

from dataclasses import replace

from bigstep.config import IslandsConfig, Published, RunConfig
from bigstep.recipes import plain

__all__ = ["PUBLISHED", "SUMMARY", "TECHNIQUES", "cifar10", "mini"]

SUMMARY = "Local SGD: islands with momentum SGD of their own take the mean of their weights every H steps"
TECHNIQUES = ("islands", "averaging every H steps", "Nesterov momentum", "linear LR scaling", "warm-up")
PUBLISHED = Published(
    system="Local SGD",
    source="Stich, Local SGD Converges Fast and Communicates Little, 2018, arXiv 1805.09767",
    hardware="not compared",
    batch="any",
    accuracy=None,
    seconds=None,
    note="A theorem on convex losses; Lin et al. (arXiv 1808.07217) train networks with it.",
)


def mini() -> RunConfig:
    """The embedded data on two CPU cores."""
    return replace(plain.mini(), islands=IslandsConfig(count=4, every=4))


def cifar10() -> RunConfig:
    """CIFAR-10 on one GPU; add workers for a larger batch (--set workers.count=512)."""
    return replace(plain.cifar10(), islands=IslandsConfig(count=8, every=4))
