"""Put a ResNet on the fused kernels in place: same modules, same state dict, fewer passes over memory."""

from __future__ import annotations

import copy
import itertools
import math
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bigstep.errors import ConfigError
from bigstep.gpu.batch_norm import Norm, fused_norm, fused_norm_pool
from bigstep.gpu.max_pool import max_pool2
from bigstep.gpu.pointwise import global_mean, pointwise, stem_convolution
from bigstep.gpu.tensor_lists import global_norm

__all__ = ["Report", "optimize", "set_groups"]

GROUPS = "bigstep_groups"
"""Attribute of a batch norm: the number of workers whose samples one call holds."""


@dataclass
class Report:
    """What `optimize` did."""

    fused: list[str] = field(default_factory=list)
    """Names of the modules whose batch norms are fused with the operations after them."""
    left: dict[str, str] = field(default_factory=dict)
    """Names of the blocks and batch norms that were left unchanged, and why."""

    def __str__(self) -> str:
        lines = [f"fused {len(self.fused)} modules: {', '.join(self.fused) or 'none'}"]
        lines += [f"left {name}: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


def optimize(model: nn.Module, *, groups: int | None = None) -> Report:
    """Fuse batch norms with ReLU, residuals and the stem's pooling in a ResNet of torchvision, timm or bigstep.

    In any other model, fuse blocks that compute what a ResNet's do, and each batch norm with the ReLU after it in an
    `nn.Sequential`.

    The model is converted to channels_last in place and its blocks' `forward` is replaced; parameters, buffers, their
    names and the state dict stay as they are. Modules that are not recognised keep their own forward. So do blocks
    whose batch norms have hooks, since fused blocks no longer call batch norms and activations as modules.

    Parts do not tell what is done with them, so copies of a block and of the network are run first, on the CPU in
    float64: they are fused only if outputs, gradients and buffers stay the same, in training and at evaluation.

    Args:
        model: Any module; blocks are recognised by their parts (conv1, bn1, conv2, bn2, ..., downsample) and the trial.
        groups: Number of workers whose samples one call holds, each with its own statistics; None keeps the number that
            each batch norm has (its attribute `workers` if it has one, else 1).

    Returns:
        What was fused, what was left, and why.

    >>> from bigstep.models.resnet import resnet18
    >>> model = resnet18(classes=10, channels=3, image_size=32)
    >>> names = list(model.state_dict())
    >>> report = optimize(model)
    >>> len(report.fused), report.left  # eight blocks and the stem
    (9, {})
    >>> names == list(model.state_dict())
    True
    """
    report = Report()
    covered: set[nn.Module] = set()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch types only the other forms
    for name, block in model.named_modules():
        if not _looks_like_block(block):
            continue
        reason = _why_not_block(block) or _why_not_same(block, _fuse_block, side=4)
        if reason is None:
            _fuse_block(block)
            report.fused.append(name)
        else:
            report.left[name] = reason
        covered.update(module for module in block.modules() if isinstance(module, nn.BatchNorm2d))
    if (reason := _why_not_network(model) or _why_not_same(model, _fuse_network, side=32)) is None:
        _fuse_network(model)
        report.fused.append("stem")
        covered.add(model.get_submodule("bn1"))
    elif hasattr(model, "layer1") and report.fused:
        report.left["stem"] = reason
    for name, sequence in model.named_modules():
        if isinstance(sequence, nn.Sequential):
            for index, norm, relu in _norms_before_relu(sequence, covered, model):
                norm.forward = types.MethodType(_norm_relu, norm)  # type: ignore[method-assign]  # the point
                relu.forward = types.MethodType(_nothing, relu)  # type: ignore[method-assign]  # as above
                report.fused.append(f"{name}.{index}" if name else str(index))
                covered.add(norm)
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d) and module not in covered:
            report.left.setdefault(name, "it is not in a block that is recognised")
    for module in model.modules():
        if isinstance(module, nn.MaxPool2d) and _is_pool(module, size=2, padding=0):
            module.forward = types.MethodType(_pool2, module)  # type: ignore[method-assign]  # as above
    if groups is not None:
        set_groups(model, groups)
    return report


