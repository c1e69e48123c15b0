"""Atomic operations, prefetch and spin waits for Numba code that runs without the GIL.

Numba has no CPU atomics of its own; each function here emits one LLVM instruction. Arrays are one-dimensional and
C-contiguous. `compiled` is the decorator of all the kernels beside this file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]  # ships no types
from numba import njit, types
from numba.extending import intrinsic

__all__ = [
    "acquire",
    "add_float",
    "compiled",
    "fetch_add",
    "inlined",
    "load_float",
    "load_int",
    "prefetch",
    "release",
    "store_int",
    "try_acquire",
    "wait_for",
]

F = TypeVar("F", bound=Callable[..., Any])

SPINS_BEFORE_YIELD = 2_000  # about a microsecond: longer than a hand-over between cores, shorter than a time slice


_KERNELS = sorted(Path(__file__).parent.glob("*.py"))
_SOURCES = hashlib.sha256(b"".join(path.read_bytes() for path in _KERNELS)).hexdigest()[:12]


def compiled(function: F) -> F:
    """Compile without the GIL and keep the machine code on disk, unless nothing can be written there.

    To see whether that code is out of date Numba checks only the function's own file, not those of what it calls; so it
    is kept under a name that changes with the source of any kernel.
    """
    function.__qualname__ += f"_{_SOURCES}"
    try:
        return njit(nogil=True, cache=True)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # a read-only installation without a writable cache folder: compile in each process
        return njit(nogil=True)(function)  # type: ignore[no-any-return]


def inlined(function: F) -> F:
    """Compile into each kernel that calls it: a call passes seven words per array, and costs more than a short row."""
    return njit(nogil=True, forceinline=True)(function)  # type: ignore[no-any-return]


def _element(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return builder.gep(array.data, [args[1]])


_INTS = types.Array(types.int64, 1, "C")
_FLOATS = types.Array(types.float32, 1, "C")


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def fetch_add(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Add to `array[index]` (int64) and return what was there before."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _element(context, builder, signature, args), args[2], "acq_rel")

    return types.int64(_INTS, types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def _exchange(typing: Any, array: Any, index: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("xchg", _element(context, builder, signature, args), args[2], "acquire")

    return types.int64(_INTS, types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def load_int(typing: Any, array: Any, index: Any) -> Any:
    """Read `array[index]` (int64) with acquire order."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_element(context, builder, signature, args), "acquire", 8)

    return types.int64(_INTS, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def store_int(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Write `array[index]` (int64) with release order."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _element(context, builder, signature, args), "release", 8)
        return context.get_dummy_value()

    return types.void(_INTS, types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def load_float(typing: Any, array: Any, index: Any) -> Any:
    """Read `array[index]` (float32) from memory now: the compiler may not reuse an earlier read."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_element(context, builder, signature, args), "monotonic", 4)

    return types.float32(_FLOATS, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def _compare_exchange(typing: Any, array: Any, index: Any, expected: Any, value: Any) -> Any:
    """Write `value` to `array[index]` (float32) if its bits are those of `expected`; return whether they were."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        place = builder.bitcast(_element(context, builder, signature, args), word.as_pointer())
        before, after = (builder.bitcast(number, word) for number in args[2:])
        return builder.extract_value(builder.cmpxchg(place, before, after, "acq_rel", "monotonic"), 1)

    return types.boolean(_FLOATS, types.int64, types.float32, types.float32), emit


@inlined
def add_float(array: Any, index: Any, value: Any) -> None:
    """Add to `array[index]` (float32) so that no other thread's addition is lost."""
    now = load_float(array, index)
    while not _compare_exchange(array, index, now, np.float32(now + value)):
        now = load_float(array, index)


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of `array[index]`; any index is allowed, nothing is read."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, int32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, int32, int32, int32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        pointer = builder.bitcast(_element(context, builder, signature, args), byte)
        builder.call(function, [pointer, int32(0), int32(3), int32(1)])  # for reading, into all caches, data
        return context.get_dummy_value()

    return types.void(array, types.int64), emit


if os.name == "posix":
    _yield_core = types.ExternalFunction("sched_yield", types.int32())
else:

    @compiled
    def _yield_core() -> int:  # elsewhere a waiting thread spins until its time slice ends
        return 0


@compiled
def wait_for(array: Any, index: Any, value: int) -> None:
    """Spin until `array[index]` is `value`; yield the core when that takes long."""
    spins = 0
    while load_int(array, index) != value:
        spins += 1
        if spins > SPINS_BEFORE_YIELD:
            _yield_core()


@compiled
def try_acquire(array: Any, index: Any) -> bool:
    """Take the spinlock at `array[index]` if it is free."""
    return bool(load_int(array, index) == 0 and _exchange(array, index, 1) == 0)


@compiled
def acquire(array: Any, index: Any) -> None:
    """Take the spinlock at `array[index]` (0 free, 1 taken)."""
    while _exchange(array, index, 1) != 0:
        wait_for(array, index, 0)  # read-only spinning keeps the line shared until the lock is free


@compiled
def release(array: Any, index: Any) -> None:
    """Release the spinlock at `array[index]`."""
    store_int(array, index, 0)
