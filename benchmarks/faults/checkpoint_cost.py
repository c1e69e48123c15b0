"""What background checkpoints cost: ResNet-18 on synthetic images, with and without, in turns.

    python benchmarks/faults/checkpoint_cost.py          # about two minutes; writes checkpoint_cost.json and .md

One run, whose steps come in blocks. Every other block submits a checkpoint before its first step, as the loop does: the
state is copied and a thread writes, syncs and renames it while the steps of the block go on. What a checkpoint adds is
the time of such a block less that of the blocks beside it; at one a minute its cost is that over 60 seconds. Blocks are
long enough for the writing to end inside.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bigstep.config import DataConfig, LrConfig, OptimizerConfig, RunConfig, WorkersConfig
from bigstep.data.sampler import Position
from bigstep.engine.background import BackgroundWriter
from bigstep.engine.build import Parts, assemble
from bigstep.engine.loop import set_rates
from bigstep.engine.methods.synchronous import gradient_of, requests_of
from bigstep.engine.ranks import Ranks
from bigstep.engine.run import capture
from bigstep.records import describe_machine

BOUND = 0.02
INTERVAL_S = 60.0


class Synthetic(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Random images of 3 x 32 x 32."""

    classes = tuple(map(str, range(10)))

    def __init__(self, count: int) -> None:
        self.images = torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], index % 10


def parts_of_run(device: torch.device, batch: int) -> Parts:
    config = RunConfig(
        model="resnet18", data=DataConfig(loaders=0), workers=WorkersConfig(count=1, local_batch=batch), epochs=10_000,
        lr=LrConfig(base=0.01), optimizer=OptimizerConfig(momentum=0.9),
    )  # fmt: skip
    return assemble(config, Ranks(device=device), data=(Synthetic(batch * 4), Synthetic(batch)))


def measure(parts: Parts, folder: Path, pairs: int, steps: int) -> tuple[list[float], list[float], float]:
    """Seconds of blocks without and with a checkpoint, and those that its submission alone took."""
    problems: list[str] = []
    writer = BackgroundWriter(folder, keep=2, problem=problems.append)
    position, number = Position(), 0
    stream = iter(parts.sampler.steps(parts.config.epochs, position))

    def block(save: bool) -> tuple[float, float]:
        nonlocal number
        mine = [next(stream) for _ in range(steps)]
        began = time.perf_counter()
        if save:
            number += 1
            writer.submit(number, capture(parts, position, 0.0))
        submitted = time.perf_counter() - began
        for step in mine:
            set_rates(parts, step)
            gradient_of(parts, step, iter(parts.train_feed(requests_of(parts, [step]))))
            parts.optimizer.step()
            parts.optimizer.zero_grad()
        if parts.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began, submitted

    block(save=True)  # warm-up, also of the writer
    writer.wait()
    without, with_one, submissions = [], [], []
    for _ in range(pairs):
        without.append(block(save=False)[0])
        seconds, submitted = block(save=True)
        with_one.append(seconds)
        submissions.append(submitted)
        writing = time.perf_counter()
        writer.wait()
        assert time.perf_counter() - writing < 0.5 * seconds, "the block is too short for its checkpoint: raise --steps"
    assert not problems, problems
    return without, with_one, statistics.median(submissions)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="steps of a block")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    parts = parts_of_run(torch.device(options.device), options.batch)
    with tempfile.TemporaryDirectory(prefix="bigstep-cost-", dir=".") as scratch:
        without, with_one, submission = measure(parts, Path(scratch), options.pairs, options.steps)
        size = max(path.stat().st_size for path in Path(scratch).iterdir())
    added = [after - before for before, after in zip(without, with_one, strict=True)]
    cost = statistics.median(added) / INTERVAL_S
    results: dict[str, Any] = {
        "checkpoint_mb": size / 1e6, "step_s": statistics.median(without) / options.steps,
        "steps_a_block": options.steps,
        "block_ratio": statistics.median(a / b for b, a in zip(without, with_one, strict=True)),
        "added_s": statistics.median(added), "added_s_quartiles": statistics.quantiles(added, n=4),
        "submission_s": submission, "cost_at_one_a_minute": cost, "bound": BOUND, "pairs": options.pairs,
        "without_s": without, "with_s": with_one, "device": options.device, "machine": describe_machine(),
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "checkpoint_cost.json").write_text(json.dumps(results, indent=1) + "\n")
    machine = results["machine"]
    low, _, high = (1e3 * seconds for seconds in results["added_s_quartiles"])
    text = (
        "# What a background checkpoint costs\n\n"
        f"ResNet-18, batch {options.batch}, {options.device}: {results['checkpoint_mb']:.0f} MB a checkpoint, "
        f"{results['step_s'] * 1e3:.0f} ms a step. A checkpoint adds {results['added_s'] * 1e3:.0f} ms (median of "
        f"{options.pairs} pairs of blocks, quartiles {low:.0f} to {high:.0f}), of which the step itself waits "
        f"{submission * 1e3:.0f} ms for the copy. At one a minute that is **{cost:.2%}** (bound {BOUND:.0%}); a block "
        f"of {options.steps} steps with one takes {results['block_ratio']:.3f} times as long. "
        f"{machine['hardware']['processor']}, {machine['hardware']['cores']} cores, torch "
        f"{machine['versions']['torch']}, commit {machine['commit']}. Made by `benchmarks/faults/checkpoint_cost.py`.\n"
    )
    (options.out / "checkpoint_cost.md").write_text(text)
    print(text)
    return 0 if cost <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
