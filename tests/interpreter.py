"""Where tests run kernels: in Triton's interpreter on a CPU (conftest.py asks for it), compiled on a GPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os

import pytest

__all__ = ["DEVICE", "needs_triton"]

DEVICE = "cuda" if os.environ.get("BIGSTEP_TEST_GPU") else "cpu"


def _why_not() -> str:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    version = importlib.metadata.version("triton")
    if DEVICE == "cpu" and tuple(map(int, version.split(".")[:2])) < (3, 7):
        return f"the interpreter of Triton {version} counts loops in a way that NumPy 2.4 refuses; 3.7 does not"
    return ""


needs_triton = pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "it is there")
