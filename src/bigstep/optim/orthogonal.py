"""Roughly the orthogonal matrix nearest to a given one, fast: with products alone, many matrices at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["batches_of", "flops_of", "orthogonalise", "orthogonalise_all"]

A, B, C = 3.4445, -4.7750, 2.0315
"""Jordan's coefficients: they bring singular values from far below 1 to between 0.7 and 1.2 in five iterations."""
EPS = 1e-7
SPARE = 3e9
"""FLOP per iteration that cost a GPU as much time as another batch's five launches: an H200 at a third of its peak."""


def orthogonalise(matrices: Tensor, iterations: int) -> Tensor:
    """Bring all singular values of n x rows x cols matrices near 1: U S V' becomes about U V'. rows <= cols is faster.

    ::

        X = G / |G|,    then each time    A = X X',    X <- a X + (b A + c A^2) X

    float32 matrices on a CUDA device are multiplied in bf16, and the result is bf16; otherwise everything stays in the
    type of the matrices.

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <...>
    >>> singular = torch.linalg.svdvals(orthogonalise(torch.randn(1, 4, 9), iterations=5))
    >>> bool(singular.min() > 0.6), bool(singular.max() < 1.3)
    (True, True)
    """
    x: Tensor = matrices / (torch.linalg.matrix_norm(matrices, keepdim=True) + EPS)
    x = x.to(_product_type(matrices))
    for _ in range(iterations):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x


def orthogonalise_all(
    matrices: Sequence[Tensor], iterations: int, group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """Orthogonalise matrices of any shapes, those of similar shape together (`batches_of`).

    Args:
        matrices: Matrices of one device and dtype.
        iterations: Iterations for each matrix.
        group: Ranks that hold the same matrices: each computes its share and receives the others' results.

    >>> [tuple(o.shape) for o in orthogonalise_all([torch.ones(5, 2), torch.ones(2, 5)], iterations=1)]
    [(5, 2), (2, 5)]
    """
    by_shape: dict[tuple[int, int], list[int]] = {}
    for index, matrix in enumerate(matrices):
        rows, cols = sorted(matrix.shape)
        by_shape.setdefault((rows, cols), []).append(index)
    # the costliest first, so that dealing them out in turn balances the ranks; only shapes decide, so all ranks agree
    order = sorted(by_shape, key=lambda shape: -(shape[0] ** 2 * shape[1]))
    dealt = [index for shape in order for index in by_shape[shape]]
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    own = dealt[rank::ranks]
    results: dict[int, Tensor] = {}
    for batch in batches_of([(min(matrices[i].shape), max(matrices[i].shape)) for i in own], _spare(matrices)):
        indices = [own[place] for place in batch]
        wide = [m if m.shape[0] <= m.shape[1] else m.mT for m in (matrices[i] for i in indices)]
        found = orthogonalise(_packed(wide), iterations)
        results.update({i: o[:, : m.shape[1]] for i, o, m in zip(indices, found, wide, strict=True)})
    if group is not None:
        results = _gather(results, matrices, dealt, group)
    return [
        results[index] if matrix.shape[0] <= matrix.shape[1] else results[index].mT
        for index, matrix in enumerate(matrices)
    ]


def flops_of(rows: int, cols: int) -> int:
    """Return the FLOP of one iteration, three products, on a rows x cols matrix with rows <= cols."""
    return 4 * rows**2 * cols + 2 * rows**3


def batches_of(shapes: Sequence[tuple[int, int]], spare: float) -> list[list[int]]:
    """Return which matrices are multiplied together, as lists of their indices.

    Matrices with equal numbers of rows can be: columns of zeros change neither X X' nor the other columns. A narrower
    shape joins a wider one if its zeros cost at most `spare` FLOP per iteration; else it is a batch of its own.

    >>> batches_of([(8, 9), (8, 32), (4, 64), (8, 9)], spare=0), batches_of([(8, 9), (8, 32), (8, 9)], spare=1e6)
    ([[1], [0, 3], [2]], [[1, 0, 2]])
    """
    places: dict[tuple[int, int], list[int]] = {}
    for place, shape in enumerate(shapes):
        places.setdefault(shape, []).append(place)
    batches: list[list[int]] = []
    widest: tuple[int, int] | None = None
    for rows, cols in sorted(places, reverse=True):
        added = places[rows, cols]
        wasted = len(added) * (flops_of(*widest) - flops_of(rows, cols)) if widest and widest[0] == rows else None
        if wasted is not None and wasted <= spare:
            batches[-1] += added
        else:
            batches.append(list(added))
            widest = rows, cols
    return batches


def _spare(matrices: Sequence[Tensor]) -> float:
    return SPARE if matrices and matrices[0].is_cuda else 0.0


def _packed(matrices: Sequence[Tensor]) -> Tensor:
    """Stack matrices with equal numbers of rows; the first is the widest, the others are padded with zeros."""
    rows, width = matrices[0].shape
    if all(matrix.shape[1] == width for matrix in matrices):
        return torch.stack(list(matrices))
    packed = matrices[0].new_zeros(len(matrices), rows, width)
    torch._foreach_copy_([place[:, : m.shape[1]] for place, m in zip(packed, matrices, strict=True)], list(matrices))
    return packed


def _product_type(matrix: Tensor) -> torch.dtype:
    return torch.bfloat16 if matrix.is_cuda and matrix.dtype == torch.float32 else matrix.dtype


def _gather(
    own: dict[int, Tensor], matrices: Sequence[Tensor], dealt: Sequence[int], group: dist.ProcessGroup
) -> dict[int, Tensor]:
    """Gather the results of all ranks in one exchange: each sends its own end to end, padded to the longest total."""
    ranks = dist.get_world_size(group)
    lengths = [sum(matrices[index].numel() for index in dealt[rank::ranks]) for rank in range(ranks)]
    sent = torch.zeros(max(lengths), dtype=_product_type(matrices[0]), device=matrices[0].device)
    if own:
        mine = torch.cat([result.reshape(-1) for result in (own[i] for i in dealt if i in own)])
        sent[: mine.numel()] = mine
    received = [torch.empty_like(sent) for _ in range(ranks)]
    dist.all_gather(received, sent, group=group)
    found: dict[int, Tensor] = {}
    for rank in range(ranks):
        begin = 0
        for index in dealt[rank::ranks]:
            rows, cols = sorted(matrices[index].shape)
            found[index] = received[rank][begin : begin + rows * cols].view(rows, cols)
            begin += rows * cols
    return found
