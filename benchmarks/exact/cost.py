"""What exact sums cost: steps of one recipe, ordinary and exact, in turn, in the same processes.

    python benchmarks/exact/cost.py [--recipes fair,adamw] [--ranks 1,2] [--repeats 15] [--steps 4]

Ranks are CPU processes on one machine, joined by Gloo over the loopback. An exact forward takes one thread, since sums
of torch are cut by the number of threads; so a rank alone is compared twice: with an ordinary run on one thread, which
is the same work, and with the default, which has all cores. Writes cost.json and cost.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from bigstep import recipes
from bigstep.config.edit import make_exact
from bigstep.config.text import apply_settings
from bigstep.data.catalog import open_data
from bigstep.data.sampler import Position
from bigstep.engine.build import Own, Run, build
from bigstep.engine.exact import fixed_arithmetic
from bigstep.engine.loop import train
from bigstep.engine.observers.base import Audience
from bigstep.engine.ranks import Ranks
from bigstep.records import describe_machine

HERE = Path(__file__).parent
SETTINGS = ["evaluate_every=1000", "checkpoint.every=0"]


def steps_of(run: Run, steps: int, *, one_thread: bool) -> None:
    run.state.position, run.state.seconds = Position(), 0.0
    with fixed_arithmetic(torch.device("cpu")) if one_thread else contextlib.nullcontext():
        train(run, Audience([]), max_steps=steps)


def ways(name: str, ranks: Ranks) -> dict[str, tuple[Run, bool]]:
    """What is compared: a run each, and whether it is held to one thread."""
    config = apply_settings(recipes.load(name), SETTINGS)
    where = config.data
    pair = open_data(where.name, length=where.length, vocabulary=where.vocabulary)
    data = Own(data=(pair.train, pair.test.subset(torch.arange(1))))  # every call ends with an evaluation
    ordinary, exact = build(config, ranks, data), build(make_exact(config), ranks, data)
    found = {"ordinary": (ordinary, True), "exact": (exact, True)}
    return {"default": (ordinary, False), **found} if ranks.size == 1 else found


def measure(rank: int, name: str, size: int, options: argparse.Namespace, scratch: str, results: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{scratch}/{name}-{size}", rank=rank, world_size=size)
    rivals = ways(name, Ranks(rank, size))
    times: dict[str, list[float]] = {way: [] for way in rivals}
    worked: dict[str, list[float]] = {way: [] for way in rivals}
    for repeat in range(options.repeats + 1):
        order = list(rivals)[:: 1 if repeat % 2 else -1]
        for way in order:
            if size > 1:
                dist.barrier()
            began, busy = time.perf_counter(), time.process_time()
            run, one_thread = rivals[way]
            steps_of(run, options.steps if repeat else 2, one_thread=one_thread)
            if repeat:  # the first round warms up
                times[way].append((time.perf_counter() - began) / options.steps)
                worked[way].append((time.process_time() - busy) / options.steps)
    if rank == 0:
        run = rivals["exact"][0]
        weights = sum(parameter.numel() for parameter in run.learner.model.parameters())
        results.put({"recipe": name, "ranks": size, "weights": weights, "workers": run.config.workers.count,
                     "times": times, "processor_times": worked})  # fmt: skip
    if size > 1:
        dist.destroy_process_group()


def summarise(found: dict[str, Any]) -> dict[str, Any]:
    """Medians, and what exact takes of each rival: the middle half of the pairs as well."""
    summary = {**found, "milliseconds": {way: 1e3 * statistics.median(found["times"][way]) for way in found["times"]}}
    for name, kind in (("ratios", "times"), ("processor_ratios", "processor_times")):
        summary[name] = {}
        for way, values in found[kind].items():
            if way != "exact":
                ratios = [a / b for a, b in zip(found[kind]["exact"], values, strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                summary[name][way] = [middle, low, high]
    return summary


def table(rows: list[dict[str, Any]], machine: dict[str, Any], options: argparse.Namespace) -> str:
    hardware = machine["hardware"]
    lines = [
        "# What exact sums cost", "",
        f"A step, exact over ordinary: median (middle half) of {options.repeats} pairs of {options.steps} steps each, "
        "in turn in the same processes; by the clock, and in processor time of a rank, which tells more where cores "
        f"are shared. {hardware['processor']}, {hardware['cores']} cores, torch "
        f"{machine['versions']['torch']}, commit {machine['commit']}. Made by `benchmarks/exact/cost.py`.", "",
        "| recipe | weights | workers | ranks | ms a step, ordinary | exact | same threads | in processor time | "
        "against the default |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        said = {way: f"{m:.3f} ({low:.2f} to {high:.2f})" for way, (m, low, high) in row["ratios"].items()}
        middle, low, high = row["processor_ratios"]["ordinary"]
        ms = row["milliseconds"]
        lines.append(
            f"| {row['recipe']} | {row['weights']:,} | {row['workers']} | {row['ranks']} | {ms['ordinary']:.0f} | "
            f"{ms['exact']:.0f} | {said['ordinary']} | {middle:.3f} ({low:.2f} to {high:.2f}) | "
            f"{said.get('default', 'the same')} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default="fair,adamw")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    context, rows = multiprocessing.get_context("spawn"), []
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.recipes.split(","):
            for size in map(int, options.ranks.split(",")):
                results = context.SimpleQueue()
                multiprocessing.spawn(measure, (name, size, options, scratch, results), size)
                rows.append(summarise(results.get()))
                told = ("recipe", "ranks", "milliseconds", "ratios", "processor_ratios")
                print(json.dumps({fact: rows[-1][fact] for fact in told}), flush=True)
    machine = describe_machine()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "cost.json").write_text(json.dumps({"rows": rows, "machine": machine}, indent=1) + "\n")
    (options.out / "cost.md").write_text(table(rows, machine, options))


if __name__ == "__main__":
    main()
