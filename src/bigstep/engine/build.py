"""The only place where names become objects: a configuration in, the parts of a run out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigstep.config import LrConfig, OptimizerConfig, Piece, RunConfig, Stage, require
from bigstep.data.catalog import open_data
from bigstep.data.feed import Feed
from bigstep.data.sampler import Sampler
from bigstep.data.sources.given import as_pair
from bigstep.engine.checkpoint import weights_hash
from bigstep.engine.fusing import Kernels, fuse
from bigstep.engine.observers.noise import NoiseScale
from bigstep.engine.ranks import Ranks
from bigstep.errors import ConfigError
from bigstep.exchange import Exchange
from bigstep.exchange.buckets import BucketTuner
from bigstep.gpu import GraphedStep
from bigstep.models import build_model
from bigstep.norm import WorkerStatistics, ghost_batch_norm, zero_gamma
from bigstep.optim import RankAdaGrad, parameter_groups
from bigstep.schedules import BatchPlan, BatchStage, Schedule, constant, join, scale_lr
from bigstep.tables import load
from bigstep.tables.schedules import make_schedule

__all__ = ["Loss", "Parts", "WorkerLoss", "assemble", "batch_plan", "learning_rate"]

Loss = Callable[[Any, Any], Tensor]
"""(output, target) -> the mean loss over the samples of a forward."""

GPU_SAMPLES_PER_FORWARD = 8192
"""Workers are joined into one forward up to this many samples on a GPU; larger forwards gain nothing there."""
GPU_BYTES_PER_PIXEL = 4096
"""Memory of a forward and backward for each pixel of its images: ResNets take 1.5 to 2.1 kB in half precision."""


class WorkerLoss(nn.Module):
    """Model and loss as one module, so that DDP sees one forward whatever the rank has to do."""

    def __init__(self, model: nn.Module, loss: Loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, inputs: Any, target: Any, weight: float) -> Tensor:
        """Return the weighted mean loss; with `inputs` None, a zero that depends on every weight.

        The zero lets a rank without samples take part in the exchange: its gradient is 0, and nobody waits for it.
        """
        if inputs is None:
            zeros = [parameter.sum() * 0 for parameter in self.model.parameters() if parameter.requires_grad]
            return torch.stack(zeros).sum()
        loss: Tensor = self.loss(self.model(inputs), target) * weight
        return loss


@dataclass
class Parts:
    """Everything the loop works with."""

    config: RunConfig
    ranks: Ranks
    model: nn.Module
    objective: WorkerLoss
    evaluation_loss: Loss
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    learning_rate: Callable[[float, int], float]
    sampler: Sampler
    train_feed: Feed
    test_feed: Feed
    statistics: WorkerStatistics
    samples_per_forward: int
    own_model: bool = False
    """Whether the model is a user's own."""
    kernels: Kernels | None = None
    """What runs on the GPU; None on a CPU."""
    graphed: GraphedStep | None = None
    ddp: DistributedDataParallel | None = None
    tuner: BucketTuner | None = None
    exchange: Exchange | None = None
    rank_adagrad: RankAdaGrad | None = None
    """Scales this rank's gradient before the exchange (optimizer.adagrad=before)."""
    owed: dict[str, Tensor] = field(default_factory=dict)
    """What the ranks of a resumed run had not delivered when there were several; one rank adds it to its next gradient,
    by the names of the objective's parameters."""
    skipped: int = 0
    """Steps that were dropped because their gradient was not finite."""
    noise: NoiseScale = field(default_factory=NoiseScale)
    pair: Tensor | None = None
    """This rank's part of what `noise_probe` measured in the last step; None if that step was not measured."""

    @property
    def parallel(self) -> DistributedDataParallel | None:
        """The DDP object of the next step: the tuner's while it looks for the size of buckets, and after."""
        return self.tuner.ddp if self.tuner else self.ddp


def assemble(
    config: RunConfig,
    ranks: Ranks,
    *,
    model: nn.Module | None = None,
    data: Any = None,
    loss: Loss | None = None,
) -> Parts:
    """Build the parts of a run; `model`, `data` and `loss` stand in for those that the configuration names."""
    on_gpu = ranks.device.type == "cuda"
    require(
        config.precision != "fp16" or on_gpu,
        "precision is fp16, which needs a GPU; use --set precision=bf16 or precision=float32 on a CPU.",
    )
    plan = batch_plan(config)
    first = plan.stages[0].workers  # a later stage may leave ranks without workers, as --finish-on-one does
    require(
        ranks.size <= first,
        f"{ranks.size} ranks were started for {first} workers, but each rank needs a worker: start at most {first} "
        f"ranks or set workers.count={ranks.size}.",
    )
    fewest = min(stage.workers for stage in plan.stages)
    require(
        not config.optimizer.before_exchange or ranks.size <= fewest,
        f"optimizer.adagrad=before scales the gradient of each of {ranks.size} ranks by itself, but a stage of the "
        f"plan has only {fewest} workers: start at most {fewest} ranks, or use adagrad=after.",
    )
    train_feed, test_feed = _feeds(config, ranks, data)
    require(
        plan.largest.batch <= len(train_feed),
        f"The batch of {plan.largest.batch} samples ({plan.largest.workers} workers x {plan.largest.local_batch}) is "
        f"larger than the training set of {len(train_feed)}; lower workers.count or workers.local_batch.",
    )
    own_model = model is not None
    torch.manual_seed(config.seed)  # every rank builds the same weights itself: nothing is broadcast
    if model is None:
        model = build_model(
            config.model,
            classes=train_feed.num_classes,
            channels=train_feed.channels,
            image_size=train_feed.image_size,
        )
    if config.norm.zero_gamma:
        zero_gamma(model)
    model.to(ranks.device, torch.float64 if config.precision == "float64" else torch.float32)
    ranks.require_same(weights_hash(model), "The initial weights")
    samples_per_forward, kernels = 1, None
    if on_gpu:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks this form
        samples_per_forward = _joined_samples(model, ranks.device, _largest_image(config, train_feed))
        kernels = fuse(model, config, own=own_model)
    if config.compile:
        model.compile()  # in place: names in checkpoints stay as they are
    smoothing = config.loss.label_smoothing
    groups, rank_adagrad = _groups(config.optimizer, model), None
    if config.optimizer.before_exchange:
        rank_adagrad = load(config.optimizer.before_exchange)(model, groups, **config.optimizer.arguments_before())
        groups = [{**group, "weight_decay": 0.0} for group in groups]  # it has decayed before it scaled
    return Parts(
        config=config,
        ranks=ranks,
        model=model,
        objective=WorkerLoss(model, loss or nn.CrossEntropyLoss(label_smoothing=smoothing)),
        evaluation_loss=loss or nn.CrossEntropyLoss(),
        optimizer=load(config.optimizer.home)(groups, lr=1.0, **config.optimizer.arguments(on_gpu=on_gpu)),
        rank_adagrad=rank_adagrad,
        # torch's own start of 65,536 overflows at first, and large batches have few steps to waste
        scaler=torch.amp.GradScaler(ranks.device.type, init_scale=1024.0, enabled=config.precision == "fp16"),
        learning_rate=learning_rate(config.lr, config.batch, config.plan),
        sampler=Sampler(len(train_feed), config.seed, plan, config.data.drop_last),
        train_feed=train_feed,
        test_feed=test_feed,
        statistics=WorkerStatistics(model, 0.0 if config.norm.statistics == "last_batch" else config.norm.momentum),
        samples_per_forward=samples_per_forward,
        own_model=own_model,
        kernels=kernels,
    )


