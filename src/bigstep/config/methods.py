"""The parts of a configuration for runs whose workers do not all take every step together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from bigstep.errors import require
from bigstep.tables.codecs import CODECS
from bigstep.tables.methods import ASYNCHRONOUS
from bigstep.validate import Count, Fraction, NotNegative, Positive, WholeNotNegative, check_ranges, require_name

__all__ = ["AsynchronousConfig", "IslandsConfig", "OuterConfig"]


@dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """How the outer gradient is applied: the mean of the islands' movements since they last met."""

    name: Literal["average", "sgd", "nesterov"] = "average"
    """average (all islands take the mean of their weights), or sgd or nesterov (DiLoCo) with their own momentum."""
    lr: Positive = 1.0
    """Learning rate of the outer step; 1 goes all the way to the mean."""
    momentum: Fraction = 0.0
    """How much of the outer velocity is kept from meeting to meeting (sgd, nesterov)."""

    def __post_init__(self) -> None:
        check_ranges(self, "islands.outer")
        require(
            self.name != "average" or (self.lr == 1 and self.momentum == 0),
            "islands.outer.name=average takes the mean as it is: use sgd or nesterov with another lr or momentum "
            f"(got lr={self.lr:g}, momentum={self.momentum:g}).",
        )


@dataclass(frozen=True, kw_only=True)
class IslandsConfig:
    """Islands: workers with weights and optimizer state of their own, which meet the others every so many steps."""

    count: Count = 1
    """How many islands the workers are spread over; 1 is ordinary training."""
    every: Count = 1
    """Steps between two meetings: H."""
    outer: OuterConfig = field(default_factory=OuterConfig)
    """The outer optimizer, which applies the mean of the islands' movements."""
    fragments: Count = 1
    """Parts of the network that meet in turn, each every `every` steps."""
    overlap: WholeNotNegative = 0
    """Steps that the islands go on computing while the data of a meeting travel."""
    codec: str = "none"
    """How the movement of an island is written on the wire, one of {codecs}."""
    begin: NotNegative = 0.0
    """The epoch until which all workers are one island (post-local SGD)."""
    drop: Fraction = 0.0
    """Fraction of its meetings that an island misses, to simulate a bad network."""
    wait: NotNegative = 60.0
    """Seconds that the other islands of an elastic run have to save where they stand when a rank is lost; slower ones
    count as lost too, and with 0 all go back to the last meeting."""

    def __post_init__(self) -> None:
        check_ranges(self, "islands")
        require_name(self.codec, CODECS, "islands.codec")
        require(
            not CODECS[self.codec].own_rounds,
            f"islands.codec is {self.codec}, which brings its own all-reduces: choose another codec for meetings.",
        )
        require(
            self.overlap < self.every or not self.meets,
            f"islands.overlap is {self.overlap}, but a meeting must have arrived before the next, {self.every} steps "
            "later: lower it or raise islands.every.",
        )

    @property
    def meets(self) -> bool:
        """Whether there are meetings: with other islands, or of one island with an outer rule."""
        return self.count > 1 or self.outer.name != "average"


@dataclass(frozen=True, kw_only=True)
class AsynchronousConfig:
    """Updates without common steps: processes that share the weights, or replicas around a parameter server."""

    method: str = "none"
    """none (all workers take a step together), or one of {asynchronous}."""
    replicas: Count = 2
    """Processes that compute gradients, each on one worker's share at a time."""
    shards: Count = 1
    """Server processes that the weights are spread over (downpour)."""
    push_every: Count = 1
    """Steps of a replica between pushes of its summed gradient: n_push (downpour)."""
    fetch_every: Count = 1
    """Steps of a replica between fetches of the weights: n_fetch (downpour)."""
    overlap: bool = False
    """Compute the next step while push and fetch travel, on weights without the replica's own last push (downpour)."""
    warm_start: NotNegative = 0.0
    """Epochs with one replica before the others take part (downpour)."""
    max_staleness: WholeNotNegative = 0
    """Refuse a push whose weights are more than this many updates old; 0 refuses none (downpour)."""

    def __post_init__(self) -> None:
        check_ranges(self, "asynchronous")
        require_name(self.method, ("none", *ASYNCHRONOUS), "asynchronous.method")
