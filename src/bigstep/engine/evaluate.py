"""Evaluation: every sample once, on identical statistics, whatever the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bigstep.data.feed import Request
from bigstep.engine.build import Parts
from bigstep.engine.methods.synchronous import autocast

__all__ = ["Evaluation", "evaluate"]

_SAMPLES_PER_FORWARD = {"cpu": 250, "cuda": 2000}


@dataclass(frozen=True)
class Evaluation:
    """What a pass over the evaluation set showed; accuracy is None where outputs are not class scores."""

    accuracy: float | None
    loss: float
    samples: int


@torch.no_grad()
def evaluate(parts: Parts) -> Evaluation:
    """Evaluate the model on its whole evaluation set; every rank must call this at the same point.

    Batch-norm statistics are first averaged over all workers, so that all ranks evaluate one and the same network.
    """
    ranks, feed = parts.ranks, parts.test_feed
    parts.statistics.synchronize(ranks.sum_)
    parts.model.eval()
    batches = feed.evaluation_batches(_SAMPLES_PER_FORWARD[ranks.device.type])
    requests = (Request(0, indices) for indices in batches[ranks.rank :: ranks.size])
    totals = torch.zeros(4, dtype=torch.float64, device=ranks.device)  # samples, loss, correct, class scores
    for inputs, target in feed(requests):
        with autocast(parts):
            output = parts.model(inputs)
        count = len(target)
        totals[0] += count
        totals[1] += parts.evaluation_loss(output, target).double() * count
        if output.ndim == 2 and not target.is_floating_point() and target.ndim == 1:
            totals[2] += (output.argmax(1) == target).sum()
            totals[3] += count
    parts.model.train()
    samples, loss, correct, scored = ranks.sum_(totals).tolist()
    return Evaluation(correct / scored if scored else None, loss / samples, int(samples))
