"""What watching costs: the processor time that the observers add to a step, with --only time and in detailed steps.

    python benchmarks/doctor/overhead.py --out benchmarks/doctor/overhead.json

Each process trains a tiny model alone first, then puts the observers on and trains on, so that both halves see the same
machine and what is added stands out. Processor time of one thread, medians of a half's steps and of the processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

STEPS = 3000


def train(seconds: list[float], steps: int, state: list[object]) -> None:
    import torch
    from torch import nn
    from torch.nn import functional as F  # noqa: N812
    from torch.utils.data import DataLoader, TensorDataset

    if not state:
        torch.manual_seed(0)
        model = nn.Linear(48, 8)
        data = TensorDataset(torch.randn(4096, 48), torch.randint(0, 8, (4096,)))
        state += [model, data]
    model, data = state[:2]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)  # type: ignore[attr-defined]
    while len(seconds) < steps:
        began = None
        for images, labels in DataLoader(data, batch_size=2, shuffle=True):  # type: ignore[arg-type]
            loss = F.cross_entropy(model(images), labels)  # type: ignore[operator]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            now = time.process_time()
            if began is not None:
                seconds.append(now - began)
            began = now


def one_process(mode: str) -> None:
    """Print the median step alone and observed, in seconds."""
    from bigstep.doctor.observe import attach, guard
    from bigstep.doctor.observe.recorder import Recorder
    from bigstep.doctor.settings import Settings

    state: list[object] = []
    alone: list[float] = []
    watched: list[float] = []
    train(alone, STEPS, state)
    with tempfile.TemporaryDirectory() as place:
        root, many = str(Path(place).resolve()), 10**9
        only = mode == "only time"
        recorder = Recorder(
            Settings(facts=root, root=root, original=root, own=root, steps=many, ranks=1, only_time=only, detail=many)
        )
        guard.install(recorder)
        attach._observe_torch(recorder)
        train(watched, STEPS, state)
    print(json.dumps([median(alone[20:]), median(watched[20:])]), flush=True)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=7)
    parser.add_argument("--modes", default="only time")
    parser.add_argument("--one", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.one:
        one_process(options.one)
    result: dict[str, object] = {"steps": STEPS, "processes": options.processes}
    for mode in options.modes.split(","):
        pairs = []
        for _ in range(options.processes):
            command = [sys.executable, __file__, "--one", mode]
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )
            pairs.append(json.loads(done.stdout))
        added = [1e6 * (watched - alone) for alone, watched in pairs]
        result[mode] = {
            "step_us_alone": round(1e6 * median(alone for alone, _ in pairs), 1),
            "added_us": round(median(added), 1),
            "all_us": [round(each, 1) for each in added],
        }
        print(mode, json.dumps(result[mode]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
