"""Did loading on a CPU get slower? Images a second of this source tree and of an older one, in turns.

    git worktree add --detach /tmp/before 658c08a^  # before the decoder was a choice
    PYTHONPATH=src python benchmarks/input/before.py --before /tmp/before/src --rounds 7 --out benchmarks/input/results

writes before.json and before.md. Every round starts a process for each tree, the older one first in every other round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from run import make_folder

from bigstep.records import describe_machine

PROGRAM = """
import json, sys, time
import torch
torch.set_num_threads(1)
from bigstep.data.feed import Feed, Request
from bigstep.data.catalog import open_data
from pathlib import Path
source = open_data("folder", sys.argv[1]).train
everything = list(range(len(source)))
chunks = [everything[n : n + 64] for n in range(0, len(everything), 64)]
found = {}
ways = {
    "training crop, CPU ms": lambda chunk: source.load_random_crops(chunk, 224, 0, 0, 0.08),
    "evaluation crop, CPU ms": lambda chunk: source.load_crops(chunk, 224),
}
for name, load in ways.items():
    load(chunks[0])
    began = time.process_time()
    for chunk in chunks:
        load(chunk)
    found[name] = 1e3 * (time.process_time() - began) / len(everything)
for name, train in (("training, images/s", True), ("evaluation, images/s", False)):
    feed = Feed(source, train=train, augment="resized_crop", image_size=224, loaders=2)
    requests = [Request(0, part) for part in torch.split(torch.arange(len(source)).repeat(4), 128)]
    batches = feed(requests)
    next(batches)
    began, images = time.perf_counter(), 0
    for x, _ in batches:
        images += len(x)
    found[name] = images / (time.perf_counter() - began)
    feed.close()
print(json.dumps(found))
"""


def measure(tree: Path, folder: Path) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    out = subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], env=environment, capture_output=True, check=True)
    return json.loads(out.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="the src folder of the older tree")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    trees = {"before": args.before, "now": Path(__file__).parents[2] / "src"}
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_folder(Path(scratch), args.images)
        for number in range(args.rounds):
            order = list(trees) if number % 2 == 0 else list(trees)[::-1]
            rounds.append({name: measure(trees[name], folder) for name in order})
    lines = ["| | before | now | now / before: median (lowest to highest) |", "|---|---:|---:|---:|"]
    result = {"rounds": rounds, "images": args.images, "load": os.getloadavg(), **describe_machine()}
    for name in rounds[0]["now"]:
        ratios = [each["now"][name] / each["before"][name] for each in rounds]
        medians = [statistics.median(each[tree][name] for each in rounds) for tree in trees]
        lines.append(
            f"| {name} | {medians[0]:,.2f} | {medians[1]:,.2f} | {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f}) |"
        )
    text = f"{args.rounds} rounds, {args.images} files of about 500 x 400 pixels, 224 px, two loaders.\n\n"
    text += "\n".join(lines)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "before.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "before.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
