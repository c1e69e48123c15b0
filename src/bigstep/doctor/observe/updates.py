"""From the loss to the update: backward, clipping, scaling, the optimizer's step."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as optim

from bigstep.doctor.facts import Backward, Clip, Update
from bigstep.doctor.observe import models
from bigstep.doctor.observe.clock import now
from bigstep.doctor.observe.digest import digest, functional, is_plain, norms
from bigstep.doctor.observe.recorder import Recorder, replace

__all__ = ["install", "optimizers", "remember", "scalers"]

optimizers: list[weakref.ref[Optimizer]] = []
scalers: list[weakref.ref[Any]] = []
_local: dict[int, Tensor] = {}
"""The functional of this rank's own gradient of each parameter, by id, before any exchange."""
_began: dict[int, dict[str, Any]] = {}
"""What was seen of an optimizer just before its step."""
_SUM = 2
"""Autograd's code for the reduction of a criterion by a sum; 0 stands for none, 1 for the mean."""
_unscaled: set[int] = set()
"""Optimizers whose gradients a scaler has divided by its scale, by id, until they step."""
_scaling: list[int] = []
_used: set[int] = set()
"""Parameters, by id, whose gradient an update has used, with no backward begun since."""
_kept: set[int] = set()
"""Parameters, by id, whose used gradient was still there at the beginning of every backward since."""
_cut: dict[int, Tensor] = {}
"""The functional, before clipping, of each gradient clipped since its last update, by id of the parameter."""
_grown: set[int] = set()
"""Parameters, by id, whose clipped gradient another backward has added to."""


def install(recorder: Recorder) -> None:
    """Observe everything between a loss and the weights it changes."""
    replace(torch.autograd, "backward", lambda original: _observed_backward(recorder, original))
    optim.register_optimizer_step_pre_hook(lambda o, args, kwargs: _before_step(recorder, o, args, kwargs))
    optim.register_optimizer_step_post_hook(lambda o, args, kwargs: _after_step(recorder, o))
    if recorder.settings.only_time:
        return
    replace(Optimizer, "add_param_group", lambda original: _observed_group(recorder, original))
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        replace(nn.utils, name, lambda original: _observed_clip(recorder, original))
    nn.utils.clip_grad.clip_grad_norm_ = nn.utils.clip_grad_norm_
    nn.utils.clip_grad.clip_grad_value_ = nn.utils.clip_grad_value_
    replace(torch.amp.GradScaler, "scale", lambda original: _observed_scale(original))
    replace(torch.amp.GradScaler, "step", lambda original: _observed_scaler(original))
    replace(torch.amp.GradScaler, "unscale_", lambda original: _observed_unscale(original))
    replace(torch.amp.GradScaler, "update", lambda original: _observed_scaler_update(original))


