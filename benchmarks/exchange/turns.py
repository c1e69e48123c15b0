"""Messages from everybody to everybody, at once and in turns, on shaped links of the network laboratory.

    python benchmarks/exchange/turns.py [--out benchmarks/exchange/results/turns]

Needs root (network namespaces); about two minutes. Four hosts hand each other messages of equal length as they do when
codes travel that cannot be added on the way: both ways in turns, so that what disturbs one disturbs the other. Between
two exchanges a host computes for a while, as between two meetings of islands. Writes OUT.json and OUT.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bigstep.exchange import World
from bigstep.exchange.collectives import phases
from bigstep.lab.hosts import Lab, bits_per_second, why_no_lab
from bigstep.records import describe_machine

HERE = Path(__file__).parent
HOSTS, REPEATS, WARM = 4, 11, 2
RATES = ("10mbit", "50mbit", "200mbit", "1gbit", "10gbit")
KILOBYTES = (40, 120, 240)
PAUSE_S = 0.05
WAYS = {"in turns": 0, "at once": 1 << 40}
"""The longest message that leaves for everybody at once, in bytes."""


def exchange_on_host() -> None:
    """Print the seconds of every exchange by way, for each length."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    world = World.join(dist.group.WORLD)
    everyone = world.everyone()
    group, found = world.new_group(everyone), []
    for kilobytes in KILOBYTES:
        mine = torch.zeros(1000 * kilobytes, dtype=torch.uint8)
        whole, took = mine.new_empty(len(mine) * HOSTS), {way: [] for way in WAYS}
        for tag in range(REPEATS + WARM):
            for way, longest in WAYS.items():
                phases._AT_ONCE = longest
                time.sleep(PAUSE_S)
                dist.barrier()
                began = time.perf_counter()
                for work in phases.all_gather(whole, mine, world, everyone, group, 2 * tag + (way == "at once")):
                    work.wait()
                dist.barrier()
                took[way].append(time.perf_counter() - began)
        found.append({way: seconds[WARM:] for way, seconds in took.items()})
    print(json.dumps(found))
    dist.destroy_process_group()


def markdown(result: dict[str, Any]) -> str:
    """Write the table."""
    machine = result["machine"]
    lines = [
        "# Messages to everybody, at once and in turns", "",
        f"Written by `python benchmarks/exchange/turns.py`: {HOSTS} hosts hand each other one message each; "
        f"milliseconds until all have all, medians of {REPEATS} (lowest to highest), both ways alternating. "
        f"{machine['hardware']['processor']}, {machine['hardware']['cores']} cores shared by the hosts, torch "
        f"{machine['versions']['torch']}, commit {machine['commit']}.", "",
        "| links | message | in turns | at once | the bytes alone |", "|---|--:|--:|--:|--:|",
    ]  # fmt: skip
    for rate, found in result["rates"].items():
        for kilobytes, took in zip(KILOBYTES, found, strict=True):
            cells = [
                f"{statistics.median(took[way]) * 1e3:.1f} ({min(took[way]) * 1e3:.1f} to {max(took[way]) * 1e3:.1f})"
                for way in WAYS
            ]
            bound = (HOSTS - 1) * kilobytes * 8e3 / bits_per_second(rate) * 1e3
            lines.append(f"| {rate} | {kilobytes} kB | {' | '.join(cells)} | {bound:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure at each speed, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(HERE / "results" / "turns"))
    options = parser.parse_args()
    if reason := why_no_lab():
        sys.exit(f"Skipped: {reason}.")
    result: dict[str, Any] = {"machine": describe_machine(), "rates": {}}
    for rate in RATES:
        with Lab(HOSTS, rate) as lab:
            result["rates"][rate] = lab.run(__file__, timeout=300, environment={"ON_A_HOST": "1"})[0]
    Path(f"{options.out}.json").write_text(json.dumps(result, indent=1) + "\n")
    Path(f"{options.out}.md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    exchange_on_host() if os.environ.get("ON_A_HOST") else main()
