"""One step of synchronous SGD as events: the backward pass completes buckets, which queue for the links; then update.

By symmetry one rank is simulated for all: the slowest, since every exchange waits for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

from bigstep.errors import ConfigError
from bigstep.plan.cluster import Cluster
from bigstep.plan.cost import Phase, exchange_phases
from bigstep.plan.events import Task, run_tasks
from bigstep.plan.scheme import Scheme, codec_seconds, make_buckets, optimizer_seconds
from bigstep.plan.workload import Workload

__all__ = ["Prediction", "closed_form", "expected_maximum", "predict", "step_tasks"]


def expected_maximum(draws: int) -> float:
    """Expected maximum of `draws` standard normal numbers, in standard deviations.

    Blom's approximation: z((N - 0.375) / (N + 0.25)), where z is the inverse of the normal distribution.

    >>> round(expected_maximum(1), 3), round(expected_maximum(1024), 2)
    (0.0, 3.23)

    Reference: Blom, Statistical Estimates and Transformed Beta-Variables, 1958. Within 0.03 of the exact
    value for every N.
    """
    return NormalDist().inv_cdf((draws - 0.375) / (draws + 0.25))


@dataclass(frozen=True)
class Prediction:
    """The time of a step, and where it goes."""

    devices: int
    local_batch: float
    scheme: Scheme
    step_s: float
    split: dict[str, float]
    """Seconds of forward, backward, straggler, codec, exchange (not hidden), optimizer, data; they sum to step_s."""
    exchange_s: float
    """Seconds that the links are busy, hidden or not."""
    bytes_sent: float
    """Bytes that one rank (the busiest) sends in a step."""
    rounds: int
    """Dependent messages in a step."""
    single_s: float
    """Step time of a single device with the same local batch."""

    @property
    def batch(self) -> float:
        """Global batch."""
        return self.devices * self.local_batch

    @property
    def samples_s(self) -> float:
        """Samples per second of all devices."""
        return self.batch / self.step_s

    @property
    def efficiency(self) -> float:
        """Rate of one device among all, relative to a single device alone."""
        return self.single_s / self.step_s

    @property
    def bottleneck(self) -> str:
        """The largest part of the step apart from forward and backward."""
        parts = {name: value for name, value in self.split.items() if name not in ("forward", "backward")}
        return max(parts, key=lambda name: parts[name])


def predict(
    workload: Workload,
    cluster: Cluster,
    *,
    devices: int,
    local_batch: float,
    scheme: Scheme | None = None,
    method: Scheme | None = None,
) -> Prediction:
    """Predict one step of data-parallel training.

    Args:
        workload: The model.
        cluster: The cluster it runs on; the devices fill its nodes in order.
        devices: Number of devices that take part.
        local_batch: Samples of one device in one step.
        scheme: Collective, codec, buckets, update rule; by default a ring in float32 and SGD.
        method: The name of `scheme` in version 0.1.

    Returns:
        The time of a step, its split, and the traffic.

    Example:
        Half the bytes shorten a step that waits for the network.

        >>> resnet, abci = Workload.load("resnet50"), Cluster.load("abci")
        >>> def step(codec):
        ...     scheme = Scheme(collective="torus", codec=codec, overlap=False)
        ...     return predict(resnet, abci, devices=1024, local_batch=32, scheme=scheme).step_s
        >>> step("fp16") < step("none")
        True

    Reference: the performance model is that of Goyal et al. 2017 (section 4) and Seide et al. 2014 (section 3).
    """
    scheme = scheme or method or Scheme()
    check_fits(workload, cluster, devices, local_batch, scheme.optimizer)
    if scheme.double_buffer:
        return _double_buffered(workload, cluster, devices, local_batch, scheme)
    slowest = 1 + cluster.jitter * expected_maximum(devices)
    phases = exchanges(workload, cluster, devices, scheme)
    tasks = step_tasks(
        workload, cluster, devices=devices, local_batch=local_batch, scheme=scheme, slowest=slowest, phases=phases
    )
    end = max(end for _, end in run_tasks(tasks))
    return _account(cluster, devices, local_batch, scheme, tasks, phases, end, slowest)


def check_fits(workload: Workload, cluster: Cluster, devices: int, local_batch: float, optimizer: str = "") -> None:
    """Refuse a run that does not fit the cluster."""
    if devices < 1:
        raise ConfigError(f"gpus is {devices}, but it must be at least 1.")
    if local_batch <= 0:
        raise ConfigError(f"batch leaves {local_batch:g} samples for each device, but it must be greater than 0.")
    if devices > cluster.devices:
        raise ConfigError(
            f"gpus is {devices}, but {cluster.name} has {cluster.devices} "
            f"({cluster.nodes} nodes of {cluster.devices_per_node}); ask for fewer or raise nodes."
        )
    needed, memory = workload.memory_byte(local_batch, optimizer), cluster.device.memory_byte
    if needed > memory:
        raise ConfigError(
            f"{workload.name} needs at least {needed / 2**30:.1f} GiB with {local_batch:g} samples a device, but "
            f"device.memory_gib is {memory / 2**30:g}; choose a larger device, a smaller model or a smaller batch."
        )


def exchanges(workload: Workload, cluster: Cluster, devices: int, scheme: Scheme) -> list[list[Phase]]:
    """The phases of each bucket's exchange."""
    return [
        exchange_phases(scheme.collective, bucket.encoded(scheme.codec), cluster, devices, scheme.grid)
        for bucket in make_buckets(workload, scheme.bucket_mb)
    ]