def _observed_backward(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def backward(tensors: Any, *arguments: Any, **named: Any) -> Any:
        if models.going_back:  # a part of another one, as for each segment in reentrant checkpointing
            return original(tensors, *arguments, **named)
        root = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
        if recorder.detailed and not recorder.looking and isinstance(root, Tensor) and root.numel() == 1:
            with recorder.quietly():
                there = _with_gradients()
                _begin_backward(there)
                synchronised = all(_synchronises(reference()) for reference in models.wrapped.values())
                scale = next((s.get_scale() for reference in scalers if (s := reference()) is not None), 1.0)
                factor, summed = _factor(root)
                recorder.write(
                    Backward(
                        value=float(root.detach()) / scale,
                        factor=factor / scale,
                        summed=summed,
                        synchronised=synchronised,
                        anew=recorder.tally.micro_steps > 0 and not there,
                        line=recorder.line(),
                    )
                )
        models.going_back.append(1)
        began = now()
        try:
            return original(tensors, *arguments, **named)
        finally:
            models.going_back.pop()
            recorder.tally.backward_s += now() - began
            recorder.tally.micro_steps += 1

    return backward


def _begin_backward(there: set[int]) -> None:
    """Drop the marks of used and clipped gradients that have been cleared: a gradient there later is a new one."""
    _kept.update(_used)
    _used.clear()
    for marked in (_kept, _grown):
        marked &= there
    for cleared in _cut.keys() - there:
        del _cut[cleared]


def _with_gradients() -> set[int]:
    """Return the ids of the parameters of all optimizers that hold a gradient which is not zero."""
    alive = [optimizer for reference in optimizers if (optimizer := reference()) is not None]
    parameters = [p for optimizer in alive for group in optimizer.param_groups for p in group["params"]]
    held = norms([_own_values(p.grad) for p in parameters])
    return {id(p) for p, norm in zip(parameters, held, strict=True) if norm not in (-1.0, 0.0)}  # NaN counts


def _own_values(gradient: Tensor | None) -> Tensor | None:
    """Return this rank's shard of a sharded gradient, and the stored values of a sparse one."""
    own = getattr(gradient, "_local_tensor", gradient)
    return own._values() if isinstance(own, Tensor) and own.is_sparse else own


def _synchronises(wrapper: nn.Module | None) -> bool:
    return bool(getattr(wrapper, "require_backward_grad_sync", True))


def _factor(root: Tensor) -> tuple[float, bool]:
    """Return the product of the numbers that the loss was multiplied with or divided by, and whether it is a sum."""
    factor, node = 1.0, root.grad_fn
    for _ in range(8):
        name = node.name() if node is not None else ""
        if name not in ("MulBackward0", "DivBackward0"):
            break
        assert node is not None
        saved = [getattr(node, f"_saved_{side}", None) for side in ("other", "self")]
        scale = next((s for s in saved if isinstance(s, Tensor) and s.numel() == 1), None)
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        if scale is None or len(parents) != 1:
            break
        number = float(scale)
        factor = factor * number if name == "MulBackward0" else factor / number if number else factor
        node = parents[0]
    kind = "" if node is None else node.name()
    return factor, kind.startswith("SumBackward") or getattr(node, "_saved_reduction", 1) == _SUM


def _observed_group(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def add_param_group(self: Optimizer, group: Any) -> Any:
        result = original(self, group)
        if not any(reference() is self for reference in optimizers):
            optimizers.append(weakref.ref(self))
        for parameter in self.param_groups[-1]["params"]:
            if parameter.is_leaf and parameter.requires_grad and is_plain(parameter):
                parameter.register_post_accumulate_grad_hook(lambda p: _note_local(recorder, p))
        return result

    return add_param_group


def _note_local(recorder: Recorder, parameter: Tensor) -> None:
    if recorder.detailed and is_plain(parameter.grad):
        if id(parameter) in _cut:
            _grown.add(id(parameter))
        with recorder.quietly(), torch.no_grad():
            _local[id(parameter)] = functional(parameter.grad)  # type: ignore[arg-type]


def _observed_clip(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    by_value = original.__name__ == "clip_grad_value_"

    def clip(parameters: Any, *arguments: Any, **named: Any) -> Any:
        limit = named.get("max_norm", named.get("clip_value", arguments[0] if arguments else 0.0))
        kept = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        waiting = any(reference() is not None for reference in scalers) and not _is_unscaled(kept)
        if math.isinf(float(limit)):  # this only asks for the norm
            return original(kept, *arguments, **named)
        recorder.tally.clipped = True
        if recorder.detailed:
            with recorder.quietly(), torch.no_grad():
                plain = {id(p): p.grad for p in kept if p.grad is not None and is_plain(p.grad)}
                _cut.update({i: functional(gradient) for i, gradient in plain.items() if i not in _cut})
        recorder.write(Clip(most=float(limit), scaled=waiting, by_value=by_value, line=recorder.line()))
        return original(kept, *arguments, **named)

    return clip


def _is_unscaled(parameters: Iterable[Tensor]) -> bool:
    """Whether a scaler has unscaled the gradients of these parameters, or any gradients if no optimizer holds them."""
    own = set(map(id, parameters))
    holders = {id(o) for reference in optimizers if (o := reference()) is not None and own & _parameters(o)}
    return bool(_unscaled & holders) if holders else bool(_unscaled)


def _observed_scale(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale(self: Any, outputs: Any) -> Any:
        if self.is_enabled():
            remember(scalers, self)
        return original(self, outputs)

    return scale


def _observed_scaler(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, optimizer: Any, *arguments: Any, **named: Any) -> Any:
        _scaling.append(1)
        try:
            return original(self, optimizer, *arguments, **named)
        finally:
            _scaling.pop()
            _unscaled.discard(id(optimizer))

    return step


def _observed_unscale(original: Callable[..., Any]) -> Callable[..., Any]:
    def unscale_(self: Any, optimizer: Any) -> Any:
        result = original(self, optimizer)
        _unscaled.add(id(optimizer))
        return result

    return unscale_


def _observed_scaler_update(original: Callable[..., Any]) -> Callable[..., Any]:
    def update(self: Any, *arguments: Any, **named: Any) -> Any:
        _unscaled.clear()
        return original(self, *arguments, **named)

    return update


def remember(shelf: list[weakref.ref[Any]], thing: Any) -> None:
    """Put a thing on a shelf once, by a weak reference that does not keep it alive."""
    if not any(reference() is thing for reference in shelf):
        shelf.append(weakref.ref(thing))


def _sum(numbers: Iterable[Tensor]) -> float:
    return float(sum(numbers, torch.zeros((), dtype=torch.float64)))


def _is_part(optimizer: Optimizer) -> bool:
    """Whether another optimizer, in its own step, uses this one for a share of its parameters, as ZeRO does."""
    own = _parameters(optimizer)
    return any(own <= seen["parameters"] for other, seen in _began.items() if other != id(optimizer))


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _before_step(recorder: Recorder, optimizer: Optimizer, arguments: Any, named: Any) -> Any:
    """Look at the gradient that the step is about to use; a closure computes it only inside the step."""
    if recorder.enough:
        recorder.stop()
    if _is_part(optimizer):
        return None
    closure = named.get("closure", arguments[1] if len(arguments) > 1 else None)
    if closure is None:
        _look(recorder, optimizer)
        return None

    def closure_then_look(*given: Any, **more: Any) -> Any:
        result = closure(*given, **more)
        _look(recorder, optimizer)
        return result

    if "closure" in named:
        return arguments, named | {"closure": closure_then_look}
    return (arguments[0], closure_then_look, *arguments[2:]), named


def _look(recorder: Recorder, optimizer: Optimizer) -> None:
    groups = optimizer.param_groups
    seen: dict[str, Any] = {"rates": tuple(float(group["lr"]) for group in groups if "lr" in group)}
    seen["base"] = float(groups[0].get("initial_lr", groups[0].get("lr", 0.0)))
    if recorder.detailed:
        with recorder.quietly(), torch.no_grad():
            parameters = [p for group in groups for p in group["params"]]
            gradients = [p.grad for p in parameters]
            plain = {id(p): p.grad for p in parameters if p.grad is not None and is_plain(p.grad)}
            names = models.names_of_parameters()
            seen |= {
                "which": next((i for i, reference in enumerate(optimizers) if reference() is optimizer), 0),
                "norms": norms(gradients),
                "names": tuple(names.get(id(p), "") for p in parameters),
                "strange": sum(id(p) not in names for p in parameters) if names else 0,
                "kept": sum(id(p) in _kept for p in parameters),
                "grown": sum(id(p) in _grown for p in parameters),
                "untouched": sum(p.requires_grad and id(p) not in _local for p in parameters),
                "used": _sum(_cut[i] if i in _cut else functional(gradient) for i, gradient in plain.items()),
                "local": _sum(_local[id(p)] for p in parameters if id(p) in _local),
                "sharded": any(p.grad is not None and not is_plain(p.grad) for p in parameters),
                "half": any(p.dtype is torch.float16 for p in parameters),
            }
    seen["parameters"] = _parameters(optimizer)
    seen["began"] = now()
    _began[id(optimizer)] = seen


def _after_step(recorder: Recorder, optimizer: Optimizer) -> None:
    ended = now()
    seen = _began.pop(id(optimizer), None)
    if seen is None:
        return
    own = seen.pop("parameters")
    for marked in (_used, _kept, _grown):
        marked -= own
    for done in own & _cut.keys():
        del _cut[done]
    step_s = ended - seen.pop("began")
    tally = recorder.tally
    if recorder.detailed:
        _used.update(own)
        with recorder.quietly(), torch.no_grad():
            seen["after"] = digest(p for group in optimizer.param_groups for p in group["params"])
            seen["stateful"] = any(
                isinstance(v, Tensor) and v.numel() > 1 for state in optimizer.state.values() for v in state.values()
            )
    recorder.write(
        Update(
            optimizer=type(optimizer).__name__,
            number=recorder.updates,
            samples=tally.samples,
            micro_steps=tally.micro_steps,
            clipped=tally.clipped,
            input_s=tally.input_s,
            forward_s=tally.forward_s,
            backward_s=tally.backward_s,
            exchange_s=tally.exchange_s,
            step_s=step_s,
            total_s=ended - tally.began,
            syncs=tally.syncs,
            sync_line=tally.sync_line,
            sync_s=tally.sync_s,
            autocast=tally.autocast,
            scaled=bool(_scaling),
            line=recorder.line() if recorder.detailed or recorder.updates < 10 else "",
            **seen,
        )
    )
    _local.clear()
    recorder.count_update(ended)
