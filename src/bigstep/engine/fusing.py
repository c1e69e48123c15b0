"""Which parts of a run use the GPU kernels, and why the others do not."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from bigstep.config import RunConfig
from bigstep.gpu import optimize
from bigstep.gpu.backend import why_not_triton

__all__ = ["Kernels", "advise_precision", "fuse", "why_open", "why_plain"]


@dataclass
class Kernels:
    """What runs on the GPU, for the records."""

    fused: list[str] = field(default_factory=list)
    """Modules whose batch norms run on the fused kernels."""
    graphs: bool = False
    """Whether a step is one CUDA graph."""
    reasons: list[str] = field(default_factory=list)
    """Why something runs in plain torch."""

    def __str__(self) -> str:
        used = [f"{len(self.fused)} fused modules"] if self.fused else []
        used += ["a CUDA graph for each step"] if self.graphs else []
        return f"On the GPU: {', '.join(used) or 'plain torch'}{''.join('; ' + reason for reason in self.reasons)}."


def fuse(model: nn.Module, config: RunConfig, *, own: bool) -> Kernels:
    """Put the fused kernels under a model on a GPU, in place, if the run can use them; `own`: it is a user's own."""
    weight = next(model.parameters())
    if reason := why_plain(config, own) or why_not_triton(weight):
        return Kernels(reasons=[reason])
    # cuDNN's default algorithm is often not its fastest, and shapes here are few; but a choice by timing may differ
    # from process to process
    torch.backends.cudnn.benchmark = not config.exact
    if not config.arithmetic.is_mixed:
        return Kernels(reasons=["batch norms are torch's own in float32"])
    report = optimize(model)
    return Kernels(report.fused, reasons=[f"{name} is torch's own: {why}" for name, why in report.left.items()])


def advise_precision(config: RunConfig, device: torch.device) -> str | None:
    """Say that float32 leaves most of a modern GPU unused, and which flag changes that; None if it does not."""
    if device.type != "cuda" or config.precision != "float32" or torch.cuda.get_device_capability(device) < (7, 0):
        return None
    return (
        f"Computing in float32, which {config.recipe} asks for, so the matrix units of this GPU stand idle. Mixed "
        "precision is several times as fast (ResNet-50 on an H200: 9,000 images/s, not 2,000): --set precision=fp16."
    )


def why_plain(config: RunConfig, own: bool) -> str | None:
    """Return why the layers of a run on a GPU must be torch's own, or None."""
    if config.compile:
        return "torch compiles the model"
    return why_open(config, own) or ("a model of your own keeps its layers" if own else None)


def why_open(config: RunConfig, own: bool) -> str | None:
    """Return why the steps of a run on a GPU cannot be graphs, whatever they contain, or None."""
    if config.kernels == "plain":
        return "kernels is plain"
    if config.precision == "float64":
        return "the kernels have no float64"
    if own and config.kernels != "graphs":  # it may contain Python that a graph would leave out
        return "a model of your own stays as it is (kernels=graphs would make each step one CUDA graph)"
    return None
