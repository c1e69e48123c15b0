"""Users' own data made into sources: the only place that examines what kind of object was given."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from bigstep.data.pair import DataPair, hold_out
from bigstep.data.sources.base import Source
from bigstep.data.sources.own import OwnItems, TensorItems, widened
from bigstep.errors import DataError

__all__ = ["as_pair", "as_source"]

_ARRAYS = Tensor | np.ndarray


def as_source(given: Any, what: str = "data") -> Source:
    """Return a source of samples.

    Args:
        given: a source (`TensorImages`, `FolderImages`, ...), any map-style data set of pairs (x, y), two arrays
            (x, y) of one length, of which y may be a list of numbers, or a `Subset` of these.
        what: where it came from, for messages.

    >>> len(as_source((np.zeros((5, 3)), np.arange(5))))
    5
    """
    source = _source_of(given, what)
    if len(source) == 0:
        raise DataError(f"{what} gave an empty data set.")
    return source


def _source_of(given: Any, what: str) -> Source:
    if isinstance(given, Source):
        return given
    if type(given) is Subset:
        return as_source(given.dataset, what).subset(torch.as_tensor(given.indices, dtype=torch.int64))
    if type(given) is TensorDataset and len(given.tensors) == 2:
        return TensorItems(TensorDataset(*(_as_tensor(part, what) for part in given.tensors)))
    if _is_x_and_y(given):
        x, y = (_as_tensor(part, what) for part in given)
        if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
            raise DataError(
                f"{what} gave arrays x of {tuple(x.shape)} and y of {tuple(y.shape)}; give one y for each x."
            )
        return TensorItems(TensorDataset(x, y))
    if isinstance(given, DataLoader):
        raise DataError(
            f"{what} gave a DataLoader, which draws batches by itself; give its data set (loader.dataset), since the "
            "run decides which worker sees which sample."
        )
    if isinstance(given, _ARRAYS):
        raise DataError(f"{what} gave an array of {tuple(given.shape)} alone; give a pair of arrays (x, y).")
    if not hasattr(given, "__len__") or not hasattr(given, "__getitem__"):
        raise DataError(
            f"{what} gave a {type(given).__name__}, which has no length or no items by index; give a map-style "
            "data set, whose items are pairs (x, y)."
        )
    return OwnItems(given)


def _is_x_and_y(given: Any) -> bool:
    """Whether this is (x, y) of all samples: two arrays, or an array and the labels in a list."""
    if not isinstance(given, tuple | list) or len(given) != 2 or not isinstance(given[0], _ARRAYS):
        return False
    y = given[1]
    return isinstance(y, _ARRAYS) or (isinstance(y, list) and len(y) > 0 and isinstance(y[0], int | float | np.number))


def _as_tensor(given: Any, what: str) -> Tensor:
    """Return numbers as a tensor, which shares their memory if torch can compute with them as they are."""
    if isinstance(given, Tensor):
        if given.layout != torch.strided:
            raise DataError(f"{what} gave a tensor of layout {given.layout}; give a dense one (x.to_dense()).")
        return widened(given.detach())
    try:
        array = np.asarray(given)
    except ValueError:
        raise DataError(f"{what} gave labels in a list, but not all are single numbers; give one for each x.") from None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*not writable.*")  # it is never written to
            return widened(torch.as_tensor(array))
    except ValueError:  # foreign byte order or negative strides
        return widened(torch.as_tensor(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))))
    except TypeError:
        raise DataError(
            f"{what} gave an array of {array.dtype}, which torch cannot hold; give numbers, such as "
            "numpy.unique(words, return_inverse=True)[1] for words."
        ) from None


def as_pair(given: Any, holdout: float = 0.0, seed: int = 0, what: str = "data") -> DataPair:
    """Return what to train on and what to evaluate on.

    Args:
        given: two of what `as_source` takes, (train, test); with `holdout`, a training set alone is enough, as it is
            or as (train, None). A `DataPair`, already divided, is returned as it is.
        holdout: this fraction of the training set is evaluated on instead of a test set.
        seed: decides which samples are held out.
        what: where it came from, for messages.

    >>> x, y = np.zeros((10, 3)), np.arange(10) % 2
    >>> pair = as_pair((x, y), holdout=0.2)
    >>> len(pair.train), len(pair.test)
    (8, 2)
    """
    if isinstance(given, DataPair):
        return given
    train, test = _train_and_test(given, what)
    if holdout:
        return hold_out(as_source(train, what), holdout, seed)
    if test is None:
        as_source(train, what)  # if it is not a data set, this raises first
        raise DataError(
            f"{what} gave a {type(given).__name__} with a training set alone, but a run needs two data sets, (train, "
            "test); give both, or set data.holdout, the fraction of the training set that is evaluated on instead."
        )
    return DataPair(as_source(train, what), as_source(test, what))


def _train_and_test(given: Any, what: str) -> tuple[Any, Any]:
    """Return (train, test), without test where this is a single set: two arrays (x, y), or a list of items."""
    if not isinstance(given, tuple | list) or len(given) != 2 or _is_x_and_y(given):
        return given, None
    if isinstance(given, list) and all(isinstance(part, tuple | list) and len(part) == 2 for part in given):
        raise DataError(
            f"{what} gave a list of two pairs, which may be two data sets or two samples of one; give two data sets as "
            "a tuple, (train, test), and two samples as (list, None)."
        )
    return given[0], given[1]
