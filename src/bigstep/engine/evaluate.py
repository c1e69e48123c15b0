"""Evaluation: every sample once, on identical statistics, whatever the number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from bigstep.data.feed import Feed, Request
from bigstep.engine.learner import Loss
from bigstep.engine.measures import Evaluation, Metric, Totals
from bigstep.engine.methods.base import Method
from bigstep.engine.precision import Precision
from bigstep.engine.ranks import Ranks
from bigstep.engine.views import views_of

__all__ = ["Evaluation", "Evaluator"]

_SAMPLES_PER_FORWARD = {"cpu": 250, "cuda": 2000}
_SCORES_PER_FORWARD = {"cpu": 2**23, "cuda": 2**29}


@dataclass(frozen=True)
class Evaluator:
    """Evaluates what a method has trained on a whole evaluation set."""

    feed: Feed
    loss: Loss
    ranks: Ranks
    precision: Precision
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    classes: int = 0
    """The most scores per token that the model gives; 0 asks the data, which may have to be read for it."""
    views: int = 1
    """Views of each image, whose outputs are averaged for a second accuracy; with 1 there is none."""

    @property
    def _samples_per_forward(self) -> int:
        """As many as keep a device busy, or fewer if the scores of all their tokens would fill its memory."""
        device, length = self.ranks.device.type, self.feed.length
        scores = length * (self.classes or self.feed.num_classes) if length else 1
        return max(1, min(_SAMPLES_PER_FORWARD[device], _SCORES_PER_FORWARD[device] // scores))

    @torch.no_grad()
    def __call__(self, method: Method) -> Evaluation:
        """Return the figures reached; every rank must call this at the same point."""
        ranks, feed = self.ranks, self.feed
        batches = feed.evaluation_batches(self._samples_per_forward)[ranks.rank :: ranks.size]
        totals = Totals(ranks.device, self.metrics, tokens=feed.length > 0)
        averaged = Totals(ranks.device)
        if feed.waits is not None:
            feed.waits.forget()  # the waits of an evaluation are not reported
        with method.evaluation() as model, _algorithms_by_rule():
            for inputs, target in feed(Request(0, indices) for indices in batches):
                with self.precision.autocast():
                    output = model(inputs)
                totals.add(output, target, self.loss(output, target))
                if self.views > 1:
                    with self.precision.autocast():
                        output = sum(weight * model(view).float() for weight, view in views_of(inputs, self.views))
                    averaged.add(output, target, self.loss(output, target))
        for indices in batches:
            totals.add_bytes(feed.source.bytes(indices))
        ranks.sum_(totals.sums)
        evaluation = totals.evaluation()
        if self.views == 1:
            return evaluation
        ranks.sum_(averaged.sums)
        accuracy = averaged.evaluation().accuracy
        more = {} if accuracy is None else {"accuracy_views": accuracy}
        return replace(evaluation, more={**evaluation.more, **more})


@contextlib.contextmanager
def _algorithms_by_rule() -> Iterator[None]:
    """Let cuDNN choose algorithms by rule: timing them pays off over the many steps of a run, not for a few batches."""
    cudnn = torch.backends.cudnn
    by_clock, cudnn.benchmark = cudnn.benchmark, False
    try:
        yield
    finally:
        cudnn.benchmark = by_clock
