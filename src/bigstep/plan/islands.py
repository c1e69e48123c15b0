"""Islands: groups of devices that take H steps on their own and then exchange how far their weights have moved.

    step = t + max(0, T / F - o t) F / H + w        t  an island's own synchronous step
                                                    T  one exchange of all parameters between islands
                                                    F  fragments, exchanged in turn
                                                    o  steps that the exchange of one fragment may take
                                                    w  waiting for the slowest island, which averages out over H steps

Between M islands, data that can be summed on the way (float32, exact) costs what a ring costs, 2 (M - 1) / M of its
bytes. The output of a lossy codec cannot be, so every island sends its own to the M - 1 others.

The proposed outer rule depends on the number of islands and on the number of meetings in the whole run.

References: Douillard et al., DiLoCo, 2023, and Streaming DiLoCo, 2025 (fragments, overlap); Charles et al.,
Communication-Efficient Language Model Training Scales Reliably and Robustly, 2025 (the best outer rates).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from bigstep.errors import ConfigError
from bigstep.plan.cluster import Cluster
from bigstep.plan.cost import Phase, Placement, exchange_phases
from bigstep.plan.scheme import Scheme
from bigstep.plan.simulate import Prediction, expected_maximum, predict
from bigstep.plan.workload import Workload
from bigstep.tables.codecs import CODECS, encoded_bytes

__all__ = ["IslandPlan", "IslandPrediction", "OuterRule", "fewest_steps_between", "predict_islands", "propose_outer"]

LONGEST = 1000
"""Most steps between two meetings that are proposed; published results reach this far."""
BEST_RATES = {1: 0.4, 2: 0.6, 8: 0.8}
"""The best published outer rate with Nesterov momentum 0.9 and H = 30, by the smallest number of islands it is for."""
OUTER_MOMENTUM = 0.9
FEW_MEETINGS = 40
"""With fewer meetings an outer momentum does not pay: measured, averaging won with 13 and 20 meetings (two and four
islands), momentum with 40 and 80 (eight islands; docs/islands.md)."""


@dataclass(frozen=True, kw_only=True)
class IslandPlan:
    """How islands meet; the fields are those of `islands` in a configuration."""

    count: int
    every: int = 1
    fragments: int = 1
    overlap: int = 0
    codec: str = "none"
    two_levels: bool = True
    """Each device of an island exchanges its share with its counterparts on other islands; else one ring joins all."""


@dataclass(frozen=True)
class IslandPrediction:
    """The time of a step on average, meetings included."""

    plan: IslandPlan
    inner: Prediction
    """A step of one island."""
    meeting_s: float
    """Seconds of one exchange of all parameters between islands, hidden or not."""
    meeting_bytes: float
    """Bytes that the busiest device sends in it."""
    exposed_s: float
    """Seconds of meetings per step, on average, that compute does not hide."""
    waiting_s: float
    """Seconds per step, on average, of waiting for the slowest island."""

    @property
    def devices(self) -> int:
        """Devices of all islands."""
        return self.plan.count * self.inner.devices

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.inner.step_s + self.exposed_s + self.waiting_s

    @property
    def samples_s(self) -> float:
        """Samples per second of all islands."""
        return self.devices * self.inner.local_batch / self.step_s

    @property
    def label(self) -> str:
        """A few words for tables."""
        parts = f", {self.plan.fragments} fragments" if self.plan.fragments > 1 else ""
        plural = "" if self.plan.overlap == 1 else "s"
        hidden = f", {self.plan.overlap} step{plural} on the way" if self.plan.overlap else ""
        return f"{self.plan.count} islands, H = {self.plan.every}, {self.plan.codec}{parts}{hidden}"


@dataclass(frozen=True)
class OuterRule:
    """The update from the moves of islands; all fields but `why` are those of `islands.outer` in a configuration."""

    name: str
    lr: float
    momentum: float
    why: str
    """The rule and the reason for it, as part of a sentence."""


def propose_outer(count: int, every: int, steps: float | None) -> OuterRule:
    """Propose the outer rule for a number of islands.

    Args:
        count: Number of islands.
        every: Steps between two meetings.
        steps: Steps of the whole run; None if no law of epochs gives them.

    >>> rule = propose_outer(4, 30, 30_000)
    >>> rule.lr, rule.why
    (0.6, 'outer rate 0.6 with Nesterov momentum 0.9, the best published for 4 islands')
    >>> propose_outer(4, 30, 900).why
    'outer rate 1 without momentum, since 30 meetings are too few for a momentum to settle'
    """
    if steps is not None and steps / every < FEW_MEETINGS:
        meetings = f"{steps / every:.0f} meetings are" if steps / every >= 1.5 else "one meeting is"
        return OuterRule("average", 1.0, 0.0, f"outer rate 1 without momentum, since {meetings} too few for a momentum "
                         "to settle")  # fmt: skip
    rate = BEST_RATES[max(fewest for fewest in BEST_RATES if fewest <= count)]
    why = (
        f"outer rate {rate:g} with Nesterov momentum {OUTER_MOMENTUM:g}, the best published for {min(count, 8)} islands"
    )
    if steps is None:
        why += f" (rate 1 without momentum in runs of fewer than {FEW_MEETINGS * every:,} steps)"
    return OuterRule("nesterov", rate, OUTER_MOMENTUM, why)


def predict_islands(
    workload: Workload,
    cluster: Cluster,
    *,
    devices: int,
    local_batch: float,
    plan: IslandPlan,
    scheme: Scheme | None = None,
) -> IslandPrediction:
    """Predict training on islands: time only, since the epochs that a large H costs do not depend on links.

    Args:
        workload: The model.
        cluster: The cluster it runs on; islands fill its nodes in order.
        devices: Of all islands together.
        local_batch: Samples of one device in one step.
        plan: How the islands meet.
        scheme: The exchange inside an island, in every step.

    Example:
        Over 1 Gbit/s eight nodes lose most of their speed to an exchange in every step, and little to one in 300 steps.

        >>> slow = Cluster.load("dgx_h200").with_bandwidth(125e6)
        >>> gpt = Workload.load("gpt-124m")
        >>> def efficiency(every):
        ...     plan = IslandPlan(count=8, every=every)
        ...     found = predict_islands(gpt, slow, devices=64, local_batch=32, plan=plan)
        ...     return found.inner.single_s / found.step_s
        >>> efficiency(1) < 0.2, efficiency(300) > 0.9
        (True, True)
    """
    size, left = divmod(devices, plan.count)
    if not size or left:
        raise ConfigError(f"{devices} devices do not make {plan.count} equal islands; change one of the two.")
    inner = predict(workload, cluster, devices=size, local_batch=local_batch, scheme=scheme)
    nbytes = encoded_bytes(plan.codec, workload.shapes) / plan.fragments
    phases = _meeting(nbytes, cluster, plan, size)
    fragment_s = sum(phase.seconds for phase in phases)
    exposed = max(0.0, fragment_s - plan.overlap * inner.step_s) * plan.fragments / plan.every
    compute = inner.split["forward"] + inner.split["backward"]
    return IslandPrediction(
        plan=plan,
        inner=inner,
        meeting_s=fragment_s * plan.fragments,
        meeting_bytes=sum(phase.bytes_sent for phase in phases) * plan.fragments,
        exposed_s=exposed,
        waiting_s=compute * cluster.jitter * expected_maximum(plan.count) / math.sqrt(plan.every),
    )


def _meeting(nbytes: float, cluster: Cluster, plan: IslandPlan, size: int) -> list[Phase]:
    """The phases of one meeting of islands with `size` devices each that exchange `nbytes` encoded bytes."""
    devices = plan.count * size
    if CODECS[plan.codec].loses == "nothing":
        grid = (size, plan.count) if plan.two_levels else None
        return exchange_phases("torus" if plan.two_levels else "ring", nbytes, cluster, devices, grid)
    if plan.count == 1:
        return []
    place = Placement(cluster.running("gather"), devices)
    apart = place.nodes > 1
    link = place.cluster.between if apart else place.cluster.inside
    flows = min(size, place.per_node) if apart else 1  # devices of an island that share a node's adapters
    rate = place.cluster.node_rate(place.nodes, 1) / flows if apart else link.rate
    sent = (plan.count - 1) * nbytes / (size if plan.two_levels else 1)
    waiting = link.start_s + link.latency_s + (plan.count - 1) * link.gap_s
    seconds = waiting + sent / min(rate, link.copy_byte_s)
    return [Phase("between" if apart else "inside", 1, sent, seconds, waiting)]


def fewest_steps_between(
    workload: Workload,
    cluster: Cluster,
    *,
    devices: int,
    local_batch: float,
    plan: IslandPlan,
    scheme: Scheme | None = None,
    share: float = 0.1,
) -> IslandPrediction:
    """Predict with the smallest H at which meetings take at most `share` of the time: a larger one costs accuracy.

    If even the longest H takes more, the prediction for that H is returned.
    """
    once = predict_islands(workload, cluster, devices=devices, local_batch=local_batch, plan=plan, scheme=scheme)
    lost = once.exposed_s * plan.every
    every = math.ceil(lost * (1 - share) / (share * once.inner.step_s)) if lost else 1
    plan = replace(plan, every=min(LONGEST, max(every, plan.overlap + 1)))
    return predict_islands(workload, cluster, devices=devices, local_batch=local_batch, plan=plan, scheme=scheme)