def step_tasks(
    workload: Workload, cluster: Cluster, *, devices: int, local_batch: float, scheme: Scheme, slowest: float = 1.0,
    phases: list[list[Phase]] | None = None,
) -> list[Task]:  # fmt: skip
    """The tasks of one step: forward, backward and encoding by bucket, exchange, decoding, update.

    `phases` is the result of `exchanges`, if it is already known.
    """
    phases = exchanges(workload, cluster, devices, scheme) if phases is None else phases
    times = [(f * slowest, b * slowest) for f, b in workload.times(cluster.device, local_batch)]
    tasks = [Task("forward", "device", sum(forward for forward, _ in times))]
    buckets = make_buckets(workload, scheme.bucket_mb)
    above = len(times)
    ready, codings = [], []
    for bucket in buckets:
        seconds = sum(backward for _, backward in times[bucket.layer : above])
        above = bucket.layer
        tasks.append(Task("backward", "device", seconds, (len(tasks) - 1,)))
        encode, decode = codec_seconds(scheme.codec, bucket.values, cluster, devices)
        if encode:
            tasks.append(Task("codec", "device", encode, (len(tasks) - 1,)))
        ready.append(len(tasks) - 1)
        codings.append(decode)
    if above:
        tasks.append(Task("backward", "device", sum(backward for _, backward in times[:above]), (len(tasks) - 1,)))
    backward_end = len(tasks) - 1
    finals = [backward_end]
    for parts, start, decode in zip(phases, ready, codings, strict=True):
        after = start if scheme.overlap else backward_end
        for phase in parts:
            resource = phase.level if scheme.pipelined else "links"
            apart = phase.rounds_s if scheme.in_flight else 0.0
            tasks.append(Task("exchange", resource, phase.seconds - apart, (after,)))
            after = len(tasks) - 1
            if apart:  # on a resource of their own, so that no other task queues behind these rounds
                tasks.append(Task("rounds", f"rounds {after}", apart, (after,)))
                after += 1
        if decode:  # decoded after the backward pass, in order
            tasks.append(Task("codec", "device", decode, (after, *finals[-1:], backward_end)))
            after = len(tasks) - 1
        finals.append(after)
    update = optimizer_seconds(workload, cluster.device, scheme.optimizer)
    tasks.append(Task("optimizer", "device", update, tuple(finals)))
    return tasks


