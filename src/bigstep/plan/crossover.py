"""The bandwidth below which something pays: compressed gradients instead of plain ones, or islands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bigstep.plan.cluster import Cluster
from bigstep.plan.scheme import Scheme
from bigstep.plan.simulate import predict
from bigstep.plan.workload import Workload

__all__ = ["Crossover", "find_crossover", "highest_rate", "spoken_rate"]

SLOWEST_BYTE_S, FASTEST_BYTE_S = 1e6 / 8, 1e13 / 8


def highest_rate(pays: Callable[[float], bool], *, halvings: int = 40) -> float | None:
    """Bisect for the highest line rate, in bytes per second, at which something that pays on slow links still pays.

    Args:
        pays: Whether it pays at a rate.
        halvings: Number of bisections of the seven decades from 1 Mbit/s to 10 Tbit/s.

    Returns:
        None if it pays at none of these rates, infinity if it pays at all of them.

    >>> round(highest_rate(lambda byte_s: byte_s < 1e9) / 1e9, 6), highest_rate(lambda byte_s: True)
    (1.0, inf)
    """
    low, high = SLOWEST_BYTE_S, FASTEST_BYTE_S
    if not pays(low):
        return None
    if pays(high):
        return math.inf
    for _ in range(halvings):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return math.sqrt(low * high)


def spoken_rate(gbit_s: float | None, unit: str = "") -> str:
    """The rates at which something pays, as part of a sentence, with a unit unless the sentence names it elsewhere.

    >>> spoken_rate(2.5), spoken_rate(math.inf), spoken_rate(None)
    ('below 2.5', 'at every rate', 'at no rate')
    """
    if gbit_s is None:
        return "at no rate"
    return f"below {gbit_s:.3g}{unit}" if math.isfinite(gbit_s) else "at every rate"


@dataclass(frozen=True)
class Crossover:
    """The rate at which two exchanges take equally long: the line rate of one adapter between nodes."""

    compressed: str
    plain: str
    byte_s: float | None
    """None if the plain one wins at every rate from 1 Mbit/s to 10 Tbit/s, infinity if the compressed one does."""
    pays_here: bool
    gain_here: float
    """Share of the step that compression saves at the cluster's own rate; negative if it costs time."""

    @property
    def gbit_s(self) -> float | None:
        """The crossover in Gbit/s."""
        return None if self.byte_s is None else self.byte_s * 8 / 1e9


def find_crossover(
    workload: Workload,
    cluster: Cluster,
    *,
    devices: int,
    local_batch: float,
    compressed: Sequence[Scheme],
    plain: Sequence[Scheme],
) -> Crossover:
    """Bisect for the rate at which the best compressed exchange takes as long as the best plain one.

    At each rate both sides use their own best scheme, since slow and fast networks favour different ones.

    Example:
        >>> resnet, abci = Workload.load("resnet50"), Cluster.load("abci")
        >>> plain, onebit = Scheme(collective="halving", codec="fp16"), Scheme(collective="gather", codec="onebit")
        >>> found = find_crossover(resnet, abci, devices=64, local_batch=32, plain=[plain], compressed=[onebit])
        >>> found.pays_here, 0.1 < found.gbit_s < 100
        (False, True)
    """

    def best(schemes: Sequence[Scheme], byte_s: float) -> tuple[float, str]:
        tried = [
            (predict(workload, cluster.with_bandwidth(byte_s), devices=devices, local_batch=local_batch, scheme=m), m)
            for m in schemes
        ]
        step, scheme = min(((p.step_s, m) for p, m in tried), key=lambda pair: pair[0])
        return step, scheme.label

    def saved(byte_s: float) -> float:
        return best(plain, byte_s)[0] - best(compressed, byte_s)[0]

    here = cluster.between.bandwidth_byte_s
    plain_s, plain_label = best(plain, here)
    return Crossover(
        compressed=best(compressed, here)[1],
        plain=plain_label,
        byte_s=highest_rate(lambda byte_s: saved(byte_s) > 0),
        pays_here=saved(here) > 0,
        gain_here=saved(here) / plain_s,
    )
