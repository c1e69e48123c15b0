"""What the loop costs beside a hand-written PyTorch DDP loop: the same model, data, batch and mathematics.

    python benchmarks/loop/run.py [--ranks 2] [--repeats 9] [--steps 24]

Both loops run in the same processes, in turn, so that what else the machine does falls on both. Writes result.json
and result.md beside this file.
"""

from __future__ import annotations

import argparse
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
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bigstep import recipes
from bigstep.config.text import apply_settings
from bigstep.data.catalog import open_data
from bigstep.data.sampler import Position
from bigstep.engine.build import Own, Run, build
from bigstep.engine.loop import train
from bigstep.engine.observers.base import Audience
from bigstep.engine.observers.records import Records
from bigstep.engine.ranks import Ranks
from bigstep.models import build_model
from bigstep.records import RunWriter, describe_machine

HERE = Path(__file__).parent


class HandWritten:
    """The loop a careful engineer writes: accumulation under no_sync, one exchange a step, loss kept on the device."""

    def __init__(self, rank: int, ranks: int, workers: int, local_batch: int):
        pair = open_data("embedded")
        self.images, self.labels = pair.train.images, pair.train.labels
        self.mean, self.std = 255 * pair.train.mean[0], 255 * pair.train.std[0]
        torch.manual_seed(0)
        self.model: nn.Module = build_model("small", classes=10, channels=1, image_size=28)
        self.rank, self.ranks, self.workers, self.local_batch = rank, ranks, workers // ranks, local_batch
        self.ddp = DistributedDataParallel(self.model) if ranks > 1 else self.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, 0.9, nesterov=True, weight_decay=5e-4)
        self.loss = nn.CrossEntropyLoss()

    def __call__(self, steps: int) -> None:
        self.model.train()
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(0))
        batch, losses = self.workers * self.local_batch * self.ranks, []
        for step in range(steps):
            start = (step * batch) % (len(order) - batch) + self.rank * self.workers * self.local_batch
            total = torch.zeros(())
            for worker in range(self.workers):
                picked = order[start + worker * self.local_batch : start + (worker + 1) * self.local_batch]
                images = self.images[picked].float().sub_(self.mean).div_(self.std)
                flipped = torch.rand(len(images)) < 0.5
                images = torch.where(flipped[:, None, None, None], images.flip(3), images)
                if self.ranks > 1 and worker < self.workers - 1:
                    with self.ddp.no_sync():  # type: ignore[operator]
                        loss = self.loss(self.ddp(images), self.labels[picked]) / self.workers
                        loss.backward()
                else:
                    loss = self.loss(self.ddp(images), self.labels[picked]) / self.workers
                    loss.backward()
                total += loss.detach()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(total)
        assert torch.stack(losses).isfinite().all()


def ours(run: Run, steps: int, folder: Path | None) -> None:
    observers = [Records(RunWriter(folder, {}))] if folder else []
    run.state.position, run.state.seconds = Position(), 0.0
    train(run, Audience(observers), max_steps=steps)


def measure(rank: int, options: argparse.Namespace, scratch: str, results: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
    if options.ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=options.ranks)
    config = apply_settings(
        recipes.load("plain", "mini"), [f"workers.count={options.workers}", "evaluate_every=1000", "checkpoint.every=0"]
    )
    pair = open_data("embedded")
    run = build(config, Ranks(rank, options.ranks), Own(data=(pair.train, _Tiny(pair.test))))
    rival = HandWritten(rank, options.ranks, options.workers, config.workers.local_batch)
    times: dict[str, list[float]] = {"bigstep": [], "hand-written": []}
    cpu: dict[str, list[float]] = {"bigstep": [], "hand-written": []}
    for repeat in range(options.repeats + 1):
        for name in ("bigstep", "hand-written") if repeat % 2 else ("hand-written", "bigstep"):
            if options.ranks > 1:
                dist.barrier()
            started, worked = time.perf_counter(), time.process_time()
            if name == "bigstep":
                ours(run, options.steps, Path(scratch) / f"run-{repeat}" if rank == 0 else None)
            else:
                rival(options.steps)
            if repeat:  # the first round warms up
                times[name].append((time.perf_counter() - started) / options.steps)
                cpu[name].append((time.process_time() - worked) / options.steps)
    if rank == 0:
        results.put((times, cpu))
    run.close()
    if options.ranks > 1:
        dist.destroy_process_group()


def _Tiny(images: Any) -> Any:  # noqa: N802 - stands for a data set
    import dataclasses

    return dataclasses.replace(images, images=images.images[:1], labels=images.labels[:1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--workers", type=int, default=32)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        results = context.SimpleQueue()
        multiprocessing.spawn(measure, (options, scratch, results), options.ranks)
        times, cpu = results.get()
    ratios = [a / b for a, b in zip(times["bigstep"], times["hand-written"], strict=True)]
    medians = {name: statistics.median(values) for name, values in times.items()}
    cpu_medians = {name: statistics.median(values) for name, values in cpu.items()}
    summary = {
        "options": vars(options),
        "ratio": {"n": len(ratios), "median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "ratio_of_medians": medians["bigstep"] / medians["hand-written"],
        "ratio_of_median_cpu_times": cpu_medians["bigstep"] / cpu_medians["hand-written"],
        "milliseconds_per_step": {name: 1e3 * value for name, value in medians.items()},
        "times": times,
        "cpu_times": cpu,
        **describe_machine(),
    }
    (HERE / f"result-{options.ranks}.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(
        json.dumps(
            {
                key: summary[key]
                for key in ("ratio", "ratio_of_medians", "ratio_of_median_cpu_times", "milliseconds_per_step")
            }
        )
    )


if __name__ == "__main__":
    main()
