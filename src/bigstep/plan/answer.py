"""The answer of `bigstep plan` as one dictionary, which the command prints, writes as JSON and draws."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bigstep.errors import ConfigError
from bigstep.plan.accuracy import LAWS, ConvergenceLaw, law_from_runs
from bigstep.plan.cluster import Cluster
from bigstep.plan.crossover import find_crossover
from bigstep.plan.search import (
    Choice,
    best_of_each,
    candidate_schemes,
    explain,
    fewest_devices,
    prefer,
    rank,
    suggest_recipe,
)  # fmt: skip
from bigstep.plan.validate import as_dict, check_rows, summarise
from bigstep.plan.ways import Way, cheapest, compare_ways, recommend, synchronous
from bigstep.plan.workload import Workload
from bigstep.tables import find
from bigstep.tables.codecs import CODECS
from bigstep.tables.collectives import COLLECTIVES

__all__ = ["cli_result"]


def cli_result(
    *,
    model: str = "resnet50",
    cluster: str = "abci",
    gpus: int = 0,
    batch: int = 0,
    target: float = 0.0,
    budget_minutes: float = 0.0,
    collective: str = "",
    codec: str = "",
    sweep: str = "",
    law_runs: Sequence[Path] = (),
    price: float = 0.0,
    lifetime_hours: float = 0.0,
    validate: bool = False,
) -> dict[str, Any]:
    """Answer `bigstep plan` with plain dicts and lists.

    Args:
        model: A built-in model, or a workload file (.yaml).
        cluster: A built-in cluster, or a cluster file (.yaml).
        gpus: Number of devices, 0 for all of the cluster; with a budget, the most that may be used.
        batch: Global batch; 0 lets the search choose.
        target: Accuracy in percent; 0 for that of the law.
        budget_minutes: Find the fewest devices that reach the target in this time; 0 for no budget.
        collective: Only this one; empty for all.
        codec: Only this one; empty for all.
        sweep: A range such as gpus=1..4096, for curves.
        law_runs: Run folders of your own, to fit the law of epochs against batch to.
        price: Price of a device hour; with it, the cheapest number of devices is found.
        lifetime_hours: Mean time until a device is lost, as spot machines are; 0 if none ever is.
        validate: Return the published rows beside their predictions instead of a plan.

    Returns:
        A dictionary with `kind` plan or validation; `render` prints it.

    Example:
        >>> answer = cli_result(model="resnet50", cluster="dgx_h100", gpus=512, target=75.9)
        >>> answer["best"]["collective"], 0.3 < answer["best"]["minutes"] < 0.7
        ('switch', True)
    """
    if validate:
        return {"kind": "validation", **as_dict(check_rows())}
    _require_known(collective, codec)
    _require_numbers(gpus=gpus, batch=batch, budget=budget_minutes, price=price, lifetime=lifetime_hours)
    workload, machine = Workload.load(model), Cluster.load(cluster)
    law = choose_law(workload, target, law_runs)
    counts = parse_sweep(sweep) if sweep else []
    if counts:
        machine = machine.resized(max(*counts, gpus))
    lifetime = lifetime_hours or math.inf
    result: dict[str, Any] = {"kind": "plan", "model": workload.name, "cluster": machine.name}
    if budget_minutes:
        chosen = _within_budget(workload, machine, budget_minutes, law, batch, collective, codec, most=gpus)
        gpus = chosen.prediction.devices
    gpus = gpus or (max(counts) if counts else machine.devices)
    choices = rank(workload, machine, gpus, batch=batch, law=law, collective=collective, codec=codec)
    best = prefer(choices)
    result |= {
        "warnings": list(_warnings(workload, law, target, best, lifetime_hours)),
        "gpus": gpus,
        "target": law.target if law else None,
        "asked": target or None,
        "law": _law_facts(law),
        "best": _facts(best),
        "asks": _asks(workload, machine, best),
        "ranking": [_facts(choice) for choice in choices],
        "why": [*_passed_over(choices[0], best), *explain(workload, machine, best)],
        "sure": confidence(),
        "crossover": _crossover(workload, machine, best),
        "sweep": [
            _facts(choice) | {"price": synchronous(workload, choice, price=price, lifetime_h=lifetime).price}
            for n in counts
            for choice in best_of_each(
                workload, machine, [n], batch=batch, law=_reachable(law, n, batch), collective=collective, codec=codec
            )
        ],
    }
    result |= _ways(compare_ways(workload, machine, best, price=price, lifetime_h=lifetime))
    if price:
        sizes = sorted({2**power for power in range(21) if 2**power <= machine.devices} | {gpus})
        found = cheapest(workload, machine, sizes, price=price, law=law, lifetime_h=lifetime, batch=batch,
                         collective=collective, codec=codec)  # fmt: skip
        result["cheapest"] = asdict(found)
    return result


def _require_known(collective: str, codec: str) -> None:
    if codec:
        find(CODECS, "codec", codec)
    if collective:
        find(COLLECTIVES, "collective", collective)


def _require_numbers(**numbers: float) -> None:
    for name, number in numbers.items():
        if number < 0:
            raise ConfigError(f"{name} is {number:g}, but it must not be negative.")
        if not math.isfinite(number):
            raise ConfigError(f"{name} is {number:g}, but it must be a finite number.")


def _warnings(
    workload: Workload, law: ConvergenceLaw | None, target: float, best: Choice, lifetime_h: float
) -> Iterator[str]:
    """What is unknown, outside the measured range, or missing from the headline figure."""
    batch, devices = best.prediction.batch, best.prediction.devices
    if batch % devices:
        below = batch // devices * devices
        yield (
            f"a batch of {batch:,.0f} gives {devices:,} devices unequal shares, and the wait for the largest is not "
            f"counted; {below:,.0f} or {below + devices:,.0f} would divide evenly"
        )
    if lifetime_h:
        yield (
            f"the headline and the tables of exchanges assume that devices are never lost; the ways and prices count "
            f"on a mean lifetime of {lifetime_h:g} hours for each device"
        )
    if law is None:
        yield (
            f"no law of epochs against batch is known for {workload.name}, so the ranking is by samples a second; "
            "fit one to your own runs with --runs"
        )
        return
    if not workload.samples:
        yield (
            f"the file of {workload.name} does not say how many samples an epoch has, so the time to "
            f"{law.target:g} % is unknown and the ranking is by samples a second; add `samples` to the file"
        )
    elif target and target < law.target:
        yield f"the law gives epochs to {law.target} %; {target:g} % needs somewhat fewer"
    if warning := law.warning(best.prediction.batch):
        yield warning


def _passed_over(first: Choice, best: Choice) -> Iterator[str]:
    """Why the first in the ranking is not the one that is recommended."""
    if first is not best:
        gain = 1 - first.cost / best.cost
        codec = first.prediction.scheme.codec
        yield (
            f"The first, {codec}, would take {100 * gain:.1f} % less time, too little to justify a codec "
            "that changes the path of training."
        )


def _reachable(law: ConvergenceLaw | None, devices: int, batch: int) -> ConvergenceLaw | None:
    """The law if a plan on this many devices may use it; beyond it, a sweep goes by samples per second alone."""
    return law if law and (batch or devices <= law.furthest_batch) else None


def choose_law(workload: Workload, target: float, runs: Sequence[Path]) -> ConvergenceLaw | None:
    """The law of epochs against batch: fitted to your own runs, or the built-in one; None if none is known."""
    if target and not 0 < target < 100:
        raise ConfigError(f"target is {target}, but it is an accuracy in percent, between 0 and 100.")
    if 0 < target < 1:
        raise ConfigError(f"target is {target:g}, but it is in percent: write {100 * target:g}.")
    if runs:
        if not target:
            raise ConfigError("A law fitted to your own runs needs an accuracy; give --target in percent.")
        return law_from_runs(runs, target)
    law = LAWS.get(workload.name)
    if law is None:
        if target:
            raise ConfigError(
                f"No law of epochs against batch is known for {workload.name}; give run folders with --runs, or drop "
                "--target."
            )
        return None
    if target > law.target:
        raise ConfigError(
            f"target is {target:g}, but the law for {workload.name} ends at {law.target} %; lower it, or fit your "
            "own runs with --runs."
        )
    return law


def _within_budget(
    workload: Workload, cluster: Cluster, minutes: float, law: ConvergenceLaw | None, batch: int, collective: str,
    codec: str, *, most: int,
) -> Choice:  # fmt: skip
    if law is None:
        raise ConfigError(
            f"A budget needs a law of epochs against batch, and none is known for {workload.name}; fit one to your own "
            "runs with --runs and --target."
        )
    if not workload.samples:
        raise ConfigError(f"A budget needs the samples of an epoch; add `samples` to the file of {workload.name}.")
    chosen = fewest_devices(workload, cluster, minutes, law=law, batch=batch, collective=collective, codec=codec,
                            most=most)  # fmt: skip
    if chosen is None:
        raise ConfigError(
            f"budget is {minutes:g} min, but {cluster.name} does not reach {law.target} % in that time with any "
            f"number of devices up to {most or cluster.devices:,}; allow more time, more devices or a faster cluster."
        )
    return chosen


def parse_sweep(text: str) -> list[int]:
    """Read gpus=1..4096 as powers of two and the last count.

    >>> parse_sweep("gpus=1..6")
    [1, 2, 4, 6]
    """
    name, _, span = text.partition("=")
    first, dots, last = span.partition("..")
    if name.strip() != "gpus" or not dots or not first.strip().isdecimal() or not last.strip().isdecimal():
        raise ConfigError(f"--sweep takes gpus=FIRST..LAST, as in gpus=1..4096 (got {text!r}).")
    low, high = int(first), int(last)
    if not 1 <= low <= high <= 2**20:
        raise ConfigError(f"--sweep gpus={low}..{high} must rise from at least 1 to at most {2**20}.")
    counts = [2**power for power in range(21) if low <= 2**power < high]
    return sorted({low, *counts, high})


@functools.cache
def confidence() -> dict[str, float]:
    """How accurate predictions are: the errors on the published rows that count."""
    summary = summarise(check_rows())
    return {key: summary[key] for key in ("predicted", "mean_error", "worst_error")}


def _facts(choice: Choice) -> dict[str, Any]:
    prediction, scheme = choice.prediction, choice.prediction.scheme
    return {
        "recipe": suggest_recipe(choice),
        "gpus": prediction.devices,
        "collective": scheme.collective,
        "codec": scheme.codec,
        "grid": list(scheme.grid) if scheme.grid else None,
        "bucket_mb": scheme.bucket_mb,
        "batch": round(prediction.batch),
        "local_batch": prediction.local_batch,
        "step_ms": prediction.step_s * 1e3,
        "samples_per_s": prediction.samples_s,
        "tokens_per_s": prediction.samples_s * choice.tokens if choice.tokens else None,
        "efficiency": prediction.efficiency,
        "epochs": choice.epochs,
        "minutes": choice.minutes,
        "bottleneck": prediction.bottleneck,
        "split_ms": {name: seconds * 1e3 for name, seconds in prediction.split.items()},
        "megabytes_sent": prediction.bytes_sent / 1e6,
        "rounds": prediction.rounds,
    }


def _asks(workload: Workload, cluster: Cluster, best: Choice) -> dict[str, Any]:
    """What one device needs for the best choice: arithmetic, exchanged bytes and memory."""
    rule, local = best.prediction.scheme.optimizer or workload.optimizer, best.prediction.local_batch
    parts = workload.memory_parts(local, rule)
    return {
        "parameters": workload.parameters,
        "gflop_a_sample": workload.step_flops / 1e9 or None,  # 0 for a measured workload: only its times are known
        "gradient_mb": 4 * workload.parameters / 1e6,
        "optimizer": rule,
        "memory_gb": {name: size / 1e9 for name, size in parts.items()},
        "device_gb": cluster.device.memory_byte / 1e9,
    }


def _ways(ways: Sequence[Way]) -> dict[str, Any]:
    way, why = recommend(ways)
    return {"ways": [asdict(way) for way in ways], "recommended": {"method": way.method, "why": why}}


def _law_facts(law: ConvergenceLaw | None) -> dict[str, Any] | None:
    if law is None:
        return None
    return {
        "base_epochs": law.base_epochs,
        "epochs_per_sample_of_batch": law.slope,
        "critical_batch": law.critical_batch,
        "largest_batch": law.largest_batch,
        "furthest_batch": law.furthest_batch,
        "worst_residual_epochs": law.worst_residual,
        "source": law.source,
    }


def _crossover(workload: Workload, cluster: Cluster, best: Choice) -> dict[str, Any] | None:
    devices, local = best.prediction.devices, best.prediction.local_batch
    if devices <= cluster.devices_per_node:
        return None  # nothing crosses the network
    schemes = [m for m in candidate_schemes(cluster, devices, optimizer=workload.optimizer) if m.bucket_mb in (4, 64)]
    dense, onebit = ([m for m in schemes if m.codec in codecs] for codecs in (("none", "fp16"), ("onebit",)))
    found = find_crossover(workload, cluster, devices=devices, local_batch=local, compressed=onebit, plain=dense)
    return {
        "compressed": found.compressed,
        "plain": found.plain,
        "gbit_s": found.gbit_s,
        "here_gbit_s": cluster.between.bandwidth_byte_s * 8 / 1e9,
        "pays_here": found.pays_here,
        "gain_here": found.gain_here,
    }