def batch_plan(config: RunConfig) -> BatchPlan:
    """Return the stages of a run as a `BatchPlan`."""
    first = BatchStage(0.0, config.workers.count, config.workers.local_batch)
    later = (BatchStage(stage.epoch, stage.count, stage.local_batch) for stage in config.plan)
    return BatchPlan((first, *later))


def learning_rate(config: LrConfig, first_batch: int, plan: Sequence[Stage] = ()) -> Callable[[float, int], float]:
    """Return the learning rate as a function of the epoch and the batch of the current stage."""

    def scaled(batch: int) -> float:
        grown = min(batch, config.saturation or batch)
        return scale_lr(config.base, grown, base_batch=config.base_batch, rule=config.scaling)

    def of_stage(epoch: float) -> float:
        return next((stage.rate for stage in reversed(plan) if stage.epoch <= epoch), 1.0)

    listed = _warmed_longer(config.schedule, first_batch / config.warmup_batch if config.warmup_batch else 1.0)
    begins = [0.0, *(piece.until for piece in listed)]
    unscaled = config.base / scaled(first_batch)
    pieces = [(piece.until, _schedule(piece, begin, unscaled)) for piece, begin in zip(listed, begins, strict=False)]
    multiple = join(*pieces) if pieces else constant(1.0)
    return lambda epoch, batch: scaled(batch if config.follow_plan else first_batch) * multiple(epoch) * of_stage(epoch)


def _warmed_longer(schedule: Sequence[Piece], factor: float) -> Sequence[Piece]:
    """The schedule with a first warm-up of `factor` times its epochs, at most half of all; what it covers is left out.

    A warm-up has to last for some steps, and larger batches have fewer in an epoch.
    """
    if factor <= 1 or not schedule or schedule[0].shape != "warmup":
        return schedule
    until = max(schedule[0].until, min(factor * schedule[0].until, schedule[-1].until / 2))
    return [replace(schedule[0], until=until), *(piece for piece in schedule if piece.until > until)]


def _schedule(piece: Piece, begin: float, unscaled: float) -> Schedule:
    start = unscaled if piece.start == "base" else piece.start
    return make_schedule(piece.shape, {**vars(piece), "start": start, "begin": begin})


def _groups(config: OptimizerConfig, model: nn.Module) -> list[dict[str, Any]]:
    groups = parameter_groups(model, config.weight_decay)
    if config.decay_all:
        for group in groups:
            group["weight_decay"] = config.weight_decay
    return groups


def _joined_samples(model: nn.Module, device: torch.device, image_size: int) -> int:
    """Make ready to run several workers in one forward, and return how many samples that may be.

    A norm layer that cannot keep workers apart leaves every worker to a forward of its own.
    """
    try:
        ghost_batch_norm(model, 1)
    except ConfigError:
        return 1
    memory: int = torch.cuda.get_device_properties(device).total_memory
    fitting = memory // (GPU_BYTES_PER_PIXEL * image_size**2)
    return max(1, min(fitting, GPU_SAMPLES_PER_FORWARD))


def _largest_image(config: RunConfig, feed: Feed) -> int:
    return max([feed.image_size, *(size.image_size for size in config.data.sizes)])


def _feeds(config: RunConfig, ranks: Ranks, data: Any) -> tuple[Feed, Feed]:
    where = config.data
    if data is None:
        pair = open_data(where.name, where.path, where.holdout, config.seed)
    else:
        pair = as_pair(data, where.holdout, config.seed)
    dtype = torch.float64 if config.precision == "float64" else torch.float32

    def feed(source: Any, train: bool) -> Feed:
        return Feed(
            source,
            train=train,
            seed=config.seed,
            augment=config.data.augment if train else "none",
            image_size=config.data.image_size,
            device=ranks.device,
            dtype=dtype,
            loaders=config.data.loaders,
            rectangular=config.data.rectangular,
        )

    return feed(pair.train, True), feed(pair.test, False)
