"""Bytes and FLOPs of one operation, from its name and what the profiler records of its arguments.

Bytes are those of the inputs and outputs, each counted once: what must move if nothing stays in a cache.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Cost", "cost_of", "takes_its_children"]

_BYTES = {
    "double": 8, "long int": 8, "long": 8, "float": 4, "int": 4, "c10::Half": 2, "c10::BFloat16": 2, "short int": 2,
    "unsigned char": 1, "signed char": 1, "bool": 1,
}  # fmt: skip
_LIST_BYTES = 4  # the profiler records the shapes of a list of tensors, not their types; weights are float32

_CONVOLUTIONS = {
    "aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::convolution", "aten::_convolution",
    "aten::cudnn_convolution", "aten::mkldnn_convolution",
}  # fmt: skip
_PRODUCTS = {"aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::addmm": (1, 2), "aten::baddbmm": (1, 2)}
_NORMS = {"aten::batch_norm", "aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::layer_norm", "FusedNorm"}
_NORMS_BACKWARD = {"aten::native_batch_norm_backward", "aten::cudnn_batch_norm_backward", "aten::batch_norm_backward"}
_FREE = {  # these move no data
    "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "as_strided", "as_strided_", "expand", "detach",
    "detach_", "alias", "slice", "select", "narrow", "split", "split_with_sizes", "chunk", "squeeze", "unsqueeze",
    "unfold", "flatten", "resize_", "resolve_conj", "resolve_neg", "item", "_local_scalar_dense", "empty",
    "empty_like", "empty_strided", "new_empty", "to", "contiguous", "set_", "is_nonzero",
}  # fmt: skip
_UNKNOWN = {"index", "_index_put_impl_", "index_put_", "_unsafe_index", "gather", "scatter_", "embedding", "unbind"}
_REDUCTIONS = {
    "sum", "mean", "amax", "amin", "norm", "linalg_vector_norm", "_foreach_norm", "nll_loss_forward", "argmax", "any",
    "all", "max", "min", "adaptive_avg_pool2d", "count_nonzero",
}  # fmt: skip
_WRITES_ONLY = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "_foreach_copy_", "_foreach_zero_"}


@dataclass(frozen=True)
class Cost:
    """The least that an operation has to do."""

    bytes: float
    flops: float = 0.0


@dataclass(frozen=True)
class _Tensor:
    shape: tuple[int, ...]
    bytes: float  # of its memory: a broadcast dimension takes none of its own
    itemsize: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def takes_its_children(name: str) -> bool:
    """Whether an operation's cost covers the operations that it calls."""
    return (
        name in _CONVOLUTIONS
        or name in _PRODUCTS
        or name in _NORMS
        or name in _NORMS_BACKWARD
        or name.startswith(("FusedNorm", "aten::_foreach", "aten::_fused_"))
        or name in {"aten::convolution_backward", "aten::linear", "aten::max_pool2d_with_indices"}
    )


def cost_of(name: str, arguments: Mapping[str, Any]) -> Cost | None:
    """Return the cost of an operation; None if it is unknown.

    A convolution of output Y and weight W with K filters does 2 |Y| |W| / K FLOPs, its backward the same for each
    gradient that is asked for; a product of (m, k) and (k, n) does 2 m k n.

    Args:
        name: as the profiler writes it.
        arguments: those of the event in the trace: "Input Dims", "Input Strides", "Input type", "Concrete Inputs".

    >>> shapes = {"Input Dims": [[64, 128], [128, 32]], "Input type": ["float", "float"]}
    >>> cost_of("aten::mm", shapes)
    Cost(bytes=57344.0, flops=524288.0)
    """
    tensors = _tensors(arguments)
    flat = [tensor for group in tensors for tensor in group]
    short = name.removeprefix("aten::")
    if short in _FREE:
        return Cost(0.0)
    if not flat or short in _UNKNOWN:
        return None
    read = sum(tensor.bytes for tensor in flat)
    concrete: Sequence[str] = arguments.get("Concrete Inputs", ())
    if name in _CONVOLUTIONS:
        return _convolution(tensors, concrete, read)
    if name == "aten::convolution_backward":
        return _convolution_backward(tensors, concrete, read)
    if name in _PRODUCTS or name == "aten::linear":
        return _product(name, tensors, read)
    if name in _NORMS_BACKWARD:
        return Cost(read + flat[1].bytes)  # dx, as large as x
    if name == "FusedNormBackward":
        return Cost(read + 2 * flat[0].bytes)  # x was kept, dx is written; both have the shape of the gradient
    if name.startswith("FusedNormPool"):
        return Cost(read + flat[0].bytes / 4) if name == "FusedNormPool" else Cost(read + 8 * flat[0].bytes)
    if name in _NORMS:
        return Cost(read + flat[0].bytes)
    return Cost(_generic(short, tensors, read, concrete))


