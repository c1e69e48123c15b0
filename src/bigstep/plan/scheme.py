"""How gradients are exchanged in a step: collective, codec, buckets; and the time that codec and update take."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from bigstep.errors import ConfigError, nearest
from bigstep.plan.cluster import Cluster, Device
from bigstep.plan.workload import Workload
from bigstep.tables.codecs import CODECS, check_pair, encoded_bytes
from bigstep.tables.optimizers import OPTIMIZERS
from bigstep.validate import POSITIVE, check_range

__all__ = ["Bucket", "Scheme", "codec_seconds", "make_buckets", "optimizer_seconds"]

STREAMED = 0.9
"""Share of a memory's nominal bandwidth that a streaming kernel reaches (4.3 of 4.8 TB/s on an H200)."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One way of exchanging gradients and applying them, in every step."""

    collective: str = "ring"
    codec: str = "none"
    grid: tuple[int, int] | None = None
    """X and Y of a torus; None for the squarest that fits the nodes."""
    bucket_mb: float = 4.0
    """Gradients are grouped until a group holds this many megabytes of float32."""
    overlap: bool = True
    """The exchange runs during the backward pass; otherwise it starts after it."""
    pipelined: bool = False
    """A bucket may be exchanged inside nodes while the one before it is exchanged between them."""
    in_flight: bool = False
    """Buckets are exchanged concurrently, as with `bigstep.exchange` on CPUs: while a round of one waits, bytes of
    another use the links. Otherwise they are exchanged one after another, as on the single stream of a GPU."""
    double_buffer: bool = False
    """Apply each gradient one step late, so that its exchange runs while the next step is computed."""
    optimizer: str = "sgd"
    """The update rule."""

    def __post_init__(self) -> None:
        check_pair(self.collective, self.codec, double_buffer=self.double_buffer, planned=True)
        check_range(self.bucket_mb, POSITIVE, "bucket_mb")
        priced = [name for name, entry in OPTIMIZERS.items() if entry.traffic is not None]
        if self.optimizer not in priced:
            raise ConfigError(
                f"The planner has no price for the optimizer {self.optimizer!r:.80}: {nearest(self.optimizer, priced)}"
            )

    @property
    def label(self) -> str:
        """A few words for tables."""
        grid = f" {self.grid[0]}x{self.grid[1]}" if self.grid else ""
        halves = ", double-buffered" if self.double_buffer else ""
        return f"{self.collective}{grid}, {self.codec}, {self.bucket_mb:g} MB{halves}"


@dataclass(frozen=True, eq=False)
class Bucket:
    """Gradients exchanged together; complete when the backward pass has left `layer` (its index in forward order)."""

    layer: int
    values: int
    shapes: tuple[tuple[int, ...], ...]

    @functools.cache  # noqa: B019 - buckets live as long as their workload, a few hundred at most
    def encoded(self, codec: str) -> int:
        """Bytes on the wire."""
        return encoded_bytes(codec, self.shapes)


@functools.lru_cache(maxsize=256)
def make_buckets(workload: Workload, bucket_mb: float) -> tuple[Bucket, ...]:
    """Group gradients in backward order until a group holds `bucket_mb` megabytes of float32.

    >>> [round(bucket.values * 4 / 1e6, 1) for bucket in make_buckets(Workload.load("alexnet"), 25)]
    [83.5, 151.0, 15.0]
    """
    limit = bucket_mb * 1e6
    buckets: list[Bucket] = []
    shapes: list[tuple[int, ...]] = []
    values, last = 0, 0
    for index in range(len(workload.layers) - 1, -1, -1):
        layer = workload.layers[index]
        if not layer.parameters:
            continue
        shapes += reversed(layer.shapes)
        values, last = values + layer.parameters, index
        if values * 4 >= limit:
            buckets.append(Bucket(last, values, tuple(shapes)))
            shapes, values = [], 0
    if values:
        buckets.append(Bucket(last, values, tuple(shapes)))
    return tuple(buckets)


def codec_seconds(codec: str, values: int, cluster: Cluster, devices: int) -> tuple[float, float]:
    """Seconds to encode and to decode `values` numbers on one device; as measured, if the cluster has figures."""
    speed = cluster.codecs.get(codec)
    if codec == "none" or devices <= 1:
        return 0.0, 0.0
    if speed:
        return (
            speed.encode_call_s + 4 * values / speed.encode_byte_s,
            speed.decode_call_s + 4 * values / speed.decode_byte_s,
        )
    entry, streamed = CODECS[codec], cluster.device.memory_byte_s * STREAMED
    again = 0.0 if entry.summable else entry.encode_traffic / devices  # each owner encodes its slice of the sum
    return values * entry.encode_traffic / streamed, values * (entry.decode_traffic + again) / streamed


def optimizer_seconds(workload: Workload, device: Device, optimizer: str) -> float:
    """Seconds of the update: as measured, or from its memory traffic and the memory bandwidth."""
    if workload.optimizer_s:
        return workload.optimizer_s
    traffic = OPTIMIZERS[optimizer].traffic
    assert traffic is not None  # checked by Scheme
    return workload.parameters * traffic / (device.memory_byte_s * STREAMED)