def set_groups(model: nn.Module, groups: int) -> None:
    """Set for every batch norm the number of workers whose samples one call holds; only fused ones use it.

    >>> set_groups(nn.BatchNorm2d(3), 0)
    Traceback (most recent call last):
    ...
    bigstep.errors.ConfigError: set_groups was given groups=0; it must be at least 1.
    """
    if groups < 1:
        raise ConfigError(f"set_groups was given groups={groups}; it must be at least 1.")
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            setattr(module, GROUPS, groups)


def groups_of(model: nn.Module) -> tuple[int, ...]:
    """The groups of every batch norm, in order; they are fixed in a CUDA graph."""
    return tuple(_groups(module) for module in model.modules() if isinstance(module, nn.BatchNorm2d))


def _groups(norm: nn.BatchNorm2d) -> int:
    return int(getattr(norm, GROUPS, getattr(norm, "workers", 1)))


def _norm(module: nn.BatchNorm2d) -> Norm:
    training = module.training or module.running_mean is None
    momentum = module.momentum
    assert momentum is not None, "checked by _why_not_norm"
    return Norm(
        module.weight,
        module.bias,
        module.running_mean,
        module.running_var,
        groups=_groups(module) if training else 1,
        momentum=momentum,
        eps=module.eps,
        training=training,
    )


def _absent(module: object) -> bool:
    return module is None or isinstance(module, nn.Identity)


def _why_not_norm(norm: object) -> str | None:
    if not isinstance(norm, nn.BatchNorm2d):
        return f"{type(norm).__name__} is not a BatchNorm2d"
    if type(norm) is not nn.BatchNorm2d and not hasattr(norm, "workers"):
        return f"{type(norm).__name__} may compute something other than BatchNorm2d"
    if norm._forward_hooks or norm._forward_pre_hooks:
        return "a batch norm has hooks, which would no longer fire"
    if norm.weight is None:
        return "a batch norm has no weight and bias"
    if norm.momentum is None:
        return "a batch norm keeps a cumulative average (momentum=None)"
    return None


def _looks_like_block(module: nn.Module) -> bool:
    return all(hasattr(module, part) for part in ("conv1", "bn1", "conv2", "bn2", "downsample"))


def _pairs(block: nn.Module) -> Iterator[tuple[nn.Module, nn.BatchNorm2d]]:
    """Convolutions and their norms, in order."""
    for index in ("1", "2", "3"):
        if hasattr(block, "conv" + index):
            yield getattr(block, "conv" + index), getattr(block, "bn" + index)


def _why_not_block(block: nn.Module) -> str | None:
    for extra in ("se", "aa", "drop_block", "drop_path"):
        if not _absent(getattr(block, extra, None)):
            return f"it has {extra}"
    for act in ("relu", "act1", "act2", "act3"):
        if hasattr(block, act) and not isinstance(getattr(block, act), nn.ReLU):
            return f"its activation {act} is {type(getattr(block, act)).__name__}, not ReLU"
    shortcut = block.downsample
    if shortcut is not None and not (isinstance(shortcut, nn.Sequential) and len(shortcut) >= 2):
        return "its shortcut is not a convolution and a batch norm in sequence"
    norms: list[object] = [norm for _, norm in _pairs(block)]
    if isinstance(shortcut, nn.Sequential):
        norms.append(shortcut[-1])
    return next((reason for norm in norms if (reason := _why_not_norm(norm)) is not None), None)


def _why_not_network(model: nn.Module) -> str | None:
    if not all(hasattr(model, part) for part in ("conv1", "bn1", "maxpool", "layer1", "layer2", "layer3", "layer4")):
        return "the model is not a ResNet with conv1, bn1, maxpool and layer1 to layer4"
    if (reason := _why_not_norm(model.bn1)) is not None:
        return reason
    act = getattr(model, "act1", getattr(model, "relu", None))
    if not isinstance(act, nn.ReLU):
        return f"the stem's activation is {type(act).__name__}, not ReLU"
    if not (hasattr(model, "forward_head") or (hasattr(model, "avgpool") and hasattr(model, "fc"))):
        return "the model has no avgpool and fc"
    if getattr(model, "grad_checkpointing", False):
        return "it uses gradient checkpointing"
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        if not isinstance(stage, nn.Sequential) or not all(hasattr(block, "bigstep_fused") for block in stage):
            return "not every block is fused"
    return None


