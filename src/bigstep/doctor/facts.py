"""What an observed program did, as plain facts: a dataclass per kind of event, a file of JSON lines per process.

The observers write these inside the program; the findings read them afterwards, without torch.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import ClassVar

__all__ = ["KINDS", "Event"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened; `line` is the line of the user's own code that made it happen, as file:number."""

    kind: ClassVar[str] = ""
    line: str = ""

    def to_json(self) -> str:
        """Return the event as one line of JSON; fields that hold their default are left out."""
        defaults = _DEFAULTS[self.kind]
        told = {name: value for name, value in self.__dict__.items() if value != defaults[name]}
        return json.dumps({"kind": self.kind} | told)


@dataclass(frozen=True, kw_only=True)
class Start(Event):
    """A process began, with rank and world size from its environment; joining a group may correct both."""

    kind = "start"
    pid: int
    rank: int
    world: int
    torch: str = ""


@dataclass(frozen=True, kw_only=True)
class Group(Event):
    """The process joined the process group."""

    kind = "group"
    rank: int
    world: int
    backend: str = ""
    asked: str = ""
    """The backend that the program asked for, if another one was used instead."""


@dataclass(frozen=True, kw_only=True)
class Seed(Event):
    """A generator was seeded."""

    kind = "seed"
    generator: str
    value: int
    own: bool = True
    """By the user's own code, not by a framework."""


@dataclass(frozen=True, kw_only=True)
class Wrap(Event):
    """A module was wrapped for data-parallel training."""

    kind = "wrap"
    wrapper: str
    parameters: int
    own: bool = True
    """By the user's own code, not by a framework."""
    find_unused: bool = False
    broadcast_buffers: bool = True
    batch_norms: int = 0


@dataclass(frozen=True, kw_only=True)
class Loader(Event):
    """A data loader was iterated for the first time."""

    kind = "loader"
    loader: int
    dataset: str
    samples: int = -1
    """Samples in the data set; -1 if it has no length."""
    drawn: int = -1
    """Samples that this rank would read in one pass; -1 if unknown."""
    batch: int = -1
    workers: int = 0
    sampler: str = ""
    shuffle: bool = False
    replacement: bool = False
    iterable: bool = False
    padded: int = 0
    """Samples that the sampler repeats so that every rank gets the same number."""
    drop_last: bool = False
    seed: int = -1
    """Of the sampler's order; -1 if it has none."""


@dataclass(frozen=True, kw_only=True)
class Pass(Event):
    """A loader started another pass over its data."""

    kind = "pass"
    loader: int
    number: int
    sampler_epoch: int = -1


@dataclass(frozen=True, kw_only=True)
class Batch(Event):
    """A loader returned a batch."""

    kind = "batch"
    loader: int
    number: int
    """Of the pass, not of the batch."""
    indices: tuple[int, ...] = ()
    """Of the samples in the underlying data set, where they are known."""
    rows: tuple[str, ...] = ()
    """A short digest of each sample's content."""
    wait_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Forward(Event):
    """A model was called, from outside any other model."""

    kind = "forward"
    module: str
    training: bool
    route: str = "plain"
    """wrapped: through DDP or FSDP; past: the inner module of a wrapper was called directly; plain: no wrapper."""
    loader: int = -1
    rows: tuple[str, ...] = ()
    samples: int = 0
    generator: str = ""
    """Digest of the CPU generator's state before the call, if the call drew from it."""


@dataclass(frozen=True, kw_only=True)
class Weights(Event):
    """The weights when training began: one digest for all parameters, one for all buffers."""

    kind = "weights"
    parameters: str
    buffers: str = ""


@dataclass(frozen=True, kw_only=True)
class Loss(Event):
    """A criterion was evaluated in training; `targets` counts those that it does not ignore."""

    kind = "loss"
    reduction: str
    targets: int
    value: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Backward(Event):
    """Gradients were computed from a scalar."""

    kind = "backward"
    value: float
    factor: float = 1.0
    """The factor by which the loss was multiplied after it was formed, without the scale of a GradScaler."""
    summed: bool = False
    """Whether the loss is a sum over samples, not a mean."""
    synchronised: bool = True
    """False inside `no_sync`."""
    anew: bool = False
    """The gradients of the previous backward were cleared without an update in between."""


