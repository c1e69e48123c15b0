"""What a step costs when its workers live on islands: one rank that hosts all of them, beside a synchronous step.

    python benchmarks/islands/step_cost.py [--rounds 5] [--out benchmarks/islands/results/step_cost.md]

Both run the same forwards, a worker each; islands add weights that are put under the model and an update each. Rounds
alternate, and processor seconds are counted, which other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from bigstep import recipes
from bigstep.config import IslandsConfig, RunConfig
from bigstep.data.catalog import open_data
from bigstep.records import describe_machine
from bigstep.train import fit

HERE = Path(__file__).parent
STEPS, FEW = 18, 4
LOCAL_BATCH = 32
"""Sequences of a worker: as many as a forward takes on a CPU, so that neither run joins workers into one."""


def step_seconds(config: RunConfig, data: tuple[object, object]) -> float:
    """Return the processor seconds of a step: a long run less a short one, so that what both share cancels."""
    taken = []
    for steps in (FEW, STEPS):
        begun = time.process_time()
        fit(config, data=data, max_steps=steps, device="cpu")
        taken.append(time.process_time() - begun)
    return (taken[1] - taken[0]) / (STEPS - FEW)


def main() -> None:
    """Alternate the two, and write the ratio of neighbouring rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default=str(HERE / "results" / "step_cost.md"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    base = recipes.load("adamw", "mini")
    base = replace(
        base, workers=replace(base.workers, local_batch=LOCAL_BATCH), checkpoint=replace(base.checkpoint, every=0)
    )
    kinds = {"synchronous": base, "islands": replace(base, islands=IslandsConfig(count=4, every=20))}
    pair = open_data("shakespeare", length=base.data.length)
    data = pair.train, pair.test.subset(torch.arange(8))
    seen: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(options.rounds):
        for name, config in kinds.items():
            seen[name].append(step_seconds(config, data))
        Path(options.out).write_text(text_of(seen))
        print(text_of(seen), flush=True)


def text_of(seen: dict[str, list[float]]) -> str:
    """Say what was seen so far."""
    ratios = [a / b for a, b in zip(seen["islands"], seen["synchronous"], strict=True)]
    medians = {name: statistics.median(each) * 1e3 for name, each in seen.items()}
    machine = describe_machine()
    return (
        f"gpt-mini, 4 workers of {LOCAL_BATCH} sequences on one rank: a synchronous step takes "
        f"{medians['synchronous']:.0f} ms of one core, a step of 4 islands with H = 20 {medians['islands']:.0f} ms; "
        f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f}–{max(ratios):.3f}, n = {len(ratios)}). "
        f"{machine['hardware']['processor']}, torch {machine['versions']['torch']}, commit {machine['commit']}.\n"
    )


if __name__ == "__main__":
    main()