def _fuse_block(block: Any) -> None:
    block.forward = types.MethodType(_block_alone, block)
    block.bigstep_fused = True
    for conv in block.modules():
        if isinstance(conv, nn.Conv2d) and _is_pointwise(conv, stride=1):
            conv.forward = types.MethodType(_pointwise, conv)  # type: ignore[method-assign]  # the point of this module


def _fuse_network(model: nn.Module) -> None:
    model.forward = types.MethodType(_network, model)  # type: ignore[method-assign]  # as above


def _why_not_same(module: nn.Module, fuse: Callable[[nn.Module], None], side: int) -> str | None:
    """None if a copy of the module computes the same after `fuse`, else the reason; leaves no trace in the module."""
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            plain = copy.deepcopy(module).to("cpu", torch.float64)
            for norm in plain.modules():
                if getattr(norm, "workers", 1) > 2:
                    norm.workers = 2  # type: ignore[assignment]  # two show what many do, in a fraction of the time
            _draw_weights(plain)
            fused = copy.deepcopy(plain)
            fuse(fused)
            for training in (True, False):
                for got, want in zip(_trial(fused, side, training), _trial(plain, side, training), strict=True):
                    away = global_norm(torch._foreach_sub(got, want), torch.float64)
                    if not away <= 1e-6 * global_norm(want, torch.float64):
                        return "its forward computes something other than a ResNet's"
    except Exception as error:  # whatever a forward that we do not know raises on such an input
        return f"it cannot be tried ({(str(error).strip() or repr(error)).splitlines()[0]})"
    return None


@torch.no_grad()
def _draw_weights(module: nn.Module) -> None:
    """Give random weights and buffers: as they begin, zeros would hide a whole branch, and ones a factor."""
    for weight in module.parameters():
        weight.uniform_(-1, 1).mul_(math.sqrt(len(weight) / weight.numel()) if weight.dim() > 1 else 1.0)
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)  # variances are among them


