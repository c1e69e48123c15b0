"""What each host of the laboratory does for `planned.py`: train on islands over links that change their speed.

A job, in the JSON file of the first argument, is a list of cases in the order in which they are run; rank 0 prints the
seconds of every period of meetings, case by case.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from worker import LENGTH, configure, joined, network

from bigstep.config import IslandsConfig
from bigstep.data.catalog import open_data
from bigstep.engine.methods.base import Note, Outcome
from bigstep.engine.observers.base import Observer
from bigstep.train import fit

JUDGED_ON = 4
"""Held-out sequences of the evaluation that ends a run: none would do."""


class Clock(Observer):
    """Notes when each step has ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def stepped(self, step: object, outcome: Outcome, *, pausing: bool) -> Iterable[Note]:
        """Note the moment."""
        self.ends.append(time.perf_counter())
        return ()


def run(case: dict[str, Any], data: tuple[Any, Any]) -> list[float]:
    """Return the seconds of each period of H steps with its meetings, but for the first two.

    The first warms up; and where hosts leave the first meeting one after another, the second is shorter for the last.
    """
    for command in case["commands"][dist.get_rank()]:
        subprocess.run(command, check=True)
    dist.barrier()
    islands, clock = IslandsConfig(**case["islands"]), Clock()
    steps = islands.every * (case["periods"] + 2)
    config = replace(configure("DDP"), islands=islands, evaluate_every=1.0)
    fit(config, network(), data, observers=[clock], max_steps=steps, device="cpu")
    marks = clock.ends[2 * islands.every - 1 :: islands.every]
    return [later - sooner for sooner, later in zip(marks, marks[1:], strict=False)]


def main() -> None:
    """Run the cases of the argument in order."""
    torch.set_num_threads(1)
    pair = open_data("shakespeare", length=LENGTH)
    data = pair.train, pair.test.subset(torch.arange(JUDGED_ON))
    seen = []
    for number, case in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        with joined(number):
            seen.append(run(case, data))
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
