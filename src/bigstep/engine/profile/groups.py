"""Which part of a step an operation or a kernel belongs to, by its name and the ranges around it."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["DATA", "GAPS", "GROUPS", "STEP", "WARM_UP_STEPS", "group_of_kernel", "group_of_operation"]

WARM_UP_STEPS = 5
"""Steps before a profile: libraries choose their algorithms, kernels are compiled, graphs are captured."""
STEP, DATA = "bigstep::step", "bigstep::data"
"""Ranges that the profiled loop marks in the trace."""

CONVOLUTION, NORM, ELEMENTWISE = "convolution and matmul", "batch norm", "activation and elementwise"
OPTIMIZER, EXCHANGE, INPUT, GAPS = "optimizer", "exchange", "data", "host gaps"
GROUPS = (CONVOLUTION, NORM, ELEMENTWISE, OPTIMIZER, EXCHANGE, INPUT, GAPS)

_KERNELS = (  # the first that fits counts; our own kernels have plain names
    (EXCHANGE, ("nccl", "_encode_kernel", "_decode_kernel", "allreduce")),
    (NORM, (
        "statistics_kernel", "normalize_kernel", "normalize_pool_kernel", "backward_sums_kernel", "batch_norm",
        "backward_coefficients_kernel", "backward_input_kernel", "unpool_backward_kernel", "bn_fw", "bn_bw", "::bn",
        "batchnorm",
    )),
    (OPTIMIZER, (
        "norms_kernel", "trust_kernel", "update_kernel", "multi_tensor", "fusedsgd", "fused_sgd", "amp_non_finite",
        "amp_update_scale",
    )),
    (CONVOLUTION, (
        "gemm", "gemv", "cutlass", "xmma", "nvjet", "splitk", "cask", "cudnn", "conv", "dgrad", "wgrad", "fprop",
    )),
    (INPUT, ("htod", "indexselect", "index_select")),
)  # fmt: skip


def group_of_kernel(name: str) -> str:
    """Return the group of a kernel of which only the name is known, as in a CUDA graph.

    >>> group_of_kernel("sm90_xmma_fprop_implicit_gemm_f16f16"), group_of_kernel("backward_sums_kernel")
    ('convolution and matmul', 'batch norm')
    """
    lower = name.lower()
    for group, words in _KERNELS:
        if any(word in lower for word in words):
            return group
    return ELEMENTWISE


def group_of_operation(name: str, around: Iterable[str]) -> str:
    """Return the group of an operation; `around` are the names of the ranges that it lies in, from the inside out.

    >>> group_of_operation("aten::add_", ["Optimizer.step#SGD.step", "bigstep::step"])
    'optimizer'
    """
    for outer in (name, *around):
        lower = outer.lower()
        if outer == DATA or lower.startswith("enumerate(dataloader)"):
            return INPUT
        if lower.startswith("optimizer.") or "_fused_sgd" in lower or "_amp_" in lower:
            return OPTIMIZER
        if lower.startswith(("c10d::", "gloo:", "nccl:", "record_param_comms")):
            return EXCHANGE
    lower = name.lower()
    if "norm" in lower and ("batch_norm" in lower or "batchnorm" in lower or lower.startswith("fusednorm")):
        return NORM
    if any(word in lower for word in ("conv", "::mm", "::bmm", "addmm", "baddbmm", "::linear", "matmul")):
        return CONVOLUTION
    return ELEMENTWISE
