"""Rules by batch with a small GPT and a small LSTM on Shakespeare, on two CPU cores, in equal tokens.

    PYTHONPATH=src python benchmarks/sequence/small.py --model gpt --book results/small_gpt.jsonl      # some 5 minutes
    PYTHONPATH=src python benchmarks/sequence/small.py --model lstm --book results/small_lstm.jsonl
    PYTHONPATH=src torchrun --nproc-per-node 2 benchmarks/sequence/small.py --model gpt --rules onebit \\
        --book results/small_gpt.jsonl                                                             # 1-bit, two ranks

The study of `books.py` at a size that two cores can do: a quarter of a pass (250,000 bytes), windows of 64, three
batches, the rate of each rule searched at each batch on half of the tokens and held-out training text, three seeds. The
networks have 0.12 million (two blocks of width 64) and 0.10 million weights (one layer of 96 units). It goes on from
its book. `figure.py` draws it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from books import RULES, Book, Run, summary, table
from torch import nn

from bigstep import recipes
from bigstep.config import RunConfig
from bigstep.config.edit import stretch
from bigstep.config.text import apply_settings
from bigstep.data.catalog import open_data
from bigstep.data.pair import DataPair
from bigstep.engine.build import Own
from bigstep.engine.ranks import Ranks, joined_ranks
from bigstep.models import GPT, LSTM

EPOCHS = 0.25
BATCHES = (64, 16, 4)
"""In the order in which they are worth having."""
TEST_WINDOWS = 256
"""Of the test text, evenly over it: an evaluation of all would take as long as the training."""
ONE_BIT = ('exchange={"collective": "gather", "codec": "onebit"}',)
SETS = {"dense": RULES, "onebit": {"adamw-1bit": ("adamw", ONE_BIT, 1e-3, 2.0)}}
"""Rules that are run together: those that one rank can run, and the one that needs somebody to send bits to."""


class Small(Book):
    """The book of one kind of network."""

    faster = 4.0
    local = 2

    def __init__(self, path: Path, model: str, rules: str, ranks: Ranks) -> None:
        super().__init__(path, "", ranks, small=True)
        self.batches, self.model, self.rules = BATCHES, model, SETS[rules]

    def config(self, run: Run) -> RunConfig:
        quiet = ["checkpoint.every=0", "checkpoint.seconds=0", "evaluate_every=1000", f"seed={run.seed}"]
        config = apply_settings(recipes.load(run.preset, "mini"), [*quiet, "data.drop_last=true"])
        return apply_settings(stretch(config, run.epochs), run.settings)

    def pair(self, config: RunConfig) -> Any:
        where = config.data
        if where.holdout not in self.pairs:
            pair = open_data(where.name, "", where.holdout, 0, length=where.length, vocabulary=where.vocabulary)
            some = torch.linspace(0, len(pair.test) - 1, min(TEST_WINDOWS, len(pair.test))).long()
            self.pairs[where.holdout] = DataPair(pair.train, pair.test.subset(some))
        return self.pairs[where.holdout]

    def own(self, pair: Any) -> Own:
        def fresh(_: nn.Module) -> nn.Module:  # called behind the run's own seed
            if self.model == "gpt":
                return GPT(vocabulary=256, length=64, depth=2, width=64, heads=2)
            return LSTM(vocabulary=256, depth=1, width=96)

        return Own(nn.Identity(), (pair.train, pair.test), change=fresh)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=["gpt", "lstm"], default="gpt")
    parser.add_argument("--rules", choices=list(SETS), default="dense")
    parser.add_argument("--book", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after this")
    options = parser.parse_args()
    begin = time.perf_counter()
    with joined_ranks("cpu") as ranks:
        book = Small(options.book, options.model, options.rules, ranks)
        for run in table(book, EPOCHS, options.seeds):
            if ranks.from_first(time.perf_counter() - begin) > options.seconds:
                print("the time is over; the same command goes on from here", flush=True)
                break
            book.run(run)
        if ranks.first:
            summary(book)


if __name__ == "__main__":
    main()
