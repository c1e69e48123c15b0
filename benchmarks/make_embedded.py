"""Make src/bigstep/data/embedded/{train,test}.png from the four official IDX files of Fashion-MNIST.

    python benchmarks/make_embedded.py FOLDER

Prints what belongs in src/bigstep/data/embedded.py: checksums, mean and deviation.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from bigstep.data import embedded
from bigstep.data.idx import find_idx, open_idx
from bigstep.data.sources.memory import TensorImages


def first_of_each_class(images: TensorImages, count: int) -> TensorImages:
    chosen = [(images.labels == label).nonzero().flatten()[:count] for label in range(len(images.classes))]
    return images.subset(torch.cat(chosen).sort().values)


def write_sheet(images: TensorImages, path: Path) -> None:
    tiles = images.images.numpy().reshape(-1, embedded.ACROSS, embedded.SIDE, embedded.SIDE)
    sheet = Image.fromarray(np.ascontiguousarray(tiles.swapaxes(1, 2)).reshape(-1, embedded.ACROSS * embedded.SIDE))
    text = PngInfo()
    text.add_text("labels", "".join(map(str, images.labels.tolist())), zip=True)
    text.add_text("Copyright", "Fashion-MNIST, Copyright (c) 2017 Zalando SE, MIT licence")
    sheet.save(path, optimize=True, pnginfo=text)
    print(path.name, hashlib.sha256(path.read_bytes()).hexdigest(), f"{path.stat().st_size:,} bytes")


def main() -> None:
    files = find_idx(Path(sys.argv[1]))
    assert files, f"{sys.argv[1]} does not hold the four files"
    train, test = open_idx(files, embedded.CLASSES, embedded.MEAN, embedded.STD)
    train = first_of_each_class(train, 1200)
    write_sheet(train, embedded.FOLDER / "train.png")
    write_sheet(first_of_each_class(test, 200), embedded.FOLDER / "test.png")
    scaled = train.images.double() / 255
    print(f"mean {scaled.mean():.4f} std {scaled.std(correction=0):.4f}")


if __name__ == "__main__":
    main()
