"""Hardware queues from a process to its GPU. Streams that share a queue wait for each other, whatever their priority.

CUDA gives a process eight queues by default. nvJPEG keeps fourteen streams per decoder, so some of them queue behind
the training step, and their images are ready only when a step ends: beside ResNet-50 on an H200, nvJPEG decoded 600
images a second with eight queues and 21,000 with 32. CUDA reads the number once, when its driver starts; even
`torch.cuda.is_available()` starts it.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["ask_for_queues", "why_few_queues"]

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST = 32
"""The most queues that CUDA offers."""
_DRIVER, _NOT_STARTED = "libcuda.so.1", 3  # CUDA_ERROR_NOT_INITIALIZED


def ask_for_queues() -> None:
    """Ask for as many queues as CUDA offers, unless CUDA has started already; a value that the user has set stands."""
    if not _has_started():
        os.environ.setdefault(VARIABLE, str(MOST))


def why_few_queues() -> str | None:
    """Return a note that images will wait for whole steps and what to change, or None if there are enough queues."""
    told = os.environ.get(VARIABLE)
    if told is None:
        return f"CUDA had already started with eight queues; set {VARIABLE}={MOST} at the start of the program."
    if told.isdecimal() and int(told) < MOST:
        return f"{VARIABLE} is {told}; images are decoded far faster beside a model with {MOST}."
    return None


def _has_started() -> bool:
    """Whether CUDA's driver is loaded in this process and has been initialized."""
    try:
        driver = ctypes.CDLL(_DRIVER, mode=os.RTLD_NOLOAD)
    except (OSError, AttributeError):  # OSError: not loaded; AttributeError: not Linux
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_STARTED)
