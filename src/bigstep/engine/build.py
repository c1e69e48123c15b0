"""The only place where names become objects: it takes a configuration and returns a run."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bigstep.config import RunConfig, require
from bigstep.config.trust import names_code
from bigstep.data.catalog import open_data
from bigstep.data.decoders.choose import choose
from bigstep.data.feed import Feed, Request
from bigstep.data.pair import DataPair
from bigstep.data.sampler import Sampler
from bigstep.data.sources.base import spread
from bigstep.data.sources.given import as_pair
from bigstep.engine.checkpoint import weights_hash
from bigstep.engine.evaluate import Evaluation, Evaluator
from bigstep.engine.fusing import Kernels, fuse
from bigstep.engine.growth import Growth
from bigstep.engine.learner import Learner, Loss, WorkerLoss, keep_kernels
from bigstep.engine.methods.base import Method
from bigstep.engine.methods.build import Emulation, Setting, make_method
from bigstep.engine.own import Own, named_loss, require_trainable, require_usable
from bigstep.engine.precision import Precision
from bigstep.engine.ranks import SAME_CODE, Ranks
from bigstep.engine.rates import Rates, batch_plan, learning_rate
from bigstep.engine.state import Identity, State, Threads
from bigstep.errors import ConfigError
from bigstep.losses import CrossEntropy, SampleCrossEntropy
from bigstep.models import GPT, LSTM, SeesImages, build_model
from bigstep.norm import WorkerStatistics, ghost_batch_norm, zero_gamma
from bigstep.optim import parameter_groups
from bigstep.schedules import BatchPlan
from bigstep.tables import load, load_own
from bigstep.tables.models import find_model

__all__ = ["Emulation", "Own", "Run", "build"]

IMAGES_SEEN = 2000
"""Training images that a network sees if its initial weights depend on them (`SeesImages`)."""
CPU_TOKENS_PER_FORWARD = 2048
"""Workers are joined into one forward up to this many tokens on a CPU: then a small GPT's data stays in its caches."""
GPU_SAMPLES_PER_FORWARD = 8192
"""Workers are joined into one forward up to this many samples on a GPU; larger forwards gain nothing there."""
GPU_BYTES_PER_PARAMETER = 0.03
"""Memory of a forward and backward per token and parameter: GPT-124M takes 0.007 in half precision, GPT-10M 0.015."""
GPU_BYTES_PER_SCORE = 12
"""The same per token and word of the vocabulary: scores, their gradient, and one of both in float32."""
GPU_BYTES_PER_PIXEL = 4096
"""The same per pixel of the images: ResNets take 1.5 to 2.1 kB in half precision."""


