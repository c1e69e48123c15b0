"""One SHA-256 of the final weights for each of seven exact runs, whatever the ranks and the collective.

    python benchmarks/exact/one_hash.py [--steps 3] [--only sony] [--append]

Eight rank processes are started once and joined by Gloo into worlds of 1, 2, 3, 4, 7 and 8. Every run has eight
workers, which lie unevenly on 3 and 7 ranks. A run without `--exact` is taken along: its hashes must differ, or the
comparison could not fail. Writes one_hash.json and one_hash.md; the exit status is 1 if a hash differs.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from bigstep import recipes
from bigstep.config import RunConfig
from bigstep.config.edit import make_exact, scale_workers
from bigstep.config.text import apply_settings
from bigstep.data.catalog import open_data
from bigstep.records import describe_machine
from bigstep.train import fit

HERE = Path(__file__).parent
SIZES = (1, 2, 3, 4, 7, 8)
COLLECTIVES = {"ring": SIZES, "torus": (4, 8), "hierarchical": (4, 7), "halving": (3, 8)}
CASES: dict[str, tuple[str, list[str]]] = {
    "plain": ("plain", []),
    "sony": ("sony", []),
    "pfn": ("pfn", []),
    "fair": ("fair", []),
    "text": ("adamw", []),
    "Muon": ("plain", ["optimizer={name: muon}", "lr.base=0.02"]),
    "islands": ("localsgd", ["islands.count=8", "islands.every=2"]),
    "plain, not exact": ("plain", []),
}


def configuration(name: str, collective: str) -> RunConfig:
    recipe, settings = CASES[name]
    config = recipes.load(recipe)
    if config.data.name == "shakespeare":
        small = replace(config, workers=replace(config.workers, count=8, local_batch=2))
    else:
        small = scale_workers(config, count=8 / config.workers.count, local_batch=1 / 4)
        # sony's batch is to grow within the few steps
        plan = tuple(replace(stage, epoch=0.01) for stage in small.plan)
        small = replace(small, plan=plan, islands=replace(small.islands, count=1))
    more = [f"exchange.collective={collective}", "exchange.codec=none", "evaluate_every=1000", "checkpoint.every=0"]
    config = apply_settings(small, [*settings, *more])
    return config if name.endswith("not exact") else make_exact(config)


def data_of(config: RunConfig) -> Any:
    """The recipe's data with little to evaluate."""
    where = config.data
    pair = open_data(where.name, length=where.length, vocabulary=where.vocabulary)
    return pair.train, pair.test.subset(torch.arange(40))


def serve(rank: int, cases: list[tuple[str, str, int]], steps: int, scratch: str, results: Any) -> None:
    """Run all cases that have this rank, one after another."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    for number, (name, collective, size) in enumerate(cases):
        if rank >= size:
            continue
        if size > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{scratch}/{number}", rank=rank, world_size=size,
                timeout=datetime.timedelta(seconds=1200),
            )  # fmt: skip
        config, began = configuration(name, collective), time.monotonic()
        result = fit(config, None, data_of(config), out=f"{scratch}/run-{number}", device="cpu", max_steps=steps)
        results.put((number, rank, result.weights_sha256, result.loss, time.monotonic() - began))
        gc.collect()  # a run in cycles would keep its groups, each with threads of its own
        if size > 1:
            dist.destroy_process_group()


def table(found: dict[str, Any]) -> str:
    machine = found["machine"]
    lines = [
        "# One hash for any number of ranks", "",
        f"SHA-256 of the final float32 weights after {found['steps']} steps of 8 workers. "
        f"{machine['hardware']['processor']}, {machine['hardware']['cores']} cores, torch "
        f"{machine['versions']['torch']}, commit {machine['commit']}; {found['seconds']:.0f} s. Made by "
        "`benchmarks/exact/one_hash.py`.", "",
        "| run | " + " | ".join(f"{name}: ranks" for name in COLLECTIVES) + " | hashes | the hash |",
        "|---" * (len(COLLECTIVES) + 3) + "|",
    ]  # fmt: skip
    for name, rows in found["runs"].items():
        ranks = [", ".join(str(row["ranks"]) for row in rows if row["collective"] == each) for each in COLLECTIVES]
        hashes = sorted({sha for row in rows for sha in row["hashes"]})
        shown = f"`{hashes[0][:16]}…`" if len(hashes) == 1 else "they differ"
        lines.append(f"| {name} | {' | '.join(ranks)} | {len(hashes)} | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", choices=list(CASES), action="append", help="a run; may be given several times")
    parser.add_argument("--append", action="store_true", help="add to the results that are there")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    names = [name for name in CASES if name in (options.only or CASES)]
    cases = [(name, collective, size) for name in names for collective, sizes in COLLECTIVES.items() for size in sizes]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bigstep-hashes-") as scratch:
        results = multiprocessing.get_context("spawn").SimpleQueue()
        arguments = (cases, options.steps, scratch, results)
        ranks = multiprocessing.spawn(serve, arguments, max(SIZES), join=False)
        told: dict[int, dict[int, tuple[Any, ...]]] = {}
        while sum(map(len, told.values())) < sum(size for *_, size in cases):
            while results.empty():
                if ranks.join(timeout=0.2):  # raises if a rank has failed
                    break
            number, rank, *facts = results.get()
            told.setdefault(number, {})[rank] = tuple(facts)
            if len(told[number]) == cases[number][2]:
                print(*cases[number], told[number][0][0][:12], f"{told[number][0][2]:.1f} s", flush=True)
        while not ranks.join():
            pass
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number, (name, collective, size) in enumerate(cases):
        hashes = sorted({sha for sha, *_ in told[number].values()})
        runs[name].append({"collective": collective, "ranks": size, "hashes": hashes, "loss": told[number][0][1]})
    path = options.out / "one_hash.json"
    before = json.loads(path.read_text()) if options.append and path.exists() else {"runs": {}, "seconds": 0.0}
    seconds, runs = before["seconds"] + time.monotonic() - began, {**before["runs"], **runs}
    found = {"steps": options.steps, "seconds": seconds, "machine": describe_machine(), "runs": runs}
    options.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    (options.out / "one_hash.md").write_text(table(found))
    print(table(found))
    counts = {name: len({sha for row in rows for sha in row["hashes"]}) for name, rows in runs.items()}
    return 0 if all((count == 1) != name.endswith("not exact") for name, count in counts.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
