"""From the shell to the first step on a GPU: cold, with nothing compiled, and warm, with what was kept.

    PYTHONPATH=src python benchmarks/start/run.py --data FOLDER --out benchmarks/start/results/h200.json

Each run is `bigstep train` in a process of its own, with a cache folder that is empty at first and kept afterwards.
`--limits 10 3` also tries how many algorithms cuDNN times for each convolution (torch lets it time 10).
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
from typing import Any

DEFAULT = 10
"""Algorithms of a convolution that cuDNN times unless it is told otherwise."""
TRAIN = """
import sys
from bigstep.cli.imports import leave_out_compiler
from bigstep.gpu.queues import ask_for_queues
ask_for_queues()
leave_out_compiler()  # as the command does before it imports torch
import torch
torch.backends.cudnn.benchmark_limit = int(sys.argv.pop(1))
from bigstep.__main__ import program
program()
"""

PROFILED = """
import cProfile, os, sys
from bigstep.__main__ import program
profiler, path, leave = cProfile.Profile(), sys.argv.pop(1), os._exit
def told(code):
    profiler.disable()
    profiler.dump_stats(path)
    leave(code)
os._exit = told  # the command leaves without waiting for what an interpreter cleans up
profiler.enable()
program()
"""


def train(arguments: list[str], cache: Path, limit: int, profile: Path | None = None) -> dict[str, Any]:
    """One run from the shell: wall seconds, those of training, and when its first step was ready.

    `profile` is where Python's profiler writes what each function took, which slows the run down.
    """
    known = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    environment = {key: value for key, value in os.environ.items() if key not in known}
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        arguments = [*arguments, "--out", f"{out}/run", "--json", "--no-report"]
        own = ["-m", "bigstep"] if limit == DEFAULT else ["-c", TRAIN, str(limit)]
        own = own if profile is None else ["-c", PROFILED, str(profile)]
        command = [sys.executable, *own, "train", *arguments]
        done = subprocess.run(command, env={**environment, "BIGSTEP_DATA": str(cache)}, capture_output=True, text=True)
        wall_s = time.perf_counter() - begin
        if done.returncode:
            return {"limit": limit, "failure": done.stderr[-2000:]}
        notes = json.loads(Path(out, "run", "run.json").read_text())
    result = json.loads(done.stdout)
    where = {key: notes.get(key) for key in ("commit", "device", "versions")}
    told = [line for line in done.stderr.splitlines() if "first step" in line]
    kept = {key: result[key] for key in ("accuracy", "seconds", "steps")}
    return {"limit": limit, "wall_s": wall_s, **kept, "told": told, **where}


def main() -> None:
    """Cold once, warm several times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="the folder of CIFAR-10's batches")
    parser.add_argument("--recipe", default="muon")
    parser.add_argument("--preset", default="sprint")
    parser.add_argument("--workers", type=int, help="the preset's by default")
    parser.add_argument("--epochs", type=float, help="the preset's by default")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limits", type=int, nargs="*", default=[DEFAULT], help="the first is used for cold and warm")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "start.json")
    parser.add_argument("--profile", type=Path, help="a file for one more warm run under Python's profiler")
    options = parser.parse_args()
    arguments = [options.recipe, "--preset", options.preset, "--data", options.data]
    for name in ("workers", "epochs"):
        if getattr(options, name) is not None:
            arguments += [f"--{name}", str(getattr(options, name))]
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        kinds = [("cold", options.limits[0])] + [("warm", options.limits[0])] * options.repeats
        for kind, limit in [*kinds, *((f"warm, {n} algorithms", n) for n in options.limits[1:])]:
            row = {"kind": kind, **train(arguments, Path(cache), limit)}
            rows.append(row)
            print(row, flush=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(rows, indent=1) + "\n")
        if options.profile is not None:
            print({"kind": "profiled", **train(arguments, Path(cache), DEFAULT, options.profile)}, flush=True)


if __name__ == "__main__":
    main()
