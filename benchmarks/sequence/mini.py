"""The rates of the presets `mini` of adamw and lamb: the same search for both, judged on held-out training text.

    PYTHONPATH=src python benchmarks/sequence/mini.py --book results/mini.jsonl            # all trials, some 6 minutes
    PYTHONPATH=src python benchmarks/sequence/mini.py --book results/mini.jsonl --only 3   # three more of them
    PYTHONPATH=src python benchmarks/sequence/mini.py --book results/mini.jsonl --table

A quarter of the tokens, one seed, rates a factor of two apart; the best must have a worse one on either side, else
the search goes on beyond it. The last tenth of the training text is the judge, so the test text is not looked at. A
line of the book is one trial, and a line that is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from rates import next_power

from bigstep import recipes
from bigstep.config.edit import stretch
from bigstep.config.text import apply_settings
from bigstep.engine.build import build
from bigstep.engine.loop import train
from bigstep.engine.observers.base import Audience
from bigstep.engine.ranks import Ranks
from bigstep.errors import BigstepError

START = {"adamw": 8e-3, "lamb": 1e-2}
EPOCHS = 0.4


def trial(rule: str, rate: float) -> dict[str, Any]:
    """Train with one rate and return what it reached."""
    settings = [f"lr.base={rate:.6g}", "data.holdout=0.1", "evaluate_every=1000", "checkpoint.every=0"]
    config = stretch(apply_settings(recipes.load(rule, "mini"), settings), EPOCHS)
    started = time.perf_counter()
    run = build(config, Ranks())
    facts: dict[str, Any] = {"rule": rule, "rate": rate, "epochs": EPOCHS, "batch": config.batch}
    try:
        ending = train(run, Audience())
        facts |= {"bits_per_byte": ending.evaluation.bits_per_byte, "steps": run.state.position.step}
    except BigstepError as error:
        facts |= {"bits_per_byte": None, "error": str(error)[:200]}
    run.close()
    commit = subprocess.run(["git", "describe", "--always"], capture_output=True, text=True, check=False).stdout.strip()
    return {**facts, "seconds": time.perf_counter() - started, "torch": torch.__version__, "commit": commit}


def read(book: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in book.read_text().splitlines()] if book.exists() else []


def scores_of(rows: list[dict[str, Any]], rule: str) -> dict[int, float | None]:
    """What each rate of a rule reached, by its power of two; None for one that diverged."""
    mine = [row for row in rows if row["rule"] == rule]
    return {round(math.log2(row["rate"] / START[rule])): row["bits_per_byte"] for row in mine}


def table(rows: list[dict[str, Any]]) -> None:
    print("| rule | rate | bits per byte | steps | s |\n|---|---:|---:|---:|---:|")
    for row in sorted(rows, key=lambda row: (row["rule"], row["rate"])):
        bits = "diverged" if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.3f}"
        print(f"| {row['rule']} | {row['rate']:g} | {bits} | {row.get('steps', '')} | {row['seconds']:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--book", type=Path, default=Path("results/mini.jsonl"))
    parser.add_argument("--only", type=int, default=1000, help="at most so many trials now")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        return table(read(options.book))
    for _ in range(options.only):
        rows = read(options.book)
        rule = min(START, key=lambda rule: (next_power(scores_of(rows, rule)) is None, len(scores_of(rows, rule))))
        power = next_power(scores_of(rows, rule))
        if power is None:
            break
        row = trial(rule, START[rule] * 2.0**power)
        options.book.parent.mkdir(parents=True, exist_ok=True)
        with open(options.book, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{rule} {row['rate']:g}: {row['bits_per_byte']} bits per byte in {row['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
