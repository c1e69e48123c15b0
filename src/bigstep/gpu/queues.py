"""Queues from a process to its GPU. Streams that share one wait for each other, whatever their work and priority.

CUDA gives a process eight. nvJPEG keeps fourteen streams a decoder, so some of them queue behind the training step, and
what it decodes comes out when a step ends: beside ResNet-50 on an H200, 600 images a second with eight queues and
21,000 with 32.
"""

from __future__ import annotations

import os
import sys

__all__ = ["ask_for_queues", "why_few_queues"]

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST = 32
"""More than this CUDA does not have."""


def ask_for_queues() -> None:
    """Ask for all queues that CUDA has, unless it has started already; what the user has set stands."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        os.environ.setdefault(VARIABLE, str(MOST))


def why_few_queues() -> str | None:
    """Say that images will wait for whole steps, and what to change; None where there are queues enough."""
    told = os.environ.get(VARIABLE)
    if told is None:
        return f"CUDA had started before with eight queues; set {VARIABLE}={MOST} where the program begins."
    if told.isdecimal() and int(told) < MOST:
        return f"{VARIABLE} is {told}; images are decoded far faster beside a model with {MOST}."
    return None
