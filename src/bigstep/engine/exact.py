"""What an exact run needs besides exact gradients: forwards with the same bits anywhere, and exact sums of all else."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bigstep.config import ExchangeConfig
from bigstep.engine.ranks import Ranks
from bigstep.errors import RunError
from bigstep.exchange.bucket import Bucket
from bigstep.exchange.codecs.exact import Exact
from bigstep.exchange.collectives import Collective
from bigstep.exchange.summed import Summed
from bigstep.exchange.world import World
from bigstep.tables import load
from bigstep.tables.collectives import COLLECTIVES

__all__ = ["ExactSum", "fixed_arithmetic", "say_moved"]


@contextlib.contextmanager
def fixed_arithmetic(device: torch.device) -> Iterator[None]:
    """Let a forward give the same bits wherever it runs.

    One thread per forward, since torch cuts sums by the number of threads (more ranks use more cores); on a GPU,
    deterministic kernels, and convolution algorithms that cuDNN chooses by rule and not by timing.
    """
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    cudnn = torch.backends.cudnn
    by_clock, in_order = cudnn.benchmark, cudnn.deterministic
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # untyped in torch
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses to be deterministic
        torch.use_deterministic_algorithms(True)
        # otherwise torch fills every new tensor for nothing: a seventh of a step of ResNet-50
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        cudnn.benchmark, cudnn.deterministic = False, True
    else:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]
        cudnn.benchmark, cudnn.deterministic = by_clock, in_order


def say_moved(sessions: Sequence[Any]) -> str | None:
    """Say that an exact run goes on where a forward may round differently; None if it does not.

    Args:
        sessions: Those of its records, the present one last.

    >>> old, new = ({"hardware": {"processor": name}, "device": "cpu"} for name in ("EPYC 7", "EPYC 9"))
    >>> say_moved([old]), say_moved([old, old])
    (None, None)
    >>> say_moved([old, new])[:90]
    'The bits of an exact run are promised on one processor, but this one was on EPYC 7 and goe'
    """
    places = [_place(session) for session in sessions[-2:] if isinstance(session, Mapping)]
    changed = [what for what in places[0] if places[0][what] != places[-1][what]] if places else []
    if not changed:
        return None
    what = changed[0]
    return (
        f"The bits of an exact run are promised on one {what}, but this one was on {places[0][what]!s:.80} and goes on "
        f"on {places[-1][what]!s:.80}: they may differ from those of a run that was never moved."
    )


def _place(session: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that decides how a forward rounds."""
    facts = [session.get(name) for name in ("hardware", "versions")]
    hardware, versions = (fact if isinstance(fact, Mapping) else {} for fact in facts)
    return {
        "processor": hardware.get("processor"),
        "kind of device": session.get("device"),
        "release of torch": versions.get("torch"),
    }


class ExactSum:
    """Adds up the parts of some workers (or islands): the result is the same wherever they run.

    Every rank must make it.

    Args:
        ranks: Those that host them.
        config: Names the collective.
        parts: The most parts that there are in all; the scale of the sum depends on it.
    """

    def __init__(self, ranks: Ranks, config: ExchangeConfig, parts: int):
        self._ranks = ranks
        self._name = config.collective if COLLECTIVES[config.collective].sums else "ring"
        world: World | None = None
        collective: Collective | None = None
        if ranks.size > 1:
            group = ranks.group or dist.group.WORLD
            assert group is not None
            grid = config.grid if config.grid == "auto" else (config.grid[0], config.grid[1])
            timeout = timedelta(seconds=ranks.timeout_s)
            world = World.join(group, grid=grid, timeout=timeout, purpose=f"exact sums by {self._name}")
            collective = load(COLLECTIVES[self._name].home)(world)
        self._sum = Summed(world, collective, Exact(), agrees=True, parts=parts)

    def __call__(self, parts: Sequence[Tensor], shapes: Sequence[torch.Size]) -> Tensor:
        """Return the sum over all ranks' parts, which are flat and laid out alike; the first of them is overwritten.

        Every rank must call this at the same point; one that has no part gives zeros. A part holds tensors of these
        shapes one after another; each has its own scale.
        """
        first, *others = parts
        bucket = Bucket(first, names=(), shapes=tuple(shapes), step=0, held=tuple(others))
        try:
            for under_way in self._sum.start(bucket):
                for work in under_way:
                    work.wait()
        except RuntimeError as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RunError(f"The exact sum ({self._name}) failed on rank {self._ranks.rank}: {reason}") from error
        return first
