"""What the ranks of a world observe of a run: functions that run on every rank and return plain values.

They use the subject only through its functions and do not judge what they see; the properties do that. All take
(subject, own, trial), and every rank of the world must call the same one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from bigstep.check.subject import Own, Subject, Trial
from bigstep.data.sampler import Position, Step
from bigstep.engine.checkpoint import tensors_of
from bigstep.engine.evaluate import Evaluation
from bigstep.engine.ranks import Ranks
from bigstep.nested import leaves

__all__ = [
    "Beginning", "Gradient", "Journey", "Vectors", "accumulation", "beginning", "composed", "gradients", "journey",
    "journey_of", "present_ranks", "rates", "resumed",
]  # fmt: skip

Vectors = dict[str, NDArray[Any]]
"""Tensors by name. Only rank 0 sends them; the others send a hash, which is enough to tell whether they agree."""

EPOCHS = 5
"""Epochs whose samples are counted."""
PICTURES = 16
"""Samples whose augmentation is compared."""


def present_ranks() -> Ranks:
    """The rank of this process in its current world, and the size of that world."""
    return Ranks(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Ranks()


@dataclass(frozen=True)
class Beginning:
    """A rank before it is connected to the others."""

    weights: str
    """Hash of all parameters and buffers, by name."""
    order: tuple[tuple[str, tuple[int, ...]], ...]
    """Names and shapes of the parameters, as the exchange will get them."""
    sizes: tuple[int, int]
    """Samples of the training and the evaluation set."""
    epochs: tuple[tuple[tuple[int, ...], ...], ...]
    """For each of the first epochs, for each step, the samples of this rank."""
    pictures: tuple[tuple[str, ...], ...]
    """For each of the first two epochs, a hash of each of some samples as this rank sees it."""
    shared: int
    """Tokens by which neighbouring windows of a text overlap; 0 for other data."""


def beginning(subject: Subject, own: Own, trial: Trial) -> Beginning:
    """Start a run and look at it before any gradient."""
    longer = replace(trial, config=replace(trial.config, epochs=float(EPOCHS)))  # a fault may show only later
    run = subject.start(own, longer, present_ranks())
    model = subject.model(run)
    epochs: tuple[list[tuple[int, ...]], ...] = tuple([] for _ in range(EPOCHS))
    for step in subject.steps(run, Position()):
        if step.position.epoch < EPOCHS:
            epochs[step.position.epoch].append(tuple(subject.samples(run, step)))
    sizes = subject.sizes(run)
    chosen = list(range(min(PICTURES, sizes[0])))
    pictures = []
    for epoch in (0, 1):
        inputs, target = subject.batch(run, epoch, chosen)
        samples = zip(*leaves(inputs), strict=True)
        pictures.append(tuple(_hash([("", part) for part in sample]) for sample in samples))
    seen = Beginning(
        weights=_hash(sorted(tensors_of(model).items())),
        order=tuple((name, tuple(parameter.shape)) for name, parameter in model.named_parameters()),
        sizes=sizes,
        epochs=tuple(tuple(epoch) for epoch in epochs),
        pictures=tuple(pictures),
        shared=_shared_tokens(inputs, target),
    )
    subject.finish(run)
    return seen


def _shared_tokens(inputs: Any, target: Any) -> int:
    """How many tokens at the end of a window recur at the start of the next, where most windows overlap.

    >>> text = torch.arange(100) % 23
    >>> [_shared_tokens(text.unfold(0, 8, step), text[1:].unfold(0, 8, step)) for step in (8, 5)]
    [0, 3]
    """
    if not isinstance(inputs, Tensor) or inputs.ndim != 2 or inputs.is_floating_point() or len(inputs) < 3:
        return 0
    if not isinstance(target, Tensor) or target.shape[:2] != inputs.shape:
        return 0
    ends, follow = target[: len(inputs) - 1, -1], inputs[1 : len(target), 0]
    whole = ends >= 0  # the other windows end in padding
    if bool(whole.any()) and bool((ends[whole] == follow[whole]).all()):
        return 0  # each continues where the one before ended
    pairs = list(zip(inputs[:-1], inputs[1:], strict=True))
    for count in range(inputs.shape[1] - 1, 1, -1):
        if sum(bool((before[-count:] == after[:count]).all()) for before, after in pairs) > len(pairs) // 2:
            return count
    return 0


def rates(subject: Subject, own: Own, trial: Trial) -> list[tuple[int, float]]:
    """Samples seen before each step, and the rate of that step."""
    run = subject.start(own, trial, present_ranks())
    size = subject.sizes(run)[0]
    table = [
        (step.position.epoch * size + step.position.offset, subject.learning_rate(run, step))
        for step in subject.steps(run, Position())
    ]
    subject.finish(run)
    return table


@dataclass(frozen=True)
class Gradient:
    """The mean gradient of one step."""

    samples: int
    """In the step, over all ranks."""
    vectors: Vectors
    digest: str
    draws: tuple[float, ...]
    """At each forward of this rank, a number drawn from the generator that dropout uses."""
    drew: bool
    """Whether a forward itself drew from that generator."""
    unused: tuple[str, ...]
    """Trainable parameters that got no gradient."""


def gradients(subject: Subject, own: Own, trial: Trial) -> list[Gradient]:
    """The gradients of the first and of the last, incomplete step of an epoch, at the initial weights."""
    run = _connected(subject, own, trial)
    steps = [step for step in subject.steps(run, Position()) if step.position.epoch == 0]
    seen = [_gradient(subject, run, step) for step in (steps[0], steps[-1])]
    subject.finish(run)
    return seen


def _gradient(subject: Subject, run: Any, step: Step) -> Gradient:
    model = subject.model(run)
    draws: list[float] = []
    states: list[Tensor] = []
    drew: list[bool] = []

    def draw(*_: object) -> None:
        states.append(torch.get_rng_state())
        draws.append(float(torch.rand(())))
        torch.set_rng_state(states[-1])

    def look(*_: object) -> None:
        drew.append(not torch.equal(torch.get_rng_state(), states[-1]))

    handles = model.register_forward_pre_hook(draw), model.register_forward_hook(look)
    _clear(model)
    subject.gradient(run, step)
    for handle in handles:
        handle.remove()
    named = _gradients_of(model)
    unused = tuple(name for name, p in model.named_parameters() if p.requires_grad and p.grad is None)
    _clear(model)
    return Gradient(step.size, _vectors(named), _hash(named), tuple(draws), any(drew), unused)


def accumulation(subject: Subject, own: Own, trial: Trial) -> list[tuple[Vectors, Vectors]]:
    """On one rank, for a full and an uneven step: the accumulated gradient, and that of one forward of all samples."""
    run = _connected(subject, own, trial)
    model = subject.model(run)
    steps = [step for step in subject.steps(run, Position()) if step.position.epoch == 0]
    pairs = []
    for step in (steps[0], steps[-1]):
        _clear(model)
        subject.gradient(run, step)
        accumulated = _vectors(_gradients_of(model))
        _clear(model)
        subject.objective(run, *subject.batch(run, step.position.epoch, subject.samples(run, step))).backward()  # type: ignore[no-untyped-call]
        pairs.append((accumulated, _vectors(_gradients_of(model))))
        _clear(model)
    subject.finish(run)
    return pairs


@dataclass(frozen=True)
class Journey:
    """The steps of a run and its final state."""

    losses: tuple[float, ...]
    rates: tuple[float, ...]
    weights: Vectors
    digest: str
    """Of the weights."""
    statistics: Vectors
    """The model's buffers as an evaluation leaves them."""
    statistics_digest: str
    evaluation: Evaluation | None
    """None where the subject has none."""


