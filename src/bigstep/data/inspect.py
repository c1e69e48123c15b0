"""Look at a data set: counts, classes, sizes, statistics, damaged files, baselines, and a sheet of examples."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from bigstep.data.baselines import ngram_bits
from bigstep.data.catalog import open_data
from bigstep.data.names import Wanted, name_of_set
from bigstep.data.pair import DataPair
from bigstep.errors import ConfigError, DataError
from bigstep.records import write_atomically

__all__ = ["contact_sheet", "describe"]

_TILE, _LABEL_WIDTH, _MAX_CLASSES = 64, 150, 100


def describe(
    name_or_path: str, *, verify: bool = False, length: int = Wanted.length, vocabulary: str = Wanted.vocabulary
) -> dict[str, Any]:
    """Describe a data set as plain values.

    Args:
        name_or_path: a name that `open_data` knows, a file or folder, or package.module:function.
        verify: read every sample and list all that are damaged, instead of a few of them.
        length: tokens of a sequence, of text.
        vocabulary: how text is divided into tokens.

    Returns:
        name, unit, classes, fingerprint, and for train and test: count and what the source says of itself. Of images:
        per_class, sizes (width and height: smallest, median, largest), mean and std of each channel (0..1), checked
        (samples that were decoded), corrupt (file and reason of each). Of text: tokens, length, vocabulary,
        bytes_per_token, and beside train and test `baselines`, what the simplest models reach.

    >>> facts = describe("embedded")
    >>> facts["train"]["count"], facts["test"]["per_class"]["Bag"], facts["train"]["mean"]
    (12000, 200, [0.2865])
    """
    pair = open_data(*name_of_set(name_or_path), length=length, vocabulary=vocabulary)
    facts = {
        "name": name_or_path,
        "unit": pair.train.unit,
        "classes": list(pair.train.classes),
        "fingerprint": pair.fingerprint(),
        "train": {"count": len(pair.train), **pair.train.describe(verify)},
        "test": {"count": len(pair.test), **pair.test.describe(verify)},
    }
    if "length" in pair.train.inputs(0):
        facts["baselines"] = ngram_bits(pair)
    return facts


def contact_sheet(pair: DataPair, path: Path, *, per_class: int = 10, overwrite: bool = False) -> Path:
    """Draw the first training images of each class, one row per class with its name, as a PNG.

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
    source, inner = pair.train, _TILE - 4  # a white line between tiles
    if source.labels is None or source.thumbnail(0, inner) is None:
        raise DataError(f"{source.name} has no labelled images to draw.")
    classes = source.classes[:_MAX_CLASSES]
    sheet = Image.new("RGB", (_LABEL_WIDTH + per_class * _TILE, len(classes) * _TILE), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=13)
    for row, name in enumerate(classes):
        text = name if len(name) <= 20 else f"{name[:19]}…"
        pen.text((6, row * _TILE + _TILE // 2), text, fill="black", font=font, anchor="lm")
        for column, index in enumerate((source.labels == row).nonzero().flatten()[:per_class].tolist()):
            tile = source.thumbnail(index, inner)
            assert tile is not None, "the first sample has one"
            sheet.paste(tile, (_LABEL_WIDTH + column * _TILE, row * _TILE))
    content = io.BytesIO()
    sheet.save(content, "PNG")
    try:
        write_atomically(path, content.getvalue())
    except OSError as error:
        raise ConfigError(f"The contact sheet {path} cannot be written: {error.strerror}.") from None
    return path
