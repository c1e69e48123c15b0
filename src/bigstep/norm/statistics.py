"""Running statistics of batch norm: where a model keeps them, and the two treatments that any loop can use."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["average_statistics", "last_batch_statistics", "other_buffers", "statistics_of", "tracking_norms"]


def tracking_norms(model: nn.Module) -> list[_BatchNorm]:
    """The batch norms of a model that keep running statistics, each once, in the order of `model.modules()`.

    >>> model = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False), nn.LayerNorm(4))
    >>> len(tracking_norms(model))
    1
    """
    return [module for module in model.modules() if isinstance(module, _BatchNorm) and module.running_mean is not None]


def statistics_of(norms: list[_BatchNorm]) -> list[Tensor]:
    """The running means and variances themselves, not copies: all means first, then all variances.

    >>> [tensor.tolist() for tensor in statistics_of([nn.BatchNorm2d(2), nn.BatchNorm1d(1)])]
    [[0.0, 0.0], [0.0], [1.0, 1.0], [1.0]]
    """
    # read anew at each use: Module.to() may replace the tensors
    means = [norm.running_mean for norm in norms]
    variances = [norm.running_var for norm in norms]
    return [buffer for buffer in (*means, *variances) if buffer is not None]


def other_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers of a model that a forward may write and that do not belong to a batch norm.

    >>> model = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False))
    >>> model.register_buffer("seen", torch.zeros(()))
    >>> other_buffers(model)
    [tensor(0.)]
    """
    norms = {id(buffer) for norm in tracking_norms(model) for buffer in norm.buffers()}
    # in an expanded buffer several elements share one address, so it cannot be written in place
    return [buffer for buffer in model.buffers() if id(buffer) not in norms and buffer.is_contiguous()]


def last_batch_statistics(model: nn.Module) -> int:
    """Keep the statistics of the last batch alone instead of moving averages.

    ::

        running <- (1 - momentum) * running + momentum * batch,  with momentum = 1

    With the few updates of a very large batch, moving averages lag behind the weights. Before an evaluation, average
    the statistics over the ranks with `average_statistics`: one rank's last batch is small.

    Args:
        model: Any module; its batch norms are changed in place.

    Returns:
        How many batch norms were changed.

    >>> norm = nn.BatchNorm1d(1)
    >>> last_batch_statistics(norm)
    1
    >>> for batch in ([[1.0], [3.0]], [[10.0], [20.0]]):
    ...     _ = norm(torch.tensor(batch))
    >>> norm.running_mean
    tensor([15.])

    Reference: Akiba, Suzuki, Fukuda, Extremely Large Minibatch SGD, 2017, section 3.3 (batch norm without moving
    averages).

    Differs from the paper: in nothing; `average_statistics` is its second half, the mean over workers.
    """
    norms = tracking_norms(model)
    for norm in norms:
        norm.momentum = 1.0
    return len(norms)


def average_statistics(model: nn.Module, sum_over_ranks: Callable[[Tensor], object], ranks: int) -> None:
    """Give every rank the mean over ranks of the running statistics.

    ::

        running <- sum over ranks of running / ranks

    Every rank must call it, and all at the same point, since `sum_over_ranks` is a collective.

    Args:
        model: Any module; its batch norms are changed in place.
        sum_over_ranks: Sums one flat tensor over the ranks in place, as `torch.distributed.all_reduce` does.
        ranks: How many there are.

    >>> norm = nn.BatchNorm1d(1)
    >>> _ = norm.running_mean.fill_(3.0)
    >>> average_statistics(norm, lambda flat: flat.add_(torch.tensor([5.0, 1.0])), ranks=2)  # the other has mean 5
    >>> norm.running_mean, norm.running_var
    (tensor([4.]), tensor([1.]))

    Reference: Akiba, Suzuki, Fukuda, Extremely Large Minibatch SGD, 2017, section 3.3.

    Differs from the paper: in nothing; note that a mean of variances leaves out the variance between the ranks' means.
    """
    buffers = statistics_of(tracking_norms(model))
    if not buffers:
        return
    flat = torch.cat(buffers)
    sum_over_ranks(flat)
    copy_out(flat / ranks, buffers)


def copy_out(flat: Tensor, buffers: list[Tensor]) -> None:
    """Write the parts of one flat tensor into buffers.

    >>> buffers = [torch.zeros(1), torch.zeros(2)]
    >>> copy_out(torch.tensor([1.0, 2.0, 3.0]), buffers)
    >>> buffers
    [tensor([1.]), tensor([2., 3.])]
    """
    if buffers:  # torch's multi-tensor functions refuse empty lists
        parts = torch.split_with_sizes(flat, [buffer.numel() for buffer in buffers])
        torch._foreach_copy_(buffers, list(parts))