def _generic(short: str, tensors: list[list[_Tensor]], read: float, concrete: Sequence[str]) -> float:
    """Elementwise unless the name says otherwise: the output has the largest shape and the type of the first input."""
    flat = [tensor for group in tensors for tensor in group]
    first = next(group for group in tensors if group)
    if short in _REDUCTIONS:
        return read
    if short in _WRITES_ONLY:
        return read
    if short == "index_select":
        dim = int(concrete[1])
        return 2 * first[0].bytes / max(first[0].shape[dim], 1) * flat[1].count
    if short == "cat":
        return 2 * read
    if short.endswith("_"):
        return read + sum(tensor.bytes for tensor in first)  # read and written
    if short.startswith("_foreach"):
        return read + sum(tensor.bytes for tensor in first)
    if short == "max_pool2d_with_indices":
        stride = math.prod(_numbers(concrete[2]) or _numbers(concrete[1]))
        return read + flat[0].count / stride * (flat[0].itemsize + 8)
    return read + max(tensor.count for tensor in flat) * first[0].itemsize


def _convolution(tensors: list[list[_Tensor]], concrete: Sequence[str], read: float) -> Cost | None:
    (x,), (weight,) = tensors[0], tensors[1]
    stride, padding, dilation = (_numbers(concrete[index]) for index in (3, 4, 5))
    if not stride or not padding:  # padding given by name
        return None
    sides = [
        (side + 2 * p - d * (k - 1) - 1) // s + 1
        for side, k, s, p, d in zip(
            x.shape[2:], weight.shape[2:], _spread(stride), _spread(padding), _spread(dilation), strict=False
        )
    ]
    out = x.shape[0] * weight.shape[0] * math.prod(sides)
    return Cost(read + out * x.itemsize, 2.0 * out * weight.count / weight.shape[0])


def _convolution_backward(tensors: list[list[_Tensor]], concrete: Sequence[str], read: float) -> Cost:
    (dy,), (x,), (weight,) = tensors[0], tensors[1], tensors[2]
    wanted = ast.literal_eval(concrete[10]) if len(concrete) > 10 and concrete[10] else [True, True, False]
    written = x.bytes * wanted[0] + weight.bytes * wanted[1]
    return Cost(read + written, 2.0 * dy.count * weight.count / weight.shape[0] * (wanted[0] + wanted[1]))


def _product(name: str, tensors: list[list[_Tensor]], read: float) -> Cost:
    left, right = (tensors[index][0] for index in _PRODUCTS.get(name, (0, 1)))
    columns = right.shape[0] if name == "aten::linear" else right.shape[-1]
    out = left.count // max(left.shape[-1], 1) * columns
    return Cost(read + out * left.itemsize, 2.0 * out * left.shape[-1])


def _spread(numbers: Sequence[int]) -> list[int]:
    return list(numbers) * 3 if len(numbers) == 1 else list(numbers)


def _numbers(text: str) -> list[int]:
    try:
        value = ast.literal_eval(text) if text else []
    except (ValueError, SyntaxError):
        return []
    return [value] if isinstance(value, int) else list(value)


def _tensors(arguments: Mapping[str, Any]) -> list[list[_Tensor]]:
    """Return the tensors of each argument: one, several if it is a list, none if it is a number or missing."""
    dims, types = arguments.get("Input Dims", ()), arguments.get("Input type", ())
    strides = arguments.get("Input Strides") or [[] for _ in dims]
    found: list[list[_Tensor]] = []
    for shape, stride, kind in zip(dims, strides, types, strict=False):
        if kind == "TensorList":
            found.append([_tensor(s, t, _LIST_BYTES) for s, t in zip(shape, stride or [[]] * len(shape), strict=False)])
        else:
            found.append([_tensor(shape, stride, _BYTES[kind])] if kind in _BYTES else [])
    return found


def _tensor(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> _Tensor:
    own = [side for side, step in zip(shape, strides, strict=True) if step] if len(strides) == len(shape) else shape
    return _Tensor(tuple(shape), float(math.prod(own) * itemsize), itemsize)
