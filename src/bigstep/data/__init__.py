"""Data sets, augmentation, and the feed that brings batches to the device.

The public names are loaded when they are used: naming a data set needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bigstep.data.augment import Augment, sample_uniform
    from bigstep.data.catalog import open_data
    from bigstep.data.feed import Feed, Request
    from bigstep.data.folder import FolderImages
    from bigstep.data.images import TensorImages
    from bigstep.data.pair import DataPair, MapStyle

_HOMES = {
    "Augment": "augment",
    "DataPair": "pair",
    "Feed": "feed",
    "FolderImages": "folder",
    "MapStyle": "pair",
    "Request": "feed",
    "TensorImages": "images",
    "open_data": "catalog",
    "sample_uniform": "augment",
}

__all__ = [
    "Augment", "DataPair", "Feed", "FolderImages", "MapStyle", "Request", "TensorImages", "open_data",
    "sample_uniform",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"bigstep.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'bigstep.data' has no attribute {name!r}")
