"""A run as data: frozen dataclasses that recipes fill, YAML carries and `--set` changes.

Every field has a sentence under it; `bigstep recipes NAME --yaml` prints them as comments. A value that cannot be
run is refused here, once, with one sentence; nothing below this layer checks it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from bigstep.config.exchange import ExchangeConfig
from bigstep.errors import require, require_fraction, require_positive
from bigstep.published import Published
from bigstep.tables.optimizers import OptimizerConfig
from bigstep.tables.schedules import SHAPES
from bigstep.validate import require_name

__all__ = [
    "AsynchronousConfig", "CheckpointConfig", "DataConfig", "ExchangeConfig", "LossConfig", "LrConfig", "NormConfig",
    "OptimizerConfig", "Piece", "Published", "Resize", "RunConfig", "Stage", "WorkersConfig", "require",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Resize:
    """Progressive resizing: from `epoch` on, train on images of `image_size`."""

    epoch: float
    """The first epoch at this size."""
    image_size: int
    """Side of the training crop in pixels."""
    min_scale: float = 0.08
    """Smallest area of a random resized crop, as a fraction of the image."""

    def __post_init__(self) -> None:
        require_positive(self.image_size, "data.sizes.image_size")
        require(self.epoch >= 0, f"data.sizes.epoch is {self.epoch}, but it must not be negative.")
        require(
            0 < self.min_scale <= 1,
            f"data.sizes.min_scale is {self.min_scale}, but it must lie above 0 and at most at 1.",
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images, how large, how augmented."""

    name: str = "embedded"
    """embedded, fashion-mnist, mnist, cifar10, imagenet, folder, or package.module:function for your own."""
    path: str = ""
    """Where the files lie; empty means the cache folder (and a download where the set allows it)."""
    image_size: int = 0
    """Side of the images in pixels; 0 keeps the size of the set."""
    augment: Literal["none", "flip", "crop_flip", "resized_crop"] = "none"
    """Augmentation of training images, tied to (seed, epoch, sample), never to a rank."""
    sizes: tuple[Resize, ...] = ()
    """Progressive resizing, as a list of {epoch, image_size, min_scale}; empty for a constant size."""
    rectangular: bool = False
    """Evaluate folders on whole images in batches of like aspect ratio instead of square centre crops."""
    drop_last: bool = False
    """Leave out the incomplete last batch of each epoch, for which the rate of a huge batch is too large."""
    holdout: float = 0.0
    """Fraction of the training set kept out of training and used for evaluation instead of the test set."""
    loaders: int = 2
    """Processes that decode images of a folder, for each rank; sets held in memory need none."""

    def __post_init__(self) -> None:
        require_fraction(self.holdout, "data.holdout")
        require(self.image_size >= 0, f"data.image_size is {self.image_size}, but it must not be negative.")
        require(self.loaders >= 0, f"data.loaders is {self.loaders}, but it must not be negative.")
        epochs = [size.epoch for size in self.sizes]
        require(
            epochs == sorted(set(epochs)),
            f"data.sizes must be listed by rising epoch, but the epochs are {epochs}.",
        )


@dataclass(frozen=True, kw_only=True)
class WorkersConfig:
    """The logical workers of the first stage; the global batch is count x local_batch."""

    count: int
    """Logical workers: each has its own share of the batch and its own batch-norm statistics."""
    local_batch: int
    """Samples of one worker in one step."""

    def __post_init__(self) -> None:
        require_positive(self.count, "workers.count")
        require_positive(self.local_batch, "workers.local_batch")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Batch-size control: from `epoch` on, this many workers with this local batch."""

    epoch: float
    """The first epoch of the stage."""
    count: int
    """Logical workers from then on."""
    local_batch: int
    """Samples of one worker from then on."""
    rate: float = 1.0
    """What the learning rate is multiplied by in this stage, after everything else that decides it."""

    def __post_init__(self) -> None:
        require_positive(self.rate, "plan.rate")
        require_positive(self.epoch, "plan.epoch")
        require_positive(self.count, "plan.count")
        require_positive(self.local_batch, "plan.local_batch")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One piece of a schedule; values are multiples of the scaled learning rate."""

    shape: str
    """The curve: one of {shapes}."""
    until: float
    """The epoch at which the next piece takes over."""
    start: float | Literal["base"] = 1.0
    """Value at the beginning; `base` means the rate before scaling by the batch."""
    end: float = 1.0
    """Value at `until` (warmup, linear, polynomial, cosine)."""
    power: float = 2.0
    """Exponent of a polynomial."""
    at: tuple[float, ...] = ()
    """Epochs of the changes of step and table."""
    factor: float = 0.1
    """What step multiplies by at each epoch of `at`."""
    values: tuple[float, ...] = ()
    """The values of a table: one more than epochs in `at`."""

    def __post_init__(self) -> None:
        require_name(self.shape, SHAPES, "lr.schedule.shape")
        require_positive(self.until, "lr.schedule.until")
        require(
            list(self.at) == sorted(set(self.at)),
            f"lr.schedule.at must rise, but it is {list(self.at)}.",
        )
        require(
            self.shape != "table" or len(self.values) == len(self.at) + 1,
            f"A table needs one more value than epochs in lr.schedule.at, but it has {len(self.values)} values "
            f"for {len(self.at)} epochs.",
        )
        if self.shape == "polynomial":
            require_positive(self.power, "lr.schedule.power")


