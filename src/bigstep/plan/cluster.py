"""A cluster as data: nodes, devices, links inside and between nodes; from YAML, with the source of each figure."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bigstep.config.text import read_yaml
from bigstep.errors import ConfigError, nearest
from bigstep.plan import units
from bigstep.tables import find
from bigstep.tables.codecs import CODECS
from bigstep.tables.collectives import COLLECTIVES

__all__ = ["Cluster", "CodecSpeed", "CollectiveSpeed", "Device", "Link", "cluster_names"]

FOLDER = Path(__file__).parent / "clusters"

_LINK = {
    "bandwidth_byte_s": units.rate("bandwidth"),
    "latency_s": units.duration("latency"),
    "gap_s": units.duration("gap", 1e-6),
    "efficiency": units.number("efficiency", 1.0),
    "start_s": units.duration("start", 0.0),
    "copy_byte_s": units.rate("copy", math.inf),
}
_DEVICE = {
    "memory_byte": units.size("memory"),
    "memory_byte_s": units.rate("memory_bandwidth"),
    "flop_s": units.number("sustained_tflop_s", factor=1e12),
    "matmul_flop_s": units.number("matmul_tflop_s", 0.0, factor=1e12, zero_allowed=True),
    "launch_s": units.duration("launch", 19e-6),
}
_CODEC = {
    "encode_byte_s": units.rate("encode"),
    "decode_byte_s": units.rate("decode"),
    "encode_call_s": units.duration("encode_call", 0.0),
    "decode_call_s": units.duration("decode_call", 0.0),
}
_COLLECTIVE = {
    "latency_s": units.duration("latency"),
    "start_s": units.duration("start", 0.0),
    "copy_byte_s": units.rate("copy", math.inf),
}
_CLUSTER = {
    "nodes": units.count("nodes"),
    "devices_per_node": units.count("devices_per_node"),
    "adapters_per_node": units.count("adapters_per_node", 1),
    "nodes_per_rack": units.count("nodes_per_rack", 0, zero_allowed=True),
    "oversubscription": units.number("oversubscription", 1.0),
    "jitter": units.number("jitter", 0.03, zero_allowed=True),
    "loader_samples_s": units.number("loader_samples_s", math.inf),
}


@dataclass(frozen=True, kw_only=True)
class Link:
    """One kind of link: the rate of a port in one direction, and the cost of a message."""

    bandwidth_byte_s: float
    """Line rate of one port, in one direction."""
    latency_s: float
    """Time of one dependent message in addition to its bytes (alpha)."""
    gap_s: float = 1e-6
    """Time between two independent messages of one sender (the g of LogP)."""
    efficiency: float = 1.0
    """Share of the line rate that collectives reach."""
    start_s: float = 0.0
    """Time to start one collective."""
    copy_byte_s: float = math.inf
    """Rate at which a rank copies and adds exchanged data; the slower of this and the wire counts."""

    @property
    def rate(self) -> float:
        """Bytes per second that a collective gets out of one port."""
        return self.bandwidth_byte_s * self.efficiency


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or one CPU rank."""

    name: str = ""
    memory_byte: float
    memory_byte_s: float
    flop_s: float
    """Sustained rate in a training step, not the peak."""
    matmul_flop_s: float = 0.0
    """The same for networks of matrix products only, such as transformers; 0 if unknown."""
    launch_s: float = 19e-6
    """Part of the step time that does not shrink with the batch, per parameter tensor."""


