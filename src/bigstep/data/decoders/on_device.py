"""Who decodes on a GPU: several nvJPEG decoders at once if their pixels agree with Pillow's, else torchvision."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from bigstep.data.decoders import nvjpeg, nvjpeg_decoders
from bigstep.data.decoders.nvjpeg_library import RefusedError, Sizes
from bigstep.gpu.queues import why_few_queues

__all__ = ["OnDevice", "said_of"]

_VARIABLE = "BIGSTEP_NVJPEG_DECODERS"
_USUAL = 2
_MOST = 8
_LARGE = 1 << 30
"""Bytes of decoded images above which torchvision decodes a batch: our buffers would keep three times as much."""


class OnDevice:
    """Decodes for one reader: batch after batch, each read by work on the stream that was current when it was begun.

    Args:
        device: where images are decoded.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        trusted = _why_torchvision(device) is None
        self._decoders = nvjpeg_decoders.open_decoders(device, _count()) if trusted else None

    def begin(
        self, contents: Sequence[Tensor], sizes: Sizes, again: Callable[[int], Tensor]
    ) -> Callable[[], Sequence[Tensor]]:
        """Begin to decode files; return a function that waits for the images, uint8 of (3, height, width) each.

        The work that reads them must be queued before the next call but one, which reuses their memory.

        Args:
            contents: The bytes of each file, on the CPU.
            sizes: Width and height of each image.
            again: Decodes the file of this number on the CPU, or raises a `DataError` that names it.
        """
        large = 3 * np.prod(np.asarray(sizes).reshape(-1, 2), 1).sum() > _LARGE
        if self._decoders is None or large or not contents:
            return lambda: nvjpeg.decode_on_device(contents, self._device, again) if contents else []
        finish = self._decoders.begin(contents, sizes)

        def decoded() -> Sequence[Tensor]:
            try:
                return finish()
            except RefusedError:  # torchvision has other ways for files that the hardware decoders do not take
                return nvjpeg.decode_on_device(contents, self._device, again)

        return decoded

    def __call__(self, contents: Sequence[Tensor], sizes: Sizes, again: Callable[[int], Tensor]) -> Sequence[Tensor]:
        """Decode files and wait for the images."""
        return self.begin(contents, sizes, again)()

    def close(self) -> None:
        """Free what the decoders hold."""
        if self._decoders is not None:
            self._decoders.close()


def said_of(device: torch.device) -> str:
    """Say how a device decodes, and what slows it down."""
    slowed = f" {few}" if (few := why_few_queues()) else ""
    if reason := _why_torchvision(device):
        return f"nvJPEG is called through torchvision: {reason}.{slowed}"
    return f"nvJPEG is called directly, by {_count()} decoder{'s' * (_count() > 1)}.{slowed}"


def _why_torchvision(device: torch.device) -> str | None:
    return nvjpeg_decoders.why_not_library(device) if _count() else f"{_VARIABLE} asks for no decoder"


def _count() -> int:
    """How many decoders are asked for; 0 leaves decoding to torchvision."""
    told = os.environ.get(_VARIABLE, "")
    return min(int(told), _MOST) if told.isdecimal() else _USUAL