def _trial(module: nn.Module, side: int, training: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Output and buffers of a module after one step with random images, and its gradients."""
    module.train(training)
    torch.default_generator.manual_seed(0)  # torch.manual_seed would reach the GPUs too
    planes = next(conv.in_channels for conv in module.get_submodule("conv1").modules() if isinstance(conv, nn.Conv2d))
    images = torch.randn(4 * math.lcm(*groups_of(module)), planes, side, side, dtype=torch.float64, requires_grad=True)
    output = module(images)
    read = [images, *(param for param in module.parameters() if param.requires_grad)]
    gradients = torch.autograd.grad(output.square().mean(), read, materialize_grads=True)
    return [output.detach(), *(buffer.double() for buffer in module.buffers())], list(gradients)


def _norms_before_relu(
    sequence: nn.Sequential, covered: set[nn.Module], model: nn.Module
) -> Iterator[tuple[int, nn.BatchNorm2d, nn.ReLU]]:
    """Batch norms followed by a ReLU that is used nowhere else in the model, since that ReLU will do nothing."""
    places = [child for module in model.modules() for child in module._modules.values()]
    for index, (norm, relu) in enumerate(itertools.pairwise(sequence)):
        if not (isinstance(norm, nn.BatchNorm2d) and isinstance(relu, nn.ReLU)) or norm in covered:
            continue
        alone = not relu._forward_hooks and sum(child is relu for child in places) == 1
        if alone and _why_not_norm(norm) is None:
            yield index, norm, relu


def _norm_relu(norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    _count_batches(norm)
    return fused_norm(x, _norm(norm))[0]


def _nothing(relu: nn.ReLU, x: Tensor) -> Tensor:
    """Replaces the forward of a ReLU that the norm before it now computes."""
    return x


def _is_pointwise(conv: nn.Conv2d, stride: int) -> bool:
    plain = type(conv) is nn.Conv2d and conv.bias is None and conv.groups == 1 and conv.padding == (0, 0)
    return plain and conv.kernel_size == (1, 1) and conv.stride == (stride, stride)


def _pointwise(conv: nn.Conv2d, x: Tensor) -> Tensor:
    return pointwise(x, conv.weight)


def _shortcut_stride(block: nn.Module) -> int:
    """2 if the shortcut begins with a 1x1 convolution of stride 2, which needs only a quarter of its input."""
    shortcut = block.downsample
    first = shortcut[0] if isinstance(shortcut, nn.Sequential) else None
    return 2 if isinstance(first, nn.Conv2d) and _is_pointwise(first, stride=2) else 1


def _block(block: nn.Module, x: Tensor, skip: Tensor, fork: int) -> tuple[Tensor, Tensor]:
    """One residual block; x feeds the branch, and skip, the same tensor or its subsample, the shortcut."""
    *inner, (last_conv, last_norm) = _pairs(block)
    for conv, norm in inner:
        x = fused_norm(conv(x), _norm(norm))[0]
    x = last_conv(x)
    shortcut = block.downsample
    if not isinstance(shortcut, nn.Sequential):
        return fused_norm(x, _norm(last_norm), residual=skip, fork=fork)
    first = shortcut[0]
    # with a stride of 2, skip has been subsampled already
    skip = pointwise(skip, first.weight) if _shortcut_stride(block) == 2 else first(skip)  # type: ignore[arg-type]  # of a convolution
    skip = shortcut[1:-1](skip)
    return fused_norm(x, _norm(last_norm), other=skip, other_norm=_norm(shortcut[-1]), fork=fork)  # type: ignore[arg-type]  # checked by _why_not_block


def _block_alone(block: nn.Module, x: Tensor) -> Tensor:
    """A fused block inside a model that is not fused as a whole."""
    _count_batches(block)
    stride = _shortcut_stride(block)
    return _block(block, x, x[:, :, ::stride, ::stride], fork=0)[0]


def _network(model: Any, x: Tensor) -> Tensor:
    """A whole ResNet; where branch and shortcut read the same tensor, its two gradients are added as they are read."""
    _count_batches(model)
    blocks = [block for stage in (model.layer1, model.layer2, model.layer3, model.layer4) for block in stage]
    forks = [*map(_shortcut_stride, blocks), 0]
    x = _stem(model.conv1, x.contiguous(memory_format=torch.channels_last))
    pool = model.maxpool
    if _is_pool(pool, size=3, padding=1):
        x, skip = fused_norm_pool(x, _norm(model.bn1), fork=forks[0])
    elif _absent(pool):
        x, skip = fused_norm(x, _norm(model.bn1), fork=forks[0])
    else:
        x = pool(fused_norm(x, _norm(model.bn1))[0])
        skip = x[:, :, :: forks[0], :: forks[0]]
    for block, fork in zip(blocks, forks[1:], strict=True):
        x, skip = _block(block, x, skip, fork)
    if hasattr(model, "forward_head"):
        return model.forward_head(x)  # type: ignore[no-any-return]  # modules are untyped in torch
    usual = isinstance(model.avgpool, nn.AdaptiveAvgPool2d) and model.avgpool.output_size in (1, (1, 1))
    return model.fc(global_mean(x) if usual else torch.flatten(model.avgpool(x), 1))  # type: ignore[no-any-return]  # as above


def _stem(conv: nn.Module, x: Tensor) -> Tensor:
    if type(conv) is not nn.Conv2d or conv.bias is not None or conv.groups != 1 or isinstance(conv.padding, str):
        return conv(x)  # type: ignore[no-any-return]  # modules are untyped in torch
    if conv.padding_mode != "zeros" or conv.dilation != (1, 1):
        return conv(x)  # type: ignore[no-any-return]  # modules are untyped in torch
    return stem_convolution(x, conv.weight, conv.stride, conv.padding)  # type: ignore[arg-type]  # pairs of integers


def _pool2(pool: nn.MaxPool2d, x: Tensor) -> Tensor:
    return max_pool2(x)


def _is_pool(pool: nn.Module, size: int, padding: int) -> bool:
    """Whether a module is a plain max-pooling of stride 2 with this window and padding."""
    return (
        isinstance(pool, nn.MaxPool2d)
        and not pool.return_indices
        and (
            (pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode) == (size, 2, padding, 1, False)
        )
    )


def _count_batches(module: nn.Module) -> None:
    """Advance the batch norms' counters in one launch; the fused functions do not."""
    norms = [m for m in module.modules() if isinstance(m, nn.BatchNorm2d) and m.training]
    counters = [m.num_batches_tracked for m in norms if m.num_batches_tracked is not None]
    if counters:
        torch._foreach_add_(counters, 1)
