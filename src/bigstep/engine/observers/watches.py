"""Naming what goes wrong during a run: a slow rank, input that does not keep up, a loss that is not finite."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from bigstep.config import RunConfig
from bigstep.data.sampler import hosted_workers
from bigstep.engine.meter import Flush
from bigstep.engine.methods.base import Note
from bigstep.engine.observers.base import Observer
from bigstep.engine.ranks import AgreedError

__all__ = ["InputWatch", "LossWatch", "StragglerWatch", "loads_of_ranks", "patience_of"]

_HOPELESS = 100
"""Steps in a row that fp16 may skip: its scale is at its floor after ten, and no weight has moved in any of them."""
_SLOWER = 1.4
"""A rank is a straggler if its time is at least this multiple of the others' median."""
_IN_A_ROW = 2
"""Flushes in a row in which that must be so."""
_WAITING = 0.2
"""Share of the time above which a run is said to wait for its data."""
_LONG_ENOUGH_S = 10.0
"""Seconds over which that share is taken, so that loaders that start with an epoch do not matter."""


_REMEDIES = {
    "disk": "reading takes longer than decoding, so the disk is the bottleneck; use a faster one or read from memory, "
    "or pack the images into a few files with `bigstep data pack FOLDER OUT --side 400`.",
    "copy": "copying to the device takes longer than decoding; train on smaller images (data.image_size), or let the "
    "GPU decode (data.decoder=nvjpeg), so that compressed ones travel.",
    "device": "the GPU's own decoders take the time; store smaller images (`bigstep data pack FOLDER OUT --side 256`), "
    "or let more cores help them (data.decoder=both, and more data.loaders).",
}
"""What to do if something other than decoding takes the time; 256: most photographs of ImageNet have 500 x 375."""


class LossWatch(Observer):
    """Ends a run whose loss is not finite, or stays so where steps with such gradients are skipped anyway.

    Args:
        patience: Steps in a row that may have such a loss: 0 ends the run at once, infinity never.
    """

    def __init__(self, patience: float = 0):
        self._patience, self._times = patience, 0

    def flushed(self, flush: Flush) -> Iterable[Note]:
        """Look at every loss; all ranks see the same."""
        for row in flush.rows:
            self._times = 0 if math.isfinite(row["loss"]) else self._times + 1
            if self._times > self._patience:
                since = f", and was not finite in the {self._patience:.0f} steps before" if self._patience else ""
                raise AgreedError(
                    f"The loss is {row['loss']} at step {row['step']} (epoch {row['epoch']:.2f}, learning rate "
                    f"{row['lr']:.4g}){since}; lower lr.base, lengthen the warm-up or shrink the batch."
                )
        return ()


def patience_of(config: RunConfig) -> float:
    """Return how many steps in a row may have a loss that is not finite.

    >>> from bigstep.config.schema import config_from_mapping
    >>> base = {"workers": {"count": 8, "local_batch": 32}, "epochs": 2, "lr": {"base": 0.1}}
    >>> [patience_of(config_from_mapping({**base, "precision": name})) for name in ("bf16", "fp16")]
    [0, 100]
    """
    if config.nonfinite == "skip":
        return math.inf
    # the loss of one of several islands may stay so until it meets the others again
    return max(_HOPELESS, 2 * config.islands.every) if config.arithmetic.loss_scale > 0 else 0


class StragglerWatch(Observer):
    """Names a rank whose own work takes much longer than that of the others, once each time it begins.

    >>> watch, data = StragglerWatch(), [0.1, 0.1, 0.1]
    >>> [watch.see([1.0, 1.0, 2.1], data), watch.see([1.0, 1.1, 2.2], data), watch.see([1.0, 1.0, 2.0], data)]
    [None, 'Rank 2 takes 2.0 times as long as the others (in computing); the whole run waits for it.', None]
    """

    def __init__(self, islands: int = 1) -> None:
        """`islands`: how many the workers of the run are spread over."""
        self._islands = islands
        self._suspect, self._times = -1, 0

    def flushed(self, flush: Flush) -> Iterable[Note]:
        """Look at the ranks, unless some of them have nothing to do."""
        ranks = len(flush.compute_by_rank)
        if flush.step.workers < ranks:
            return
        loads = loads_of_ranks(flush.step.workers, ranks, self._islands)
        if (sentence := self.see(flush.compute_by_rank, flush.data_by_rank, loads)) is not None:
            yield Note(sentence)

    def see(self, compute_s: Sequence[float], data_s: Sequence[float], loads: Sequence[int] = ()) -> str | None:
        """Take each rank's seconds of computing and of waiting for data since the last call; name a sure straggler.

        A rank with a larger load may take longer; it is slow only if it also takes longer per unit of its load.
        """
        if len(compute_s) < 2:
            return None
        own_s = [compute + data for compute, data in zip(compute_s, data_s, strict=True)]
        slowest = max(range(len(own_s)), key=own_s.__getitem__)

        def typical(seconds: Sequence[float]) -> float:
            return statistics.median(value for rank, value in enumerate(seconds) if rank != slowest)

        each_s = [seconds / load for seconds, load in zip(own_s, loads or [1] * len(own_s), strict=True)]
        ratio = min(seconds[slowest] / max(typical(seconds), 1e-9) for seconds in (own_s, each_s))
        if ratio < _SLOWER:
            self._suspect, self._times = -1, 0
            return None
        self._times = self._times + 1 if slowest == self._suspect else 1
        self._suspect = slowest
        if self._times != _IN_A_ROW:
            return None
        excess_in_data = data_s[slowest] - typical(data_s) > compute_s[slowest] - typical(compute_s)
        part = "waiting for its data" if excess_in_data else "computing"
        return f"Rank {slowest} takes {ratio:.1f} times as long as the others (in {part}); the whole run waits for it."


