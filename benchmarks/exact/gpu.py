"""Exact runs on one GPU: one SHA-256 in bf16 and fp16 on 1, 2 and 4 ranks that share it, and what a step costs.

    python benchmarks/exact/gpu.py                           # some three minutes on an H200
    python benchmarks/exact/gpu.py --device cpu --tiny       # a rehearsal without one

The hashes: a residual network with fused batch norms and a small GPT, a few steps each, started as a user would
(`bigstep train --exact --device shared --procs 4`); a run without --exact is taken along, whose hashes must differ, or
the comparison could not fail. The cost: steps of ResNet-50 in bf16 in one process, in turn: ordinary, with its kernels
held to one order, and exact, in which every worker is a forward of its own and a part of the sum. Writes gpu.json after
every part, and gpu.md; a part that would begin after --seconds is left out and named. The exit status is 1 if a hash
differs, or a deterministic step takes more than 1 / 0.9 of an ordinary one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BOUND = 0.9  # of an ordinary step's rate
IMAGES = ["fair", "--set", "workers.count=8", "--set", "workers.local_batch=32"]
TEXT = ["adamw", "--set", "workers.count=4", "--set", "workers.local_batch=4"]


def cases(options: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """What is hashed: a name, and the words behind `bigstep train`."""
    half = ("bf16", "fp16") if options.device == "cuda" else ("bf16", "float32")
    found = [(f"images, {each}", [*IMAGES, "--set", f"precision={each}", "--exact"]) for each in half]
    found.append(("text, bf16", [*TEXT, "--set", "precision=bf16", "--exact"]))
    found.append(("images, float32, not exact", [*IMAGES, "--set", "precision=float32"]))
    return found


def start(words: list[str], ranks: int, options: argparse.Namespace, folder: Path) -> subprocess.Popen[str]:
    device = "shared" if ranks > 1 and options.device == "cuda" else options.device
    command = [sys.executable, "-m", "bigstep", "train", *words, "--procs", str(ranks), "--device", device]
    command += ["--steps", str(options.steps), "--json", "--no-report", "--out", str(folder)]
    command += ["--set", "evaluate_every=1000", "--set", "checkpoint.every=0"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def hashes(name: str, words: list[str], options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The SHA-256 of the final weights by number of ranks; all of them run at once."""
    began, found = time.monotonic(), {}
    folders = {ranks: scratch / f"{name}-{ranks}".replace(", ", "-").replace(" ", "-") for ranks in options.ranks}
    running = {ranks: start(words, ranks, options, folder) for ranks, folder in folders.items()}
    try:
        for ranks, process in running.items():
            out, err = process.communicate(timeout=150)
            if process.returncode:
                found[ranks] = {"failed": err.strip().splitlines()[-1:] or [f"status {process.returncode}"]}
                continue
            result = json.loads(out)
            found[ranks] = {"sha": result["weights_sha256"], "loss": result["loss"], "eval_loss": result["eval_loss"]}
    except subprocess.TimeoutExpired:
        found[ranks] = {"failed": ["not done after 150 s"]}
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    different = len({each.get("sha", ranks) for ranks, each in found.items()})
    holds = (different == 1) != name.endswith("not exact") and not any("failed" in each for each in found.values())
    return {"ranks": found, "different": different, "holds": holds, "seconds": time.monotonic() - began}


