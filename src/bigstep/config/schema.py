"""A run as data: frozen dataclasses that recipes fill, YAML carries and `--set` changes.

Every field has a sentence under it; `bigstep recipes NAME --yaml` prints them as comments. A value that cannot be
run is refused here, once, with one sentence; nothing below this layer checks it again.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

from bigstep.config.data import DataConfig
from bigstep.config.exchange import ExchangeConfig
from bigstep.config.growth import GrowthConfig
from bigstep.config.methods import AsynchronousConfig, IslandsConfig
from bigstep.config.rate import LrConfig
from bigstep.config.trust import CODE, names_code, require_own
from bigstep.errors import require
from bigstep.tables.codecs import CODECS
from bigstep.tables.optimizers import OptimizerConfig
from bigstep.tables.precisions import PRECISIONS, Precision
from bigstep.validate import Count, Fraction, NotNegative, Positive, Range, build, check_ranges, require_name

__all__ = [
    "CheckpointConfig", "LossConfig", "NormConfig", "RunConfig", "Stage", "WorkersConfig", "config_from_mapping",
    "config_to_mapping",
]  # fmt: skip

Seed = Annotated[int, Range(lambda value: 0 <= value < 2**31, "lie between 0 and 2147483647")]


@dataclass(frozen=True, kw_only=True)
class WorkersConfig:
    """The logical workers of the first stage; the global batch is count x local_batch."""

    count: Count
    """Logical workers: each has its own share of the batch and its own batch-norm statistics."""
    local_batch: Count
    """Samples of one worker in one step."""

    def __post_init__(self) -> None:
        check_ranges(self, "workers")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Batch-size control: from `epoch` on, this many workers with this local batch."""

    epoch: Positive
    """The first epoch of the stage."""
    count: Count
    """Logical workers from then on."""
    local_batch: Count
    """Samples of one worker from then on."""
    rate: Positive = 1.0
    """Factor on the learning rate in this stage, applied after everything else."""

    def __post_init__(self) -> None:
        check_ranges(self, "plan")


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What is minimised: cross-entropy, which may be smoothed, or a loss of your own."""

    name: str = "cross_entropy"
    """cross_entropy, or package.module:function of (output, target) that returns the mean over the samples."""
    label_smoothing: Fraction = 0.0
    """Weight epsilon of the uniform distribution in the target."""

    def __post_init__(self) -> None:
        check_ranges(self, "loss")
        own = names_code(self.name)
        require(
            own or self.name == "cross_entropy",
            f"loss.name is {self.name!r:.60}, but it must be cross_entropy or package.module:function.",
        )
        require(
            not own or not self.label_smoothing,
            f"loss.label_smoothing is {self.label_smoothing:g}, which is cross-entropy's, but loss.name is "
            f"{self.name!r:.60}: leave one of them out.",
        )


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """Batch norm: which statistics an evaluation uses, and how the residual branches start."""

    statistics: Literal["moving", "last_batch"] = "moving"
    """moving: averages over the steps; last_batch: those of the last full batch; both are averaged over all workers."""
    momentum: Fraction = 0.9
    """How much of a moving average is kept from step to step."""
    zero_gamma: bool = False
    """Start the last batch norm of each residual branch at gamma = 0."""

    def __post_init__(self) -> None:
        check_ranges(self, "norm")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state of a run is written."""

    every: NotNegative = 1.0
    """Epochs between checkpoints; fractions are fine, 0 leaves it to `seconds`."""
    seconds: NotNegative = 60.0
    """Seconds after which a checkpoint is written in any case; 0 for never. The last step is always saved."""
    keep: Count = 2
    """How many checkpoints stay on disk."""
    meetings: bool = False
    """Islands also keep their state at every meeting, each on its own machine; --elastic turns it on."""

    def __post_init__(self) -> None:
        check_ranges(self, "checkpoint")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides the path of a run."""

    recipe: str = "custom"
    """The published system this configuration came from."""
    preset: str = "custom"
    """Which variant of the recipe: paper, mini, cifar10, or custom."""
    model: str = "small"
    """One of {models}."""
    data: DataConfig = field(default_factory=DataConfig)
    """The data set."""
    workers: WorkersConfig
    """The logical workers of the first stage."""
    plan: Literal["auto"] | tuple[Stage, ...] = ()
    """Later stages of batch-size control: a list of {epoch, count, local_batch}, or auto, which follows the noise."""
    growth: GrowthConfig = field(default_factory=GrowthConfig)
    """How `plan: auto` lets the batch follow the measured gradient noise scale."""
    epochs: Positive
    """Passes over the training set."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The update rule."""
    lr: LrConfig
    """The learning rate."""
    loss: LossConfig = field(default_factory=LossConfig)
    """The loss."""
    norm: NormConfig = field(default_factory=NormConfig)
    """Batch norm."""
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    """The exchange of gradients."""
    islands: IslandsConfig = field(default_factory=IslandsConfig)
    """Islands that meet every so many steps; a count of 1 is ordinary training."""
    asynchronous: AsynchronousConfig = field(default_factory=AsynchronousConfig)
    """Updates without common steps; with method none the run is synchronous, as the rest of this file describes."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    evaluate_every: Positive = 1.0
    """Epochs between evaluations; the last epoch is always evaluated."""
    evaluate_views: Literal[1, 2, 6] = 1
    """2: also report `accuracy_views`, over each test image and its mirror image; 6: over shifts of both as well."""
    measure_noise: bool = True
    """Measure the gradient noise scale during the run; on one GPU a step that measures it runs without a graph."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What to do when a gradient is NaN or infinite: stop and name the layer, or skip the step and count it."""
    precision: str = "float32"
    """Arithmetic of forward and backward, one of {precisions}; bf16 and fp16 keep float32 weights."""
    compile: bool = False
    """Let torch compile the model: a minute at the start, for faster steps on a GPU."""
    kernels: Literal["auto", "graphs", "plain"] = "auto"
    """On a GPU, auto: fused kernels and whole-step graphs; graphs: graphs for your own model too; plain: only torch."""
    exact: bool = False
    """The same bits on any number of ranks: integer sums, one thread per forward; --exact sets all that this needs."""
    seed: Seed = 0
    """Seed of initial weights, sample order, augmentation and dropout."""

    def __post_init__(self) -> None:
        check_ranges(self)
        require_name(self.precision, PRECISIONS, "precision")
        for name, value in self.code.items():
            require_own(value, name)
        starts = [stage.epoch for stage in self.stages]
        require(
            starts == sorted(set(starts)),
            f"The stages of plan must have rising epochs, but they are {starts}.",
        )
        require(
            not self.optimizer.before_exchange or not self.arithmetic.loss_scale,
            "optimizer.adagrad=before scales gradients that still hold fp16's loss scale: use "
            "precision=bf16 or float32, or adagrad=after.",
        )
        self._require_islands()
        if self.exact:
            self._require_exact()
        if self.plan == "auto":
            self._require_measurable()

    def _require_islands(self) -> None:
        if not self.islands.meets:
            return
        count = self.islands.count
        name, given, without = (
            ("islands.count", count, 1) if count > 1 else ("islands.outer.name", self.islands.outer.name, "average")
        )
        require(
            self.asynchronous.method == "none",
            f"{name} is {given}, but a {self.asynchronous.method} run has one copy of the weights: use "
            f"{name}={without} or asynchronous.method=none.",
        )
        require(
            "islands" in self.optimizer.entry.methods and not self.optimizer.before_exchange,
            f"{name} is {given}, which does not go with this optimizer: use another, or {name}={without}.",
        )
        uneven = [workers for workers in (self.workers.count, *(s.count for s in self.stages)) if workers % count]
        require(
            not uneven,
            f"{', '.join(map(str, uneven))} workers cannot be shared evenly by {count} islands: make workers.count "
            "(and that of every stage of plan) a multiple of islands.count.",
        )

    def _require_exact(self) -> None:
        """Refuse settings whose result depends on the ranks or on timing."""
        require(
            self.asynchronous.method == "none",
            f"exact is true, but what a {self.asynchronous.method} run computes depends on which process is first: use "
            "exact=false or asynchronous.method=none.",
        )
        codecs = {"exchange.codec": self.exchange.codec}
        if self.islands.count > 1:
            codecs["islands.codec"] = self.islands.codec
        for name, codec in codecs.items():
            require(codec == "exact", f"exact is true, but {name}={codec} rounds on each rank: use {name}=exact.")
        require(
            self.data.decoder in ("auto", "pillow"),
            f"exact is true, but the pixels of data.decoder={self.data.decoder} may differ between machines in their "
            "last bit: use data.decoder=pillow.",
        )
        hindering = {
            "exchange.double_buffer": self.exchange.double_buffer,
            "optimizer.adagrad=before": bool(self.optimizer.before_exchange),
            "compile": self.compile,
        }
        for name, asked in hindering.items():
            require(not asked, f"exact is true, but with {name} a step depends on the ranks: leave one of them out.")

    def _require_measurable(self) -> None:
        """Refuse `plan: auto` where the noise scale cannot be measured, or not alike on all ranks."""
        hindering = {
            f"asynchronous.method={self.asynchronous.method}": self.asynchronous.method != "none",
            f"islands.count={self.islands.count}": self.islands.count > 1,
            f"islands.outer.name={self.islands.outer.name}": self.islands.meets,
            "exact": self.exact,
            f"exchange.codec={self.exchange.codec}": CODECS[self.exchange.codec].loses == "carried",
            "exchange.double_buffer": self.exchange.double_buffer,
            "optimizer.adagrad=before": bool(self.optimizer.before_exchange),
            "workers.count=1": self.workers.count == 1,
            "measure_noise=false": not self.measure_noise,
        }
        for name, given in hindering.items():
            require(
                not given,
                f"plan is auto, but with {name} no step has the two gradients that measure the noise: list the "
                "stages of the plan, or change that setting.",
            )
        require(
            not self.data.drop_last or self.growth.every % 1 == 0,
            f"growth.every is {self.growth.every:g}, but with data.drop_last the batch can grow between whole epochs "
            "only: give a whole number, or data.drop_last=false.",
        )

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The later stages, as far as they are known beforehand; `plan: auto` has none."""
        return () if self.plan == "auto" else self.plan

    @property
    def batch(self) -> int:
        """The global batch of the first stage."""
        return self.workers.count * self.workers.local_batch

    @property
    def code(self) -> dict[str, str]:
        """Values of the fields that may name user code, by field (`bigstep.config.trust`)."""
        values = (self.model, self.data.name, self.optimizer.name, self.loss.name)
        return dict(zip(CODE, values, strict=True))

    @property
    def arithmetic(self) -> Precision:
        """The types that the run computes in, and its loss scale."""
        return PRECISIONS[self.precision]


def config_from_mapping(mapping: Any) -> RunConfig:
    """Build a `RunConfig` from plain dicts, lists and scalars.

    >>> config_from_mapping({"workers": {"count": 8, "local_batch": 32}, "epochs": 2, "lr": {"base": 0.1}}).batch
    256
    """
    return build(RunConfig, mapping)


def config_to_mapping(config: RunConfig | OptimizerConfig) -> dict[str, Any]:
    """Return `config` as plain dicts and lists, ready for JSON."""
    return cast(dict[str, Any], _plain(dataclasses.asdict(config)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
