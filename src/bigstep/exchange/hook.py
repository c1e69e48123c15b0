"""The exchange as a DDP communication hook: collective x codec, overlapped with backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from bigstep.errors import ConfigError, RunError, require
from bigstep.exchange.bucket import Bucket, Transport
from bigstep.exchange.codecs.levels import exponent_above
from bigstep.exchange.codecs.piles import Piles, make_piles
from bigstep.exchange.double_buffer import DoubleBuffer
from bigstep.exchange.gradients import real_shape, require_dense, shape_as, shapes_of
from bigstep.exchange.piled import Piled, add_gradients
from bigstep.exchange.runner import Runner
from bigstep.exchange.transports import make_transports
from bigstep.exchange.world import World
from bigstep.tables.codecs import CODECS, check_pair, collectives_for, fill_settings

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

__all__ = ["Exchange"]

_ANOTHER_MODEL = "This Exchange was attached to another model, whose residuals it carries: make one for each model."


class Exchange:
    """How the gradients of a DistributedDataParallel model travel: collective x codec.

    The result is the mean over ranks, as with DDP alone. Works with gradient accumulation (`no_sync`), since DDP calls
    its hook only where it would have exchanged. Every rank must make the same Exchange and attach it at the same point.

    Args:
        collective: A name of `bigstep.tables.collectives`: ring (the backend's all-reduce), hierarchical, torus,
            halving, hybrid, or gather (an owner for each block, for codes that cannot be summed); by default the usual
            one for the codec.
        codec: A name of `bigstep.tables.codecs`.
        grid: X and Y of the torus; auto chooses rows of whole nodes (`choose_grid`).
        warmup_steps: Dense steps before the first one that loses information (with codecs that carry what they lose).
        error_feedback: Carry what a lossy codec lost into the next step.
        double_buffer: Hand back each gradient one backward late, so that its exchange overlaps with the next forward
            and backward; see `bigstep.exchange.double_buffer`.
        ranks_per_node: 0 takes torchrun's LOCAL_WORLD_SIZE if it is set, or else counts all ranks as one node.
        timeout: Seconds after which a collective that has not ended is an error.
        prepare: Called with each parameter and this rank's gradient of it, which it may change in place before anything
            is sent (`bigstep.optim.RankAdaGrad`, say); the caller saves what it carries.
        parts: Total number of parts of the sum, if ranks add several (`hold`); the result is then their sum, not the
            mean over ranks. With codec exact that sum has the same bits however the parts are spread over ranks.
        **settings: Of the codec, by the names in its table: `rank` of the approximation (powersgd).

    Example:
        Three lines in any program: `exchange = Exchange("torus", "fp16")`, `exchange.attach(ddp)`, and at the end
        `exchange.close()`. Combinations that cannot work are refused at once:

        >>> Exchange("torus", "onebit")
        Traceback (most recent call last):
        bigstep.errors.ConfigError: onebit codes cannot be summed on the wire: use collective=gather (got torus).

    Reference: Mikami et al., Massively Distributed SGD, 2018 (torus); Jia et al., 2018, and Goyal et al., 2017
    (hierarchical, halving); Akiba et al., 2017 (fp16); Seide et al., 2014 (1-bit).

    Differs from the papers: their collectives were parts of their frameworks; these are phases over any backend's
    process groups, and each class in `bigstep.exchange` says how it differs.
    """

    def __init__(
        self,
        collective: str | None = None,
        codec: str = "none",
        grid: Literal["auto"] | tuple[int, int] = "auto",
        *,
        warmup_steps: int = 0,
        error_feedback: bool = True,
        double_buffer: bool = False,
        ranks_per_node: int = 0,
        timeout: float = 300.0,
        prepare: Callable[[Tensor, Tensor], None] | None = None,
        parts: int = 0,
        **settings: float,
    ) -> None:
        collective = collectives_for(codec)[0] if collective is None else collective
        check_pair(collective, codec, double_buffer=double_buffer)
        require(
            not parts or (CODECS[codec].orderless and not double_buffer),  # else parts of two steps would be one sum
            f"A sum of {parts} parts needs a codec whose sums do not depend on order, and no double buffering: use "
            f"codec=exact and double_buffer=False (got codec={codec}, double_buffer={double_buffer}).",
        )
        self.collective, self.codec, self.grid = collective, codec, grid
        self.warmup_steps, self.ranks_per_node = warmup_steps, ranks_per_node
        self.error_feedback, self.settings = error_feedback, fill_settings(settings)
        self.timeout = timedelta(seconds=timeout)
        self.world: World | None = None
        """The ranks, once attached."""
        self.failure: RunError | None = None
        """The error that ended the exchange, if one has."""
        self.steps = 0
        """Backward passes so far; they decide when the warm-up ends."""
        self.parts = parts
        self._prepare = prepare
        self._piles: Piles | None = None  # the parts added so far to the sum of the next exchange
        self._backward: list[Future[Tensor]] = []  # the buckets of the backward under way
        self._transports: list[Transport] = []  # the warm-up's first, the last for all steps after it
        self._late = DoubleBuffer() if double_buffer else None
        self._loaded: dict[str, Any] | None = None  # a state loaded before the world is known
        self._names: dict[Tensor, str] = {}  # of the model's parameters
        self._kept: dict[Tensor, Tensor] | None = None  # copies of this rank's own gradients, if asked for

    def __repr__(self) -> str:
        return f"Exchange(collective={self.collective!r}, codec={self.codec!r}, grid={self.grid!r})"

    @property
    def bytes_sent(self) -> float:
        """Bytes this rank has put on the wire since the beginning, as `bigstep.tables` counts them."""
        return sum(transport.bytes_sent for transport in self._transports)

    @property
    def seconds(self) -> float:
        """Time since the beginning during which at least one bucket was being exchanged."""
        return self._runner.busy.seconds if self.world else 0.0

    @property
    def exposed_seconds(self) -> float:
        """Time since the beginning from a backward's last bucket being ready until its last exchange had ended."""
        return self._runner.exposed.seconds if self.world else 0.0

    @property
    def exponent_above(self) -> int:
        """With parts: an e such that |values| of the last backward's sum are below 2^e; large if it is not finite."""
        return max(exponent_above(piled.highest(self.steps - 1), self.parts) for piled in self._piled_transports())

    def attach(self, ddp: DistributedDataParallel) -> Exchange:
        """Put this exchange under `ddp`; every rank must call it, once for each DDP object.

        A second DDP object around the same model (with other buckets, say) may be given later; state is kept.
        """
        if not isinstance(ddp, DistributedDataParallel):
            raise ConfigError(
                f"Exchange.attach takes a DistributedDataParallel object, but got {type(ddp).__name__}: wrap the model."
            )
        names = {parameter: name for name, parameter in ddp.module.named_parameters()}
        require(self.world is None or shapes_of(names) == shapes_of(self._names), _ANOTHER_MODEL)
        self._names = names
        require_dense(ddp.module)
        if self.parts:
            trained = [parameter for parameter in self._names if parameter.requires_grad]
            kinds = [str(parameter.dtype) for parameter in trained if parameter.is_complex()]
            require(
                not kinds,
                f"Exact sums of parts take real numbers, but a parameter is {''.join(kinds[:1])}: omit parts.",
            )
            self._piled = {parameter: place for place, parameter in enumerate(trained)}
            self._piles = make_piles([parameter.numel() for parameter in trained], self.parts, trained[0].device)
        if self.world is None:
            self._runner = Runner(next(iter(self._names)).device, self._explain)
            self.world = World.join(
                ddp.process_group,
                ranks_per_node=self.ranks_per_node,
                grid=self.grid,
                timeout=self.timeout,
                purpose=f"{self.collective} of {self.codec}{' parts' if self.parts else ''}",
            )
            self._transports = make_transports(
                self.world,
                self.collective,
                self.codec,
                self.settings,
                shapes_of(names),
                warmup_steps=self.warmup_steps,
                error_feedback=self.error_feedback,
                shared=self._count_shared() if self.parts else None,
            )
            if self._loaded is not None:
                self.load_state_dict(self._loaded)
        for piled in self._piled_transports():
            piled.regroup()
        ddp.register_comm_hook(None, lambda _, bucket: self._on_bucket(bucket))
        return self

    def state_dict(self) -> dict[str, Any]:
        """What this rank carries from step to step: plain values and tensors on the CPU, by parameter name."""
        world = self._attached()
        # first: what is under way still changes residuals
        late = {} if self._late is None else {n: p.to("cpu", copy=True) for n, p in self._late.finish().items()}
        carried = self._transports[-1].residuals.state_dict()
        return {"codec": self.codec, "ranks": world.size, "step": self.steps, "carried": carried, "late": late}

    def gather_state(self) -> dict[str, Any] | None:
        """The state of all ranks in one, on rank 0 (others get None); every rank must call it, between two steps.

        `torch.load(..., weights_only=True)` accepts it, and `load_state_dict` takes it on any number of ranks. While it
        is being saved, rank 0 holds the residuals of all ranks in memory.
        """
        world = self._attached()
        states: list[Any] | None = [None] * world.size if world.rank == 0 else None
        dist.gather_object(self.state_dict(), states, dst=world.ranks[0], group=world.group)
        if states is None:
            return None
        return {
            **states[0],
            "carried": self._transports[-1].residuals.merge([state["carried"] for state in states]),
            "gathered": True,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Carry on from `state_dict` of this rank, or from `gather_state` of any number of ranks.

        With the same number of ranks each takes its own residuals, exactly. With another number each takes the mean of
        all, which leaves unchanged what the model is still owed (`bigstep.exchange.residuals.mean_over_ranks`). Called
        before `attach`, it takes effect there.
        """
        if state["codec"] != self.codec:
            raise ConfigError(
                f"The saved exchange used codec {state['codec']!r}, whose residuals mean nothing to {self.codec!r}: "
                f"resume with codec={state['codec']!r} or without the exchange's state."
            )
        if self.world is None:
            self._loaded = state
            return
        if not state.get("gathered") and state["ranks"] != self.world.size:
            raise ConfigError(
                f"The saved state is that of one rank of {state['ranks']}, but there are {self.world.size} ranks: save "
                "with gather_state to change their number."
            )
        self.steps = state["step"]
        self._transports[-1].residuals.load(state["carried"])
        if self._late is not None:
            self._late.load(dict(state["late"]))

    @property
    def carries(self) -> bool:
        """Whether a part of a gradient, or all of it, stays here until a later step."""
        return CODECS[self.codec].loses == "carried" or self._late is not None

    @property
    def gives_the_mean(self) -> bool:
        """Whether a backward leaves the mean over ranks of its own gradients, up to the rounding of a half type."""
        return not (self.carries or self.parts or self._prepare)

    def keep_own(self) -> None:
        """Copy this rank's own gradients in the next exchange, before they are encoded; `take_own` returns them."""
        self._kept = {}

    def take_own(self) -> dict[Tensor, Tensor]:
        """Return the gradients that were copied, by parameter, and stop copying."""
        kept, self._kept = self._kept or {}, None
        return {parameter: shape_as(parameter, flat) for parameter, flat in kept.items()}

    def hold(self) -> None:
        """Add the gradients now in `.grad` to the next exchange's sum, as one part of it, and clear them.

        For a rank that computes several workers one after another (under `no_sync`): the backward that is exchanged
        adds the last part. Each part is converted to integers on its own, so it does not matter which rank computed it.
        """
        require(self.parts > 0, "Only an Exchange with parts=N adds up parts: say how many there are in all.")
        assert self._piles is not None
        add_gradients(self._piles, list(self._piled))

    def rescale(self, factor: float) -> None:
        """Multiply everything carried: for a loss scaler that changes its scale by this factor."""
        if self._late is not None:  # first: what is under way still changes residuals
            self._late.load({name: piece * factor for name, piece in self._late.finish().items()})
        for transport in self._transports:
            transport.residuals.scale(factor)

    def flush(self) -> bool:
        """Double buffering: put the last exchanged gradient into `.grad` of the parameters, for one more update.

        Returns:
            Whether there was one; the next backward then gets zeros again.
        """
        if self._late is None:
            return False
        pieces = self._late.finish()
        self._late.load({})
        for parameter, name in self._names.items():
            if name in pieces:
                parameter.grad = shape_as(parameter, pieces[name]).clone()
        return bool(pieces)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turn the error that a failed exchange causes in `backward` (a RuntimeError of torch) into its RunError."""
        try:
            yield
        except RuntimeError as error:
            if self.failure is not None and error is not self.failure:
                raise self.failure from error
            raise

    def close(self) -> None:
        """Wait for what is under way and end the threads; call it before the process group is destroyed."""
        if self.world is not None:
            self._runner.close()
            closed = RunError("This exchange was closed: close it after the last backward of its DDP objects.")
            self.failure = self.failure or closed  # a later backward would wait for ever: the threads have ended

    def _attached(self) -> World:
        if self.world is None:
            raise ConfigError("This Exchange is not attached yet: call exchange.attach(ddp) first.")
        return self.world

    def _piled_transports(self) -> list[Piled]:
        return [transport for transport in self._transports if isinstance(transport, Piled)]

    def _count_shared(self) -> int:
        """Values that ranks of one host may sum through shared memory; 0 on a GPU or with a collective but ring."""
        shared = self.collective == "ring" and all(parameter.device.type == "cpu" for parameter in self._piled)
        return sum(parameter.numel() for parameter in self._piled) if shared else 0

    def _on_bucket(self, grad_bucket: GradBucket) -> Future[Tensor]:
        """What DDP calls for each bucket that is ready, in the same order on every rank."""
        if self.failure is not None:
            raise self.failure
        parameters = grad_bucket.parameters()
        require(all(parameter in self._names for parameter in parameters), _ANOTHER_MODEL)
        names = tuple(self._names[parameter] for parameter in parameters)
        bucket = Bucket(
            flat=grad_bucket.buffer(),
            names=names,
            shapes=tuple(map(real_shape, parameters)),
            step=self.steps,
            piles=self._piles,
            places=tuple(self._piled[parameter] for parameter in parameters) if self.parts else (),
        )
        if self._kept is not None:
            self._kept.update(zip(parameters, bucket.flat.clone().split_with_sizes(bucket.sizes), strict=True))
        if self._prepare is not None:
            for parameter, piece in zip(parameters, bucket.flat.split_with_sizes(bucket.sizes), strict=True):
                self._prepare(parameter, shape_as(parameter, piece))
        late = self._late
        future = self._start(bucket) if late is None else late.exchange(bucket, self._start, self._runner.stream)
        self._backward.append(future)
        if grad_bucket.is_last():
            self.steps += 1
            self._runner.note_exposed(self._backward)
            self._backward = []
        return future

    def _start(self, bucket: Bucket) -> Future[Tensor]:
        transport = self._transports[0 if bucket.step < self.warmup_steps else -1]
        return self._runner.run(transport.start(bucket), bucket)

    def _explain(self, error: BaseException, step: int) -> RunError:
        """The error that ended the exchange, in one sentence; after the first error always that one."""
        assert self.world is not None
        if self.failure is not None:
            return self.failure
        what = f"The {self.collective} exchange ({self.codec}) of step {step}"
        self.failure = RunError(f"{what} failed on rank {self.world.rank}: {self.world.say_why(error)}")
        return self.failure
