"""Data sets, augmentation, and the feed that brings batches to the device.

The public names are imported when they are first used, so that naming a data set does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bigstep.data.augment import Augment, sample_uniform
    from bigstep.data.catalog import open_data
    from bigstep.data.feed import Feed, Request
    from bigstep.data.pair import DataPair
    from bigstep.data.sources.base import Source
    from bigstep.data.sources.folder import FolderImages
    from bigstep.data.sources.given import as_pair, as_source
    from bigstep.data.sources.memory import TensorImages
    from bigstep.data.sources.own import MapStyle
    from bigstep.data.sources.text import TokenWindows

_HOMES = {
    "Augment": "augment",
    "DataPair": "pair",
    "Feed": "feed",
    "FolderImages": "sources.folder",
    "MapStyle": "sources.own",
    "Request": "feed",
    "Source": "sources.base",
    "TensorImages": "sources.memory",
    "TokenWindows": "sources.text",
    "as_pair": "sources.given",
    "as_source": "sources.given",
    "open_data": "catalog",
    "sample_uniform": "augment",
}

__all__ = [
    "Augment", "DataPair", "Feed", "FolderImages", "MapStyle", "Request", "Source", "TensorImages",
    "TokenWindows", "as_pair", "as_source", "open_data", "sample_uniform",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"bigstep.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'bigstep.data' has no attribute {name!r}")
