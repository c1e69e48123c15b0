"""The set that ships with the package: 12,000 + 2,000 images of Fashion-MNIST, ten classes, 28 x 28, grey.

The first 1,200 and 200 images of each class, in the order of the original. A split is one PNG, a sheet of tiles in
rows of 100, with the labels as a string of digits in its metadata. `benchmarks/make_embedded.py` made them. Copyright
Zalando SE, MIT licence: see embedded/LICENSE.txt.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from bigstep.data.sources.memory import TensorImages
from bigstep.errors import DataError

__all__ = ["CLASSES", "open_embedded"]

CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
MEAN, STD = (0.2865,), (0.3539,)  # of the 12,000 training images
SIDE, ACROSS = 28, 100  # of a tile in pixels; tiles in a row
FOLDER = Path(__file__).with_name("embedded")
SHA256 = {
    "train.png": "b881616571adb62fdde856d3bf775fd7023a24acafbc738161f6266b82371120",
    "test.png": "0fa935a710f9c02c7c1dde0a57544f7e4d6cd4e3582927bbb6b8b2aa951b1cc9",
}


def open_embedded() -> tuple[TensorImages, TensorImages]:
    """Read the training and the test set.

    >>> train, test = open_embedded()
    >>> len(train), len(test), train.classes[train.labels[0]]
    (12000, 2000, 'Ankle boot')
    """
    train, test = (_decoded(FOLDER / name) for name in ("train.png", "test.png"))
    return _own(train), _own(test)


def _own(shared: TensorImages) -> TensorImages:
    """A copy that the caller may change."""
    return dataclasses.replace(shared, images=shared.images.clone(), labels=shared.labels.clone())


@functools.cache  # decoding takes a tenth of a second, as long as a small run
def _decoded(path: Path) -> TensorImages:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); install bigstep again.") from None
    if hashlib.sha256(content).hexdigest() != SHA256[path.name]:
        raise DataError(f"{path} is not the file that ships with bigstep; install it again.")
    with Image.open(io.BytesIO(content), formats=["PNG"]) as sheet:
        labels = torch.tensor([int(digit) for digit in sheet.info["labels"]])
        tiles = np.asarray(sheet).reshape(-1, SIDE, ACROSS, SIDE).swapaxes(1, 2)
    images = torch.from_numpy(np.ascontiguousarray(tiles)).view(-1, 1, SIDE, SIDE)
    return TensorImages(images=images, labels=labels, classes=CLASSES, mean=MEAN, std=STD, name=str(path))
