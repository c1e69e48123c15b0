"""Steps on one GPU as CUDA graphs, the update included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bigstep.data.sampler import Step
from bigstep.engine.build import Parts
from bigstep.engine.fusing import why_plain
from bigstep.engine.methods.noise_probe import Probe
from bigstep.engine.methods.synchronous import begin_forward, forwards_of_rank, is_measured
from bigstep.errors import ConfigError
from bigstep.gpu import GraphedStep

__all__ = ["graph", "graphed_step"]


def graph(parts: Parts) -> None:
    """Let the steps of a run on one GPU be graphs, if they can; call this once its state is in place."""
    kernels = parts.kernels
    if kernels is None:
        return
    if parts.ranks.size > 1:
        kernels.reasons.append("no graphs, since several ranks exchange gradients within a step")
    elif parts.config.nonfinite == "skip":
        kernels.reasons.append("no graphs, since nonfinite=skip looks at every gradient")
    elif parts.rank_adagrad is not None or parts.owed:
        kernels.reasons.append("no graphs, since something is done to gradients between backward and update")
    elif why_plain(parts.config, own=parts.own_model) is None:
        try:
            parts.graphed = GraphedStep(
                parts.model, parts.objective.loss, parts.optimizer, precision=parts.config.precision
            )
            parts.graphed.load_scaler_state(parts.scaler.state_dict())
        except ConfigError as error:
            kernels.reasons.append(f"no graphs: {error}")
    kernels.graphs = parts.graphed is not None


def graphed_step(parts: Parts, step: Step, batches: Iterator[tuple[Any, Any]]) -> tuple[Tensor, float]:
    """Take a whole step, the update included; return the loss and the wait for data. One rank only.

    A batch that fits one forward is one graph. A larger one, and the incomplete last one of an epoch, goes through in
    parts without a graph, where the host is not what limits it.
    """
    assert parts.graphed is not None, "graphed_step needs a GraphedStep"
    forwards = forwards_of_rank(parts, step)
    loss = torch.zeros((), dtype=torch.float64, device=parts.ranks.device)
    waited_s, seen = 0.0, 0
    parts.pair, probe = None, None
    for forward in forwards:
        inputs, target, wait_s = begin_forward(parts, step, forward, seen, batches)
        waited_s += wait_s
        share = forward.size / step.size
        loss += parts.graphed(inputs, target) if share == 1 else parts.graphed.add(inputs, target, share) * share
        if seen == 0 and is_measured(parts, step):
            probe = Probe(parts.graphed.gathered, forward.size, step.size, share)
        seen += forward.workers
    if len(forwards) > 1:
        if probe is not None:
            parts.pair = probe.compare(parts.graphed.gathered, parts.graphed.scale)
        parts.graphed.update()
    parts.statistics.end_step(seen / step.active)
    return loss, waited_s
