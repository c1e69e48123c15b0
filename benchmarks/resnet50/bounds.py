"""The least time of each kind of kernel in a step: bytes over the bandwidth, or FLOPs over the matrix rate."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

from bigstep.gpu import batch_norm_launch as launch

BYTES_PER_MS = 4.3e9  # copy bandwidth of an H200, read and written bytes together
FLOP_PER_MS = 790e9  # dense fp16 matrix product


def size(*tensors: object) -> float:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def of_step(model: nn.Module, plain: nn.Module, images: torch.Tensor) -> dict[str, float]:
    """Milliseconds by kernel name, from the tensors that one step of `model` moves; `plain` is it before `optimize`."""
    bytes_moved: dict[str, float] = defaultdict(float)
    convolutions = 0.0
    kept = {name: getattr(launch, name) for name in ("statistics", "normalize", "backward_sums", "backward_input", "pool", "unpool")}  # fmt: skip  # noqa: E501

    def counted(name, kernel):
        def call(*args, **kwargs):
            out = kept[name](*args, **kwargs)
            results = out if isinstance(out, tuple) else (out,)
            moved = size(args[0]) if name == "statistics" else size(*args, *results)
            bytes_moved[kernel] += moved
            return out

        return call

    kernels = {
        "statistics": "statistics_kernel", "normalize": "normalize_kernel", "backward_sums": "backward_sums_kernel",
        "backward_input": "backward_input_kernel", "pool": "normalize_pool_kernel", "unpool": "unpool_backward_kernel",
    }  # fmt: skip

    def hook(module, inputs, output):
        nonlocal convolutions
        x = inputs[0]
        read = x.numel() / (4 if module.kernel_size == (1, 1) and module.stride == (2, 2) else 1)
        moved = 2 * (read + output.numel() + module.weight.numel())
        flops = 2 * output.numel() * module.weight[0].numel()
        passes = 2 if x.shape[1] == 3 else 3  # the stem needs no gradient of its input
        convolutions += passes * max(moved / BYTES_PER_MS, flops / FLOP_PER_MS)

    hooks = [m.register_forward_hook(hook) for m in plain.modules() if isinstance(m, nn.Conv2d)]
    with torch.no_grad(), torch.autocast("cuda", torch.float16):
        plain(images)
    for handle in hooks:
        handle.remove()
    try:
        for name, kernel in kernels.items():
            setattr(launch, name, counted(name, kernel))
        with torch.autocast("cuda", torch.float16):
            model(images).float().square().mean().backward()
    finally:
        for name, function in kept.items():
            setattr(launch, name, function)
    model.zero_grad(set_to_none=True)
    weights = sum(p.numel() for p in model.parameters())
    result = {name: moved / BYTES_PER_MS for name, moved in bytes_moved.items()}
    result["norms_kernel"] = weights * 6 / BYTES_PER_MS
    result["update_kernel"] = weights * 20 / BYTES_PER_MS
    result["add_plane_kernel"] = size(images) * (1 + 4 / 3) / BYTES_PER_MS
    result["convolutions"] = convolutions
    return result


def table(rows: list[tuple[str, int, float]], bounds: dict[str, float]) -> list[dict[str, object]]:
    """Kernels of a profile by kind: launches, milliseconds, bound."""
    kinds: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for name, count, ms in rows:
        library = any(word in name for word in ("xmma", "nvjet", "splitK", "cask", "gemm", "cudnn"))
        kind = name if name in bounds or name.endswith("_kernel") else "convolutions" if library else "rest"
        kinds[kind][0] += count
        kinds[kind][1] += ms
    ordered = sorted(kinds.items(), key=lambda item: -item[1][1])
    return [{"kind": k, "launches": int(n), "ms": ms, "bound_ms": bounds.get(k)} for k, (n, ms) in ordered if ms > 0]