@dataclass(frozen=True, kw_only=True)
class CodecSpeed:
    """Measured speed of a codec, in bytes of the uncompressed gradient."""

    encode_byte_s: float
    decode_byte_s: float
    encode_call_s: float = 0.0
    decode_call_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CollectiveSpeed:
    """Measured cost of one collective's software, which replaces that of the links."""

    latency_s: float
    start_s: float = 0.0
    copy_byte_s: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of devices, joined by two kinds of links.

    >>> abci = Cluster.load("abci")
    >>> abci.devices, abci.node_rate(nodes=512, senders=34) / abci.node_rate(nodes=34, senders=34)
    (4352, 0.3333333333333333)
    """

    name: str
    about: str = ""
    nodes: int
    devices_per_node: int
    device: Device
    inside: Link
    between: Link
    adapters_per_node: int = 1
    nodes_per_rack: int = 0
    """Nodes under one full-bisection switch; 0 means all of them."""
    oversubscription: float = 1.0
    """Factor by which the bandwidth out of a rack is below what its nodes can send."""
    jitter: float = 0.03
    """Standard deviation of a device's compute time in one step, relative to its mean."""
    loader_samples_s: float = math.inf
    """Samples per second that the input pipeline supplies to one device."""
    in_network: bool = False
    """The switches can add numbers (SHARP)."""
    codecs: dict[str, CodecSpeed] = field(default_factory=dict)
    """Measured codecs; the others are priced by the device's memory bandwidth."""
    collectives: dict[str, CollectiveSpeed] = field(default_factory=dict)
    """Measured collectives; the others are priced by the links."""
    sources: dict[str, str] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """All devices of the cluster."""
        return self.nodes * self.devices_per_node

    def node_rate(self, nodes: int, senders: int) -> float:
        """Bytes per second that a node can send if `nodes` take part and `senders` nodes of its rack send out of it."""
        rate = self.adapters_per_node * self.between.rate
        if not self.nodes_per_rack or nodes <= self.nodes_per_rack:
            return rate
        uplinks = self.nodes_per_rack * rate / self.oversubscription
        return min(rate, uplinks / max(1, min(senders, self.nodes_per_rack)))

    def with_bandwidth(self, byte_s: float) -> Cluster:
        """Return the same cluster with another line rate between its nodes."""
        return dataclasses.replace(self, between=dataclasses.replace(self.between, bandwidth_byte_s=byte_s))

    def running(self, collective: str) -> Cluster:
        """Return the cluster with both links priced as measured for this collective, if it was measured."""
        speed = self.collectives.get(collective)
        if speed is None:
            return self
        costs = dataclasses.asdict(speed)
        return dataclasses.replace(
            self, inside=dataclasses.replace(self.inside, **costs), between=dataclasses.replace(self.between, **costs)
        )

    def resized(self, devices: int) -> Cluster:
        """Return the same cluster with enough nodes for `devices`."""
        return dataclasses.replace(self, nodes=max(self.nodes, -(-devices // self.devices_per_node)))

    @classmethod
    def load(cls, name: str) -> Cluster:
        """Read a preset by name, or a YAML file by path."""
        path = Path(name)
        if path.suffix in (".yaml", ".yml"):
            return cls.from_mapping(read_yaml(path), str(path))
        if name not in cluster_names():
            raise ConfigError(
                f"Unknown cluster {name!r:.80}: {nearest(name, cluster_names())} A file of your own ends in .yaml."
            )
        return cls.from_mapping(read_yaml(FOLDER / f"{name}.yaml"), name)

    @classmethod
    def from_mapping(cls, mapping: dict[str, Any], origin: str) -> Cluster:
        """Build a cluster from the content of a file; refuse a bad one in one sentence that names the field."""
        nested = {"device": dict, "inside": dict, "between": dict, "codecs": dict, "collectives": dict, "sources": dict}
        plain = {"name": str, "about": str, "in_network": bool}
        values = units.read_fields(mapping, _CLUSTER, nested | plain, "")
        for name in ("device", "inside", "between"):
            if name not in values:
                raise ConfigError(f"{origin} lacks the field {name!r}; add it.")
        for name in ("inside", "between"):
            values[name] = Link(**units.read_fields(values[name], _LINK, {}, name))
            if values[name].efficiency > 1:
                raise ConfigError(f"{name}.efficiency is {values[name].efficiency}, but it is a share; give at most 1.")
        values["device"] = Device(**units.read_fields(values["device"], _DEVICE, {"name": str}, "device"))
        for codec in values.get("codecs", {}):
            find(CODECS, "codec", str(codec))  # the speed of an unknown codec would be silently ignored
        for collective in values.get("collectives", {}):
            find(COLLECTIVES, "collective", str(collective))
        values["codecs"] = {
            codec: CodecSpeed(**units.read_fields(speed, _CODEC, {}, f"codecs.{codec}"))
            for codec, speed in values.get("codecs", {}).items()
        }
        values["collectives"] = {
            name: CollectiveSpeed(**units.read_fields(speed, _COLLECTIVE, {}, f"collectives.{name}"))
            for name, speed in values.get("collectives", {}).items()
        }
        if values["oversubscription"] < 1:
            raise ConfigError(
                f"oversubscription is {values['oversubscription']}, but a rack cannot send more than its nodes; "
                "give at least 1."
            )
        return cls(**{"name": Path(origin).stem, **values})


def cluster_names() -> list[str]:
    """The names of the built-in clusters."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))
