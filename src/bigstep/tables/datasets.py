"""Data sets by name: what each holds and which function opens it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bigstep.tables.plugins import Table

__all__ = ["DATASETS", "DataSet"]


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set, or a kind of files that users bring."""

    about: str
    """What it is."""
    input: Literal["images", "tokens"]
    """What a model for it must take."""
    size: str
    """How many training and test samples there are, and what they are."""
    home: str
    """The function that opens it: (Wanted) -> DataPair."""
    needs_path: bool = False
    """Whether it needs a path."""
    packer: str = ""
    """The function that packs it: (Wanted, Packing) -> what was packed; empty if packing would gain nothing."""


DATASETS: dict[str, DataSet] = {
    "embedded": DataSet(
        about="Part of Fashion-MNIST that ships with the package.",
        input="images",
        size="12,000 + 2,000 grey images of 28 x 28, 10 classes",
        home="bigstep.data.catalog:open_embedded_set",
    ),
    "fashion-mnist": DataSet(
        about="Articles of clothing (Xiao et al., 2017); fetched once.",
        input="images",
        size="60,000 + 10,000 grey images of 28 x 28, 10 classes",
        home="bigstep.data.catalog:open_idx_set",
    ),
    "mnist": DataSet(
        about="Handwritten digits (LeCun et al., 1998); fetched once.",
        input="images",
        size="60,000 + 10,000 grey images of 28 x 28, 10 classes",
        home="bigstep.data.catalog:open_idx_set",
    ),
    "cifar10": DataSet(
        about="Small colour photographs (Krizhevsky, 2009); fetched once.",
        input="images",
        size="50,000 + 10,000 colour images of 32 x 32, 10 classes",
        home="bigstep.data.catalog:open_cifar_set",
    ),
    "imagenet": DataSet(
        about="ImageNet (ILSVRC 2012) as a folder: train/CLASS/*.JPEG and val/CLASS/*.JPEG.",
        input="images",
        size="1,281,167 + 50,000 colour photographs, 1,000 classes",
        home="bigstep.data.catalog:open_folder_set",
        needs_path=True,
        packer="bigstep.data.pack:pack_folder",
    ),
    "folder": DataSet(
        about="Any folder of images like ImageNet's: train/CLASS/* and val/CLASS/*.",
        input="images",
        size="as many images and classes as it holds",
        home="bigstep.data.catalog:open_folder_set",
        needs_path=True,
        packer="bigstep.data.pack:pack_folder",
    ),
    "packed": DataSet(
        about="Images packed by `bigstep data pack`: WebDataset tar files with an index.",
        input="images",
        size="as many images and classes as it holds",
        home="bigstep.data.sources.packed:open_packed",
        needs_path=True,
    ),
    "shakespeare": DataSet(
        about="Plays of Shakespeare, a text that ships with the package.",
        input="tokens",
        size="1,003,854 + 111,540 bytes of text",
        home="bigstep.data.text:open_shakespeare",
    ),
    "text": DataSet(
        about="Any text: a file (plain, .gz or .xz) or a folder of files.",
        input="tokens",
        size="as much text as it holds; a tenth of it is the test set",
        home="bigstep.data.text:open_text",
        needs_path=True,
        packer="bigstep.data.text:pack_text",
    ),
    "tokens": DataSet(
        about="A packed file of tokens (.tokens or .npy), read from disk as it is needed.",
        input="tokens",
        size="as many tokens as it holds",
        home="bigstep.data.text:open_tokens",
        needs_path=True,
    ),
}
"""The sets that are known by name; `package.module:function` is a user's own."""
DATASETS = Table("datasets", DataSet, DATASETS)
