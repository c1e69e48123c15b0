"""What an exchange does to known gradients: no network, no data, only the exchange itself."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigstep.check.observe import present_ranks
from bigstep.check.subject import Own, Subject, Trial

__all__ = ["ROUNDS", "Exchanged", "exchanged"]

ROUNDS = 8
"""Backward passes: DDP regroups its buckets after the first, and a lossy codec must carry something by the last."""


@dataclass(frozen=True)
class Exchanged:
    """How far an exchange was from the plain mean over ranks; all relative to the largest gradient that came in."""

    error: float
    """The worst of any one round."""
    unaccounted: float
    """|sum of results + what is still owed - sum of means|: what was lost or invented."""
    carries: bool
    """Whether the exchange reports that it owes anything."""
    digest: str
    """Of all results on this rank. Only rank 0 knows what is owed, and hence what is unaccounted for."""


def exchanged(subject: Subject, own: Own, trial: Trial) -> Exchanged:
    """Send gradients of the shapes of the model's parameters through the exchange."""
    assert subject.exchange is not None
    ranks = present_ranks()
    run = subject.start(own, trial, ranks)
    form = _Form(subject.model(run))
    subject.finish(run)
    parallel = DistributedDataParallel(form, bucket_cap_mb=0.05)  # several buckets even for a small model
    # residuals must not fade while they are counted
    exchange = subject.exchange(replace(trial.config.exchange, decay=1.0))
    exchange.attach(parallel)
    totals = [torch.zeros_like(parameter) for parameter in form.parameters()]
    error, largest, digest = 0.0, 0.0, hashlib.sha256()
    for turn in range(ROUNDS):
        came_in = [_coefficients(form, turn, rank) for rank in range(ranks.size)]
        form.zero_grad()
        parallel(came_in[ranks.rank]).backward()
        for total, parameter, *parts in zip(totals, form.parameters(), *came_in, strict=True):
            mean = torch.stack(parts).mean(0)
            assert parameter.grad is not None
            error = max(error, _largest(parameter.grad - mean))
            largest = max(largest, _largest(torch.stack(parts)))
            digest.update(parameter.grad.numpy().tobytes())
            total += parameter.grad - mean
    owed = subject.owed(exchange)  # every rank takes part
    exchange.close()
    unaccounted = max(
        _largest(total.flatten() + owed.get(f"values.{i}", torch.zeros(())).double()) for i, total in enumerate(totals)
    )
    return Exchanged(
        error=error / largest,
        unaccounted=unaccounted / largest,
        carries=any(bool(value.any()) for value in owed.values()),
        digest=digest.hexdigest(),
    )


def _largest(tensor: Tensor) -> float:
    """The largest magnitude; infinite if any value is NaN."""
    return float(tensor.abs().max().nan_to_num(nan=math.inf, posinf=math.inf))


class _Form(nn.Module):
    """A linear form: the gradient of sum(values * coefficients) is the coefficients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        shapes = [parameter.shape for parameter in model.parameters() if parameter.requires_grad]
        self.values = nn.ParameterList(torch.zeros(shape, dtype=torch.float64) for shape in shapes)

    def forward(self, coefficients: list[Tensor]) -> Tensor:
        return torch.stack([(v * c).sum() for v, c in zip(self.values, coefficients, strict=True)]).sum()


def _coefficients(form: _Form, turn: int, rank: int) -> list[Tensor]:
    """Numbers that every rank can draw for every other, so that only the exchange itself communicates."""
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return [torch.randn(value.shape, generator=generator, dtype=torch.float64) for value in form.values]
