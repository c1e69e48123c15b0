"""What watching costs: the step time of a small script alone, with --only time, and in the detailed steps.

    python benchmarks/doctor/overhead.py --out benchmarks/doctor/overhead.json

Processor time of the training process, so that other work on the machine does not count; one thread. Runs
alternate, and each gives the lower quartile of its steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bigstep.doctor.launch import Limits, run_world
from bigstep.doctor.settings import Settings

SCRIPT = """
import time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2304, 8))
data = TensorDataset(torch.randn(4096, 3, 16, 16), torch.randint(0, 8, (4096,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
seconds, before = [], None
for _ in range(3):
    for images, labels in DataLoader(data, batch_size=32, shuffle=True):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        now = time.process_time()
        seconds += [now - before] if before else []
        before = now
print("quartile", sorted(seconds)[len(seconds) // 4])
"""


def step_s(folder: Path, mode: str, number: int) -> float:
    if mode == "alone":
        done = subprocess.run([sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, check=True)
        return float(done.stdout.split()[-1])
    facts = folder / f"facts-{mode}-{number}"
    facts.mkdir()
    place, many = str(folder), 10**9
    only = mode == "only time"
    settings = Settings(
        facts=str(facts), root=place, original=place, own=place, steps=many, ranks=1, only_time=only, detail=many
    )
    world = run_world(["train.py"], settings, folder, Limits(total_s=300), gpus=False)
    return float(world.output.split("quartile")[1].split()[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--modes", default="alone,only time,detailed")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    found: dict[str, list[float]] = {mode: [] for mode in options.modes.split(",")}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve()
        (folder / "train.py").write_text(SCRIPT)
        for number in range(options.rounds):
            for mode, steps in found.items():
                steps.append(step_s(folder, mode, number))
    best = {mode: min(steps) for mode, steps in found.items()}
    result = {
        "step_ms": {mode: round(1000 * value, 3) for mode, value in best.items()},
        "overhead_percent": {mode: round(100 * (best[mode] / best["alone"] - 1), 2) for mode in best},
        "rounds": options.rounds,
        "all_ms": {mode: [round(1000 * value, 3) for value in steps] for mode, steps in found.items()},
    }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
