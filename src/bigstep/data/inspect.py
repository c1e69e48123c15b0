"""Look at a data set: counts, classes, sizes, statistics, damaged files, and a sheet of examples."""

from __future__ import annotations

import io
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from bigstep.data.catalog import open_data
from bigstep.data.decode import centre_box, cut, open_image
from bigstep.data.folder import FolderImages
from bigstep.data.images import TensorImages
from bigstep.data.names import name_of_set
from bigstep.data.pair import DataPair
from bigstep.errors import ConfigError, DataError
from bigstep.records import write_atomically

__all__ = ["contact_sheet", "describe"]

_SAMPLE = 500  # files of a folder that are decoded for its statistics unless all are asked for
_STATISTICS_SIZE = 64  # side at which they are decoded, in pixels
_TILE, _LABEL_WIDTH, _MAX_CLASSES = 64, 150, 100


def describe(name_or_path: str, *, verify: bool = False) -> dict[str, Any]:
    """Describe a data set as plain values.

    Args:
        name_or_path: a name that `open_data` knows, a folder, or package.module:function.
        verify: decode every file of a folder and list all that are damaged, instead of a sample of them.

    Returns:
        name, classes, and for train and test: count, per_class, sizes (width and height: smallest, median, largest),
        mean and std of each channel (0..1), checked (samples that were decoded), corrupt (file and reason of each).

    >>> facts = describe("embedded")
    >>> facts["train"]["count"], facts["test"]["per_class"]["Bag"], facts["train"]["mean"]
    (12000, 200, [0.2865])
    """
    pair = open_data(*name_of_set(name_or_path))
    classes = [str(name) for name in getattr(pair.train, "classes", ())]
    return {
        "name": name_or_path,
        "classes": classes,
        "train": _describe_split(pair.train, classes, verify),
        "test": _describe_split(pair.test, classes, verify),
    }


def _describe_split(source: Any, classes: list[str], verify: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {"count": len(source)}
    if isinstance(source, TensorImages | FolderImages):
        counts = source.labels.bincount(minlength=len(classes)).tolist()
        facts["per_class"] = dict(zip(classes, counts, strict=True))
    if isinstance(source, TensorImages):
        side = [source.image_size, source.image_size]
        facts["sizes"] = {"smallest": side, "median": side, "largest": side}
        histogram = torch.stack([_histogram(source.images[:, channel]) for channel in range(source.channels)])
        facts.update(_moments(histogram), checked=len(source), corrupt=[])
    elif isinstance(source, FolderImages):
        facts.update(_describe_files(source, verify))
    else:
        x, y = source[0]
        facts["item"] = f"{_shape(x)}, {_shape(y)}"
    return facts


def _shape(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor | np.ndarray) else type(value).__name__


def _describe_files(source: FolderImages, verify: bool) -> dict[str, Any]:
    count = len(source) if verify else min(len(source), _SAMPLE)
    chosen = torch.linspace(0, len(source) - 1, count).round().long().tolist()  # evenly over the classes

    def look(index: int) -> tuple[tuple[int, int], Tensor] | dict[str, str]:
        path = source.path(index)
        try:
            with open_image(path) as image:
                size = image.size
                if verify:
                    image.load()  # every pixel: a reduced decode can pass over damage
                pixels = cut(image, centre_box(*size, fraction=1.0), (_STATISTICS_SIZE, _STATISTICS_SIZE))
        except DataError as error:
            return {"file": str(path), "reason": str(error)}
        return size, torch.stack([_histogram(torch.from_numpy(pixels[..., c].copy())) for c in range(3)])

    sizes, corrupt, histogram = [], [], torch.zeros(3, 256, dtype=torch.int64)
    with ThreadPoolExecutor() as pool:  # decoding releases the interpreter's lock
        for seen in pool.map(look, chosen):
            if isinstance(seen, dict):
                corrupt.append(seen)
            else:
                sizes.append(seen[0])
                histogram += seen[1]
    facts: dict[str, Any] = {"checked": count, "corrupt": corrupt}
    if sizes:
        by_area = sorted(sizes, key=lambda size: (math.prod(size), size))
        picks = {"smallest": by_area[0], "median": by_area[len(by_area) // 2], "largest": by_area[-1]}
        facts["sizes"] = {key: list(size) for key, size in picks.items()}
        facts.update(_moments(histogram))
    return facts


def _histogram(values: Tensor) -> Tensor:
    return torch.from_numpy(np.bincount(values.numpy().reshape(-1), minlength=256))


def _moments(histogram: Tensor) -> dict[str, list[float]]:
    """Mean and deviation of each channel from its histogram, exactly, without a floating copy of the images."""
    share = histogram.double() / histogram.sum(1, keepdim=True)
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = share @ values
    std = (share @ values.square() - mean.square()).clamp(min=0).sqrt()
    return {"mean": [round(m, 4) for m in mean.tolist()], "std": [round(s, 4) for s in std.tolist()]}


def contact_sheet(pair: DataPair, path: Path, *, per_class: int = 10, overwrite: bool = False) -> Path:
    """Draw the first training images of each class, a class a row with its name, as a PNG.

    Args:
        pair: as `open_data` gives it; a user's own data set cannot be drawn.
        path: the file to write.
        per_class: images in a row.
        overwrite: replace a file that is there.

    Returns:
        The path.
    """
    if path.suffix.lower() != ".png":
        raise ConfigError(f"The contact sheet {path} must be a .png file.")
    if path.exists() and not overwrite:
        raise ConfigError(f"{path} exists already; choose another name or allow overwriting.")
    source = pair.train
    if not isinstance(source, TensorImages | FolderImages):
        raise DataError(f"A {type(source).__name__} has no labelled images to draw.")
    classes = source.classes[:_MAX_CLASSES]
    sheet = Image.new("RGB", (_LABEL_WIDTH + per_class * _TILE, len(classes) * _TILE), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=13)
    for row, name in enumerate(classes):
        text = name if len(name) <= 20 else f"{name[:19]}…"
        pen.text((6, row * _TILE + _TILE // 2), text, fill="black", font=font, anchor="lm")
        for column, index in enumerate((source.labels == row).nonzero().flatten()[:per_class].tolist()):
            sheet.paste(_tile(source, index), (_LABEL_WIDTH + column * _TILE, row * _TILE))
    content = io.BytesIO()
    sheet.save(content, "PNG")
    try:
        write_atomically(path, content.getvalue())
    except OSError as error:
        raise ConfigError(f"The contact sheet {path} cannot be written: {error.strerror}.") from None
    return path


def _tile(source: TensorImages | FolderImages, index: int) -> Image.Image:
    inner = _TILE - 4  # a white line between tiles
    if isinstance(source, FolderImages):
        try:
            with open_image(source.path(index)) as image:
                return Image.fromarray(cut(image, centre_box(*image.size, fraction=1.0), (inner, inner)))
        except DataError:
            return Image.new("RGB", (inner, inner), "red")  # a damaged file is meant to be seen
    pixels = source.images[index]
    image = Image.fromarray(pixels[0].numpy() if len(pixels) == 1 else pixels.permute(1, 2, 0).contiguous().numpy())
    return image.resize((inner, inner), Image.Resampling.NEAREST)
