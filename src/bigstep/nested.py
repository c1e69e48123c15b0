"""Inputs of several tensors in a dict, tuple or list, as networks for text or for several modalities take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["is_input", "kinds_of", "leaves", "map_tensors"]


def map_tensors(function: Callable[..., Any], *alike: Any) -> Any:
    """Apply a function to the corresponding tensors of equal structures; return the results in the same structure.

    >>> map_tensors(lambda one, other: one + other, {"a": 1, "b": (2, 3)}, {"a": 10, "b": (20, 30)})
    {'a': 11, 'b': (22, 33)}
    """
    first = alike[0]
    if isinstance(first, Mapping):
        return {key: map_tensors(function, *(one[key] for one in alike)) for key in first}
    if isinstance(first, tuple | list):
        parts = [map_tensors(function, *several) for several in zip(*alike, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return function(*alike)


def leaves(nested: Any) -> Iterator[Any]:
    """Yield the leaves in order: tensors, or anything else that is not a dict, tuple or list.

    >>> list(leaves({"a": 1, "b": (2, 3)}))
    [1, 2, 3]
    """
    if isinstance(nested, Mapping | tuple | list):
        for part in nested.values() if isinstance(nested, Mapping) else nested:
            yield from leaves(part)
    else:
        yield nested


def is_input(x: Any) -> bool:
    """Whether a network can take this as input: a tensor, an array or a number, or several tensors.

    A list of plain numbers is refused, since torch would collate each position into a tensor of its own.

    >>> is_input(np.zeros(3)), is_input({"age": 3, "picture": np.zeros((3, 3))}), is_input([1, 2, 3]), is_input("text")
    (True, True, False, False)
    """
    if isinstance(x, Mapping):
        return len(x) > 0 and all(map(is_input, x.values()))
    if isinstance(x, tuple | list):
        return len(x) > 0 and all(is_input(part) and not isinstance(part, int | float) for part in x)
    return isinstance(x, Tensor | np.ndarray | np.generic | int | float | complex)


def kinds_of(nested: Any) -> str:
    """Describe the types and shapes in something nested, in a few words.

    >>> kinds_of((np.zeros(2), 3)), kinds_of({"a": np.zeros((2, 2))})
    ('float64 of (2,), int', '{a: float64 of (2, 2)}')
    """
    if isinstance(nested, Mapping):
        return "{" + ", ".join(f"{key}: {_in_place(part)}" for key, part in nested.items()) + "}"
    if isinstance(nested, tuple | list):
        return ", ".join(map(_in_place, nested))
    if isinstance(nested, Tensor | np.ndarray):
        return f"{nested.dtype} of {tuple(nested.shape)}"
    return type(nested).__name__


def _in_place(part: Any) -> str:
    return f"({kinds_of(part)})" if isinstance(part, tuple | list) else kinds_of(part)