def closed_form(
    workload: Workload, cluster: Cluster, *, devices: int, local_batch: float, scheme: Scheme, slowest: float = 1.0
) -> float:
    """The time of the same step without events, for one channel of links.

    With r_j the time at which bucket j is encoded, c_j its exchange and d_j its decoding::

        e_j = max(e_{j-1}, r_j) + c_j        f_j = max(f_{j-1}, e_j, backward) + d_j        step = f_last + update

    With `in_flight`, buckets hold the links only for their bytes: c_j then excludes the seconds a_j of rounds, and
    f_j = max(f_{j-1}, e_j + a_j, backward) + d_j.

    Without decoding, f_last is the maximum over j of (r_j + c_j + c_{j+1} + ...), and at least the backward pass.
    """
    times = [(f * slowest, b * slowest) for f, b in workload.times(cluster.device, local_batch)]
    now = sum(forward for forward, _ in times)
    above, links = len(times), []
    for bucket in make_buckets(workload, scheme.bucket_mb):
        encode, decode = codec_seconds(scheme.codec, bucket.values, cluster, devices)
        now += sum(backward for _, backward in times[bucket.layer : above]) + encode
        above = bucket.layer
        phases = exchange_phases(scheme.collective, bucket.encoded(scheme.codec), cluster, devices, scheme.grid)
        rounds = sum(phase.rounds_s for phase in phases) if scheme.in_flight else 0.0
        links.append((now, sum(phase.seconds for phase in phases) - rounds, rounds, decode))
    backward = now + sum(backward for _, backward in times[:above])
    end, done = 0.0, backward
    for ready, seconds, rounds, decode in links:
        end = max(end, ready if scheme.overlap else backward) + seconds
        done = max(done, end + rounds) + decode
    return done + optimizer_seconds(workload, cluster.device, scheme.optimizer)


def _account(
    cluster: Cluster, devices: int, local_batch: float, scheme: Scheme,
    tasks: list[Task], phases: list[list[Phase]], end: float, slowest: float,
) -> Prediction:  # fmt: skip
    def total(name: str) -> float:
        return sum(task.seconds for task in tasks if task.name == name)

    forward, backward = total("forward") / slowest, total("backward") / slowest
    compute = forward + backward
    fed = local_batch / cluster.loader_samples_s
    split = {
        "forward": forward,
        "backward": backward,
        "straggler": compute * (slowest - 1),
        "codec": total("codec"),
        "exchange": max(0.0, end - compute * slowest - total("codec") - total("optimizer")),
        "optimizer": total("optimizer"),
        "data": max(0.0, fed - end),
    }
    return Prediction(
        devices=devices,
        local_batch=local_batch,
        scheme=scheme,
        step_s=max(end, fed),
        split=split,
        exchange_s=total("exchange"),
        bytes_sent=math.fsum(phase.bytes_sent for bucket in phases for phase in bucket),
        rounds=sum(phase.rounds for bucket in phases for phase in bucket),
        single_s=max(compute + total("optimizer"), fed),
    )


def _double_buffered(
    workload: Workload, cluster: Cluster, devices: int, local_batch: float, scheme: Scheme
) -> Prediction:
    """Exchange each gradient while the next step is computed: step = max(compute + codec + update, exchange, data).

    The local batch is that of one backward pass; the paper calls two such steps one minibatch.

    Reference: Seide et al., 1-Bit Stochastic Gradient Descent, 2014, section 3.3.
    """
    plain = replace(scheme, double_buffer=False, overlap=False)
    step = predict(workload, cluster, devices=devices, local_batch=local_batch, scheme=plain)
    own = step.step_s - step.split["exchange"] - step.split["data"]
    end = max(own, step.exchange_s)
    step_s = max(end, local_batch / cluster.loader_samples_s)
    split = step.split | {"exchange": end - own, "data": step_s - end}
    return replace(step, scheme=scheme, step_s=step_s, split=split)
