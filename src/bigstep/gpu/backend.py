"""Whether Triton kernels can take a tensor, and if not, why; and the device they are launched on."""

from __future__ import annotations

import contextlib
import importlib.util
from functools import cache

import torch
from torch import Tensor

__all__ = ["on_device_of", "why_not_triton"]

INTERPRET = False
"""Accept CPU tensors too: for tests under Triton's interpreter (set TRITON_INTERPRET=1 before importing triton)."""


@cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def why_not_triton(tensor: Tensor) -> str | None:
    """Return None if Triton kernels can run on the tensor's device, else the reason in words.

    >>> import torch
    >>> why_not_triton(torch.zeros(1))
    'the tensors are on cpu, not on a CUDA device'
    """
    if not (tensor.is_cuda or INTERPRET):
        return f"the tensors are on {tensor.device.type}, not on a CUDA device"
    if not _triton_installed():
        return "triton is not installed"
    return None


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make a tensor's device the current one: Triton launches there, and a new thread starts on device 0."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)
