"""Models: how they are wrapped, how they are called, and what their losses are."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bigstep.doctor.facts import Forward, Loss, Weights, Wrap
from bigstep.doctor.observe import data
from bigstep.doctor.observe.clock import now
from bigstep.doctor.observe.digest import biggest, digest, rows, text_digest
from bigstep.doctor.observe.recorder import Recorder, replace

__all__ = ["called", "install", "names_of_parameters", "wrapped"]

called: dict[int, weakref.ref[nn.Module]] = {}
"""Modules that the program called directly, not from within another one, by id."""
wrapped: dict[int, weakref.ref[nn.Module]] = {}
"""The wrapper of each wrapped module, by the id of the inner module."""
_begun: set[int] = set()
"""Modules that were called in training, by id."""
_inside = threading.local()
going_back: list[int] = []
"""Not empty while a backward runs, on any thread: a module called then is recomputed, as in checkpointing."""
_evaluated: dict[int, int] = {}
"""Calls outside training, by loader."""
_LOSSES = (
    "cross_entropy",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "binary_cross_entropy_with_logits",
    "binary_cross_entropy",
)


def install(recorder: Recorder) -> None:
    """Observe direct calls of modules, wrappers, and the usual criteria."""
    replace(nn.Module, "__call__", lambda original: _observed_call(recorder, original))
    wrapper = nn.parallel.DistributedDataParallel
    replace(wrapper, "__init__", lambda original: _observed_wrap(recorder, original))
    for name in _LOSSES:
        replace(F, name, lambda original: _observed_loss(recorder, original))


def _observed_call(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: nn.Module, *arguments: Any, **named: Any) -> Any:  # noqa: N807
        seen = getattr(_inside, "depth", 0) or going_back or recorder.looking
        if seen or torch.compiler.is_compiling() or _is_criterion(self):
            return original(self, *arguments, **named)
        if recorder.enough:
            recorder.stop()
        training = self.training and torch.is_grad_enabled()
        look = recorder.detailed or (not training and _is_new_evaluation())
        before = _look(recorder, self, arguments, named, training) if look else None
        _inside.depth = 1
        began = now()
        try:
            return original(self, *arguments, **named)
        finally:
            _inside.depth = 0
            recorder.tally.forward_s += now() - began
            if training and torch.is_autocast_enabled("cpu"):
                recorder.tally.autocast = str(torch.get_autocast_dtype("cpu")).removeprefix("torch.")
            if training and torch.cuda.is_available() and torch.is_autocast_enabled("cuda"):
                recorder.tally.autocast = str(torch.get_autocast_dtype("cuda")).removeprefix("torch.")
            if before is not None:
                _tell(recorder, before)
            elif training:
                tensor = biggest([arguments, named])
                recorder.tally.samples += len(tensor) if tensor is not None else 0

    return __call__


def _is_new_evaluation() -> bool:
    """Whether this is among the first batches of a loader that a model is evaluated on; later ones tell nothing new."""
    count = _evaluated[data.last_loader] = _evaluated.get(data.last_loader, 0) + 1
    return count <= 3


def _is_criterion(module: nn.Module) -> bool:
    """Whether a module has nothing to train: a loss, an activation, a transform."""
    return next(module.parameters(), None) is None


def _look(
    recorder: Recorder, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], training: bool
) -> tuple[nn.Module, bool, str, Tensor | None, bytes, str]:
    with recorder.quietly():
        if id(module) not in called:
            called[id(module)] = weakref.ref(module)
        if training and id(module) not in _begun:
            _begun.add(id(module))
            weights, buffers = digest(module.parameters()), digest(module.buffers())
            recorder.write(Weights(parameters=weights, buffers=buffers, line=recorder.line()))
        tensor = biggest([arguments, named])
        return module, training, recorder.line(), tensor, torch.get_rng_state().numpy().tobytes(), _route(module)


def _tell(recorder: Recorder, before: tuple[nn.Module, bool, str, Tensor | None, bytes, str]) -> None:
    module, training, line, tensor, state, route = before
    samples = len(tensor) if tensor is not None else 0
    with recorder.quietly():
        drew = torch.get_rng_state().numpy().tobytes() != state
        inner = getattr(module, "module", module)
        recorder.write(
            Forward(
                module=type(inner if route == "wrapped" else module).__name__,
                training=training,
                route=route,
                loader=data.last_loader,
                rows=rows(tensor),
                samples=samples,
                generator=text_digest(state) if drew else "",
                line=line,
            )
        )
    if training:
        recorder.tally.samples += samples


def _route(module: nn.Module) -> str:
    if isinstance(module, nn.parallel.DistributedDataParallel) or hasattr(module, "_get_fsdp_state"):
        return "wrapped"
    if any(type(base).__name__ == "FullyShardedDataParallel" for base in [module]):
        return "wrapped"
    reference = wrapped.get(id(module))
    return "past" if reference is not None and reference() is not None else "plain"


def _observed_wrap(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: nn.Module, module: nn.Module, *arguments: Any, **named: Any) -> None:  # noqa: N807
        line, own = recorder.line(), recorder.called_by_own()
        original(self, module, *arguments, **named)
        wrapped[id(module)] = weakref.ref(self)
        norms = sum(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in module.modules())
        synced = sum(isinstance(each, nn.SyncBatchNorm) for each in module.modules())
        recorder.write(
            Wrap(
                wrapper=type(self).__name__,
                own=own,
                parameters=sum(1 for p in module.parameters() if p.requires_grad),
                find_unused=bool(getattr(self, "find_unused_parameters", False)),
                broadcast_buffers=bool(getattr(self, "broadcast_buffers", True)),
                batch_norms=norms - synced,
                line=line,
            )
        )

    return __init__


def _observed_loss(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def criterion(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        if recorder.detailed and not recorder.looking and torch.is_grad_enabled() and isinstance(result, Tensor):
            target = named.get("target", arguments[1] if len(arguments) > 1 else None)
            if isinstance(target, Tensor) and result.requires_grad:
                with recorder.quietly():
                    ignored = named.get("ignore_index", -100)
                    whole = target.is_floating_point()
                    targets = target.numel() if whole else int((target != ignored).sum())
                    value = float(result.detach()) if result.dim() == 0 else 0.0
                    reduction = str(named.get("reduction", "mean"))
                    recorder.write(Loss(reduction=reduction, targets=targets, value=value, line=recorder.line()))
        return result

    return criterion


def names_of_parameters() -> dict[int, str]:
    """Return the name of every parameter of the models that were called, by id."""
    names: dict[int, str] = {}
    for reference in called.values():
        module = reference()
        if module is not None:
            for name, parameter in module.named_parameters():
                names.setdefault(id(parameter), name.removeprefix("module."))
    return names
