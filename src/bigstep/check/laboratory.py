"""Where properties get their observations: worlds that run trials, each trial once."""

from __future__ import annotations

import functools
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bigstep.check.pool import Pool, pickled
from bigstep.check.shrink import lossless, one_island
from bigstep.check.subject import Own, Subject, Trial
from bigstep.check.verdict import PATH_BOUND, ROUNDING_BOUND

__all__ = ["Laboratory"]


class Laboratory:
    """Runs observations of one subject in worlds of one pool and remembers them."""

    def __init__(
        self, pool: Pool, subject: Subject, own: Own, trial: Trial, ranks: tuple[int, ...], precision: str
    ) -> None:
        self.precision = precision
        """Of the configured run; trials are in float64."""
        self.trial = trial
        """The run as configured, made small."""
        self.lossless = lossless(trial)
        """With a codec that loses nothing, so that different numbers of ranks can be compared."""
        self.synchronous = one_island(self.lossless)
        """With all workers on one island, so that there is one gradient."""
        self.path_bound, self.rounding_bound = (0.0, 0.0) if trial.config.exact else (PATH_BOUND, ROUNDING_BOUND)
        """Of differences between numbers of ranks; an exact run may have none."""
        self.subject = subject
        self.own = own
        self.ranks = ranks
        """Sizes of the worlds, ascending, from 1."""
        self._pool = pool
        self._seen: dict[tuple[Any, ...], list[Any]] = {}
        # a unique name: ranks cache what they loaded under it
        self._prefix = Path(tempfile.mkdtemp(prefix="check-", dir=pool.folder))
        self._context = self._prefix / "subject.pickle"
        self._context.write_bytes(pickled((subject, own)))

    @property
    def several(self) -> tuple[int, ...]:
        """Sizes of the worlds of more than one rank."""
        return self.ranks[1:]

    def see(self, observation: Callable[..., Any], trial: Trial, ranks: int, *args: Any) -> list[Any]:
        """Return what each rank of a world saw; an observation is made once and remembered."""
        key = (observation, trial, ranks, *args)
        if key not in self._seen:
            self._seen[key] = self._pool.run(ranks, _observe, self._context, observation, trial, args)
        return self._seen[key]

    def folder(self, trial: Trial, ranks: int) -> Path:
        """Where the run of a trial in a world leaves its checkpoint."""
        return self._prefix / f"{hash(trial) & 0xFFFFFFFF:08x}-{ranks}"

    def close(self) -> None:
        """Remove the pickled subject; checkpoints are removed with the pool."""
        self._context.unlink(missing_ok=True)


def _observe(context: Path, observation: Callable[..., Any], trial: Trial, args: tuple[Any, ...]) -> Any:
    subject, own = _loaded(context)
    return observation(subject, own, trial, *args)


@functools.lru_cache(maxsize=1)
def _loaded(context: Path) -> tuple[Subject, Own]:
    loaded: tuple[Subject, Own] = pickle.loads(context.read_bytes())
    return loaded
