"""Ghost batch norm: one forward over the samples of several workers, each normalised by its own statistics."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch users know
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bigstep.errors import ConfigError

__all__ = ["GhostBatchNorm2d", "ghost_batch_norm", "normalize_by_worker", "set_workers"]


class GhostBatchNorm2d(nn.BatchNorm2d):
    """Batch norm whose batch holds the samples of several workers, in equal groups one after another.

    ::

        y = gamma * (x - mean_k) / sqrt(var_k + eps) + beta          for the samples x of worker k
        running <- (1 - momentum) * running + momentum * mean over workers of (mean_k, unbiased var_k)

    In training it computes the same as one `nn.BatchNorm2d` call per worker, forward and backward, at the cost of a
    single call. In evaluation, and with one worker, it is `nn.BatchNorm2d`; the state dict is the same too.

    Args:
        num_features: Channels.
        workers: Groups in a batch; `set_workers` changes it for a whole model.
        settings: Further arguments of `nn.BatchNorm2d`.

    >>> norm = GhostBatchNorm2d(1, workers=2, momentum=1.0)
    >>> batch = torch.tensor([0.0, 2.0, 10.0, 30.0]).reshape(4, 1, 1, 1)  # workers with means 1 and 20
    >>> norm(batch).flatten().round().tolist()
    [-1.0, 1.0, -1.0, 1.0]
    >>> norm.running_mean
    tensor([10.5000])

    Reference: Hoffer, Hubara, Soudry, Train longer, generalize better, 2017, Algorithm 1.

    Differs from the paper: the running statistics are updated once, with the mean over the groups, where the paper
    updates them with one group after another; so all groups have equal weight.
    """

    workers: int

    def __init__(self, num_features: int, workers: int = 1, **settings: Any) -> None:
        """See the class."""
        _check_workers(workers)
        super().__init__(num_features, **settings)
        self.workers = workers

    def forward(self, input: Tensor) -> Tensor:
        """Normalise a batch."""
        if self.workers == 1 or not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        if len(input) % self.workers:
            raise ConfigError(
                f"A batch of {len(input)} samples cannot be split evenly among {self.workers} workers; "
                "call set_workers with the number of workers in the batch."
            )
        output, mean, variance = normalize_by_worker(input, self.workers, self.weight, self.bias, self.eps)
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.mean(0).to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(variance.mean(0).to(self.running_var.dtype), momentum)
        return output

    def extra_repr(self) -> str:
        """The settings, for print(model)."""
        return f"{super().extra_repr()}, workers={self.workers}"  # type: ignore[no-untyped-call]  # untyped in torch


def normalize_by_worker(
    x: Tensor, workers: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise each worker's samples by their own statistics.

    The workers' channels are laid side by side, (workers * n, C, H, W) -> (n, workers * C, H, W), and torch's batch
    norm does the rest: its kernels, its precision under autocast, its backward, and one launch for any number of
    workers. The price is one copy before it and one after it. The memory format of `x` is kept.

    Args:
        x: A batch of `workers` equal groups, one after another.
        workers: How many.
        weight: gamma, or None.
        bias: beta, or None.
        eps: Added to the variance.

    Returns:
        The normalised batch, and each worker's mean and unbiased variance, both of shape (workers, C).

    >>> y, mean, variance = normalize_by_worker(torch.arange(8.0).reshape(8, 1, 1, 1), 2, None, None, 1e-5)
    >>> mean.flatten().tolist(), round(float(variance[0]), 4)
    ([1.5, 5.5], 1.6667)
    """
    channels = x.shape[1]
    # statistics in float32 at least, even for half-precision activations
    mean = torch.zeros(workers * channels, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    variance = torch.zeros_like(mean)
    y = F.batch_norm(
        _side_by_side(x, workers),
        mean,
        variance,
        weight.repeat(workers) if weight is not None else None,
        bias.repeat(workers) if bias is not None else None,
        training=True,
        momentum=1.0,  # so that the buffers become the statistics of this batch
        eps=eps,
    )
    return _one_after_another(y, workers), mean.view(workers, channels), variance.view(workers, channels)


def _side_by_side(x: Tensor, workers: int) -> Tensor:
    """(workers * n, C, H, W) -> (n, workers * C, H, W), in the memory format of `x`."""
    samples, C, H, W = x.shape
    n = samples // workers
    if _channels_last(x):
        grouped = x.permute(0, 2, 3, 1).view(workers, n, H, W, C).permute(1, 2, 3, 0, 4)
        return grouped.reshape(n, H, W, workers * C).permute(0, 3, 1, 2)
    return x.reshape(workers, n, C, H, W).transpose(0, 1).reshape(n, workers * C, H, W)


def _one_after_another(y: Tensor, workers: int) -> Tensor:
    """The inverse of `_side_by_side`."""
    n, channels, H, W = y.shape
    C = channels // workers
    if _channels_last(y):
        grouped = y.permute(0, 2, 3, 1).view(n, H, W, workers, C).permute(3, 0, 1, 2, 4)
        return grouped.reshape(workers * n, H, W, C).permute(0, 3, 1, 2)
    return y.reshape(n, workers, C, H, W).transpose(0, 1).reshape(workers * n, C, H, W)


def _channels_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def set_workers(model: nn.Module, workers: int) -> int:
    """Tell every `GhostBatchNorm2d` of a model how many workers the next batch holds.

    Args:
        model: Any module.
        workers: Groups in a batch.

    Returns:
        How many norms were set.

    >>> set_workers(nn.Sequential(GhostBatchNorm2d(4), nn.ReLU(), GhostBatchNorm2d(4)), 8)
    2
    """
    _check_workers(workers)
    norms = [module for module in model.modules() if isinstance(module, GhostBatchNorm2d)]
    for norm in norms:
        norm.workers = workers
    return len(norms)


def ghost_batch_norm(model: nn.Module, workers: int) -> nn.Module:
    """Turn every `nn.BatchNorm2d` of a model into a `GhostBatchNorm2d`, in place.

    Parameters, buffers, hooks and settings stay the same objects, so an optimizer that was made before stays valid.

    Args:
        model: Any module whose batch norms are all plain `nn.BatchNorm2d`; others (1-dimensional, synchronised, or
            with a forward of their own) are refused, since they would mix the workers' samples.
        workers: Groups in a batch.

    Returns:
        The model itself.

    >>> model = ghost_batch_norm(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), workers=2)
    >>> type(model[1]).__name__, model[1].workers
    ('GhostBatchNorm2d', 2)
    """
    _check_workers(workers)
    norms = [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    for name, norm in norms:
        if type(norm) not in (nn.BatchNorm2d, GhostBatchNorm2d):
            raise ConfigError(
                f"{name or 'The model'} is a {type(norm).__name__}, which would mix the samples of several workers; "
                "only nn.BatchNorm2d can be turned into a ghost batch norm: run one worker at a time instead."
            )
    for _, norm in norms:
        # the class alone decides the forward; with a new module, its hooks and the optimizer's parameters would be lost
        norm.__class__ = GhostBatchNorm2d
    set_workers(model, workers)
    return model


def _check_workers(workers: int) -> None:
    if workers < 1:
        raise ConfigError(f"A ghost batch norm was given {workers} workers, but it needs at least one.")