@dataclass(frozen=True, kw_only=True)
class LrConfig:
    """The learning rate: base, scaled by the batch, times the schedule."""

    base: float
    """The rate at base_batch."""
    scaling: Literal["linear", "sqrt", "none"] = "linear"
    """How the rate grows with the global batch: linear, with its square root, or not at all."""
    base_batch: int = 256
    """The batch that `base` is meant for."""
    saturation: int = 0
    """The batch beyond which the rate no longer grows; 0 for none."""
    warmup_batch: int = 0
    """Beyond this batch a first warm-up lasts batch / warmup_batch times as long, up to half the schedule; 0: never."""
    schedule: tuple[Piece, ...] = ()
    """Pieces of the schedule, each until its epoch; empty for a constant rate."""
    follow_plan: bool = False
    """Scale the rate again when the batch plan changes the batch; otherwise growth replaces decay."""

    def __post_init__(self) -> None:
        require_positive(self.base, "lr.base")
        require_positive(self.base_batch, "lr.base_batch")
        for name in ("saturation", "warmup_batch"):
            value = getattr(self, name)
            require(value >= 0, f"lr.{name} is {value}, but it must not be negative.")
        ends = [piece.until for piece in self.schedule]
        require(
            ends == sorted(set(ends)),
            f"The pieces of lr.schedule must follow one another, but end at {ends}.",
        )


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Cross-entropy and its smoothing."""

    label_smoothing: float = 0.0
    """Weight epsilon of the uniform distribution in the target."""

    def __post_init__(self) -> None:
        require_fraction(self.label_smoothing, "loss.label_smoothing")


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """Batch norm: which statistics an evaluation uses, and how the residual branches start."""

    statistics: Literal["moving", "last_batch"] = "moving"
    """moving averages over steps, or those of the last batch alone; both are averaged over all workers."""
    momentum: float = 0.9
    """How much of a moving average is kept from step to step."""
    zero_gamma: bool = False
    """Start the last batch norm of each residual branch at gamma = 0."""

    def __post_init__(self) -> None:
        require_fraction(self.momentum, "norm.momentum")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state of a run is written."""

    every: float = 1.0
    """Epochs between checkpoints; fractions are fine, 0 leaves it to `seconds`."""
    seconds: float = 60.0
    """Seconds after which one is written in any case; 0 for never. The last step is always saved."""
    keep: int = 2
    """How many checkpoints stay on disk."""

    def __post_init__(self) -> None:
        require(min(self.every, self.seconds) >= 0, "checkpoint.every and checkpoint.seconds must not be negative.")
        require_positive(self.keep, "checkpoint.keep")


@dataclass(frozen=True, kw_only=True)
class AsynchronousConfig:
    """Updates that wait for nobody: processes that share the weights, or replicas around a parameter server."""

    method: Literal["none", "locked", "hogwild", "downpour"] = "none"
    """none (synchronous), locked and hogwild (one machine, shared weights) or downpour (a parameter server)."""
    replicas: int = 2
    """Processes that compute gradients, each of one worker's share at a time."""
    shards: int = 1
    """Server processes that the weights are spread over (downpour)."""
    push_every: int = 1
    """Steps of a replica between pushes of its summed gradient: n_push (downpour)."""
    fetch_every: int = 1
    """Steps of a replica between fetches of the weights: n_fetch (downpour)."""
    overlap: bool = False
    """Compute the next step while push and fetch travel, on weights without the replica's own last push (downpour)."""
    warm_start: float = 0.0
    """Epochs with one replica before the others take part (downpour)."""
    max_staleness: int = 0
    """Refuse a push that more than this many updates overtook; 0 refuses none (downpour)."""

    def __post_init__(self) -> None:
        for name in ("replicas", "shards", "push_every", "fetch_every"):
            require_positive(getattr(self, name), f"asynchronous.{name}")
        for name in ("warm_start", "max_staleness"):
            value = getattr(self, name)
            require(value >= 0, f"asynchronous.{name} is {value}, but it must not be negative.")


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
    plan: tuple[Stage, ...] = ()
    """Later stages of batch-size control, as a list of {epoch, count, local_batch}; empty for most."""
    epochs: float
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
    asynchronous: AsynchronousConfig = field(default_factory=AsynchronousConfig)
    """Updates without waiting; method none is the synchronous run that the rest of this file describes."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    evaluate_every: float = 1.0
    """Epochs between evaluations; the last epoch is always evaluated."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What to do when a gradient is NaN or infinite: stop and name the layer, or skip the step and count it."""
    precision: Literal["float64", "float32", "bf16", "fp16"] = "float32"
    """Arithmetic of forward and backward; bf16 and fp16 keep float32 weights, fp16 scales the loss."""
    compile: bool = False
    """Let torch compile the model: a minute at the start, for faster steps on a GPU."""
    kernels: Literal["auto", "plain"] = "auto"
    """auto: fused kernels and whole-step graphs on a GPU, where they can be used; plain: torch alone."""
    seed: int = 0
    """Decides initial weights, sample order, augmentation and dropout."""

    def __post_init__(self) -> None:
        require_positive(self.epochs, "epochs")
        require_positive(self.evaluate_every, "evaluate_every")
        require(0 <= self.seed < 2**31, f"seed is {self.seed}, but it must lie between 0 and 2147483647.")
        starts = [stage.epoch for stage in self.plan]
        require(
            starts == sorted(set(starts)),
            f"The stages of plan must have rising epochs, but they are {starts}.",
        )
        require(
            not self.optimizer.before_exchange or self.precision != "fp16",
            "optimizer.adagrad=before scales gradients before fp16's loss scale is taken out of them: use "
            "precision=bf16 or float32, or adagrad=after.",
        )

    @property
    def batch(self) -> int:
        """The global batch of the first stage."""
        return self.workers.count * self.workers.local_batch
