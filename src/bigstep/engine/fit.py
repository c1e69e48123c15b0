"""Train any module on any map-style data set from Python."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from bigstep.config import RunConfig
from bigstep.engine.build import Own
from bigstep.engine.learner import Loss
from bigstep.engine.observers.progress import Progress
from bigstep.engine.ranks import DeviceChoice, joined_ranks
from bigstep.engine.run import Order, run
from bigstep.errors import ConfigError

__all__ = ["FitResult", "fit"]


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What a run reached; `facts` is the object that `bigstep train --json` prints."""

    accuracy: float | None
    loss: float
    seconds: float
    steps: int
    weights_sha256: str
    facts: dict[str, Any]


def fit(
    config: RunConfig,
    model: nn.Module | None = None,
    data: tuple[Any, Any] | None = None,
    loss: Loss | None = None,
    *,
    out: Path | str | None = None,
    resume: bool = False,
    max_steps: int | None = None,
    device: DeviceChoice = "auto",
    progress: bool = False,
) -> FitResult:
    """Train as `config` says, with your own model, data or loss in place of those it names.

    The gradient of a step is the mean over the samples of all logical workers,
    g = 1/B * sum_w sum_(i in worker w) grad loss(x_i), with batch-norm statistics per worker; the result does not
    depend on the number of ranks beyond rounding. Under torchrun every rank calls this.

    Args:
        config: Everything that decides the path of the run.
        model: A module that takes the first element of a sample; None builds the one that `config` names. Its
            weights are trained in place.
        data: (training set, evaluation set), each with `__len__` and `__getitem__` returning (input, target).
        loss: (output, target) -> mean loss over the samples; None is cross-entropy as `config.loss` says.
        out: The run folder; None keeps no records.
        resume: Go on with the run in `out`.
        max_steps: Stop after this many steps in all.
        device: cpu, cuda, shared (several ranks on one GPU), or auto for a GPU where there is one.
        progress: Show a live line.

    Returns:
        Accuracy, loss, time, steps and a hash of the final weights.

    >>> import torch
    >>> from bigstep.config import LrConfig, WorkersConfig
    >>> inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    >>> data = torch.utils.data.TensorDataset(inputs, inputs @ torch.tensor([[1.0], [-2.0], [0.5]]))
    >>> rate = LrConfig(base=0.1, scaling="none")
    >>> config = RunConfig(workers=WorkersConfig(count=4, local_batch=4), epochs=60, lr=rate)
    >>> model = torch.nn.Linear(3, 1)
    >>> result = fit(config, model, (data, data), torch.nn.functional.mse_loss, device="cpu")
    >>> [round(weight, 2) for weight in model.weight[0].tolist()]
    [1.0, -2.0, 0.5]

    Reference: Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 3 (the mean over k workers).

    Differs from the paper: workers are logical, so any number of them runs on any number of processes.
    """
    method = config.asynchronous.method
    if method != "none":
        raise ConfigError(f"fit is synchronous, but asynchronous.method is {method}; call train_{method} instead.")
    if resume and out is None:
        raise ConfigError("fit(resume=True) needs out=…, the folder of the run to go on with.")
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(joined_ranks(device))
        folder = Path(out or stack.enter_context(tempfile.TemporaryDirectory()))
        order = Order(config=config, folder=folder, resume=resume, max_steps=max_steps)
        shown = [stack.enter_context(Progress(config.recipe, config.epochs))] if progress and ranks.first else []
        facts = run(order, ranks, shown, Own(model, data, loss))
    return FitResult(
        accuracy=facts["accuracy"],
        loss=facts["loss"],
        seconds=facts["seconds"],
        steps=facts["steps"],
        weights_sha256=facts["weights_sha256"],
        facts=facts,
    )
