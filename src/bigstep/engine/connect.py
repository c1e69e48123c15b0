"""Putting the gradients of several ranks under DDP and the configured exchange."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bigstep.config import ExchangeConfig
from bigstep.data.feed import Request
from bigstep.engine.build import Parts
from bigstep.engine.methods.synchronous import autocast
from bigstep.exchange import BucketTuner, Exchange
from bigstep.norm import set_workers

__all__ = ["connect", "make_exchange"]

# newer releases of torch renamed the argument and warn about the old name
_ddp_arguments = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _ddp_arguments else "broadcast_buffers"


def connect(parts: Parts) -> None:
    """Make the ranks of a run exchange gradients; every rank must call this.

    DDP regroups its buckets after its first backward. A sum over ranks is rounded in an order that depends on where
    a gradient lies in its bucket, so the regrouping is provoked here, with a backward whose gradient is thrown away:
    every step of the run, resumed or not, then sees the same buckets and gives the same bits. With `bucket_mb: auto`
    the size of the buckets depends on the clock, and so do the last bits.
    """
    if parts.ranks.size == 1:
        return
    config = parts.config.exchange
    parts.exchange = make_exchange(config, parts.ranks.timeout_s, parts.rank_adagrad)
    if config.bucket_mb == "auto":
        parts.tuner = BucketTuner(lambda bucket_mb: _attached(parts, bucket_mb))
        return
    parts.ddp = _parallel(parts, config.bucket_mb)
    _rehearse(parts, parts.ddp)
    parts.exchange.attach(parts.ddp)


def make_exchange(
    config: ExchangeConfig, timeout_s: float = 600.0, prepare: Callable[[Tensor, Tensor], None] | None = None
) -> Exchange:
    """Return the exchange that a configuration names, not yet attached."""
    return Exchange(
        collective=config.collective,
        codec=config.codec,
        grid=config.grid if config.grid == "auto" else (config.grid[0], config.grid[1]),
        warmup_steps=config.warmup_steps,
        error_feedback=config.error_feedback,
        double_buffer=config.double_buffer,
        rank=config.rank,
        timeout=timeout_s,
        prepare=prepare,
    )


def _parallel(parts: Parts, bucket_mb: float) -> DistributedDataParallel:
    keep_local = {_SYNC_BUFFERS: False}  # each rank's batch-norm statistics are its own until an evaluation
    return DistributedDataParallel(
        parts.objective,
        device_ids=[parts.ranks.device] if parts.ranks.device.type == "cuda" else None,
        bucket_cap_mb=bucket_mb,
        init_sync=False,  # weights come from the seed; their hash was compared
        gradient_as_bucket_view=True,
        **keep_local,  # type: ignore[arg-type]
    )


def _attached(parts: Parts, bucket_mb: float) -> DistributedDataParallel:
    assert parts.exchange is not None
    ddp = _parallel(parts, bucket_mb)
    parts.exchange.attach(ddp)
    return ddp


def _rehearse(parts: Parts, parallel: DistributedDataParallel) -> None:
    """Run one small forward and backward on every rank and undo what it changed."""
    buffers = [buffer.clone() for buffer in parts.model.buffers()]
    count = min(8, len(parts.train_feed))
    inputs, target = next(parts.train_feed(iter([Request(0, torch.arange(count))])))
    parts.model.train()
    set_workers(parts.model, 1)
    with autocast(parts):
        loss = parallel(inputs, target, 1.0)
    loss.backward()
    parts.optimizer.zero_grad()
    with torch.no_grad():
        for buffer, before in zip(parts.model.buffers(), buffers, strict=True):
            buffer.copy_(before)
