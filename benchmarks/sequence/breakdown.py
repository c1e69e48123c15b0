"""Where the time of a step goes: what the device did, for how long it was idle, how long the host took."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

__all__ = ["breakdown", "busy_us", "tell"]

GROUPS = (  # the first that fits a kernel's name counts
    ("cross-entropy", ("cost_kernel", "gradient_kernel", "nll_loss", "log_softmax", "softmax_backward")),
    (
        "update",
        ("adam", "corrections_k", "moments_k", "ratios_k", "norms_k", "trust_k", "update_k", "multi_tensor_apply"),
    ),
    ("attention", ("flash", "fmha", "attention", "cudnn_generated")),
    ("product", ("gemm", "nvjet", "cutlass", "xmma", "cublas")),
    ("compiled", ("triton_",)),
    ("copy or set", ("memcpy", "memset", "copy_kernel", "copy_device")),
    ("norm", ("layer_norm", "layernorm")),
)
"""What a kernel does, by a part of its name; all else is elementwise work and sums."""


def busy_us(spans: Iterable[tuple[float, float]]) -> float:
    """Return for how long at least one of some spans lasted.

    >>> busy_us([(0.0, 4.0), (6.0, 7.0), (1.0, 5.0)])
    6.0
    """
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


class Rival(Protocol):
    """What takes steps, and knows how long the host was busy with all of them."""

    host_s: float

    def __call__(self, steps: int, /) -> None:
        """Take some steps."""


def breakdown(rival: Rival, steps: int, device: torch.device) -> dict[str, Any]:
    """Profile some steps of a rival that is warm; milliseconds of a step throughout.

    `host_ms` is measured without the profiler: what the host needs to launch a step. Near the time of a step it means
    that the host waits for the device, or holds it up: `idle_ms` tells which.
    """
    on_gpu, before = device.type == "cuda", rival.host_s
    rival(steps)
    host_ms = 1e3 * (rival.host_s - before) / steps
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds) as profiled:
        rival(steps)
        if on_gpu:
            torch.cuda.synchronize()
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    seen = [event for event in profiled.events() or [] if event.device_type == wanted]
    events = [event for event in seen if not event.is_user_annotation]  # those span the kernels that they name
    if not events:
        return {"host_ms": host_ms}
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    whole_us, used_us = max(stop for _, stop in spans) - min(start for start, _ in spans), busy_us(spans)
    by_name: dict[str, list[float]] = {}
    for event, (start, stop) in zip(events, spans, strict=True):
        by_name.setdefault(event.name, []).append(stop - start)
    per_step = 1e-3 / steps
    top = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    groups: dict[str, float] = {}
    for name, times in by_name.items():
        groups[group_of(name)] = groups.get(group_of(name), 0.0) + per_step * sum(times)
    return {
        "host_ms": host_ms,
        "step_ms": per_step * whole_us,
        "busy_ms": per_step * used_us,
        "idle_ms": per_step * (whole_us - used_us),
        "kernels_a_step": len(events) / steps,
        "graph_launches_a_step": _calls(profiled, "cudaGraphLaunch") / steps,
        "waits_a_step": (_calls(profiled, "cudaStreamSynchronize") + _calls(profiled, "cudaDeviceSynchronize")) / steps,
        "groups_ms": dict(sorted(groups.items(), key=lambda item: -item[1])),
        "top": [
            {"name": name[:100], "calls_a_step": len(times) / steps, "ms": per_step * sum(times)}
            for name, times in top[:15]
        ],
    }


def group_of(name: str) -> str:
    """Return what a kernel does, by its name.

    >>> group_of("void pytorch_flash::flash_fwd_kernel"), group_of("nvjet_sm90_tst_128x256")
    ('attention', 'product')
    """
    low = name.lower()
    return next((group for group, parts in GROUPS if any(part in low for part in parts)), "elementwise and sums")


def tell(name: str, found: dict[str, Any]) -> None:
    """Print a breakdown."""
    figures = (f"{key.replace('_', ' ')} {value:.2f}" for key, value in found.items() if isinstance(value, int | float))
    print(f"\n{name}: {', '.join(figures)}")
    print("  " + ", ".join(f"{group} {ms:.2f} ms" for group, ms in found.get("groups_ms", {}).items()))
    for row in found.get("top", []):
        print(f"  {row['ms']:8.3f} ms {row['calls_a_step']:7.1f} x  {row['name']}", flush=True)


def _calls(profiled: Any, name: str) -> int:
    return sum(1 for event in profiled.events() or [] if event.name == name)
