"""Post-local SGD: synchronous until the rate first decays, local SGD from there on.

Evidence
    Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2018 (arXiv 1808.07217): large batches generalise worse;
    islands in the last phase bring back the noise, and with it the accuracy.

    | what                                                          | standing                                     |
    |---------------------------------------------------------------|----------------------------------------------|
    | better than large batches at the same time and scale          | abstract; no figure is repeated here         |
    | a user's run fell from 76.97 to 69.62 % on ImageNet           | public thread, PyTorch 74157: not explained  |

Launch
    bigstep train postlocal
    bigstep train postlocal --preset cifar10 --data cifar10 --device cuda --set workers.count=512

Batch
    mini: 32 workers x 32 = 1,024, then 4 islands of 8 workers from epoch 10 of 20 on, a meeting every 4 steps.
    cifar10: 16 workers x 32 = 512, 8 islands from epoch 15 of 30 on; --set workers.count=N takes any batch.

Known
    Synchronous up to the first decay of the rate; then averaging every H steps; each island keeps its own momentum.

Chosen
    A rate that falls in steps, by 10 after half and three quarters of the run, so that there is a first decay; warm-up,
    peak rate and weight decay are those of `plain`. Islands as in `localsgd`. Not searched.

Differs
    Each island begins with a copy of the momentum and the batch-norm statistics of the synchronous part.
"""

from __future__ import annotations

from dataclasses import replace

from bigstep.config import IslandsConfig, Piece, Published, RunConfig
from bigstep.recipes import plain

__all__ = ["PUBLISHED", "SUMMARY", "TECHNIQUES", "cifar10", "mini"]

SUMMARY = "Post-local SGD: synchronous until the rate first decays, then islands that meet every H steps"
TECHNIQUES = ("islands from the first decay on", "averaging every H steps", "Nesterov momentum", "warm-up")
PUBLISHED = Published(
    system="Post-local SGD",
    source="Lin et al., Don't Use Large Mini-Batches, Use Local SGD, 2018, arXiv 1808.07217",
    hardware="not compared",
    batch="any",
    accuracy=None,
    seconds=None,
    note="Its networks and data are not those of the presets.",
)


def mini() -> RunConfig:
    """The embedded data on two CPU cores."""
    return _after_the_first_decay(plain.mini(), IslandsConfig(count=4, every=4))


def cifar10() -> RunConfig:
    """CIFAR-10 on one GPU; add workers for a larger batch (--set workers.count=512)."""
    return _after_the_first_decay(plain.cifar10(), IslandsConfig(count=8, every=4))


def _after_the_first_decay(config: RunConfig, islands: IslandsConfig) -> RunConfig:
    """Let the rate fall after half and three quarters of a run, and islands begin at the first fall."""
    epochs = config.epochs
    falls = Piece(shape="step", until=epochs, at=(epochs / 2, epochs * 3 / 4), factor=0.1)
    warmup = config.lr.schedule[0]
    return replace(config, lr=replace(config.lr, schedule=(warmup, falls)), islands=replace(islands, begin=epochs / 2))