class Way:
    """A run of which single steps can be taken, on batches that lie on the device."""

    def __init__(self, kind: str, options: argparse.Namespace) -> None:
        import torch

        from bigstep.engine.exact import fixed_arithmetic

        self.device = torch.device(options.device)
        with contextlib.nullcontext() if kind == "ordinary" else fixed_arithmetic(self.device):
            self._build(kind, options)
            if kind != "ordinary":
                torch.backends.cudnn.benchmark = False
            for _ in range(3):  # compiles kernels, chooses algorithms, captures graphs
                self.step()
        self._kind, self._fixed = kind, fixed_arithmetic

    def _build(self, kind: str, options: argparse.Namespace) -> None:
        import torch
        from torch.utils.data import TensorDataset

        from bigstep import recipes
        from bigstep.config.edit import make_exact
        from bigstep.config.text import apply_settings
        from bigstep.data.sampler import Position
        from bigstep.engine.build import Own, build
        from bigstep.engine.ranks import Ranks

        local, size = (4, 32) if options.tiny else (256, 224)
        model = "small" if options.tiny else "resnet50"
        settings = [f"model={model}", "workers.count=2", f"workers.local_batch={local}", "precision=bf16"]
        settings += [
            "lr.base=0.01",
            "checkpoint.every=0",
            "measure_noise=false",
        ]  # always the first step: it would measure
        config = apply_settings(recipes.load("plain"), settings)
        config = make_exact(config) if kind == "exact" else config
        images = torch.rand(2 * local, 3, size, size, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(images, torch.arange(2 * local) % 10)
        self.run = build(config, Ranks(device=self.device), Own(data=(data, data)))
        self.at = self.run.sampler.step_at(Position())
        self.batches = list(self.run.train_feed(self.run.method.requests([self.at])))

    def step(self) -> float:
        return float(self.run.method.step(self.at, iter(self.batches)).loss)

    def timed(self, steps: int) -> float:
        """Seconds a step; the loss is looked at once."""
        import torch

        with contextlib.nullcontext() if self._kind == "ordinary" else self._fixed(self.device):
            began = time.perf_counter()
            for _ in range(steps):
                loss = self.run.method.step(self.at, iter(self.batches)).loss
            assert torch.isfinite(loss)  # waits for the device
            return (time.perf_counter() - began) / steps


def cost(options: argparse.Namespace) -> dict[str, Any]:
    """Steps of three ways in turn."""
    ways = {kind: Way(kind, options) for kind in ("ordinary", "deterministic", "exact")}
    times: dict[str, list[float]] = {kind: [] for kind in ways}
    for repeat in range(options.repeats):
        for kind in list(ways)[:: 1 if repeat % 2 else -1]:
            times[kind].append(ways[kind].timed(2 if options.tiny else 8))
    rates = {
        kind: sorted(usual / mine for usual, mine in zip(times["ordinary"], times[kind], strict=True))
        for kind in ("deterministic", "exact")
    }
    kernels = {kind: str(way.run.kernels) for kind, way in ways.items()}
    return {
        "milliseconds": {kind: 1e3 * statistics.median(each) for kind, each in times.items()},
        "rates": {kind: [statistics.median(each), each[0], each[-1]] for kind, each in rates.items()},
        "times": times, "kernels": kernels, "holds": statistics.median(rates["deterministic"]) >= BOUND,
    }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    machine = found["machine"]
    lines = [
        "# Exact runs on one GPU", "",
        f"{found['device']}, torch {machine['versions']['torch']}, commit {machine['commit']}; "
        f"{found['seconds']:.0f} s. Made by `benchmarks/exact/gpu.py`.", "",
        "| run | ranks that share the GPU | hashes | the hash |", "|---|---|---|---|",
    ]  # fmt: skip
    for name, case in found["hashes"].items():
        failed = [f"{ranks} ranks: {each['failed'][0]}" for ranks, each in case["ranks"].items() if "failed" in each]
        sha = next((each["sha"] for each in case["ranks"].values() if "sha" in each), "")
        shown = "; ".join(failed) or (f"`{sha[:16]}…`" if case["different"] == 1 else "they differ")
        lines.append(f"| {name} | {', '.join(map(str, case['ranks']))} | {case['different']} | {shown} |")
    if "cost" in found:
        rates, ms, n = found["cost"]["rates"], found["cost"]["milliseconds"], len(found["cost"]["times"]["exact"])
        lines += ["", f"ResNet-50 in bf16, 2 workers of 256 images, {n} turns of 8 steps: median (least to most).", "",
                  "| step | ms | rate over the ordinary one's |", "|---|---|---|",
                  f"| ordinary | {ms['ordinary']:.1f} | 1 |"]  # fmt: skip
        for kind, (middle, low, high) in rates.items():
            lines.append(f"| {kind} | {ms[kind]:.1f} | {middle:.3f} ({low:.3f} to {high:.3f}) |")
    if found["left_out"]:
        lines += ["", f"Left out for want of time: {', '.join(found['left_out'])}."]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a rehearsal")
    parser.add_argument("--ranks", type=lambda text: tuple(map(int, text.split(","))), default=(1, 2, 4))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=220.0)
    parser.add_argument("--cost-only", action="store_true", help="no hashes")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()

    import torch

    from bigstep.records import describe_machine

    began, name = time.monotonic(), torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    found: dict[str, Any] = {"device": name, "machine": describe_machine(), "hashes": {}, "left_out": []}
    options.out.mkdir(parents=True, exist_ok=True)

    def keep() -> None:
        found["seconds"] = time.monotonic() - began
        (options.out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
        (options.out / "gpu.md").write_text(table(found))

    with tempfile.TemporaryDirectory(prefix="bigstep-gpu-") as scratch:
        for case, words in () if options.cost_only else cases(options):
            if time.monotonic() - began > options.seconds - 60:  # the cost comes last and matters as much
                found["left_out"].append(case)
                continue
            found["hashes"][case] = hashes(case, words, options, Path(scratch))
            told = found["hashes"][case]
            print(f"{case}: {'holds' if told['holds'] else 'DOES NOT HOLD'} in {told['seconds']:.0f} s", flush=True)
            keep()
    if time.monotonic() - began < options.seconds:
        found["cost"] = cost(options)
        print(json.dumps({"ms": found["cost"]["milliseconds"], "rates": found["cost"]["rates"]}), flush=True)
    else:
        found["left_out"].append("cost")
    keep()
    judged = [*found["hashes"].values(), *([found["cost"]] if "cost" in found else [])]
    return 0 if all(each["holds"] for each in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
