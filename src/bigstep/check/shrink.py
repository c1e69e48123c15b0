"""A run made small without losing what can go wrong in it: optimizer, schedule, plan, norms, exchange stay."""

from __future__ import annotations

from dataclasses import replace

from bigstep.check.subject import Trial
from bigstep.config import IslandsConfig, RunConfig, Stage, WorkersConfig, require
from bigstep.config.edit import scale_workers, stretch
from bigstep.tables.codecs import CODECS
from bigstep.tables.collectives import COLLECTIVES
from bigstep.tables.optimizers import SgdSettings

__all__ = ["few_workers", "lossless", "one_island", "shrink", "with_batch"]

WORKERS, LOCAL_BATCH = 6, 4
"""Six workers are uneven on four ranks, which exposes code that divides by the wrong number."""
EPOCHS = 2.5
TEST_SAMPLES = 260
"""Two forwards of an evaluation on a CPU, of 250 and 10: shared unevenly by any number of ranks."""
MEETING_STEPS = 3
"""Steps between two meetings of islands, at most, so that a check sees several."""
WARMUP_STEPS = 2
"""Dense steps before a lossy codec starts, at most; a check is too short for more."""


def shrink(config: RunConfig, most_ranks: int) -> Trial:
    """Return a run of some twelve steps with the structure of `config`, in float64.

    Local batches keep their ratios from stage to stage. An epoch ends with an incomplete batch whose samples do not
    divide evenly among workers, and in which some ranks have none.
    """
    require(
        config.asynchronous.method == "none",
        f"The recipe {config.recipe} is asynchronous ({config.asynchronous.method}): its path depends on timing, so "
        "there is no equality to check; `bigstep bench` measures it.",
    )
    first = config.workers
    scaled = scale_workers(
        stretch(config, EPOCHS),
        count=min(1, WORKERS / first.count),
        local_batch=min(1, LOCAL_BATCH / first.local_batch),
        least=most_ranks,
    )
    batch = scaled.batch
    largest = max([batch, *(stage.count * stage.local_batch for stage in scaled.stages)])
    small = replace(
        scaled,
        precision="float64",
        exchange=replace(config.exchange, warmup_steps=min(config.exchange.warmup_steps, WARMUP_STEPS)),
        islands=_meet_soon(scaled.islands),
        data=replace(scaled.data, loaders=0),
        checkpoint=replace(scaled.checkpoint, every=1e-6),  # so that any step may be saved
    )
    return Trial(
        config=small,
        train_samples=max(4 * batch, 2 * largest) + batch // 2 + 1,
        test_samples=TEST_SAMPLES,
        padded=config.islands.count == 1,  # islands are averaged by samples, not by tokens
    )


def _meet_soon(islands: IslandsConfig) -> IslandsConfig:
    every = min(islands.every, MEETING_STEPS)
    return replace(islands, every=every, overlap=min(islands.overlap, every - 1))


def lossless(trial: Trial) -> Trial:
    """Return the trial without what depends on ranks: a lossy codec, late gradients, AdaGrad before the mean."""
    optimizer = trial.config.optimizer
    if isinstance(optimizer, SgdSettings) and optimizer.adagrad == "before":
        trial = replace(trial, config=replace(trial.config, optimizer=replace(optimizer, adagrad="after")))
    exchange = trial.config.exchange
    plain = replace(exchange, double_buffer=False)  # one rank exchanges nothing, so nothing is late
    if CODECS[exchange.codec].loses != "nothing":
        collective = exchange.collective if COLLECTIVES[exchange.collective].sums else "ring"
        plain = replace(plain, collective=collective, codec="none", warmup_steps=0)
    return trial if plain == exchange else replace(trial, config=replace(trial.config, exchange=plain))


def one_island(trial: Trial) -> Trial:
    """Return the trial with all workers on one island."""
    return replace(trial, config=replace(trial.config, islands=IslandsConfig()))


def few_workers(trial: Trial) -> Trial:
    """Return the trial with all samples of a batch on one worker in its first and in its last third."""
    config, epochs = trial.config, trial.config.epochs
    alone = WorkersConfig(count=1, local_batch=config.batch)
    plan = (
        Stage(epoch=epochs / 3, count=config.workers.count, local_batch=config.workers.local_batch),
        Stage(epoch=2 * epochs / 3, count=1, local_batch=config.batch),
    )
    return replace(trial, config=replace(config, workers=alone, plan=plan))


def with_batch(trial: Trial, *, count: float = 1, local_batch: float = 1) -> Trial:
    """Return the trial with workers and local batches of all stages multiplied."""
    return replace(trial, config=scale_workers(trial.config, count=count, local_batch=local_batch))
