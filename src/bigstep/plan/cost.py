"""Seconds of one exchange on a cluster: the bytes and rounds of `bigstep.tables`, assigned to the links they cross.

This is the alpha-beta model: a round costs the latency of its link, a byte the inverse of its bandwidth; flows that
share a node's adapters share their rate. By symmetry one rank (or one leader) is priced for all, so 65,536 devices take
no longer to compute than two.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

from bigstep.errors import ConfigError
from bigstep.plan.cluster import Cluster, Link
from bigstep.tables import find, load
from bigstep.tables.collectives import COLLECTIVES, choose_by_size, choose_grid, collective_traffic

__all__ = [
    "Phase", "Placement", "exchange_phases", "exchange_seconds", "price_gather", "price_halving",
    "price_hierarchical", "price_hybrid", "price_ring", "price_switch", "price_torus",
]  # fmt: skip


@dataclass(frozen=True)
class Phase:
    """A part of an exchange that uses one level of links."""

    level: Literal["inside", "between"]
    rounds: int
    bytes_sent: float
    seconds: float
    rounds_s: float
    """The part of `seconds` in which messages wait for one another and no bytes use the links."""


@dataclass(frozen=True)
class Placement:
    """The devices that exchange, filling whole nodes of a cluster in order."""

    cluster: Cluster
    devices: int
    grid: tuple[int, int] | None = None
    """X and Y of a torus; X runs along a node first."""

    @property
    def per_node(self) -> int:
        """Devices per node that take part: k in the formulas."""
        return min(self.cluster.devices_per_node, self.devices)

    @property
    def nodes(self) -> int:
        """Nodes that take part: m in the formulas."""
        return -(-self.devices // self.per_node)


def exchange_seconds(
    collective: str, nbytes: float, cluster: Cluster, devices: int, grid: tuple[int, int] | None = None
) -> float:
    """Seconds to sum `nbytes` over `devices`, all parts one after another.

    >>> h100 = Cluster.load("dgx_h100")
    >>> exchange_seconds("torus", 51e6, h100, 2048) < exchange_seconds("ring", 51e6, h100, 2048)
    True
    """
    return sum(phase.seconds for phase in exchange_phases(collective, nbytes, cluster, devices, grid))


def exchange_phases(
    collective: str, nbytes: float, cluster: Cluster, devices: int, grid: tuple[int, int] | None = None
) -> list[Phase]:
    """The parts of one exchange, in order.

    With a1, b1 inside a node and a2, b2 between nodes (seconds per round and per byte), k devices per node, m nodes::

        ring          (2(N-1) - 2m) a1 + 2m a2 + 2n(N-1)/N max(b1, b2)
        hierarchical  4(k-1)(a1 + n/k b1) + 2(m-1)(a2 + n/m b2)             one leader, one adapter
        torus X x Y   ring of n over X, then ring of n/X over Y             k flows share the node's adapters
        halving       2 log2 k a1 + 2n(k-1)/k b1 + 2 log2 m a2 + 2(n/k)(m-1)/m k b2
        hybrid        hierarchical or ring, by the size of the message
        gather        2 a2 + 2(N-1) gap + max(inside, outside) bytes        each slice has an owner
        switch        2(k-1) a1 + 2n(k-1)/k b1 + 2 a2 + (n/k) k b2          the switches do the sums

    Args:
        collective: A name of `bigstep.tables.collectives`.
        nbytes: Encoded size of the gradients.
        cluster: The cluster with the links.
        devices: Number of devices that take part; they fill whole nodes in order.
        grid: X and Y of a torus; X runs along a node first.

    Returns:
        One or two phases; none for a single device.

    Reference: the cost formulas of Goyal et al. 2017 (section 4), Mikami et al. 2018 (section 3), Jia et al. 2018
    (section 3) and Seide et al. 2014; latencies of a ring that leaves its node as in NCCL's tuning model.
    """
    entry = find(COLLECTIVES, "collective", collective)
    if devices <= 1:
        return []
    phases: list[Phase] = _price(entry.price)(nbytes, Placement(cluster.running(collective), devices, grid))
    return [phase for phase in phases if phase.rounds]


_price = functools.cache(load)  # a search needs a hundred thousand prices


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


def price_ring(n: float, place: Placement) -> list[Phase]:
    """A ring over all devices."""
    return [_ring(n, place.devices, place.per_node, place.cluster, flows=1, senders=1)]


def price_torus(n: float, place: Placement) -> list[Phase]:
    """A ring along X, then rings along Y that share the adapters of a node."""
    cluster, k = place.cluster, place.per_node
    X, Y = place.grid or choose_grid(place.devices, cluster.devices_per_node)
    if place.devices != X * Y:
        raise ConfigError(f"grid is {X}x{Y} = {X * Y}, but there are {place.devices} devices; change the grid.")
    rows_in_node, row_nodes = max(1, k // X), max(1, X // k)
    return [
        _ring(n, X, min(k, X), cluster, flows=1, senders=1),
        _ring(n / X, Y, min(rows_in_node, Y), cluster, flows=min(X, k), senders=row_nodes, nodes=place.nodes),
    ]


def price_hierarchical(n: float, place: Placement) -> list[Phase]:
    """The devices inside each node in turn, then a ring of the leaders."""
    cluster, k = place.cluster, place.per_node
    traffic = collective_traffic("hierarchical", n, k * place.nodes, group=k)
    inner, outer = traffic.inner, traffic.outer
    assert inner is not None
    assert outer is not None
    # the leader also receives n(k-1)/k when its group gathers, so each of the 4(k-1) rounds moves n/k
    inside = _phase("inside", cluster.inside, inner.messages, inner.messages * n / k, cluster.inside.rate)
    return [
        replace(inside, bytes_sent=inner.bytes_sent),
        _phase("between", cluster.between, outer.messages, outer.bytes_sent, cluster.between.rate),
    ]


def price_hybrid(n: float, place: Placement) -> list[Phase]:
    """The collective that the size of the message selects, at its own measured costs."""
    name = choose_by_size(n, place.devices)
    phases: list[Phase] = load(COLLECTIVES[name].price)(n, replace(place, cluster=place.cluster.running(name)))
    return phases


def price_halving(n: float, place: Placement) -> list[Phase]:
    """Halving with neighbours first, so that only 1/(nodes per rack) of the bytes leave a rack."""
    cluster, k, m = place.cluster, place.per_node, place.nodes
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


def price_gather(n: float, place: Placement) -> list[Phase]:
    """All devices send to all owners at once: the adapters limit what leaves a node, and every message costs a gap."""
    cluster, devices, k, m = place.cluster, place.devices, place.per_node, place.nodes
    traffic = collective_traffic("gather", n, devices)
    outside = traffic.bytes_sent * (devices - k) / (devices - 1)
    link = cluster.between if m > 1 else cluster.inside
    wire = (traffic.bytes_sent - outside) / cluster.inside.rate
    if m > 1:
        wire = max(wire, outside * k / cluster.node_rate(m, cluster.nodes_per_rack))
    waiting = link.start_s + traffic.messages * link.latency_s + 2 * (devices - 1) * link.gap_s
    seconds = waiting + max(wire, traffic.bytes_sent / link.copy_byte_s)
    return [Phase("between" if m > 1 else "inside", traffic.messages, traffic.bytes_sent, seconds, waiting)]


def price_switch(n: float, place: Placement) -> list[Phase]:
    """Each device sends its 1/k of the node's sum up the tree of switches once, and receives it at the same time."""
    cluster, k, m = place.cluster, place.per_node, place.nodes
    inner, up = collective_traffic("ring", n, k), collective_traffic("switch", n / k, m)
    return [
        _phase("inside", cluster.inside, inner.messages, inner.bytes_sent, cluster.inside.rate),
        _phase("between", cluster.between, up.messages, up.bytes_sent, cluster.node_rate(m, 1) / k),
    ]
