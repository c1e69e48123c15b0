"""One step's gradient: the mean over all workers, whichever ranks host them.

Rank r runs its workers' samples, each weighted by ranks / batch, and the exchange inside the last backward takes the
mean over ranks; so every sample counts 1 / batch, in a full batch and in the incomplete last one of an epoch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bigstep.data.feed import Request
from bigstep.data.sampler import Step
from bigstep.engine.build import Parts
from bigstep.engine.diagnosis import gradients_are_finite, nonfinite_error
from bigstep.engine.methods.forwards import Forward, forwards_of
from bigstep.engine.methods.noise_probe import Probe, not_seen
from bigstep.norm import set_workers

__all__ = ["autocast", "begin_forward", "forwards_of_rank", "gradient_of", "is_measured", "requests_of"]

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}

_MEASURE_EVERY = 10
"""Steps between two measurements of the noise scale: each costs a copy of the gradient and two norms."""
_CUT_EVERY = 51_200
"""Samples between two at least, where a step is one forward on one rank: it is cut in two and runs without a graph."""


def requests_of(parts: Parts, steps: list[Step]) -> Iterator[Request]:
    """Yield what this rank asks of its feed for some steps of one epoch: one request a forward."""
    for step in steps:
        order = parts.sampler.order(step.position.epoch)
        for forward in forwards_of_rank(parts, step):
            yield Request(step.position.epoch, order[forward.start : forward.stop])


def gradient_of(parts: Parts, step: Step, batches: Iterator[tuple[Any, Any]]) -> tuple[Tensor, float]:
    """Leave the mean gradient of a step in the weights' `.grad`; return this rank's part of the loss and data wait.

    All ranks must call this for every step, also those that have no samples in it.
    """
    forwards = forwards_of_rank(parts, step)
    objective = parts.parallel or parts.objective
    loss = torch.zeros((), dtype=torch.float64, device=parts.ranks.device)
    waited_s, seen, inputs = 0.0, 0, None
    parts.pair = not_seen(parts.ranks.device) if is_measured(parts, step) else None
    probe: Probe | None = None
    for index, forward in enumerate(forwards):
        inputs, target, wait_s = begin_forward(parts, step, forward, seen, batches)
        waited_s += wait_s
        is_last, weight = index == len(forwards) - 1, parts.ranks.size * forward.size / step.size
        is_probed = parts.pair is not None and forward.first_worker == 0
        if is_probed and is_last and parts.exchange is not None:
            parts.exchange.keep_own()  # behind the backward there is only the mean over ranks
        with contextlib.nullcontext() if is_last or parts.parallel is None else parts.parallel.no_sync():
            with autocast(parts):
                weighted = objective(inputs, target, weight)
            parts.scaler.scale(weighted).backward()
        if is_probed:
            probe = Probe(_own_gradients(parts, is_last), forward.size, step.size, weight)
        loss += weighted.detach()
        seen += forward.workers
    if not forwards and parts.parallel is not None:
        parts.scaler.scale(objective(None, None, 0.0)).backward()
    if probe is not None:
        scale = parts.scaler.scale(torch.ones((), device=parts.ranks.device)) if parts.scaler.is_enabled() else 1.0
        parts.pair = probe.compare([parameter.grad for parameter in _trained(parts)], scale)
    if parts.exchange is None:
        _settle_alone(parts)
    if _gradient_is_good(parts, step, inputs):
        parts.statistics.end_step(seen / step.active)
    return loss / parts.ranks.size, waited_s


def begin_forward(
    parts: Parts, step: Step, forward: Forward, seen: int, batches: Iterator[tuple[Any, Any]]
) -> tuple[Any, Any, float]:
    """Make ready for a forward, `seen` workers of this step being done; return input, target and the wait for them."""
    asked = time.perf_counter()
    inputs, target = next(batches)
    waited_s = time.perf_counter() - asked
    parts.statistics.begin_forward(seen, forward.workers)
    if parts.samples_per_forward > 1:  # else every forward holds one worker
        set_workers(parts.model, forward.workers)
    _seed(parts, step, forward)
    return inputs, target, waited_s


def _settle_alone(parts: Parts) -> None:
    """Do to the gradient of a single rank what several do in their exchange."""
    if parts.rank_adagrad is not None:
        for parameter in parts.model.parameters():
            if parameter.grad is not None:
                parts.rank_adagrad(parameter, parameter.grad)
    if parts.owed:
        for name, parameter in parts.objective.named_parameters():
            if name in parts.owed and parameter.grad is not None:
                # flat as DDP had it: in the order of the parameter's memory
                late = parts.owed[name].to(parameter.grad).as_strided(parameter.size(), parameter.stride())
                parameter.grad.add_(late)
        parts.owed = {}


def _gradient_is_good(parts: Parts, step: Step, inputs: Any) -> bool:
    """Whether the gradient can be used; the same on all ranks, since they hold the same gradient.

    If not, the run stops, or the step is dropped: without gradients an optimizer leaves the weights alone. On a GPU
    only `skip` looks at every step, since looking waits for the device; there the loss tells a little later.
    """
    skip = parts.config.nonfinite == "skip"
    if parts.scaler.is_enabled() or (parts.ranks.device.type == "cuda" and not skip):
        return True
    if gradients_are_finite(parts.model):
        return True
    if not skip:
        raise nonfinite_error(parts.model, inputs, parts.ranks, step.position.step + 1, parts.optimizer)
    parts.skipped += 1
    parts.optimizer.zero_grad()
    return False


def forwards_of_rank(parts: Parts, step: Step) -> list[Forward]:
    """Return the forwards that this rank runs in a step: two at least if it is measured and this rank is alone."""
    forwards = forwards_of(step, parts.ranks.rank, parts.ranks.size, parts.samples_per_forward)
    if parts.ranks.size == 1 and len(forwards) == 1 and is_measured(parts, step):
        forwards = forwards_of(step, 0, 1, -(-step.active // 2) * (step.size // step.active))
    return forwards


def is_measured(parts: Parts, step: Step) -> bool:
    """Whether the noise scale is measured in a step: the same on all ranks, and if the run is resumed.

    It cannot be where all samples are one worker's, nor where the exchange hands out something else than the mean.
    """
    if step.active < 2 or not (parts.exchange is None or parts.exchange.gives_the_mean):
        return False
    batch, every = step.workers * step.local_batch, _MEASURE_EVERY
    if parts.ranks.size == 1 and batch <= parts.samples_per_forward:
        every = max(every, _CUT_EVERY // batch)
    return step.position.step % every == 0


def _trained(parts: Parts) -> list[torch.nn.Parameter]:
    return [parameter for parameter in parts.model.parameters() if parameter.requires_grad]


def _own_gradients(parts: Parts, exchanged: bool) -> list[Tensor | None]:
    """Return what this rank's forwards have left so far, also behind the exchange."""
    if not exchanged:
        return [parameter.grad for parameter in _trained(parts)]
    assert parts.exchange is not None, "one forward on one rank is cut in two where it is measured"
    own = parts.exchange.take_own()
    return [own.get(parameter) for parameter in _trained(parts)]


def _seed(parts: Parts, step: Step, forward: Forward) -> None:
    """Tie dropout and the like to (seed, step, worker), so that they do not depend on the number of ranks.

    The generators are seeded directly: `torch.manual_seed` also prepares devices that are not there, at a cost that
    shows beside a small forward.
    """
    seed = (parts.config.seed * 1_000_003 + step.position.step) * 1_000_003 + forward.first_worker
    torch.default_generator.manual_seed(seed)
    if parts.ranks.device.type == "cuda":
        torch.cuda.manual_seed(seed)


def autocast(parts: Parts) -> contextlib.AbstractContextManager[Any]:
    """Return the context of a forward in the run's precision."""
    dtype = _AUTOCAST.get(parts.config.precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(parts.ranks.device.type, dtype)