def journey(subject: Subject, own: Own, trial: Trial, folder: Path) -> Journey:
    """The whole run, with a checkpoint written half way, in the middle of an epoch."""
    run = _connected(subject, own, trial)
    steps = list(subject.steps(run, Position()))
    # not at an epoch's first step, which would hide a checkpoint that forgets its place in the epoch
    inside = [index for index, step in enumerate(steps) if step.position.offset] or list(range(len(steps)))
    half = min(inside, key=lambda index: abs(index - len(steps) // 2))
    if subject.train is not None:
        return journey_of(subject, run, subject.train(run, steps[half].position.step, folder))
    path = _compose(subject, run, steps[:half])
    if subject.save:
        subject.save(run, steps[half].position, folder)
    return journey_of(subject, run, path + _compose(subject, run, steps[half:]))


def composed(subject: Subject, own: Own, trial: Trial) -> Journey:
    """The whole run, composed step by step of the subject's functions instead of by its loop."""
    run = _connected(subject, own, trial)
    return journey_of(subject, run, _compose(subject, run, subject.steps(run, Position())))


def resumed(subject: Subject, own: Own, trial: Trial, folder: Path) -> Journey:
    """The run from the checkpoint in `folder` to its end."""
    assert subject.load is not None
    run = _connected(subject, own, trial)
    position = subject.load(run, folder)
    if subject.train is not None:
        return journey_of(subject, run, subject.train(run, -1, None))
    return journey_of(subject, run, _compose(subject, run, subject.steps(run, position)))


def _connected(subject: Subject, own: Own, trial: Trial) -> Any:
    run = subject.start(own, trial, present_ranks())
    subject.connect(run)
    return run


def _compose(subject: Subject, run: Any, steps: Iterable[Step]) -> list[tuple[float, float]]:
    path = []
    for step in steps:
        rate = subject.learning_rate(run, step)
        part = torch.tensor(subject.gradient(run, step), dtype=torch.float64)
        subject.update(run)
        path.append((float(present_ranks().sum_(part)), rate))
    return path


def journey_of(subject: Subject, run: Any, path: list[tuple[float, float]]) -> Journey:
    """Describe a run whose steps are done, and finish it."""
    model = subject.model(run)
    weights = list(model.named_parameters())
    evaluation = subject.evaluate(run) if subject.evaluate else None
    # counters of forwards are left out: nothing reads them, and a rank with more workers counts more
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    end = Journey(
        losses=tuple(loss for loss, _ in path),
        rates=tuple(rate for _, rate in path),
        weights=_vectors(weights),
        digest=_hash(weights),
        statistics=_vectors(buffers),
        statistics_digest=_hash(buffers),
        evaluation=evaluation,
    )
    subject.finish(run)
    return end


def _gradients_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]


def _clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _vectors(named: Iterable[tuple[str, Tensor]]) -> Vectors:
    return {name: t.detach().double().numpy().copy() for name, t in named} if present_ranks().first else {}


def _hash(named: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
