"""`fit` with a user's own transformer and map-style data set beside a loop by hand, on a CPU, interleaved.

    PYTHONPATH=src python benchmarks/sequence/fit.py --out results      # a minute on two cores

Two sizes: `mini` is the network of the preset `mini` (16 sequences of 64), where arithmetic takes the time; `tiny`
takes a few milliseconds a step, so that what a loop adds to it shows. By hand: torch's DataLoader in the same process,
its fused AdamW, clipping, cross-entropy. `fit`: the same module, data set, rule and batch; and the data as two tensors.
Each figure is the median over repeats of the time of a step, behind a warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from bigstep.config import DataConfig, LrConfig, RunConfig, WorkersConfig
from bigstep.engine.build import Own, build
from bigstep.engine.loop import train
from bigstep.engine.observers.base import Audience
from bigstep.engine.ranks import Ranks
from bigstep.models import GPT
from bigstep.tables.optimizers import AdamWSettings

SIZES = {"mini": (16, 64, 256, 3, 128, 4, 20), "tiny": (4, 16, 64, 2, 32, 2, 150)}
"""Batch, length, vocabulary; depth, width, heads; steps of a repeat."""


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """What a user has: an item by index."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index, :-1], self.tokens[index, 1:]


class Mine(nn.Module):
    """A user's own module: bigstep does not know what is inside."""

    def __init__(self, **size: int) -> None:
        super().__init__()
        self.body = GPT(**size)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.body(ids)
        return logits


class ByHand:
    """The loop that people write."""

    def __init__(self, model: nn.Module, data: Dataset[Any], batch: int) -> None:
        self.model, self.parameters = model, list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, 3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.batches = self._forever(DataLoader(data, batch, shuffle=True, drop_last=True))

    def _forever(self, loader: DataLoader[Any]) -> Iterator[Any]:
        while True:
            yield from loader

    def __call__(self, steps: int) -> None:
        for _ in range(steps):
            inputs, target = next(self.batches)
            loss = nn.functional.cross_entropy(self.model(inputs).flatten(0, 1), target.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()


class Fitted:
    """What `fit` runs, from its first step on."""

    def __init__(self, model: nn.Module, data: Any, batch: int) -> None:
        config = RunConfig(
            model="own",
            workers=WorkersConfig(count=1, local_batch=batch),
            epochs=1e6,
            optimizer=AdamWSettings(betas=(0.9, 0.95), weight_decay=0.1, clip=1.0),
            lr=LrConfig(base=3e-4, scaling="none"),
            data=DataConfig(loaders=0, drop_last=True),
            evaluate_every=1e6,
        )
        few = Subset(data, range(2))  # a run ends with an evaluation, and each repeat ends one
        self.run = build(config, Ranks(), Own(model, (data, few)))

    def __call__(self, steps: int) -> None:
        train(self.run, Audience(), max_steps=self.run.state.position.step + steps)


def measure(size: str, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of a step, by rival and repeat."""
    batch, length, vocabulary, depth, width, heads, steps = SIZES[size]
    tokens = torch.randint(0, vocabulary, (2048, length + 1), generator=torch.Generator().manual_seed(0))
    sentences, tensors = Sentences(tokens), TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return Mine(vocabulary=vocabulary, length=length, depth=depth, width=width, heads=heads)

    rivals: dict[str, Callable[[int], None]] = {
        "by hand": ByHand(fresh(), sentences, batch),
        "fit, map-style": Fitted(fresh(), sentences, batch),
        "fit, tensors": Fitted(fresh(), tensors, batch),
    }
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for rival in rivals.values():
        rival(10)
    for _ in range(repeats):
        for name, rival in rivals.items():
            started = time.perf_counter()
            rival(steps)
            times[name].append(1e3 * (time.perf_counter() - started) / steps)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    found = {size: measure(size, options.repeats) for size in SIZES}
    for size, times in found.items():
        hand = statistics.median(times["by hand"])
        for name, values in times.items():
            median = statistics.median(values)
            shares = [one / by_hand for one, by_hand in zip(values, times["by hand"], strict=True)]
            print(f"{size} {name:16} {median:8.2f} ms a step ({min(values):.2f} to {max(values):.2f}), "
                  f"{hand / median:.2f} of by hand; ratio of a round {statistics.median(shares):.3f}")  # fmt: skip
    commit = subprocess.run(["git", "describe", "--always"], capture_output=True, text=True, check=False).stdout.strip()
    facts = {"ms_a_step": found, "threads": torch.get_num_threads(), "torch": torch.__version__,
             "commit": os.environ.get("BIGSTEP_COMMIT") or commit}  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "fit.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
