"""The gradients of several ranks under DDP and the configured exchange; and what they leave to a run on one rank."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigstep.config import ExchangeConfig
from bigstep.engine.learner import Learner
from bigstep.engine.methods.base import Note
from bigstep.engine.precision import Precision
from bigstep.engine.ranks import Ranks
from bigstep.errors import ConfigError, RunError
from bigstep.exchange import BucketTuner, Exchange, sum_owed
from bigstep.norm import set_workers
from bigstep.tables.codecs import SETTINGS

__all__ = ["Debt", "Parallel", "make_exchange"]

# newer releases of torch renamed the argument and warn about the old name
_ddp_arguments = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _ddp_arguments else "broadcast_buffers"


def make_exchange(
    config: ExchangeConfig,
    timeout_s: float = 600.0,
    prepare: Callable[[Tensor, Tensor], None] | None = None,
    parts: int = 0,
) -> Exchange:
    """Return the exchange that a configuration names, not yet attached."""
    return Exchange(
        collective=config.collective,
        codec=config.codec,
        grid=config.grid if config.grid == "auto" else (config.grid[0], config.grid[1]),
        warmup_steps=config.warmup_steps,
        error_feedback=config.error_feedback,
        double_buffer=config.double_buffer,
        timeout=timeout_s,
        prepare=prepare,
        parts=parts,
        **{name: getattr(config, name) for name in SETTINGS},
    )


class Parallel:
    """DDP around a learner's objective, with an exchange under it; every rank must make it.

    DDP regroups its buckets after its first backward. A sum over ranks is rounded in an order that depends on where
    a gradient lies in its bucket, so the regrouping is triggered here, by a backward whose gradient is thrown away:
    every step of the run, resumed or not, then sees the same buckets and gives the same bits. With `bucket_mb: auto`
    the size of the buckets depends on the clock, and so do the last bits.

    A network may leave some parameters without a gradient. A trial backward shows whether it does; if so, DDP looks for
    them in every step, and one that no rank has used stays without a gradient, as on one rank.

    Args:
        learner: What is trained.
        ranks: Those that share it.
        precision: Of forwards.
        config: The exchange.
        example: A small (inputs, target) to trigger the regrouping with.
        steps_taken: How many steps the run has taken; asked when the state of a single rank is loaded.
        parts: Parts of a step's sum, if every worker adds one of its own; 0 for the mean over ranks.
    """

    def __init__(
        self,
        learner: Learner,
        ranks: Ranks,
        precision: Precision,
        config: ExchangeConfig,
        example: tuple[Any, Any],
        steps_taken: Callable[[], int],
        parts: int = 0,
    ):
        self._learner, self._ranks, self._precision, self._steps_taken = learner, ranks, precision, steps_taken
        self.exchange = make_exchange(config, ranks.timeout_s, learner.rank_adagrad, parts)
        self._double_buffer = config.double_buffer
        self._late_counts = 1.0  # the weight of the gradient that double buffering has in flight
        self._tuner: BucketTuner | None = None
        self._ddp: DistributedDataParallel | None = None
        self._searches = self._find_unused(example)
        if self._searches and (parts or config.double_buffer):
            name, what = min(self._searches), "exact sums" if parts else "exchange.double_buffer=true"
            raise ConfigError(
                f"{name.removeprefix('model.')} gets no gradient, but several ranks with {what} need one for every "
                "parameter: set its requires_grad to False, or remove it from the model."
            )
        if config.bucket_mb == "auto":
            self._tuner = BucketTuner(self._attach_new)
        else:
            self._ddp = self._wrap(config.bucket_mb)
            self._rehearse(self._ddp, example)
            self.exchange.attach(self._ddp)

    @property
    def ddp(self) -> DistributedDataParallel:
        """The DDP object of the next step: the tuner's, if a tuner chooses the size of buckets."""
        ddp = self._tuner.ddp if self._tuner else self._ddp
        assert ddp is not None
        return ddp

    @property
    def steady(self) -> bool:
        """Whether the size of buckets is settled."""
        return self._tuner is None or self._tuner.done

    def ended(self) -> tuple[Note, ...]:
        """Let the tuner see the end of a step; report what it chose."""
        tuner = self._tuner
        if tuner is None or tuner.done:
            return ()
        tuner.step_ended()
        if not tuner.done:
            return ()
        return (Note(f"Buckets of {tuner.bucket_mb:g} MB are the fastest here.", {"bucket_sizes": tuner.table}),)

    def require_complete(self, steps: int) -> None:
        """Refuse a backward, after `steps` others, that left out a parameter: DDP would wait for it for ever."""
        if self.exchange.steps == steps:
            raise RunError(
                "Some parameters got a gradient in one forward and none in another, which several ranks cannot "
                "exchange: let every forward use them (add 0 * parameter.sum() where they are left out), or start one "
                "rank."
            )

    def counts_of(self, counts: float) -> float:
        """Return the weight of the gradient at hand: under double buffering it is that of the step before."""
        if not self._double_buffer:
            return counts
        late, self._late_counts = self._late_counts, counts
        return late

    def state_dict(self) -> dict[str, Any] | None:
        """Gather what the ranks carry; a gradient in flight is saved times its weight."""
        state = self.exchange.gather_state()
        if state is not None and self._late_counts != 1:
            state["late"] = {name: piece * self._late_counts for name, piece in state["late"].items()}
        return state

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue with what the ranks carried, however many they were."""
        self._late_counts = 1.0
        if state is not None:
            self.exchange.load_state_dict(state)
        else:
            self.exchange.steps = self._steps_taken()  # one rank has taken them: the warm-up does not start again

    def _wrap(self, bucket_mb: float) -> DistributedDataParallel:
        device = self._ranks.device
        keep_local = {_SYNC_BUFFERS: False}  # each rank's batch-norm statistics are its own until an evaluation
        return DistributedDataParallel(
            self._learner.objective,
            device_ids=[device] if device.type == "cuda" else None,
            bucket_cap_mb=bucket_mb,
            process_group=self._ranks.group,
            init_sync=False,  # weights come from the seed; their hash was compared
            gradient_as_bucket_view=True,
            find_unused_parameters=bool(self._searches),
            **keep_local,  # type: ignore[arg-type]
        )

    def _attach_new(self, bucket_mb: float) -> DistributedDataParallel:
        ddp = self._wrap(bucket_mb)
        self.exchange.attach(ddp)
        return ddp

    def _find_unused(self, example: tuple[Any, Any]) -> set[str]:
        """Return the names of parameters that a forward leaves without a gradient, on some rank."""
        objective = self._learner.objective
        with self._undone():
            self._backward(objective, example)
            unused = {name for name, p in objective.named_parameters() if p.requires_grad and p.grad is None}
        found = self._ranks.gather(unused)
        objective.unused = set.intersection(*found)
        return set().union(*found)

    def _rehearse(self, ddp: DistributedDataParallel, example: tuple[Any, Any]) -> None:
        """Run one small forward and backward."""
        with self._undone():
            self._backward(ddp, example)

    def _backward(self, objective: nn.Module, example: tuple[Any, Any]) -> None:
        with self._precision.autocast():
            loss = objective(*example, 1.0)
        loss.backward()

    @contextlib.contextmanager
    def _undone(self) -> Iterator[None]:
        """Undo what a forward and backward change."""
        model: nn.Module = self._learner.model
        buffers = [buffer.clone() for buffer in model.buffers()]
        model.train()
        set_workers(model, 1)
        yield
        self._learner.clear()
        with torch.no_grad():
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)


class Debt:
    """What several ranks had not delivered when their run was saved; on one rank it is added to the next gradient.

    >>> carried = {"sent_by_rank": {}, "owned_by_all": {"w": torch.tensor([0.5]), "v": torch.tensor([2.0])}}
    >>> debt, gradient = Debt(), torch.zeros(1)
    >>> debt.load_state_dict({"carried": carried, "late": {}})
    >>> debt.pay({"w": gradient, "v": None})  # v has no gradient in this step
    >>> gradient, debt.open
    (tensor([0.5000]), True)
    """

    def __init__(self) -> None:
        self._owed: dict[str, Tensor] = {}

    @property
    def open(self) -> bool:
        """Whether something is owed."""
        return bool(self._owed)

    def pay(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Add what is owed to gradients, by the objective's names of parameters; the rest stays owed."""
        for name in list(self._owed):
            gradient = gradients.get(name)
            if gradient is not None:
                late = self._owed.pop(name)
                # flat as DDP had it: in the order of the parameter's memory, a complex number as two real ones
                values = torch.view_as_real(gradient) if gradient.is_complex() else gradient
                values.add_(late.to(values).as_strided(values.size(), values.stride()))

    def state_dict(self) -> None:
        """A single rank owes nothing from step to step."""

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take over what several ranks owed."""
        self._owed = sum_owed(state) if state is not None else {}
