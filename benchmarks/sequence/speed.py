"""Tokens a second of a GPT on one GPU: bigstep's whole step and `fit` beside loops by hand, in one run.

    PYTHONPATH=src python benchmarks/sequence/speed.py --out results            # gpt-124m, 1,024 tokens, batch 32, bf16
    PYTHONPATH=src python benchmarks/sequence/speed.py --only compiled --seconds 240

The same network, tokens, rule and clipping for all. Two groups, each interleaved and measured behind a warm-up:

`eager`: the loop that people write, bigstep's whole-step graph, and `fit` with a user's own module.
`compiled`: a careful loop by hand, in which `torch.compile` sees network and loss together, with the data on the
device and through a DataLoader (two processes, pinned memory, copies one batch ahead); bigstep's graph of a compiled
step; and `fit` with a user's own module and map-style data set: compiled, and compiled in whole-step graphs.

Each figure is the median over repeats of some steps. What was measured is written after every group and every round, so
a run that is cut short (`--seconds`) keeps it. At the end of a group each rival is profiled: what the device did, how
long it was idle, how long the host took (`breakdown.py`). `--check` runs all of it small on a CPU, nothing compiled.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from breakdown import breakdown, tell
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from bigstep.config import DataConfig, LrConfig, RunConfig, WorkersConfig
from bigstep.engine.build import Own, build
from bigstep.engine.loop import train
from bigstep.engine.observers.base import Audience
from bigstep.engine.ranks import Ranks
from bigstep.models import build_model
from bigstep.tables.optimizers import AdamWSettings

Batches = Iterator[tuple[Tensor, Tensor]]
LOADERS = 2
WARM_UP = 8
"""Steps before anything is measured: kernels are compiled, graphs recorded."""


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """What a user has: an item by index, in the host's memory."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens.cpu()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index, :-1], self.tokens[index, 1:]


class WithLoss(nn.Module):
    """Network and loss together, so that a compiler sees both."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())


def on_device(tokens: Tensor, batch: int) -> Batches:
    """Yield shuffled batches of tokens that lie on the device."""
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    while True:
        for rows in torch.randperm(len(tokens), device=tokens.device).split(batch):
            yield inputs.index_select(0, rows), targets.index_select(0, rows)


def through_loader(tokens: Tensor, batch: int) -> Batches:
    """Yield batches that two processes load, from pinned memory, each copied while the one before it is computed."""
    pinned, device = tokens.is_cuda, tokens.device
    loader = DataLoader(
        Sentences(tokens), batch, shuffle=True, drop_last=True, num_workers=LOADERS if pinned else 0,
        pin_memory=pinned, persistent_workers=pinned,
    )  # fmt: skip
    ahead: list[tuple[Tensor, Tensor]] = []
    while True:
        for inputs, targets in loader:
            ahead.append((inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)))
            if len(ahead) > 1:
                yield ahead.pop(0)


class ByHand:
    """A careful loop: autocast, fused AdamW, clipping, nothing that waits for the device."""

    def __init__(self, model: nn.Module, batches: Batches, device: torch.device, *, compiled: bool) -> None:
        self.batches, self.device, self.parameters = batches, device, list(model.parameters())
        self.loss: Any = torch.compile(WithLoss(model)) if compiled and device.type == "cuda" else WithLoss(model)
        self.optimizer = torch.optim.AdamW(self.parameters, 3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.host_s = 0.0

    def __call__(self, steps: int) -> None:
        started = time.perf_counter()
        for _ in range(steps):
            inputs, targets = next(self.batches)
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = self.loss(inputs, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.host_s += time.perf_counter() - started


class Bigstep:
    """The loop of `bigstep train` and `fit`, from its first step on; state goes on from call to call."""

    def __init__(
        self, options: argparse.Namespace, tokens: Tensor, *, own: nn.Module | None, items: bool = False, **fields: Any
    ) -> None:
        config = RunConfig(
            model=options.model,
            workers=WorkersConfig(count=1, local_batch=options.batch),
            epochs=1e6,
            optimizer=AdamWSettings(betas=(0.9, 0.95), weight_decay=0.1, clip=1.0),
            lr=LrConfig(base=3e-4, scaling="none"),
            data=DataConfig(loaders=LOADERS if tokens.is_cuda else 0, drop_last=True),
            precision="bf16",
            evaluate_every=1e6,
            **fields,
        )
        pairs: Any = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        pairs = Sentences(tokens) if items else pairs
        few = Subset(pairs, range(1))  # a run ends with an evaluation, and each repeat ends one
        self.run = build(config, Ranks(device=tokens.device), Own(own, (pairs, few)))
        self.host_s, self._step, method = 0.0, self.run.method.step, self.run.method
        method.step = self._timed  # type: ignore[method-assign]  # a run ends with an evaluation, which waits
        print(self.run.kernels, flush=True)

    def _timed(self, *given: Any) -> Any:
        started = time.perf_counter()
        outcome = self._step(*given)
        self.host_s += time.perf_counter() - started
        return outcome

    def __call__(self, steps: int) -> None:
        train(self.run, Audience(), max_steps=self.run.state.position.step + steps)


def rivals_of(options: argparse.Namespace, tokens: Tensor) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return what makes the rivals of each group; the first of each is what the others are compared to."""
    device, compiles = tokens.device, tokens.is_cuda  # compiling for a CPU says nothing and takes minutes

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return build_model(options.model, vocabulary=options.vocabulary, length=options.length).to(device)

    def by_hand(batches: Callable[[Tensor, int], Batches], compiled: bool) -> ByHand:
        return ByHand(fresh(), batches(tokens, options.batch), device, compiled=compiled)

    def bigstep(**fields: Any) -> Bigstep:
        return Bigstep(options, tokens, **fields)

    return {
        "eager": {
            "by hand, eager": lambda: by_hand(on_device, False),
            "bigstep": lambda: bigstep(own=None),
            "fit": lambda: bigstep(own=fresh()),
        },
        "compiled": {
            "by hand, compiled": lambda: by_hand(on_device, True),
            "bigstep, compiled": lambda: bigstep(own=None, compile=compiles),
            "fit, compiled": lambda: bigstep(own=fresh(), items=True, compile=compiles),
            "fit, compiled graphs": lambda: bigstep(own=fresh(), items=True, compile=compiles, kernels="graphs"),
            "by hand, compiled, loader": lambda: by_hand(through_loader, True),
        },
    }


