"""Large batches on CIFAR-10, every synchronous system on one GPU.

    PYTHONPATH=src python benchmarks/cifar10/run.py --data FOLDER --seconds 560

goes on with what is missing, the most wanted runs first: CIFAR-10 in seconds and our own systems (`ours.py`), then the
finished search of the others, plan: auto, the table and the ablation (`converged.py`). `--processes 3` runs as many at
once, except where seconds count. `--rehearse` takes a second for each on a CPU, with a folder of a few images
(`from_npm.py --keep 100`), into a book apart; with OMP_NUM_THREADS=1, since threads that wait for busy cores take a
minute.

The parts that the presets came from are those of `first.py`:

    PYTHONPATH=src python benchmarks/cifar10/run.py search table --data FOLDER --book results/runs.jsonl --seconds 540

Every finished run is a line of the book, and what is there is not run again: an interrupted call goes on, and a call
with `--seconds` ends in time. `summary.py` makes tables and figures from the book. What a preset gave before it was
changed is in the book under `earlier`, by hand.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import converged
import ours
import torch
from first import FIRST
from lanes import Crew, Lanes, singles
from runs import Book, Parts


def _first(name: str, part: Callable[[], Parts]) -> Callable[[Mapping[str, Any]], Lanes]:
    """The lanes of one of the first parts; only `tune` waits for its results."""
    return lambda rows: iter([part()]) if name == "tune" else singles(part())


ORDER = {**ours.ORDER, **converged.ORDER}
PARTS = {**ORDER, **converged.ALSO, **{name: _first(name, part) for name, part in FIRST.items()}}
"""Name: the lanes of a part, given the rows of the book."""
ALONE = ("timed", "speed")
"""Parts whose seconds count."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; by default {', '.join(ORDER)}"
    )
    parser.add_argument("--data", required=True, help="the folder of CIFAR-10's batches")
    parser.add_argument("--book", type=Path, help="results/runs.jsonl by default")
    parser.add_argument("--processes", type=int, default=1, help="runs at once on the GPU")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run that would end after this")
    parser.add_argument("--rehearse", action="store_true", help="a second of each run, on a CPU")
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]}; choose from {', '.join(PARTS)}")
    if not options.rehearse and not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a GPU; on a CPU a single run takes hours.")
    home = Path(__file__).parent / "results"
    book = Book(options.book or home / ("rehearsal.jsonl" if options.rehearse else "runs.jsonl"))
    until = time.monotonic() + options.seconds
    crew = Crew(book, options.data, options.processes, until, tiny=options.rehearse)
    for part in options.parts or ORDER:
        if not crew.carry_out(PARTS[part](book.rows), alone=part in ALONE):
            print(f"Stopped in {part}: the time is up; the same command goes on from here.")
            break
    print(crew.close())


if __name__ == "__main__":
    main()
