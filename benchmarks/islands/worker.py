"""What each host of the laboratory runs for `links.py`: some methods in turn, on a small GPT and the text that ships.

A job, as JSON in the first argument, names the methods and how many steps each takes; rank 0 prints what it saw.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bigstep import recipes
from bigstep.config import ExchangeConfig, IslandsConfig, OuterConfig, Piece, RunConfig
from bigstep.data.catalog import open_data
from bigstep.models import GPT
from bigstep.records import read_run
from bigstep.train import fit

LENGTH = 64
EVERY = 10
"""Steps between two meetings."""
JUDGED_ON = 128
"""Held-out sequences of an evaluation."""
DENSE = 10
"""Steps before 1-bit sets in."""
DILOCO = OuterConfig(name="nesterov", lr=0.7, momentum=0.9)
GENTLE = OuterConfig(name="nesterov", lr=0.7, momentum=0.5)
"""For a run of a few meetings, in which a momentum of 0.9 has no time to settle."""

METHODS: dict[str, dict[str, Any]] = {
    "DDP": {"exchange": ExchangeConfig(collective="ring", codec="none")},
    "1-bit": {"exchange": ExchangeConfig(collective="gather", codec="onebit", warmup_steps=DENSE)},
    "torus, fp16": {"exchange": ExchangeConfig(collective="torus", codec="fp16")},
    "averaging": {"islands": IslandsConfig(count=4, every=EVERY)},
    "DiLoCo": {"islands": IslandsConfig(count=4, every=EVERY, outer=DILOCO)},
    "DiLoCo, momentum 0.5": {"islands": IslandsConfig(count=4, every=EVERY, outer=GENTLE)},
    "streaming": {
        "islands": IslandsConfig(count=4, every=EVERY, outer=DILOCO, fragments=2, overlap=2, codec="int4"),
    },
}
"""By name, what is changed in AdamW on four workers of four sequences."""


def configure(method: str) -> RunConfig:
    """Return a run whose rate stays where its warm-up leads, so that a target may be reached at any step."""
    base = recipes.load("adamw", "mini")
    warmup = Piece(shape="warmup", until=0.02, start=0.05)  # twenty steps
    plain = replace(base, lr=replace(base.lr, base=4e-3, schedule=(warmup,)), epochs=1)
    plain = replace(plain, data=replace(plain.data, length=LENGTH), checkpoint=replace(plain.checkpoint, every=0))
    return replace(plain, **METHODS[method])


def network() -> GPT:
    """Return a GPT of 120,000 weights, the same on every host."""
    torch.manual_seed(0)
    return GPT(vocabulary=256, length=LENGTH, depth=2, width=64, heads=4)


def take_steps(method: str, steps: int, evaluate_every: int, data: tuple[Any, Any]) -> dict[str, Any]:
    """Train for some steps and return what each took and sent, and the evaluations."""
    config = configure(method)
    often = evaluate_every * config.batch / len(data[0]) if evaluate_every else config.epochs
    with tempfile.TemporaryDirectory() as folder:
        fit(replace(config, evaluate_every=often), network(), data, out=folder, max_steps=steps, device="cpu")
        if dist.get_rank():
            return {}
        run = read_run(Path(folder))
    return {
        "seconds": [row["compute_s"] + row["exchange_s"] + row["data_s"] for row in run.train],
        "bytes": [row["bytes_sent"] for row in run.train],
        "bits_per_byte": {row["step"]: row["bits_per_byte"] for row in run.evaluations},
    }


@contextlib.contextmanager
def joined(number: int) -> Iterator[None]:
    """Be in a process group for one run: those that a run makes have threads, which end with the group.

    Each wakes a hundred times a second, so that what fifty runs leave behind would slow down all that follow.
    """
    place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("gloo", store=dist.PrefixStore(f"run {number}", _store()), **place)
    try:
        yield
    finally:
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()  # a run refers to itself, and to its groups


@functools.cache
def _store() -> dist.Store:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=rank == 0)


def main() -> None:
    """Do the job: every round takes every method once."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    pair = open_data("shakespeare", length=LENGTH)
    data = pair.train, pair.test.subset(torch.arange(JUDGED_ON))
    seen: dict[str, list[dict[str, Any]]] = {method: [] for method in job["steps"]}
    for turn in range(job["rounds"]):
        for number, (method, steps) in enumerate(job["steps"].items()):
            with joined(turn * len(METHODS) + number):
                seen[method].append(take_steps(method, steps, job["evaluate_every"], data))
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
