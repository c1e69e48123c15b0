"""Train any module on any data set from Python, as `bigstep train` does from a shell; `load` reads what was trained."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bigstep import recipes
from bigstep.config import RunConfig
from bigstep.config.text import read_yaml
from bigstep.config.trust import names_code, require_trust
from bigstep.engine.build import Own
from bigstep.engine.learner import Loss
from bigstep.engine.measures import RESERVED, Metric
from bigstep.engine.observers.base import Observer
from bigstep.engine.observers.progress import Progress
from bigstep.engine.ranks import DeviceChoice, joined_ranks
from bigstep.engine.run import FitResult, Order, run
from bigstep.engine.scratch import scratch_folder
from bigstep.engine.weights import Loaded, load
from bigstep.errors import ConfigError, nearest

__all__ = ["FitResult", "Loaded", "fit", "load"]


def fit(
    config: RunConfig | str | Path,
    model: nn.Module | None = None,
    data: Any = None,
    loss: Loss | None = None,
    *,
    optimizer: torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    metrics: Mapping[str, Metric] | None = None,
    observers: Iterable[Observer] = (),
    out: Path | str | None = None,
    resume: bool = False,
    max_steps: int | None = None,
    device: DeviceChoice = "auto",
    progress: bool = False,
    trust: bool = False,
) -> FitResult:
    """Train as `config` says, with your own model, data or loss in place of those it names.

    The gradient of a step is the mean over the samples of all logical workers,
    g = 1/B * sum_w sum_(i in worker w) grad loss(x_i), with batch-norm statistics per worker; the result does not
    depend on the number of ranks beyond rounding. Under torchrun every rank calls this.

    Args:
        config: Everything that decides the path of the run; or the name of a recipe, or a YAML file, or
            `package.module:function` of your own that returns a configuration. For a recipe with other settings:
            `apply_settings(recipes.load("sony"), ["epochs=2"])`, from `bigstep.config.text`.
        model: A module that takes the first element of a sample (a tensor, or a dict or tuple of tensors); None builds
            the one that `config` names. Its weights are trained in place.
        data: (training set, evaluation set), each with `__len__` and `__getitem__` returning (input, target).
        loss: (output, target) -> mean loss over the samples; None is cross-entropy as `config.loss` says.
        optimizer: Your own, made with the model's parameters, or a function that makes it from them; its rate is set at
            every step as `config.lr` says.
        metrics: What else an evaluation reports, by name: (output, target) -> a mean over the samples; `accuracy` and
            the like replace the figure that would be reported.
        observers: What else observes the run, on the first rank (`bigstep.engine.observers.base.Observer`).
        out: The run folder; None keeps no records.
        resume: Continue the run in `out`.
        max_steps: Stop after this many steps in all.
        device: cpu, cuda, shared (several ranks on one GPU), or auto for a GPU if there is one.
        progress: Show a live line.
        trust: Allow a YAML file to name code to run (`package.module:name`).

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
    config = config if isinstance(config, RunConfig) else _named(config, trust)
    if not isinstance(model, nn.Module | None):
        raise ConfigError(f"fit was given {model!r:.60} as a model; give a module, as in fit(config, Network(), data).")
    if isinstance(data, str | Path):
        raise ConfigError(
            f"fit was given {str(data)!r:.60} as data, but a set by name or path belongs to the configuration: leave "
            "it out, and set data.name or data.path there."
        )
    method = config.asynchronous.method
    if method != "none":
        raise ConfigError(f"fit is synchronous, but asynchronous.method is {method}; call train_{method} instead.")
    if resume and out is None:
        raise ConfigError("fit(resume=True) needs out=…, the folder of the run to continue.")
    if max_steps is not None and (not isinstance(max_steps, Integral) or max_steps < 1):
        raise ConfigError(f"fit was given max_steps={max_steps!r:.60}, but it must be a whole number of at least 1.")
    if taken := sorted(RESERVED.intersection(metrics or {})):
        raise ConfigError(f"fit was given a metric {taken[0]!r}, which every run reports already; choose another name.")
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(joined_ranks(device))
        folder = Path(out or stack.enter_context(scratch_folder()))
        order = Order(config=config, folder=folder, resume=resume, max_steps=max_steps)
        watching = list(observers)
        if progress and ranks.first:
            watching.append(
                stack.enter_context(Progress(config.recipe, config.epochs, steps=max_steps, unit="samples"))
            )
        given = optimizer
        make = (lambda parameters: given) if isinstance(given, torch.optim.Optimizer) else given
        facts = run(order, ranks, watching, Own(model, data, loss, make, metrics or {}))
    return FitResult.of(facts)


def _named(given: str | Path, trust: bool) -> RunConfig:
    """Return the configuration of a recipe or of a YAML file."""
    if isinstance(given, str) and (recipes.exists(given) or names_code(given)):
        return recipes.load(given)
    if not isinstance(given, str | Path) or not Path(given).is_file():
        raise ConfigError(
            f"fit was given {str(given)!r}, which is neither a recipe ({nearest(str(given), recipes.known())}) nor a "
            "YAML file that can be read."
        )
    config = recipes.read(read_yaml(Path(given)), given, trusted=trust)
    require_trust(config.code.values(), given, trusted=trust)
    return config
