"""Seconds of one exchange on a cluster: the bytes and rounds of `bigstep.wire`, placed on the links they cross.

alpha-beta model: a round costs its link's latency, a byte its link's bandwidth; flows that share a node's adapters
share their rate. By symmetry one rank (or one leader) stands for all, so 65,536 devices cost as little as two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from bigstep.errors import ConfigError, nearest
from bigstep.plan.cluster import Cluster, Link
from bigstep.wire import COLLECTIVES, choose_grid, collective_traffic

__all__ = ["PLANNED_COLLECTIVES", "Phase", "choose_planned_grid", "exchange_phases", "exchange_seconds"]

PLANNED_COLLECTIVES = (*COLLECTIVES, "switch")
"""Those of `bigstep.exchange`, and reduction inside the switches, which a backend may do by itself."""


@dataclass(frozen=True)
class Phase:
    """A part of an exchange that uses one level of links."""

    level: Literal["inside", "between"]
    rounds: int
    bytes_sent: float
    seconds: float
    rounds_s: float
    """Those of the seconds in which messages wait for one another and no byte holds the links."""


def exchange_seconds(
    collective: str, nbytes: float, cluster: Cluster, devices: int, grid: tuple[int, int] | None = None
) -> float:
    """Seconds to sum `nbytes` over `devices`, all parts one after another.

    >>> h100 = Cluster.load("dgx_h100")
    >>> exchange_seconds("torus", 51e6, h100, 2048) < exchange_seconds("ring", 51e6, h100, 2048)
    True
    """
    return sum(phase.seconds for phase in exchange_phases(collective, nbytes, cluster, devices, grid))


def choose_planned_grid(cluster: Cluster, devices: int) -> tuple[int, int]:
    """X and Y of a torus: the squarest grid whose rows are whole nodes, so that few rounds cross the slow links."""
    k = min(cluster.devices_per_node, devices)
    if devices % k:
        return choose_grid(devices)
    X, Y = choose_grid(devices // k)
    X, Y = min(X, Y) * k, max(X, Y)
    return (X, Y) if devices == X * Y else choose_grid(devices, k)


def exchange_phases(
    collective: str, nbytes: float, cluster: Cluster, devices: int, grid: tuple[int, int] | None = None
) -> list[Phase]:
    """The parts of one exchange, in order.

    With a1, b1 inside a node and a2, b2 between nodes (seconds a round, seconds a byte), k devices a node, m nodes::

        ring          (2(N-1) - 2m) a1 + 2m a2 + 2n(N-1)/N max(b1, b2)
        hierarchical  4(k-1)(a1 + n/k b1) + 2(m-1)(a2 + n/m b2)             one leader, one adapter
        torus X x Y   ring of n over X, then ring of n/X over Y             k flows share the node's adapters
        halving       2 log2 k a1 + 2n(k-1)/k b1 + 2 log2 m a2 + 2(n/k)(m-1)/m k b2
        gather        2 a2 + 2(N-1) gap + max(inside, outside) bytes        an owner for each slice
        switch        2(k-1) a1 + 2n(k-1)/k b1 + 2 a2 + (n/k) k b2          the switches add

    Args:
        collective: One of `PLANNED_COLLECTIVES`.
        nbytes: Encoded size of what is exchanged.
        cluster: The links.
        devices: How many take part, filling whole nodes in order.
        grid: X and Y of a torus; X runs along a node first.

    Returns:
        One or two phases; none for a single device.

    Reference: the cost formulas of Goyal et al. 2017 (section 4), Mikami et al. 2018 (section 3), Jia et al. 2018
    (section 3) and Seide et al. 2014; latencies of a ring that leaves its node as in NCCL's tuning model.
    """
    if collective not in PLANNED_COLLECTIVES:
        raise ConfigError(f"There is no collective {collective!r}: {nearest(collective, PLANNED_COLLECTIVES)}")
    if devices <= 1:
        return []
    cluster = cluster.running(collective)
    k = min(cluster.devices_per_node, devices)
    m = -(-devices // k)
    if collective == "ring":
        phases = [_ring(nbytes, devices, k, cluster, flows=1, senders=1)]
    elif collective == "torus":
        X, Y = grid or choose_planned_grid(cluster, devices)
        if devices != X * Y:
            raise ConfigError(f"grid is {X}x{Y} = {X * Y}, but there are {devices} devices; change the grid.")
        rows_in_node = max(1, k // X)
        row_nodes = max(1, X // k)
        phases = [
            _ring(nbytes, X, min(k, X), cluster, flows=1, senders=1),
            _ring(nbytes / X, Y, min(rows_in_node, Y), cluster, flows=min(X, k), senders=row_nodes, nodes=m),
        ]
    elif collective == "hierarchical":
        phases = _hierarchical(nbytes, k, m, cluster)
    elif collective == "halving":
        phases = _halving(nbytes, k, m, cluster)
    elif collective == "gather":
        phases = [_gather(nbytes, devices, k, m, cluster)]
    else:
        phases = _switch(nbytes, k, m, cluster)
    return [phase for phase in phases if phase.rounds]


def _phase(level: Literal["inside", "between"], link: Link, rounds: int, bytes_sent: float, rate: float) -> Phase:
    waiting = link.start_s + rounds * link.latency_s
    return Phase(level, rounds, bytes_sent, waiting + bytes_sent / min(rate, link.copy_byte_s), waiting)


def _ring(n: float, ranks: int, per_node: int, cluster: Cluster, *, flows: int, senders: int, nodes: int = 0) -> Phase:
    """A ring over `ranks` in order, `per_node` of them in each node; `flows` such rings share a node's adapters."""
    traffic = collective_traffic("ring", n, ranks)
    crossed = -(-ranks // per_node) if ranks > 1 else 1
    if crossed == 1:
        return _phase("inside", cluster.inside, traffic.messages, traffic.bytes_sent, cluster.inside.rate)
    rate = cluster.node_rate(nodes or crossed, senders) / flows
    outer = min(traffic.messages, 2 * crossed) if per_node > 1 else traffic.messages
    if per_node > 1:
        rate = min(rate, cluster.inside.rate)
    crossing = _phase("between", cluster.between, outer, traffic.bytes_sent, rate)
    within = (traffic.messages - outer) * cluster.inside.latency_s
    return replace(
        crossing,
        rounds=traffic.messages,
        seconds=crossing.seconds + within,
        rounds_s=crossing.rounds_s + within,
    )


def _hierarchical(n: float, k: int, m: int, cluster: Cluster) -> list[Phase]:
    traffic = collective_traffic("hierarchical", n, k * m, group=k)
    inner, outer = traffic.inner, traffic.outer
    assert inner is not None
    assert outer is not None
    # the leader also receives n(k-1)/k when its group gathers: every round of the four moves n/k
    inside = _phase("inside", cluster.inside, inner.messages, inner.messages * n / k, cluster.inside.rate)
    return [
        replace(inside, bytes_sent=inner.bytes_sent),
        _phase("between", cluster.between, outer.messages, outer.bytes_sent, cluster.between.rate),
    ]


def _halving(n: float, k: int, m: int, cluster: Cluster) -> list[Phase]:
    """Neighbours first, so that only 1/(nodes of a rack) of the bytes leave a rack."""
    inner, outer = collective_traffic("halving", n, k), collective_traffic("halving", n / k, m)
    rack = cluster.nodes_per_rack or m
    near = min(m, 1 << (rack.bit_length() - 1))
    far_bytes = 2 * n / k * max(0.0, 1 / near - 1 / m)
    near_rate = min(cluster.node_rate(1, 0) / k, cluster.between.copy_byte_s)
    far_rate = min(cluster.node_rate(m, cluster.nodes_per_rack) / k, cluster.between.copy_byte_s)
    between = _phase("between", cluster.between, outer.messages, 0.0, 1.0)
    held = max(0.0, outer.bytes_sent - far_bytes) / near_rate + far_bytes / far_rate
    return [
        _phase("inside", cluster.inside, inner.messages, inner.bytes_sent, cluster.inside.rate),
        replace(between, bytes_sent=outer.bytes_sent, seconds=between.seconds + held),
    ]


def _gather(n: float, devices: int, k: int, m: int, cluster: Cluster) -> Phase:
    traffic = collective_traffic("gather", n, devices)
    outside = traffic.bytes_sent * (devices - k) / (devices - 1)
    link = cluster.between if m > 1 else cluster.inside
    wire = (traffic.bytes_sent - outside) / cluster.inside.rate
    if m > 1:
        wire = max(wire, outside * k / cluster.node_rate(m, cluster.nodes_per_rack))
    waiting = link.start_s + traffic.messages * link.latency_s + 2 * (devices - 1) * link.gap_s
    seconds = waiting + max(wire, traffic.bytes_sent / link.copy_byte_s)
    return Phase("between" if m > 1 else "inside", traffic.messages, traffic.bytes_sent, seconds, waiting)


def _switch(n: float, k: int, m: int, cluster: Cluster) -> list[Phase]:
    """Each device sends its 1/k of the sum up the tree of switches once, and receives it once, at the same time."""
    inner = collective_traffic("ring", n, k)
    phases = [_phase("inside", cluster.inside, inner.messages, inner.bytes_sent, cluster.inside.rate)]
    if m > 1:
        phases.append(_phase("between", cluster.between, 2, n / k, cluster.node_rate(m, 1) / k))
    return phases
