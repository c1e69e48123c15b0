"""Tokens a second of GPT-124M on one GPU: bigstep's loop and `fit` beside a careful loop by hand.

    PYTHONPATH=src python benchmarks/sequence/speed.py --out results     # about three minutes on an H200

All train the same network in bf16 with torch's fused AdamW, clipped at a norm of 1, on the same tokens, which lie on
the device. By hand: the loop that people write, eager and under `torch.compile`. bigstep: the loop of `bigstep train`,
whole-step graphs, with and without `compile`; and `fit` with a user's own module and map-style data set. Interleaved;
each figure is the median over repeats of some steps, behind a warm-up. `--check` runs it small on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from bigstep.config import LrConfig, RunConfig, WorkersConfig
from bigstep.engine.build import Own, build
from bigstep.engine.loop import train
from bigstep.engine.observers.base import Audience
from bigstep.engine.ranks import Ranks
from bigstep.losses import CrossEntropy
from bigstep.models import build_model
from bigstep.tables.optimizers import AdamWSettings


def network(name: str, vocabulary: int, length: int, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return build_model(name, vocabulary=vocabulary, length=length).to(device)


class ByHand:
    """The loop that people write: autocast, fused AdamW, clipping, nothing that waits for the device."""

    def __init__(self, model: nn.Module, tokens: Tensor, batch: int, compiled: bool, precision: torch.dtype) -> None:
        self.model: Any = torch.compile(model) if compiled else model
        self.tokens, self.batch, self.dtype, self.device = tokens, batch, precision, tokens.device
        self.parameters = list(model.parameters())
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.parameters, 3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
        self.count = 0

    def __call__(self, steps: int) -> None:
        for _ in range(steps):
            rows = torch.arange(self.count, self.count + self.batch, device=self.device) % len(self.tokens)
            window = self.tokens.index_select(0, rows)
            with torch.autocast(self.device.type, self.dtype):
                logits = self.model(window[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.count += self.batch


class Bigstep:
    """The loop of `bigstep train` and `fit`, from its first step on; state goes on from call to call."""

    def __init__(self, options: argparse.Namespace, tokens: Tensor, *, compiled: bool, own: nn.Module | None) -> None:
        config = RunConfig(
            model=options.model,
            workers=WorkersConfig(count=1, local_batch=options.batch),
            epochs=1e6,
            optimizer=AdamWSettings(betas=(0.9, 0.95), weight_decay=0.1, clip=1.0),
            lr=LrConfig(base=3e-4, scaling="none"),
            precision="bf16",
            compile=compiled,
            evaluate_every=1e6,
        )
        pairs = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        few = TensorDataset(tokens[: options.batch, :-1].contiguous(), tokens[: options.batch, 1:].contiguous())
        self.run = build(config, Ranks(device=tokens.device), Own(own, (pairs, few), CrossEntropy() if own else None))
        print(self.run.kernels, flush=True)

    def __call__(self, steps: int) -> None:
        train(self.run, Audience(), max_steps=self.run.state.position.step + steps)


def seconds(rival: Callable[[int], None], steps: int, device: torch.device) -> float:
    started = time.perf_counter()
    rival(steps)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--model", default="gpt-124m")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu" if options.check else "cuda")
    if options.check:
        options.model, options.length, options.batch, options.vocabulary = "gpt-mini", 32, 4, 256
        options.steps, options.repeats = 2, 2
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, options.vocabulary, (1024, options.length + 1), generator=generator).to(device)

    def fresh() -> nn.Module:
        return network(options.model, options.vocabulary, options.length, device)

    def by_hand(compiled: bool) -> ByHand:
        return ByHand(fresh(), tokens, options.batch, compiled, torch.bfloat16)

    makers: dict[str, Callable[[], Callable[[int], None]]] = {
        "by hand, eager": lambda: by_hand(False),
        "bigstep": lambda: Bigstep(options, tokens, compiled=False, own=None),
        "fit, own module": lambda: Bigstep(options, tokens, compiled=False, own=fresh()),
        "by hand, compiled": lambda: by_hand(True),
        "bigstep, compiled": lambda: Bigstep(options, tokens, compiled=True, own=None),
    }
    rivals: dict[str, Callable[[int], None]] = {}
    times: dict[str, list[float]] = {}
    for group in (("by hand, eager", "bigstep", "fit, own module"), ("by hand, compiled", "bigstep, compiled")):
        if options.check and "by hand, compiled" in group:
            continue
        for name in group:  # compiling may take long: what was measured before it is kept
            rivals[name] = makers[name]()
            print(name, f"warm in {seconds(rivals[name], 8, device):.1f} s", flush=True)
        for _ in range(options.repeats):
            for name, rival in rivals.items():
                times.setdefault(name, []).append(seconds(rival, options.steps, device))
        write(options, times, device)


def write(options: argparse.Namespace, times: dict[str, list[float]], device: torch.device) -> None:
    """Write and print what was measured so far."""
    per_call = options.batch * options.length * options.steps
    rates = {name: [per_call / each for each in values] for name, values in times.items()}
    result = {
        "tokens_per_s": {name: statistics.median(values) for name, values in rates.items()},
        "repeats": rates,
        "setting": {k: str(v) for k, v in vars(options).items() if k != "out"},
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "commit": os.environ.get("BIGSTEP_COMMIT")
        or subprocess.run(["git", "describe", "--always"], capture_output=True, text=True, check=False).stdout.strip(),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "speed.json").write_text(json.dumps(result, indent=1) + "\n")
    for name, values in rates.items():
        median = statistics.median(values)
        print(f"{name:22} {median:12,.0f} tokens/s  ({min(values):,.0f} to {max(values):,.0f})", flush=True)


if __name__ == "__main__":
    main()