@dataclass(frozen=True, kw_only=True)
class Collective(Event):
    """A collective was called by hand."""

    kind = "collective"
    operation: str
    target: str = "other"
    """gradient, parameter, buffer or other."""
    values: int = 0
    reduce: str = ""
    """SUM, AVG, …"""
    group: tuple[int, ...] = ()
    """The global ranks of its process group; empty for the group of all."""
    done: bool = False
    """An event is written before the call and one after it; a call that never returned has only the first."""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Clip(Event):
    """Gradients were clipped."""

    kind = "clip"
    most: float
    scaled: bool = False
    """While they still carried the scale of a GradScaler."""
    by_value: bool = False


@dataclass(frozen=True, kw_only=True)
class Update(Event):
    """An optimizer took a step."""

    kind = "update"
    optimizer: str
    number: int
    which: int = 0
    """The optimizer's number, in the order in which the program made them: several may have the same name."""
    rates: tuple[float, ...] = ()
    base: float = 0.0
    """The rate of the first group before any schedule."""
    samples: int = 0
    micro_steps: int = 0
    norms: tuple[float, ...] = ()
    """Norm of each parameter's gradient as the step used it; -1 where there was none, or a sharded or sparse one."""
    local: float = 0.0
    """A linear functional of this rank's own gradient, before any exchange."""
    used: float = 0.0
    """The same functional of the gradient that the step used, before it was clipped."""
    clipped: bool = False
    sharded: bool = False
    strange: int = 0
    """Parameters of the optimizer that belong to no model that was called."""
    kept: int = 0
    """Parameters whose gradient, used by the optimizer's previous update, was still there at every backward since."""
    grown: int = 0
    """Parameters whose gradient was clipped and then added to by another backward."""
    untouched: int = 0
    """Trainable parameters that got no gradient from this rank's own backward passes."""
    names: tuple[str, ...] = ()
    after: str = ""
    """Digest of the weights after the step."""
    input_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    exchange_s: float = 0.0
    """In collectives called by hand."""
    step_s: float = 0.0
    total_s: float = 0.0
    """Since the end of the previous step."""
    syncs: int = 0
    """Values fetched from tensors one by one (`item`, `tolist`, …)."""
    sync_line: str = ""
    sync_s: float = 0.0
    stateful: bool = False
    """The optimizer keeps more than the weights: momentum, second moments."""
    half: bool = False
    """Weights in float16 are updated directly."""
    scaled: bool = False
    """Through a GradScaler."""
    autocast: str = ""
    """The dtype of autocast around the forward, if any."""


@dataclass(frozen=True, kw_only=True)
class Schedule(Event):
    """A scheduler was stepped."""

    kind = "schedule"
    scheduler: str
    position: int
    horizon: int = 0
    """Steps until its shape ends; 0 if no end is known."""
    stepped: int = 1
    rate: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Worker(Event):
    """A loader process, or a rank that loads samples itself (worker -1), drew random numbers for a sample."""

    kind = "worker"
    loader: int
    worker: int
    generator: str
    state: str
    """Digest of the generator's state before it drew."""


@dataclass(frozen=True, kw_only=True)
class Save(Event):
    """A checkpoint was written."""

    kind = "save"
    path: str
    holds: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    """What the program carries from step to step but the file does not hold: optimizer, scheduler, scaler."""
    resumable: bool = False
    """Whether the file looks meant for resuming: it holds an optimizer or a counter."""
    updates: int = 0


@dataclass(frozen=True, kw_only=True)
class Load(Event):
    """A checkpoint was read."""

    kind = "load"
    path: str


@dataclass(frozen=True, kw_only=True)
class State(Event):
    """Something that a rank carries, as it was when its process ended: weights, buffers, averages."""

    kind = "state"
    what: str
    """parameters, buffers, or average: a copy of the model kept beside it."""
    name: str
    digest: str
    updates: int = 0


@dataclass(frozen=True, kw_only=True)
class Held(Event):
    """Which samples a data set holds: digests of their content, or, for a subset, #index in the whole data set."""

    kind = "held"
    loader: int
    rows: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Wrote(Event):
    """A file outside the scratch copy was opened for writing, removed or renamed."""

    kind = "wrote"
    path: str
    refused: bool = False


@dataclass(frozen=True, kw_only=True)
class Spawn(Event):
    """The program starts its ranks itself."""

    kind = "spawn"
    ranks: int
    changed: bool = False


@dataclass(frozen=True, kw_only=True)
class End(Event):
    """The process ended: stopped by the examination, finished by itself, or failed."""

    kind = "end"
    reason: str
    message: str = ""


KINDS: dict[str, type[Event]] = {kind.kind: kind for kind in Event.__subclasses__()}
_DEFAULTS = {name: {f.name: f.default for f in dataclasses.fields(kind)} for name, kind in KINDS.items()}
