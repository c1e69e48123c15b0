"""Data sets, augmentation, and the feed that brings batches to the device."""

from bigstep.data.augment import Augment, sample_uniform
from bigstep.data.catalog import open_data
from bigstep.data.feed import Feed, Request
from bigstep.data.folder import FolderImages
from bigstep.data.images import TensorImages
from bigstep.data.pair import DataPair, MapStyle

__all__ = [
    "Augment", "DataPair", "Feed", "FolderImages", "MapStyle", "Request", "TensorImages", "open_data",
    "sample_uniform",
]  # fmt: skip
