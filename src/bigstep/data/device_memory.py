"""Feeding from memory: the samples stay on the device and are gathered there, many requests in one go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from bigstep.data.view import Request, View

__all__ = ["DeviceMemory", "Take", "move_indices"]

Take = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""(indices on the device, epoch) -> inputs and targets."""

_TOGETHER = 512  # samples that are prepared in one go


class DeviceMemory:
    """Yield batches of samples that are already in the device's memory.

    Args:
        view: how the samples are wanted.
        prepare: returns, for a view, the function that gathers samples.
    """

    loaders = None
    waits = None

    def __init__(self, view: View, prepare: Callable[[View], Take]) -> None:
        self._device, self._prepare = view.device, prepare
        self.see(view)

    def see(self, view: View) -> None:
        """Use this view from the next call on."""
        self._take = self._prepare(view)

    def __call__(self, requests: Iterable[Request]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one batch for each request."""
        for group in _together(requests):
            indices = move_indices(torch.cat([request.indices for request in group]), self._device)
            sizes = [len(request.indices) for request in group]
            inputs, targets = self._take(indices, group[0].epoch)
            yield from zip(torch.split(inputs, sizes), torch.split(targets, sizes), strict=True)

    def close(self) -> None:
        """Nothing runs in the background."""


def move_indices(indices: Tensor, device: torch.device) -> Tensor:
    """Return the indices on the device, copied from pinned memory: the host may have to wait for any other copy."""
    if device.type == "cuda":
        indices = indices.pin_memory()
    return indices.to(device, non_blocking=True)


def _together(requests: Iterable[Request]) -> Iterator[list[Request]]:
    """Group small requests of an epoch: a worker's share is often too small to pay for the calls that prepare it."""
    group: list[Request] = []
    samples = 0
    for request in requests:
        samples += len(request.indices)
        if group and (samples > _TOGETHER or request.epoch != group[0].epoch):
            yield group
            group, samples = [], len(request.indices)
        group.append(request)
    if group:
        yield group
