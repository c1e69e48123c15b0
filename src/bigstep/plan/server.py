"""Asynchronous SGD with a parameter server as events: workers compute, push, wait for the update, pull, repeat.

Every worker is simulated, since they drift apart; a few rounds show the steady state.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

from bigstep.plan.cluster import Cluster
from bigstep.plan.scheme import STREAMED, codec_seconds
from bigstep.plan.workload import Workload
from bigstep.tables.codecs import encoded_bytes

__all__ = ["ServerPrediction", "predict_server", "server_bound"]


@dataclass(frozen=True)
class ServerPrediction:
    """The steady state of an asynchronous run."""

    workers: int
    updates_s: float
    """Updates per second of all workers together."""
    samples_s: float
    staleness: float
    """Updates by others between a worker's pull and its own update, on average."""
    bottleneck: str
    """The part that limits the rate: worker, push, update or pull."""


@dataclass(frozen=True)
class _Services:
    """Seconds of the parts of one cycle; push, update and pull queue at the busiest server."""

    worker: float
    push: float
    update: float
    pull: float

    @property
    def shared(self) -> dict[str, float]:
        return {"push": self.push, "update": self.update, "pull": self.pull}


def _services(workload: Workload, cluster: Cluster, local_batch: float, servers: int, codec: str) -> _Services:
    """The parts of a cycle: a server holds 1/servers of the parameters, receives codes and sends float32 weights."""
    link = cluster.between
    per_byte = 1 / min(link.rate, link.copy_byte_s)
    encode, decode = codec_seconds(codec, workload.parameters, cluster, 2)
    # momentum SGD on the shard moves 20 bytes per parameter; decoding what arrived comes on top
    update = workload.optimizer_s or workload.parameters * 20 / (cluster.device.memory_byte_s * STREAMED)
    return _Services(
        worker=workload.compute_s(cluster.device, local_batch) + encode,
        push=link.start_s + link.latency_s + encoded_bytes(codec, workload.shapes) / servers * per_byte,
        update=(update + decode) / servers,
        pull=link.latency_s + 4 * workload.parameters / servers * per_byte,
    )


def server_bound(workers: int, services: _Services) -> float:
    """Upper bound of updates per second: all workers always busy, or the slowest shared part always busy.

    min(W / (compute + push + update + pull), 1 / max(push, update, pull))
    """
    cycle = services.worker + sum(services.shared.values())
    return min(workers / cycle, 1 / max(services.shared.values()))


def predict_server(
    workload: Workload,
    cluster: Cluster,
    *,
    workers: int,
    local_batch: float,
    servers: int = 1,
    codec: str = "none",
    rounds: int = 30,
    seed: int = 0,
) -> ServerPrediction:
    """Predict asynchronous SGD: rate and staleness.

    Args:
        workload: The model.
        cluster: Its `between` link joins workers and servers; each server has one adapter.
        workers: Number of replicas that compute.
        local_batch: Samples per push.
        servers: Number of machines that the parameters are spread over.
        codec: Codec of the pushed gradients.
        rounds: Simulated cycles of each worker; the averages leave out the first half.
        seed: Seed of the jitter of compute times.

    Returns:
        Updates and samples per second, mean staleness, and what limits the rate.

    Example:
        The staleness grows with the number of workers.

        >>> resnet, cluster = Workload.load("resnet50"), Cluster.load("big_basin")
        >>> stale = [predict_server(resnet, cluster, workers=w, local_batch=32).staleness for w in (2, 16)]
        >>> stale[0] < 1.01 < 10 < stale[1] < 15.01
        True

    Reference: Dean et al., Large Scale Distributed Deep Networks, 2012 (Downpour SGD with n_fetch = n_push = 1).
    """
    services = _services(workload, cluster, local_batch, servers, codec)
    generator = random.Random(seed)
    stages, shared = ("worker", "push", "update", "pull"), services.shared
    free = {"push": 0.0, "update": 0.0, "pull": 0.0}
    events = [(max(0.0, services.worker * generator.random()), worker, 1, 0) for worker in range(workers)]
    heapq.heapify(events)
    version, pulled = 0, [0] * workers
    applied: list[tuple[float, int]] = []
    while events:
        now, worker, stage, done = events[0]
        if stage == 3:
            applied.append((now, version - pulled[worker]))
            version += 1
        if stage == 4:
            pulled[worker] = version
            if done + 1 < rounds:
                jitter = max(0.1, generator.gauss(1.0, cluster.jitter))
                heapq.heapreplace(events, (now + services.worker * jitter, worker, 1, done + 1))
            else:
                heapq.heappop(events)
            continue
        name = stages[stage]
        free[name] = max(free[name], now) + shared[name]
        heapq.heapreplace(events, (free[name], worker, stage + 1, done))
    # the steady state: without the first half and without the last updates, when workers have begun to stop
    steady = applied[len(applied) // 2 : len(applied) - workers] or applied
    span = steady[-1][0] - steady[0][0]
    rate = (len(steady) - 1) / span if span > 0 else 1 / (services.worker + sum(shared.values()))
    slowest = max(shared, key=lambda name: shared[name])
    return ServerPrediction(
        workers=workers,
        updates_s=rate,
        samples_s=rate * local_batch,
        staleness=sum(stale for _, stale in steady) / len(steady),
        bottleneck=slowest if rate * shared[slowest] > 0.9 else "worker",
    )