@dataclass(frozen=True)
class Run:
    """A run, ready to be trained or resumed. `state` holds what it carries from step to step."""

    config: RunConfig
    ranks: Ranks
    learner: Learner
    method: Method
    state: State
    sampler: Sampler
    rates: Rates
    train_feed: Feed
    evaluator: Evaluator
    kernels: Kernels | None
    """What runs on the GPU; None on a CPU."""
    growth: Growth | None = None
    """Decides the batch during the run (plan: auto)."""

    def begin_epoch(self, epoch: int) -> None:
        """Progressive resizing: take the size that the recipe lists for this epoch."""
        listed = [size for size in self.config.data.sizes if size.epoch <= epoch]
        if listed:
            self.train_feed.resize(listed[-1].image_size, listed[-1].min_scale)

    def evaluate(self) -> Evaluation:
        """Evaluate; every rank must call this at the same point."""
        return self.evaluator(self.method)

    def describe(self, own: Own) -> dict[str, object]:
        """Return what is really used where it differs from what the configuration names."""
        feed, model = self.train_feed, self.learner.model
        used: dict[str, object] = {"unit": feed.source.unit}
        if own.model is not None:
            used["model"] = type(model).__name__
            used["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        if own.data is not None:
            used["data"] = f"{feed.source.name} ({len(feed):,} and {len(self.evaluator.feed):,} samples)"
        if own.loss is not None:
            function = getattr(own.loss, "func", own.loss)  # of a functools.partial
            used["loss"] = getattr(function, "__name__", type(function).__name__)
        if own.optimizer is not None:
            used["optimizer"] = type(self.learner.optimizer).__name__
        return used

    def close(self) -> None:
        """Let go of loaders, threads and connections."""
        self.method.close()
        self.train_feed.close()
        self.evaluator.feed.close()


def build(
    config: RunConfig,
    ranks: Ranks,
    own: Own = Own(),  # noqa: B008 - frozen
    emulation: Emulation = Emulation(),  # noqa: B008 - frozen
) -> Run:
    """Build a run; every rank must call this, with the same configuration."""
    if own.loss is None and names_code(config.loss.name):
        own = replace(own, loss=named_loss(config.loss.name))
    precision = Precision(config.precision, ranks.device.type)
    plan = batch_plan(config)
    _require_runnable(config, ranks, plan)
    train_feed, test_feed = _feeds(config, ranks, precision, own.data)
    fingerprint = _fingerprint(DataPair(train_feed.source, test_feed.source), ranks)
    _require_views(config.evaluate_views, test_feed)
    require(
        plan.largest.batch <= len(train_feed),
        f"The batch of {plan.largest.batch} samples ({plan.largest.workers} workers x {plan.largest.local_batch}) is "
        f"larger than the training set of {len(train_feed)}; lower workers.count or workers.local_batch.",
    )
    model = _model(config, ranks, precision, own, train_feed)
    if isinstance(own.loss, nn.Module):  # it may hold class weights
        _place(own.loss, ranks, precision)
    samples_per_forward, kernels = _prepare_for_device(model, config, ranks, train_feed, own=own.model is not None)
    learner = _learner(config, ranks, model, own, train_feed)
    growth = Growth(config.growth, plan.stages[0], len(train_feed)) if config.plan == "auto" else None
    sampler = Sampler(len(train_feed), config.seed, growth or plan, config.data.drop_last)
    state = State(config, parts={} if growth is None else {"plan": growth})
    method = make_method(
        Setting(
            config, ranks, precision, learner, sampler, train_feed, state, samples_per_forward, kernels,
            own_model=own.model is not None, emulation=emulation,
        )
    )  # fmt: skip
    threads = Threads(torch.get_num_threads() if ranks.device.type == "cpu" else 0)
    state.register(**method.parts(), data=Identity("The data set", fingerprint), threads=threads)
    rates = Rates(config, sampler, learner.optimizer, learning_rate(config.lr, config.batch, config.plan))
    classes = 0 if own.model is None else _most_rows(model)
    loss, views = own.loss or _loss(test_feed), config.evaluate_views
    evaluator = Evaluator(test_feed, loss, ranks, precision, own.metrics, classes, views)
    model.train()
    return Run(config, ranks, learner, method, state, sampler, rates, train_feed, evaluator, kernels, growth)


def _require_runnable(config: RunConfig, ranks: Ranks, plan: BatchPlan) -> None:
    require(
        not config.arithmetic.needs_gpu or ranks.device.type == "cuda",
        f"precision is {config.precision}, which needs a GPU; use --set precision=bf16 or precision=float32 on a CPU.",
    )
    most = max(stage.workers for stage in plan.stages)  # in other stages ranks may wait
    require(
        ranks.size <= most,
        f"{ranks.size} ranks were started for {most} workers, but each rank needs a worker: start at most {most} "
        f"ranks or set workers.count={ranks.size}.",
    )
    fewest = min(stage.workers for stage in plan.stages)
    require(
        not config.optimizer.before_exchange or ranks.size <= fewest,
        f"optimizer.adagrad=before scales the gradient of each of {ranks.size} ranks by itself, but a stage of the "
        f"plan has only {fewest} workers: start at most {fewest} ranks, or use adagrad=after.",
    )


def _feeds(config: RunConfig, ranks: Ranks, precision: Precision, data: Any) -> tuple[Feed, Feed]:
    where = config.data
    if data is None:
        pair = open_data(
            where.name, where.path, where.holdout, config.seed, length=where.length, vocabulary=where.vocabulary
        )
    else:
        pair = as_pair(data, where.holdout, config.seed)
    proof = config.exact or precision.weights == torch.float64
    decoding = choose(
        where.decoder, pair.train, size=where.image_size, loaders=where.loaders, device=ranks.device, exact=proof
    )
    if decoding.why:  # all ranks measure, since they share cores; rank 0 decides
        decoding = ranks.from_first(decoding)

    def feed(source: Any, train: bool) -> Feed:
        return Feed(
            source,
            train=train,
            seed=config.seed,
            augment=where.augment if train else "none",
            shift=where.shift,
            image_size=where.image_size,
            device=ranks.device,
            dtype=precision.weights,
            loaders=where.loaders,
            rectangular=where.rectangular,
            decoding=decoding,
        )

    return feed(pair.train, True), feed(pair.test, False)


def _require_views(views: int, feed: Feed) -> None:
    """Refuse views of samples that are not images, before a run trains for an epoch."""
    what = "text has" if feed.length else f"samples of shape {feed.input_shape} have"
    is_image = not feed.length and len(feed.input_shape) == 3
    require(views == 1 or is_image, f"evaluate_views is {views}, but {what} no mirror image: use evaluate_views=1.")


def _fingerprint(data: DataPair, ranks: Ranks) -> str:
    """Return the fingerprint of the data; refuse ranks that have other samples, or the same in another order.

    If targets are drawn anew at each reading, fingerprints may change each time; then ranks are not compared.
    """
    fingerprint = data.fingerprint()
    if len(set(ranks.gather(fingerprint))) > 1 and all(ranks.gather(data.fingerprint() == fingerprint)):
        change = "give every rank the same samples in the same order: whole copies, or divided with one seed"
        ranks.require_same(fingerprint, "The samples", change)
    return fingerprint


def _model(config: RunConfig, ranks: Ranks, precision: Precision, own: Own, feed: Feed) -> nn.Module:
    """Build the model: every rank makes the same weights from the seed, and ranks compare hashes of them."""
    torch.manual_seed(config.seed)
    model = own.model
    if model is None:
        if find_model(config.model).input == "images":
            feed.source.check_images(config.model)
        model = build_model(config.model, **feed.shape)
    if own.change is not None:
        model = own.change(model)
    require_trainable(model, own.loss)
    if isinstance(model, SeesImages):
        if ranks.first:
            model.see(_some_images(config, feed))
        model.load_state_dict(ranks.from_first(model.state_dict() if ranks.first else None))
    if config.norm.zero_gamma:
        zero_gamma(model)
    _place(model, ranks, precision)
    if ranks.size > 1:  # a hash of 124 million weights on a GPU takes a second
        change = "build your model from the same seed on every rank, with torch.manual_seed before it is made"
        ranks.require_same(weights_hash(model), "The initial weights", change if own.model is not None else SAME_CODE)
    return model


def _place(module: nn.Module, ranks: Ranks, precision: Precision) -> None:
    """Move a network or a loss to the device on which the run computes, in its types."""
    module.to(ranks.device)
    module._apply(lambda each: each.to(_dtype_of(each, precision.weights)))  # type: ignore[no-untyped-call]  # torch's


def _dtype_of(tensor: Tensor, weights: torch.dtype) -> torch.dtype:
    """Return the type that a parameter or buffer is trained in; `Module.to` would make complex numbers real."""
    if tensor.is_complex():
        return weights.to_complex()
    return weights if tensor.is_floating_point() else tensor.dtype


def _some_images(config: RunConfig, feed: Feed) -> Tensor:
    """Return some images of the training set as a network gets them, but without augmentation."""
    some = feed.source.subset(spread(len(feed), IMAGES_SEEN))
    plain = Feed(some, train=False, image_size=config.data.image_size)
    with contextlib.closing(plain):
        return next(iter(plain([Request(0, torch.arange(len(plain)))])))[0]


def _prepare_for_device(
    model: nn.Module, config: RunConfig, ranks: Ranks, feed: Feed, *, own: bool
) -> tuple[int, Kernels | None]:
    """Put kernels under a model on a GPU; return how many samples may share a forward, and what was done."""
    samples, kernels = 1, None
    if ranks.device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks this form
        samples = _joined_samples(model, ranks.device, _bytes_per_sample(model, config, feed, own=own))
        kernels = fuse(model, config, own=own)
    elif feed.length and _keeps_samples_apart(model):
        samples = max(1, CPU_TOKENS_PER_FORWARD // feed.length)
    return samples, kernels


def _keeps_samples_apart(model: nn.Module) -> bool:
    """Whether workers that share a forward get the same as each alone: no batch norm, no dropout drawn by worker."""
    return isinstance(model, GPT | LSTM) and not any(isinstance(module, nn.Dropout) for module in model.modules())


def _bytes_per_sample(model: nn.Module, config: RunConfig, feed: Feed, *, own: bool) -> float:
    """Estimate the memory of a forward and backward for one sample, rather too high than too low."""
    if feed.length:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        scores = _most_rows(model) if own else feed.num_classes
        return feed.length * (GPU_BYTES_PER_PARAMETER * parameters + GPU_BYTES_PER_SCORE * scores)
    largest = max([feed.image_size, *(size.image_size for size in config.data.sizes)])
    return float(GPU_BYTES_PER_PIXEL * largest**2)


def _most_rows(model: nn.Module) -> int:
    """Return the most scores that a user's own model can give; to know more, the data would have to be read."""
    return max((len(parameter) for parameter in model.parameters() if parameter.ndim == 2), default=0)


def _joined_samples(model: nn.Module, device: torch.device, bytes_per_sample: float) -> int:
    """Prepare a model to run several workers in one forward, and return how many samples a forward may hold.

    With a norm layer that cannot keep workers apart, every worker gets a forward of its own.
    """
    try:
        ghost_batch_norm(model, 1)
    except ConfigError:
        return 1
    memory: int = torch.cuda.get_device_properties(device).total_memory
    return max(1, min(int(memory / bytes_per_sample), GPU_SAMPLES_PER_FORWARD))


def _loss(feed: Feed, smoothing: float = 0.0) -> Loss:
    """Cross-entropy, as a mean over samples or over tokens."""
    cross_entropy = CrossEntropy if feed.length else SampleCrossEntropy
    return cross_entropy(label_smoothing=smoothing)


def _learner(config: RunConfig, ranks: Ranks, model: nn.Module, own: Own, feed: Feed) -> Learner:
    rule, scaling = config.optimizer, None
    groups = parameter_groups(model, rule.weight_decay, {group.names: group.factor for group in config.lr.groups})
    if rule.decay_all:
        for group in groups:
            group["weight_decay"] = rule.weight_decay
    if rule.before_exchange:
        scaling = load(rule.before_exchange)(model, groups, **rule.arguments_before())
        groups = [{**group, "weight_decay": 0.0} for group in groups]  # weight decay is added before the scaling
    if own.optimizer is not None:
        optimizer = own.optimizer(model.parameters())
        require_usable(optimizer, model)
    else:
        on_gpu = ranks.device.type == "cuda"
        make = load_own(rule.home, "optimizer.name") if names_code(rule.name) else load(rule.home)
        try:
            optimizer = make(groups, lr=1.0, **rule.arguments(on_gpu=on_gpu))  # the rate is set in every step
        except (TypeError, ValueError) as error:
            if not names_code(rule.name):
                raise
            raise ConfigError(
                f"{rule.name} does not take optimizer.settings as they are ({error}): give the arguments of its "
                "constructor by name, other than parameters and lr."
            ) from None
        keep_kernels(optimizer)
    return Learner(
        model,
        WorkerLoss(model, own.loss or _loss(feed, config.loss.label_smoothing)),
        optimizer,
        WorkerStatistics(model, 0.0 if config.norm.statistics == "last_batch" else config.norm.momentum),
        scaling,
    )