def loads_of_ranks(workers: int, ranks: int, islands: int = 1) -> list[int]:
    """Return how much each rank has to do in a step, in workers or in whole islands.

    >>> loads_of_ranks(4, 3), loads_of_ranks(8, 3, islands=4), loads_of_ranks(6, 4, islands=2)
    ([1, 1, 2], [1, 1, 2], [1, 2, 1, 2])
    """
    if islands == 1:
        return [len(hosted_workers(workers, rank, ranks)) for rank in range(ranks)]
    if ranks <= islands:
        return [len(hosted_workers(islands, rank, ranks)) for rank in range(ranks)]
    span = ranks // islands
    return [len(hosted_workers(workers // islands, rank % span, span)) for rank in range(ranks)]


class InputWatch(Observer):
    """Says once if a run that loads files waits for them much of the time, which part is slow, and what to change.

    Args:
        loaders: Loader processes of each rank; None where the data is in memory and there is nothing to say.
        cores: Cores that a rank has for itself.
        spent: Returns seconds that went into `disk`, `decode` and `copy` so far, where the feed tells them apart.

    >>> watch = InputWatch(loaders=2, cores=8)
    >>> [watch.see([0.2, 2.4], 5.0), watch.see([0.2, 2.0], 5.5), watch.see([0.2, 2.0], 5.0)][1]
    'Waiting for data 42 % of the time: 2 loaders are too few; set data.loaders=4 (a rank has 8 cores).'
    """

    def __init__(self, loaders: int | None, cores: int, spent: Callable[[], Mapping[str, float]] = lambda: {}) -> None:
        self._loaders, self._cores, self._spent = loaders, cores, spent
        self._waited_s = self._elapsed_s = 0.0

    def flushed(self, flush: Flush) -> Iterable[Note]:
        """Look at how long the ranks have waited."""
        if (sentence := self.see(flush.data_by_rank, flush.elapsed_s)) is not None:
            yield Note(sentence)

    def see(self, data_s: Sequence[float], elapsed_s: float) -> str | None:
        """Take each rank's seconds of waiting for data and the seconds elapsed since the last call."""
        if self._loaders is None:
            return None
        self._waited_s += max(data_s)  # the others wait for that rank
        self._elapsed_s += elapsed_s
        if self._elapsed_s < _LONG_ENOUGH_S:
            return None
        share = min(0.99, self._waited_s / self._elapsed_s)
        if share <= _WAITING:
            self._waited_s = self._elapsed_s = 0.0
            return None
        spent = self._spent()
        longest = max(spent, key=spent.__getitem__, default="decode")
        advice = _REMEDIES.get(longest) or self._advice(self._loaders, share)
        sentence = f"Waiting for data {100 * share:.0f} % of the time: {advice}"
        self._loaders = None  # once is enough
        return sentence

    def _advice(self, loaders: int, share: float) -> str:
        if loaders >= self._cores:
            return (
                f"all {self._cores} cores of a rank load already; store smaller images (`bigstep data pack FOLDER OUT "
                "--side 256`), use a machine with more cores, or give each GPU more to do."
            )
        # without loaders the loop itself loads, for `share` of its time; loaders run beside it all the time
        wanted = min(self._cores, math.ceil((loaders or share) / (1 - share)))
        few = "1 loader is" if loaders == 1 else f"{loaders or 'no'} loaders are"
        return f"{few} too few; set data.loaders={max(wanted, loaders + 1)} (a rank has {self._cores} cores)."
