"""The best way to train: synchronous, islands or a parameter server, by time and price, on machines that may be lost.

A device lasts `lifetime` hours on average. With N devices there are N / lifetime losses per hour, and each costs

    synchronous   all devices a restart and half of the work between two checkpoints
    islands       all devices a restart and half of the steps between two meetings, whose result every island keeps
    server        one replica a restart

The time between checkpoints of a synchronous run is the one that costs least, sqrt(2 save / losses).

Reference: Young, A First Order Approximation to the Optimum Checkpoint Interval, 1974.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bigstep.plan.accuracy import ConvergenceLaw
from bigstep.plan.cluster import Cluster
from bigstep.plan.crossover import highest_rate, spoken_rate
from bigstep.plan.islands import LONGEST, IslandPlan, IslandPrediction, fewest_steps_between, propose_outer
from bigstep.plan.scheme import Scheme
from bigstep.plan.search import Choice, best_of_each, candidate_schemes
from bigstep.plan.server import predict_server
from bigstep.plan.simulate import predict
from bigstep.plan.workload import Workload

__all__ = ["Way", "cheapest", "compare_ways", "islands_pay_below", "lost_share", "recommend", "synchronous"]

RESTART_S = 60.0
"""Seconds until a lost process is replaced and the others continue: an assumption."""
SAVE_S = 5.0
"""Seconds that a checkpoint delays a step: an assumption; bigstep writes it in the background."""
ISLAND_OVERLAP = 1
"""Steps that the exchange of a meeting may take on the proposed islands."""
MOST_ISLANDS = 64
"""The largest number of islands with a published result."""
WORTH = 1.5
"""How many times as fast as the synchronous way another must be to be worth the epochs that it costs."""
RIVALS = {
    "a plain ring": ("ring", ("none",)),
    "the torus": ("torus", ("none", "fp16")),
    "1-bit": ("", ("onebit",)),
    "PowerSGD": ("", ("powersgd",)),
}
"""Per-step exchanges that islands are compared with: the collective, or any if empty, and the codecs of each."""
MEETINGS_SHARE = 0.1
"""Share of the time that meetings may take; H is chosen by it."""


@dataclass(frozen=True)
class Way:
    """One method on some devices, predicted."""

    method: str
    """synchronous, islands or downpour."""
    label: str
    devices: int
    samples_s: float
    """Samples per second, after losses."""
    minutes: float | None
    """Minutes to the target; None if no law of epochs is known. Only synchronous epochs are measured: see `caveat`."""
    price: float | None
    """Price of the run, or of a million samples if no law is known; None without a price per hour."""
    caveat: str = ""
    settings: tuple[str, ...] = ()
    """The settings for `bigstep train --set`."""
    advice: str = ""
    """The reasons for these settings, and when they pay, in sentences."""
    pays_below_gbit_s: dict[str, float | None] | None = None
    """By rival, the rate per adapter between nodes below which this is `WORTH` times as fast; None if at no rate,
    infinity if at every rate."""


def lost_share(method: str, devices: int, lifetime_h: float, *, between_s: float = 0.0) -> float:
    """The share of a run's time that losses and checkpoints take.

    Args:
        method: synchronous, islands or downpour.
        devices: Number of devices that take part.
        lifetime_h: Mean hours until a device is lost; infinity if none ever is.
        between_s: Seconds between two meetings of islands.

    >>> round(lost_share("synchronous", 64, math.inf), 3), round(lost_share("synchronous", 64, 10), 3)
    (0.0, 0.194)
    >>> round(lost_share("islands", 64, 10, between_s=10), 3)
    0.104
    """
    losses = devices / lifetime_h / 3600  # per second
    if not losses:
        return 0.0
    if method == "synchronous":
        apart = math.sqrt(2 * SAVE_S / losses)
        extra = SAVE_S / apart + losses * (RESTART_S + apart / 2)
    elif method == "islands":
        extra = losses * (RESTART_S + between_s / 2)
    else:
        extra = losses * RESTART_S / devices
    return extra / (1 + extra)


def compare_ways(
    workload: Workload,
    cluster: Cluster,
    best: Choice,
    *,
    price: float = 0.0,
    lifetime_h: float = math.inf,
) -> list[Way]:
    """The best synchronous way, islands and a parameter server on the same devices, fastest first."""
    devices, local = best.prediction.devices, best.prediction.local_batch
    ways = [synchronous(workload, best, price=price, lifetime_h=lifetime_h)]
    nodes, left = divmod(devices, cluster.devices_per_node)
    count = nodes if nodes > 1 and not left else devices
    if 1 < count <= MOST_ISLANDS:
        plan = IslandPlan(count=count, overlap=ISLAND_OVERLAP)
        found = _on_islands(workload, cluster, best, plan)
        lost = lost_share("islands", devices, lifetime_h, between_s=found.plan.every * found.step_s)
        way = _way(workload, best, "islands", found.label, found.samples_s, lost, price, ISLANDS_CAVEAT)
        ways.append(_with_advice(way, workload, best, found, islands_pay_below(workload, cluster, best, plan)))
    if devices > 1:
        rounds = max(4, min(30, 20_000 // devices))  # each device is simulated
        server = predict_server(
            workload, cluster, workers=devices, local_batch=local, servers=nodes or 1, rounds=rounds
        )
        servers = f"{nodes} servers" if nodes > 1 else "1 server"
        label = f"{servers}, {server.staleness:.0f} updates stale, limited by {server.bottleneck}"
        lost = lost_share("downpour", devices, lifetime_h)
        ways.append(_way(workload, best, "downpour", label, server.samples_s, lost, price, SERVER_CAVEAT))
    return sorted(ways, key=lambda way: -way.samples_s)


def _on_islands(workload: Workload, cluster: Cluster, best: Choice, plan: IslandPlan) -> IslandPrediction:
    """Islands on the devices of a choice, with its exchange inside each."""
    prediction = best.prediction
    return fewest_steps_between(
        workload,
        cluster,
        devices=prediction.devices,
        local_batch=prediction.local_batch,
        plan=plan,
        scheme=replace(prediction.scheme, grid=None),  # the grid of a torus over all devices fits no island
        share=MEETINGS_SHARE,
    )


def islands_pay_below(
    workload: Workload, cluster: Cluster, best: Choice, plan: IslandPlan
) -> dict[str, float | None] | None:
    """By rival, the rate in Gbit/s per adapter between nodes below which islands are `WORTH` times as fast.

    At each rate, islands have the H that suits it and the rival its best scheme. The result is None if nothing leaves a
    node. A rival's rate is None if there is none from 1 Mbit/s to 10 Tbit/s, infinity if islands win at all of them.
    """
    devices, local = best.prediction.devices, best.prediction.local_batch
    if devices <= cluster.devices_per_node:
        return None
    offered = candidate_schemes(cluster, devices, optimizer=workload.optimizer)
    below = {}
    for rival, (collective, codecs) in RIVALS.items():
        schemes = [s for s in offered if s.codec in codecs and collective in ("", s.collective)]

        def pays(byte_s: float, schemes: Sequence[Scheme] = schemes) -> bool:
            there = cluster.with_bandwidth(byte_s)
            rate = max(
                predict(workload, there, devices=devices, local_batch=local, scheme=s).samples_s for s in schemes
            )
            return _on_islands(workload, there, best, plan).samples_s >= WORTH * rate

        found = highest_rate(pays, halvings=14)  # to 0.1 %
        below[rival] = None if found is None else found * 8 / 1e9
    return below


def _with_advice(
    way: Way, workload: Workload, best: Choice, found: IslandPrediction, below: dict[str, float | None] | None
) -> Way:
    """Add the settings of islands and the reasons for them."""
    plan, batch = found.plan, best.prediction.batch
    steps = best.law.steps(batch, workload.samples) if best.law and workload.samples else None
    rule = propose_outer(plan.count, plan.every, steps)
    taken = found.exposed_s / (found.inner.step_s + found.exposed_s)
    reason = "the smallest with which meetings take at most a tenth of the time"
    if plan.every == LONGEST and taken > MEETINGS_SHARE:
        reason = f"the longest published, though meetings take {100 * taken:.0f} % of the time"
    advice = f"Islands meet every H = {plan.every} steps, {reason}; {rule.why}."
    if below is not None:
        rates = [f"{name} {spoken_rate(rate)}" for name, rate in below.items()]
        advice += f" In Gbit/s per adapter, they are {WORTH:g} times as fast as {', as '.join(rates)}."
    outer = f"{{name: {rule.name}, lr: {rule.lr:g}, momentum: {rule.momentum:g}}}"
    settings = (f"islands.count={plan.count}", f"islands.every={plan.every}", f"islands.overlap={plan.overlap}",
                f"islands.outer={outer}")  # fmt: skip
    return replace(way, settings=settings, advice=advice, pays_below_gbit_s=below)


ISLANDS_CAVEAT = "if it took no more epochs; short runs on islands do take more"
SERVER_CAVEAT = "if it took no more epochs; stale gradients do take more"


def _way(
    workload: Workload, best: Choice, method: str, label: str, samples_s: float, lost: float, price: float,
    caveat: str = "",
) -> Way:  # fmt: skip
    left = samples_s * (1 - lost)
    devices = best.prediction.devices
    minutes = best.epochs * workload.samples / left / 60 if best.epochs is not None and workload.samples else None
    hours = minutes / 60 if minutes is not None else 1e6 / left / 3600
    return Way(method, label, devices, left, minutes, hours * devices * price if price else None, caveat)


def synchronous(workload: Workload, best: Choice, *, price: float, lifetime_h: float) -> Way:
    """The synchronous way of a choice, with this lifetime of devices and price per device hour."""
    prediction = best.prediction
    lost = lost_share("synchronous", prediction.devices, lifetime_h)
    return _way(workload, best, "synchronous", prediction.scheme.label, prediction.samples_s, lost, price)


def recommend(ways: Sequence[Way]) -> tuple[Way, str]:
    """The recommended way, and why: the synchronous one, unless another is `WORTH` times as fast.

    Others take more epochs, by an amount that no law here predicts, so a small gain in speed may be none in the end.
    """
    synchronous = next(way for way in ways if way.method == "synchronous")
    worth = [way for way in ways if way.samples_s >= WORTH * synchronous.samples_s]
    if worth:
        way = min(worth, key=lambda way: (way.method != "islands", -way.samples_s))  # stale gradients cost the most
        return way, f"it is {way.samples_s / synchronous.samples_s:.1f} times as fast as synchronous SGD, {way.caveat}"
    fastest = max(ways, key=lambda way: way.samples_s)
    if fastest is synchronous:
        return synchronous, "it is the fastest, and the others may need more epochs"
    saved = 100 * (1 - synchronous.samples_s / fastest.samples_s)
    return (
        synchronous,
        f"{fastest.method} would take only {saved:.1f} % less time for an epoch, and may need more epochs",
    )


def cheapest(
    workload: Workload,
    cluster: Cluster,
    counts: Sequence[int],
    *,
    price: float,
    law: ConvergenceLaw | None,
    lifetime_h: float = math.inf,
    batch: int = 0,
    collective: str = "",
    codec: str = "",
) -> Way:
    """The number of devices on which the synchronous way costs least; among equals the fastest.

    Args:
        workload: The model.
        cluster: The cluster it runs on.
        counts: Numbers of devices to try; at least one of them must be able to run it.
        price: Price of a device hour.
        law: Epochs against batch; without it the price is that of a million samples.
        lifetime_h: Mean hours until a device is lost.
        batch: Global batch; 0 lets the search choose.
        collective: Only this collective; empty for all.
        codec: Only this codec; empty for all.
    """
    choices = best_of_each(workload, cluster, counts, batch=batch, law=law, collective=collective, codec=codec)
    ways = [synchronous(workload, best, price=price, lifetime_h=lifetime_h) for best in choices]
    return min(ways, key=lambda way: (way.price or 0.0, -way.samples_s))
