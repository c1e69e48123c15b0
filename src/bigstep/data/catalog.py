"""From names of data sets to data sets: the only place that knows where each is kept and where it comes from."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from bigstep.data import cifar, embedded
from bigstep.data.cifar import find_cifar, open_cifar
from bigstep.data.download import Remote, cache_folder, download, locked, unpack
from bigstep.data.idx import find_idx, open_idx
from bigstep.data.names import Progress, Wanted
from bigstep.data.pair import DataPair, hold_out
from bigstep.data.sources.folder import open_folder, scan_folder
from bigstep.data.sources.given import as_pair
from bigstep.errors import DataError, nearest
from bigstep.tables import load, load_own
from bigstep.tables.datasets import DATASETS

__all__ = ["open_data"]

CIFAR10 = Remote(
    "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
)
_FASHION = "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
# the publishers give only MD5 sums, which can be forged: these are SHA-256 sums of the unpacked files
IDX_FILES = {
    "fashion-mnist": tuple(
        Remote(f"{_FASHION}/{name}.gz", f"sha256-unpacked:{digest}")
        for name, digest in (
            ("train-images-idx3-ubyte", "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
            ("train-labels-idx1-ubyte", "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
            ("t10k-images-idx3-ubyte", "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
            ("t10k-labels-idx1-ubyte", "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
        )
    ),
    "mnist": tuple(
        Remote(f"{_MNIST}/{name}.gz", f"sha256-unpacked:{digest}")
        for name, digest in (
            ("train-images-idx3-ubyte", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
            ("train-labels-idx1-ubyte", "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
            ("t10k-images-idx3-ubyte", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
            ("t10k-labels-idx1-ubyte", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
        )
    ),
}
_IDX_FACTS = {  # classes, mean, deviation of the training images
    "fashion-mnist": (embedded.CLASSES, (0.2860,), (0.3530,)),
    "mnist": (tuple("0123456789"), (0.1307,), (0.3081,)),
}


def open_data(
    name: str,
    path: str = "",
    holdout: float = 0.0,
    seed: int = 0,
    progress: Progress | None = None,
    *,
    length: int = Wanted.length,
    vocabulary: str = Wanted.vocabulary,
) -> DataPair:
    """Open a data set by name.

    Args:
        name: one of `bigstep.tables.datasets.DATASETS`, or package.module:function, a function that returns what
            `as_pair` takes: two data sets, (train, test). It is given `path` if it takes an argument. The current
            folder is searched too, last.
        path: the folder of the files. Empty means the cache folder, into which a missing set is downloaded.
        holdout: this fraction of each class of the training set is evaluated on instead of the test set.
        seed: decides which samples are held out.
        progress: called as a download arrives.
        length: tokens of a sequence, of text.
        vocabulary: how text is divided into tokens: one of `bigstep.tables.vocabularies.VOCABULARIES`.

    Returns:
        The training and the test set.

    >>> pair = open_data("embedded", holdout=0.25)
    >>> len(pair.train), len(pair.test), pair.train.image_size
    (9000, 3000, 28)
    """
    wanted = Wanted(name=name, path=path, length=length, vocabulary=vocabulary, alone=holdout > 0, progress=progress)
    return _open(wanted, holdout, seed)


def _open(wanted: Wanted, holdout: float, seed: int) -> DataPair:
    if ":" in wanted.name:
        given = _call_with_path(load_own(wanted.name, "data.name"), wanted.path, wanted.name)
        return as_pair(given, holdout, seed, wanted.name)
    if wanted.name not in DATASETS:
        hint = nearest(wanted.name, DATASETS)
        raise DataError(f"There is no data set {wanted.name!r}: {hint} Your own is package.module:function.")
    pair: DataPair = load(DATASETS[wanted.name].home)(wanted)
    return hold_out(pair.train, holdout, seed) if holdout else pair


def open_embedded_set(wanted: Wanted) -> DataPair:
    """Open the images that ship with the package."""
    return DataPair(*embedded.open_embedded())


def open_folder_set(wanted: Wanted) -> DataPair:
    """Open a folder of images."""
    if not wanted.path:
        raise DataError(
            f"{wanted.name} needs data.path (--data DIR), the folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG."
        )
    path = Path(wanted.path)
    if wanted.alone and not (path / "val").exists():
        train = scan_folder(path / "train")
        return DataPair(train, train)  # `_open` divides it
    return DataPair(*open_folder(path))


def open_idx_set(wanted: Wanted) -> DataPair:
    """Open MNIST or Fashion-MNIST from a folder, or from the cache, into which missing files are downloaded."""
    name, path = wanted.name, wanted.path
    remotes = IDX_FILES[name]
    if path:
        files = find_idx(Path(path))
        if files is None:
            raise DataError(
                f"{path} does not hold the files of {name}: {', '.join(remote.name for remote in remotes)} "
                "(with or without .gz)."
            )
    else:
        folder = cache_folder() / name
        files = find_idx(folder)
        if files is None:
            with locked(folder):
                for remote in remotes:
                    if not (folder / remote.name).exists():
                        download(remote, folder, wanted.progress)
            files = find_idx(folder)
            assert files is not None, "all four were just downloaded"
    return DataPair(*open_idx(files, *_IDX_FACTS[name]))


def open_cifar_set(wanted: Wanted) -> DataPair:
    """Open CIFAR-10 from a folder, or from the cache, into which it is downloaded if missing."""
    path = wanted.path
    if path:
        files = find_cifar(Path(path))
        if files is None:
            raise DataError(
                f"{path} does not hold CIFAR-10: data_batch_1 to data_batch_5 and test_batch, or the same ending in "
                ".bin, there or in cifar-10-batches-py or cifar-10-batches-bin."
            )
    else:
        folder = cache_folder() / "cifar10"
        files = find_cifar(folder)
        if files is None:
            with locked(folder):
                if find_cifar(folder) is None:  # another rank may have fetched it while this one waited
                    archive = folder / CIFAR10.name
                    if not archive.exists():
                        download(CIFAR10, folder, wanted.progress)
                    unpack(archive, cifar.PYTHON_FILES, folder)
            files = find_cifar(folder)
            assert files is not None, "the archive was just unpacked"
    return DataPair(*open_cifar(files))


def _call_with_path(function: Any, path: str, name: str) -> Any:
    parameters = inspect.signature(function).parameters.values()
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    if path and not places:
        raise DataError(f"{name} takes no argument, so data.path={path} cannot be given to it; leave data.path empty.")
    required = any(p.default is p.empty and p.kind != p.VAR_POSITIONAL for p in places)
    return function(path) if path or required else function()
