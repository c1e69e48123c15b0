"""Launches the batch-norm kernels: block shapes, grids and the memory between passes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bigstep.gpu.backend import on_device_of

__all__ = [
    "Shape",
    "add_plane",
    "backward_input",
    "backward_sums",
    "normalize",
    "pool",
    "shape_of",
    "statistics",
    "unpool",
]

MULTIPROCESSORS = 132
"""Number on an H100 or H200; only a hint for how many programs share a reduction."""
STREAM_ROWS, STREAM_CHANNELS, STREAM_WARPS = 32, 128, 4
"""Tile and warps of a program in the passes that write a tensor; like the values below, tuned on an H200."""
SUM_TILE, SUM_CHANNELS, SUM_WARPS, SUM_WAVES = 4096, 64, 8, 4
"""Elements, channels and warps of a program in the passes that reduce, and programs per multiprocessor."""
POOL_PIXELS, POOL_WARPS = 8, 4
UNPOOL_PIXELS, UNPOOL_WARPS = 16, 2
"""Pixels of a line and warps of a program in the stem's pooling, forward and backward."""


class Shape(NamedTuple):
    """A tensor as the kernels see it."""

    groups: int
    rows: int
    channels: int


def shape_of(x: Tensor, groups: int) -> Shape:
    """Groups, rows (samples x pixels) of each group, channels.

    >>> shape_of(torch.zeros(8, 3, 5, 5), groups=2)
    Shape(groups=2, rows=100, channels=3)
    """
    n, c, h, w = x.shape
    return Shape(groups, n // groups * h * w, c)


def _power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(value - 1, 0).bit_length()


def _tile(shape: Shape, most_channels: int, rows: int = 0, elements: int = 0) -> tuple[int, int, bool]:
    """Rows and channels of a tile, given its rows or its elements, and whether whole tiles cover the tensor exactly."""
    block_c = max(8, min(most_channels, _power_of_two(shape.channels)))
    block_m = max(1, min(rows or elements // block_c, _power_of_two(shape.rows)))
    return block_m, block_c, shape.rows % block_m == 0 and shape.channels % block_c == 0


def _blocks(total: int, size: int) -> int:
    return (total + size - 1) // size


def _parts(shape: Shape, block_m: int, block_c: int, waves: int) -> int:
    """Number of programs that share the rows of a group and a block of channels, so that all run at once, or nearly."""
    wanted = MULTIPROCESSORS * waves // (shape.groups * _blocks(shape.channels, block_c))
    return max(1, min(wanted, _blocks(shape.rows, block_m)))


def _merge_blocks(shape: Shape, parts: int) -> dict[str, int]:
    block_p = _power_of_two(parts)
    block_g = max(1, min(_power_of_two(shape.groups), 1024 // block_p))
    return {"BC": 8, "BP": block_p, "BG": block_g}


def statistics(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    groups: int,
    momentum: float,
    eps: float,
) -> Tensor:
    """Update the buffers; return mean, 1/deviation, scale and shift by group and channel: (4, groups, channels)."""
    from bigstep.gpu import batch_norm_forward_triton as kernels

    shape = shape_of(x, groups)
    block_m, block_c, even = _tile(shape, SUM_CHANNELS, elements=SUM_TILE)
    parts = _parts(shape, block_m, block_c, SUM_WAVES)
    partial = torch.empty(2, groups, parts, shape.channels, dtype=torch.float32, device=x.device)
    stats = torch.empty(4, groups, shape.channels, dtype=torch.float32, device=x.device)
    merge = _merge_blocks(shape, parts)
    with on_device_of(x):
        kernels.statistics_kernel[(parts * _blocks(shape.channels, block_c), groups)](
            x, partial, shape.rows, shape.channels, parts, BM=block_m, BC=block_c, EVEN=even, num_warps=SUM_WARPS
        )
        kernels.merge_statistics_kernel[(_blocks(shape.channels, merge["BC"]),)](
            partial,
            weight,
            bias,
            running_mean,
            running_var,
            stats,
            shape.rows,
            shape.channels,
            parts,
            groups,
            momentum,
            eps,
            BM=block_m,
            MEAN=running_mean is not None,
            VAR=running_var is not None,
            **merge,
        )
    return stats


def normalize(
    x: Tensor,
    stats: Tensor,
    residual: Tensor | None,
    other: Tensor | None,
    other_stats: Tensor | None,
    *,
    relu: bool,
    signs: bool,
    half: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The output and, if asked for, its signs as bits and its every second line and column."""
    from bigstep.gpu import batch_norm_forward_triton as kernels

    shape = shape_of(x, stats.shape[1])
    block_m, block_c, even = _tile(shape, STREAM_CHANNELS, rows=STREAM_ROWS)
    y = torch.empty_like(x)
    y2 = torch.empty_like(x[:, :, ::2, ::2], memory_format=torch.channels_last) if half else None
    bits = torch.empty(x.numel() // 8, dtype=torch.uint8, device=x.device) if signs else None
    with on_device_of(x):
        kernels.normalize_kernel[(_blocks(shape.rows, block_m) * _blocks(shape.channels, block_c), shape.groups)](
            x,
            stats,
            residual,
            other,
            other_stats,
            y,
            y2,
            bits,
            shape.rows,
            shape.channels,
            x.shape[2],
            x.shape[3],
            BM=block_m,
            BC=block_c,
            EVEN=even,
            RELU=relu,
            RESIDUAL=residual is not None,
            OTHER=other is not None,
            SIGNS=signs,
            HALF=half,
            num_warps=STREAM_WARPS,
        )
    return y, bits, y2


class Sums(NamedTuple):
    """The results of the first backward pass: partial sums and, if it was written, the masked gradient."""

    partial: Tensor
    dz: Tensor | None


def backward_sums(
    dy: Tensor,
    dy2: Tensor | None,
    x: Tensor,
    stats: Tensor,
    other: Tensor | None,
    other_stats: Tensor | None,
    signs: Tensor | None,
    *,
    relu: bool,
    write: bool,
) -> Sums:
    """First backward pass: read every tensor once; return the sums and, with `write`, the masked (summed) gradient."""
    from bigstep.gpu import batch_norm_backward_triton as kernels

    shape = shape_of(x, stats.shape[1])
    block_m, block_c, even = _tile(shape, SUM_CHANNELS, elements=SUM_TILE if write else SUM_TILE // 2)
    parts = _parts(shape, block_m, block_c, SUM_WAVES // 2 if write else SUM_WAVES)
    planes = 2 if other is None else 3
    partial = torch.empty(planes, shape.groups, parts, shape.channels, dtype=torch.float32, device=x.device)
    dz = torch.empty_like(x) if write else None
    with on_device_of(dy):
        kernels.backward_sums_kernel[(parts * _blocks(shape.channels, block_c), shape.groups)](
            dy,
            dy2,
            x,
            stats,
            other,
            other_stats,
            signs,
            dz,
            partial,
            shape.rows,
            shape.channels,
            parts,
            x.shape[2],
            x.shape[3],
            BM=block_m,
            BC=block_c,
            EVEN=even,
            MASK=0 if not relu else 1 if signs is None else 2,
            PAIR=0 if dy2 is None else 1 if dy2.shape == dy.shape else 2,
            OTHER=other is not None,
            WRITE=write,
            num_warps=SUM_WARPS,
        )
    return Sums(partial, dz)


def coefficients(partial: Tensor, stats: Tensor, rows: int, which: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The coefficients of the second pass, and the gradients of weight and bias in the type of `like`."""
    from bigstep.gpu import batch_norm_backward_triton as kernels

    _, groups, parts, channels = partial.shape
    out = torch.empty(2, groups, channels, dtype=torch.float32, device=partial.device)
    dweight, dbias = torch.empty_like(like), torch.empty_like(like)
    merge = _merge_blocks(Shape(groups, rows, channels), parts)
    with on_device_of(partial):
        kernels.backward_coefficients_kernel[(_blocks(channels, merge["BC"]),)](
            partial, stats, out, dweight, dbias, rows, channels, parts, groups, which, **merge
        )
    return out, dweight, dbias


def backward_input(
    dz: Tensor,
    x: Tensor,
    stats: Tensor,
    coefficient: Tensor,
    other: Tensor | None,
    other_stats: Tensor | None,
    other_coefficient: Tensor | None,
    *,
    mask: bool,
) -> tuple[Tensor, Tensor | None]:
    """Second backward pass: the gradients of x and of the other branch."""
    from bigstep.gpu import batch_norm_backward_triton as kernels

    shape = shape_of(x, stats.shape[1])
    block_m, block_c, even = _tile(shape, STREAM_CHANNELS, rows=STREAM_ROWS)
    dx = torch.empty_like(x)
    dother = None if other is None else torch.empty_like(other)
    with on_device_of(dz):
        kernels.backward_input_kernel[(_blocks(shape.rows, block_m) * _blocks(shape.channels, block_c), shape.groups)](
            dz,
            x,
            stats,
            coefficient,
            dx,
            other,
            other_stats,
            other_coefficient,
            dother,
            shape.rows,
            shape.channels,
            BM=block_m,
            BC=block_c,
            EVEN=even,
            MASK=1 if mask else 0,
            OTHER=other is not None,
            num_warps=STREAM_WARPS,
        )
    return dx, dother


def add_plane(x: Tensor) -> Tensor:
    """Add a fourth plane of zeros to images of three planes; both in channels_last."""
    from bigstep.gpu import pool_triton as kernels

    n, _, h, w = x.shape
    out = torch.empty((n, 4, h, w), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    with on_device_of(x):
        kernels.add_plane_kernel[(_blocks(out.numel(), 2048),)](x, out, out.numel(), BLOCK=2048)
    return out


def pool(x: Tensor, stats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise + ReLU + max-pool 3x3/2: the output, the winning tap of each window, the input found there."""
    from bigstep.gpu import pool_triton as kernels

    n, c, h, w = x.shape
    out_h, out_w = (h + 1) // 2, (w + 1) // 2
    y = torch.empty((n, c, out_h, out_w), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    picked = torch.empty_like(y)
    winner = torch.empty_like(y, dtype=torch.uint8)
    groups = stats.shape[1]
    block_c = min(SUM_CHANNELS, _power_of_two(c))
    with on_device_of(x):
        kernels.normalize_pool_kernel[(n * out_h, _blocks(out_w, POOL_PIXELS) * _blocks(c, block_c))](
            x,
            stats,
            y,
            winner,
            picked,
            n // groups,
            h,
            w,
            out_h,
            out_w,
            c,
            groups * c,
            BW=POOL_PIXELS,
            BC=block_c,
            num_warps=POOL_WARPS,
        )
    return y, winner, picked


def unpool(dz: Tensor, winner: Tensor, x: Tensor, stats: Tensor, coefficient: Tensor) -> Tensor:
    """Second backward pass through pool and batch norm."""
    from bigstep.gpu import pool_triton as kernels

    n, c, h, w = x.shape
    out_h, out_w = (h + 1) // 2, (w + 1) // 2
    dx = torch.empty_like(x)
    groups = stats.shape[1]
    block_c = min(SUM_CHANNELS, _power_of_two(c))
    with on_device_of(dz):
        kernels.unpool_backward_kernel[(n * h, _blocks(w, UNPOOL_PIXELS) * _blocks(c, block_c))](
            dz,
            winner,
            x,
            stats,
            coefficient,
            dx,
            n // groups,
            h,
            w,
            out_h,
            out_w,
            c,
            groups * c,
            BW=UNPOOL_PIXELS,
            BC=block_c,
            num_warps=UNPOOL_WARPS,
        )
    return dx
