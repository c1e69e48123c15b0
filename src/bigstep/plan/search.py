"""The best way to train: ranks collective, codec, grid, bucket and batch by time to accuracy, and says why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from bigstep.errors import ConfigError
from bigstep.plan.accuracy import ConvergenceLaw
from bigstep.plan.cluster import Cluster
from bigstep.plan.scheme import Scheme
from bigstep.plan.simulate import Prediction, predict
from bigstep.plan.workload import Workload
from bigstep.tables.codecs import CODECS, check_pair, collectives_for
from bigstep.tables.collectives import COLLECTIVES, choose_grid

__all__ = [
    "Choice",
    "best_of_each",
    "candidate_schemes",
    "explain",
    "fewest_devices",
    "prefer",
    "rank",
    "suggest_recipe",
]

BUCKETS_MB = (1.0, 4.0, 16.0, 64.0)
LOCAL_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
DEFAULT_LOCAL_BATCH = 32
WORTH_A_CHANGE = 0.05
"""Share of the time that a codec which carries its losses from step to step must save to be preferred."""
LARGE_TOKEN_BATCH = 2**22
"""Above this many tokens per step LAMB, made for large batches, is proposed instead of AdamW."""


@dataclass(frozen=True)
class Choice:
    """One way to train, predicted."""

    prediction: Prediction
    law: ConvergenceLaw | None
    samples: int
    tokens: int = 0
    """Tokens of a sample; 0 for images."""

    @property
    def epochs(self) -> float | None:
        """Epochs to the target; None if no law is known."""
        return self.law.epochs(self.prediction.batch) if self.law else None

    @property
    def minutes(self) -> float | None:
        """Minutes to the target; None if no law or number of samples is known."""
        if self.law is None or not self.samples:
            return None
        return self.law.epochs(self.prediction.batch) * self.samples / self.prediction.samples_s / 60

    @property
    def cost(self) -> float:
        """The figure that the ranking minimises: minutes to the target, or seconds per sample."""
        return self.minutes if self.minutes is not None else 1 / self.prediction.samples_s


def candidate_schemes(
    cluster: Cluster, devices: int, *, collective: str = "", codec: str = "", optimizer: str = "lars"
) -> list[Scheme]:
    """Every exchange worth trying on this cluster, or only those with one collective or codec."""
    if collective and codec:
        check_pair(collective, codec, planned=True)
    schemes = []
    for name in COLLECTIVES:
        if (collective and name != collective) or (name == "switch" and not (cluster.in_network or collective)):
            continue
        if COLLECTIVES[name].joins and name != collective:  # the collectives it joins are tried by themselves
            continue
        if name in ("hierarchical", "hybrid") and devices % min(devices, cluster.devices_per_node):
            continue
        for written in [codec] if codec else [name for name, entry in CODECS.items() if entry.offered]:
            if name not in collectives_for(written):
                continue
            grids: list[tuple[int, int] | None] = [None]
            if name == "torus":
                grids = list(
                    dict.fromkeys([choose_grid(devices, cluster.devices_per_node), *_node_rows(cluster, devices)])
                )
            schemes += [
                Scheme(collective=name, codec=written, grid=grid, bucket_mb=bucket,
                       optimizer=optimizer)
                for grid in grids
                for bucket in BUCKETS_MB
            ]  # fmt: skip
    if not schemes:
        raise ConfigError(
            f"{collective or 'No collective'} cannot run on {devices} devices in nodes of {cluster.devices_per_node}: "
            "change the collective or the number of devices."
        )
    return schemes


def _node_rows(cluster: Cluster, devices: int) -> list[tuple[int, int]]:
    """The grid whose rows are nodes, which sends the fewest bytes between nodes; only if whole nodes take part."""
    nodes, left = divmod(devices, cluster.devices_per_node)
    return [(cluster.devices_per_node, nodes)] if nodes and not left else []


def rank(
    workload: Workload,
    cluster: Cluster,
    devices: int,
    *,
    batch: int = 0,
    law: ConvergenceLaw | None = None,
    collective: str = "",
    codec: str = "",
) -> list[Choice]:
    """Rank ways to train on `devices`, best first.

    Args:
        workload: The model.
        cluster: The cluster it runs on.
        devices: Number of devices that take part.
        batch: Global batch; 0 lets the search choose it if a law is known (else 32 samples per device).
        law: Epochs against batch; without it the ranking is by samples per second.
        collective: Only this collective; empty for all.
        codec: Only this codec; empty for all.

    Returns:
        One choice for each collective, codec and grid, each with its best bucket and batch.
    """
    if batch and batch < devices:
        raise ConfigError(f"batch is {batch}, but {devices} devices need a sample each; raise it, or ask for fewer.")
    schemes = candidate_schemes(cluster, devices, collective=collective, codec=codec, optimizer=workload.optimizer)
    first = batch / devices if batch else _feasible_batches(workload, cluster, devices, law)[0]
    trial = [_choose(workload, cluster, devices, first, scheme, law) for scheme in schemes]
    best: dict[tuple[str, str, tuple[int, int] | None], Choice] = {}
    for choice in sorted(trial, key=lambda choice: choice.cost):
        scheme = choice.prediction.scheme
        best.setdefault((scheme.collective, scheme.codec, scheme.grid), choice)
    choices = list(best.values())
    if not batch and law:
        choices = [_best_batch(workload, cluster, choice, law) for choice in choices]
    return sorted(choices, key=lambda choice: choice.cost)


def _feasible_batches(workload: Workload, cluster: Cluster, devices: int, law: ConvergenceLaw | None) -> list[int]:
    """Local batches to try, the one nearest to the default first."""
    fitting = [local for local in LOCAL_BATCHES if workload.memory_byte(local) <= cluster.device.memory_byte]
    fitting = sorted(fitting or LOCAL_BATCHES[:1], key=lambda local: abs(local - DEFAULT_LOCAL_BATCH))
    if law is None:
        return fitting[:1]
    allowed = [local for local in fitting if local * devices <= law.furthest_batch]
    if not allowed:
        raise ConfigError(
            f"gpus is {devices}, but even one sample each is a batch above {law.furthest_batch:,.0f}, "
            "beyond anything known to converge; ask for fewer devices, or give --batch."
        )
    return allowed


def _choose(
    workload: Workload, cluster: Cluster, devices: int, local: float, scheme: Scheme, law: ConvergenceLaw | None
) -> Choice:
    prediction = predict(workload, cluster, devices=devices, local_batch=local, scheme=scheme)
    return Choice(prediction, law, workload.samples, workload.tokens)


def _best_batch(workload: Workload, cluster: Cluster, choice: Choice, law: ConvergenceLaw) -> Choice:
    devices, scheme = choice.prediction.devices, choice.prediction.scheme
    tried = [
        _choose(workload, cluster, devices, local, replace(scheme, bucket_mb=bucket), law)
        for local in _feasible_batches(workload, cluster, devices, law)
        for bucket in {scheme.bucket_mb, 16.0}
    ]
    return min(tried, key=lambda choice: choice.cost)


def prefer(choices: Sequence[Choice]) -> Choice:
    """The first choice; one whose codec changes the path of training only if it saves more than `WORTH_A_CHANGE`."""
    steady = [choice for choice in choices if CODECS[choice.prediction.scheme.codec].loses != "carried"]
    first = choices[0]
    return steady[0] if steady and steady[0].cost <= first.cost * (1 + WORTH_A_CHANGE) else first


def suggest_recipe(choice: Choice) -> str:
    """The recipe whose optimizer suits the batch and whose exchange suits the scheme."""
    scheme, batch = choice.prediction.scheme, choice.prediction.batch
    if choice.tokens:
        return "adamw" if batch * choice.tokens <= LARGE_TOKEN_BATCH else "lamb"
    if scheme.codec == "onebit":
        return "onebit"
    if batch <= 32768:
        return "fair" if choice.law is None and batch <= 8192 else "lars"
    return "sony" if scheme.collective == "torus" else "fujitsu"


def explain(workload: Workload, cluster: Cluster, choice: Choice) -> list[str]:
    """Where the time of this step goes, and what would help most."""
    prediction = choice.prediction
    step_ms = prediction.step_s * 1e3
    names = {"straggler": "waiting for the slowest device", "exchange": "exchange that compute does not hide",
             "codec": "encoding and decoding", "optimizer": "the update", "data": "waiting for data"}  # fmt: skip
    lost = sorted(((prediction.split[name], words) for name, words in names.items()), reverse=True)
    compute = prediction.split["forward"] + prediction.split["backward"]
    sentences = [
        f"Of {step_ms:.2f} ms a step, {100 * compute / prediction.step_s:.0f} % is forward and backward; the largest "
        f"loss is {lost[0][1]} ({100 * lost[0][0] / prediction.step_s:.1f} %), then {lost[1][1]} "
        f"({100 * lost[1][0] / prediction.step_s:.1f} %)."
    ]
    link, device = cluster.between, cluster.device
    twice = replace(device, flop_s=2 * device.flop_s, matmul_flop_s=2 * device.matmul_flop_s)
    changes = {
        "twice the bandwidth between nodes": replace(
            cluster, between=replace(link, bandwidth_byte_s=2 * link.bandwidth_byte_s)
        ),
        "half the latency": replace(
            cluster,
            between=replace(link, latency_s=link.latency_s / 2),
            inside=replace(cluster.inside, latency_s=cluster.inside.latency_s / 2),
            collectives={
                name: replace(speed, latency_s=speed.latency_s / 2) for name, speed in cluster.collectives.items()
            },
        ),
        "devices of equal speed": replace(cluster, jitter=0.0),
    }
    tried = {words: (workload, changed) for words, changed in changes.items()}
    # a measured workload has fixed times: a device of twice the speed handles twice the batch in them
    quick = replace(workload, measured_batch=2 * workload.measured_batch)
    tried["a device of twice the speed"] = quick, replace(cluster, device=twice)
    gains = []
    for words, (asked, changed) in tried.items():
        faster = predict(asked, changed, devices=prediction.devices, local_batch=prediction.local_batch,
                         scheme=prediction.scheme)  # fmt: skip
        gains.append((1 - faster.step_s / prediction.step_s, words))
    gains.sort(reverse=True)
    helped = ", ".join(f"{words} ({100 * gain:.0f} % less time)" for gain, words in gains if gain > 0.005)
    sentences.append(f"What would help: {helped}." if helped else "Nothing about links or devices would help.")
    return sentences


def best_of_each(
    workload: Workload, cluster: Cluster, counts: Iterable[int], *, batch: int = 0, law: ConvergenceLaw | None = None,
    collective: str = "", codec: str = "",
) -> Iterator[Choice]:  # fmt: skip
    """The choice of a plan for each of these numbers of devices; numbers that cannot run it are left out."""
    for devices in counts:
        try:
            yield prefer(rank(workload, cluster, devices, batch=batch, law=law, collective=collective, codec=codec))
        except ConfigError:  # too few for the memory, too many for the batch, or no whole nodes
            continue


def fewest_devices(
    workload: Workload, cluster: Cluster, budget_minutes: float, *, law: ConvergenceLaw, batch: int = 0,
    collective: str = "", codec: str = "", most: int = 0,
) -> Choice | None:  # fmt: skip
    """The fewest devices, in whole nodes beyond the first, that reach the target within the budget.

    At most `most` are tried; 0 means all of the cluster.

    Doubling finds a number that is enough, bisection the fewest between it and the one before; None if none is.
    """

    def within(counts: Iterable[int]) -> Choice | None:
        choices = best_of_each(workload, cluster, counts, batch=batch, law=law, collective=collective, codec=codec)
        return next((one for one in choices if one.minutes is not None and one.minutes <= budget_minutes), None)

    most = min(most or cluster.devices, cluster.devices)
    k, doubled = cluster.devices_per_node, [2**power for power in range(most.bit_length())]
    counts = sorted({n if n <= k else -(-n // k) * k for n in doubled if n <= k or -(-n // k) * k <= most} | {most})
    found = within(counts)
    if found is None:
        return None
    enough = found.prediction.devices
    step = 1 if enough <= k else k
    low, high = max((n for n in counts if n < enough), default=0) // step, enough // step
    while high - low > 1:
        middle = (low + high) // 2
        fewer = within([middle * step])
        found, low, high = (fewer, low, middle) if fewer else (found, middle, high)
    return found