def seconds(rival: Callable[[int], None], steps: int, device: torch.device) -> float:
    started = time.perf_counter()
    rival(steps)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


class Study:
    """What was measured so far, and the time that is left."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        self.end = time.perf_counter() + options.seconds
        self.times: dict[str, list[float]] = {}
        self.warm_s: dict[str, float] = {}
        self.profiles: dict[str, Any] = {}
        self.errors: dict[str, str] = {}

    @property
    def over(self) -> bool:
        return time.perf_counter() > self.end

    def group(self, makers: dict[str, Callable[[], Any]]) -> None:
        """Warm all up, measure them in turns, profile each, and let go of their memory."""
        rivals: dict[str, Any] = {}
        for name, make in makers.items():
            if self.over:
                break
            try:
                started = time.perf_counter()
                rivals[name] = make()
                seconds(rivals[name], WARM_UP, self.device)
                self.warm_s[name] = time.perf_counter() - started
                print(f"{name}: warm in {self.warm_s[name]:.1f} s", flush=True)
            except Exception as error:  # the others are worth measuring without it
                rivals.pop(name, None)
                self.errors[name] = f"{type(error).__name__}: {error}"[:500]
                print(f"{name}: {self.errors[name]}", flush=True)
        for _ in range(self.options.repeats):
            if self.over and all(name in self.times for name in rivals):
                break
            for name, rival in rivals.items():
                self.times.setdefault(name, []).append(seconds(rival, self.options.steps, self.device))
            self.write()
        for name, rival in rivals.items():
            if not self.over:
                self.profiles[name] = breakdown(rival, 5, self.device)
                tell(name, self.profiles[name])
        self.write()
        for rival in rivals.values():
            if isinstance(rival, Bigstep):
                rival.run.close()
        rivals.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def rates(self) -> dict[str, list[float]]:
        per_call = self.options.batch * self.options.length * self.options.steps
        return {name: [per_call / each for each in values] for name, values in self.times.items()}

    def write(self) -> None:
        """Write what was measured so far."""
        rates = self.rates()
        commit = subprocess.run(["git", "describe", "--always"], capture_output=True, text=True, check=False).stdout
        result = {
            "tokens_per_s": {name: statistics.median(values) for name, values in rates.items()},
            "repeats": rates,
            "warm_s": self.warm_s,
            "errors": self.errors,
            "setting": {k: str(v) for k, v in vars(self.options).items() if k != "out"},
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else platform.processor(),
            "torch": torch.__version__,
            "commit": os.environ.get("BIGSTEP_COMMIT") or commit.strip(),
            "profiles": self.profiles,
        }
        self.options.out.mkdir(parents=True, exist_ok=True)
        (self.options.out / "speed.json").write_text(json.dumps(result, indent=1) + "\n")

    def tell(self) -> None:
        """Print all figures, each beside the loops by hand."""
        medians = {name: statistics.median(values) for name, values in self.rates().items()}
        best = max((rate for name, rate in medians.items() if name.startswith("by hand")), default=float("nan"))
        eager = medians.get("by hand, eager", float("nan"))
        print(f"\n{'':28}{'tokens/s':>12}  of eager by hand  of the best by hand")
        for name, values in self.rates().items():
            spread = f"({min(values):,.0f} to {max(values):,.0f}, n = {len(values)})"
            rate = medians[name]
            print(f"{name:28}{rate:12,.0f}  {rate / eager:16.3f}  {rate / best:19.3f}  {spread}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--model", default="gpt-124m")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=["eager", "compiled"], help="one group alone")
    parser.add_argument("--seconds", type=float, default=480, help="begin nothing after this")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu" if options.check else "cuda")
    if options.check:
        options.model, options.length, options.batch, options.vocabulary = "gpt-mini", 32, 4, 256
        options.steps, options.repeats = 2, 2
    generator = torch.Generator().manual_seed(0)
    windows = 64 if options.check else 4096  # an epoch of 128 steps: its beginning is part of what is measured
    tokens = torch.randint(0, options.vocabulary, (windows, options.length + 1), generator=generator).to(device)
    study = Study(options, device)
    for name, makers in rivals_of(options, tokens).items():
        if options.only in (None, name):
            study.group(makers)
    study.tell()


if __name__ == "__main__":
    main()
