"""The training loop, straight from top to bottom: rate, gradient, update, notes, evaluation, checkpoint."""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from bigstep.data.sampler import Position, Step
from bigstep.engine.build import Parts
from bigstep.engine.diagnosis import InputWatch, StragglerWatch, cores_of_rank
from bigstep.engine.evaluate import Evaluation, evaluate
from bigstep.engine.heartbeat import Heartbeat
from bigstep.engine.interruption import StoppedError, StopRequest
from bigstep.engine.meter import Meter, StepCost
from bigstep.engine.methods.graphed import graphed_step
from bigstep.engine.methods.synchronous import gradient_of, requests_of
from bigstep.engine.observers.noise import advice
from bigstep.engine.profile.profiler import StepProfiler
from bigstep.engine.ranks import AgreedError
from bigstep.errors import RunError
from bigstep.exchange import BucketTuner
from bigstep.tables import load

__all__ = ["Ending", "Listener", "resize", "set_rates", "train"]


class Listener(Protocol):
    """Hears rows as they come; rank 0 writes records and shows progress, the others are silent."""

    def train(self, row: dict[str, Any]) -> None:
        """Take a training row."""

    def evaluation(self, row: dict[str, Any]) -> None:
        """Take an evaluation row."""

    def note(self, text: str, **facts: Any) -> None:
        """Take a remark, with figures for the records."""


@dataclass(frozen=True)
class Ending:
    """Where a run ended and what it reached."""

    position: Position
    evaluation: Evaluation
    loss: float
    seconds: float


def train(
    parts: Parts,
    listener: Listener,
    save: Callable[[Position, float], None],
    *,
    begin: Position = Position(),  # noqa: B008 - frozen
    seconds_before: float = 0.0,
    max_steps: int | None = None,
    stop: StopRequest | None = None,
    heartbeat: Heartbeat | None = None,
    profiler: StepProfiler | None = None,
) -> Ending:
    """Train from `begin` to the end of the run, or until `max_steps` steps were taken in all.

    Every rank calls this; all of them reach every collective in the same order, since each decision below depends
    on the position, or on what a flush summed over ranks.

    Args:
        parts: The parts of the run.
        listener: Hears rows and notes.
        save: Writes a checkpoint; called on every rank at the same step.
        begin: Where to go on.
        seconds_before: What the run took up to there.
        max_steps: Where to stop, counted from the beginning of the run.
        stop: A signal asks through it to save and leave.
        heartbeat: Is told what this rank is doing, so that others can name it if it hangs.
        profiler: Looks at some of the steps.
    """
    config, sampler = parts.config, parts.sampler
    stop, heartbeat = stop or StopRequest(), heartbeat or Heartbeat(parts.ranks)
    meter, stragglers = Meter(parts.ranks, seconds_before), StragglerWatch()
    waits = InputWatch(parts.train_feed.loaders, cores_of_rank())
    position, evaluation, loss, saved_at = begin, None, math.nan, meter.seconds
    parts.model.train()
    for steps in _by_epoch(parts, begin, max_steps):
        resize(parts, steps[0].position.epoch)
        batches = iter(parts.train_feed(requests_of(parts, steps)))
        if profiler is not None:
            batches = profiler.watch(batches)
        for step in steps:
            started = time.perf_counter()
            exposed_before, sent_before = _traffic(parts)

            heartbeat.at(step.position.step, "forward and backward")
            lr = set_rates(parts, step)
            if parts.graphed is not None:
                step_loss, data_s = graphed_step(parts, step, batches)
            else:
                with parts.exchange.guard() if parts.exchange else contextlib.nullcontext():
                    step_loss, data_s = gradient_of(parts, step, batches)
                _update(parts)

            position = sampler.after(step)
            exposed, sent = _traffic(parts)
            cost = StepCost(time.perf_counter() - started, data_s, exposed - exposed_before)
            where = {"step": position.step, "epoch": _epochs(parts, position), "samples": _samples(parts, position)}
            meter.add(step_loss, cost, parts.pair, **where, lr=lr, batch=step.size, bytes_sent=sent - sent_before)

            is_last = where["samples"] >= config.epochs * sampler.size or position.step == max_steps
            evaluation_due = is_last or _crossed(parts, step, position, config.evaluate_every)
            save_due = is_last or _crossed(parts, step, position, config.checkpoint.every)
            if profiler is not None:
                meter.pause(profiler.step_ended(pausing=evaluation_due or save_due))
            if parts.tuner is not None and not parts.tuner.done:
                _tune_buckets(parts.tuner, listener)
            if is_last and parts.exchange is not None and parts.exchange.flush():
                _update(parts)  # double buffering: the gradient that was still on its way
            stop_number = 0
            if meter.due or evaluation_due or save_due:
                heartbeat.at(position.step, "the sum of losses")
                unsaved_s = meter.seconds - saved_at if parts.ranks.first else 0.0  # rank 0's clock decides for all
                flushed = meter.flush(stop.number == signal.SIGTERM, stop.number == signal.SIGINT, unsaved_s)
                terminate, interrupt, unsaved_s = flushed.votes  # some ranks may not have heard a signal yet
                for index, row in enumerate(flushed.rows):
                    loss = _last_finite(row, parts, loss)
                    _smooth_noise(parts, row, flushed.measured.get(index))
                    listener.train(row)
                _advise(parts, step, where, is_last, listener)
                straggler = stragglers.see(flushed.compute_by_rank, flushed.data_by_rank)
                if straggler is not None and step.workers >= parts.ranks.size:  # else some have nothing to do
                    listener.note(straggler)
                if (waiting := waits.see(flushed.data_by_rank, flushed.elapsed_s)) is not None:
                    listener.note(waiting)
                stop_number = signal.SIGTERM if terminate else signal.SIGINT if interrupt else 0
                save_due = save_due or bool(stop_number) or 0 < config.checkpoint.seconds < unsaved_s
            if evaluation_due:
                heartbeat.at(position.step, "evaluation")
                paused = time.perf_counter()
                evaluation = evaluate(parts)
                facts = {"accuracy": evaluation.accuracy, "eval_loss": evaluation.loss}
                listener.evaluation({"kind": "eval", **where, "seconds": meter.seconds, **facts})
                meter.pause(time.perf_counter() - paused)
            if save_due:
                heartbeat.at(position.step, "a checkpoint")
                paused = time.perf_counter()
                save(position, meter.seconds)
                saved_at = meter.seconds
                meter.pause(time.perf_counter() - paused)
            if stop_number and not is_last:
                raise StoppedError(stop_number, position.step)
    return Ending(position, evaluation or evaluate(parts), loss, meter.seconds)


def _by_epoch(parts: Parts, begin: Position, max_steps: int | None) -> Iterator[list[Step]]:
    steps = parts.sampler.steps(parts.config.epochs, begin)
    if max_steps is not None:
        steps = itertools.takewhile(lambda step: step.position.step < max_steps, steps)
    for _, group in itertools.groupby(steps, key=lambda step: step.position.epoch):
        yield list(group)


def _update(parts: Parts) -> None:
    """Update the weights with the gradient they hold."""
    scale = parts.scaler.get_scale() if parts.scaler.is_enabled() else 1.0
    parts.scaler.step(parts.optimizer)
    parts.scaler.update()
    parts.optimizer.zero_grad()
    if parts.scaler.is_enabled() and parts.exchange is not None and parts.scaler.get_scale() != scale:
        parts.exchange.rescale(parts.scaler.get_scale() / scale)  # what a lossy codec carries is scaled as well


def _tune_buckets(tuner: BucketTuner, listener: Listener) -> None:
    """Let the tuner see the end of a step; tell what it chose."""
    tuner.step_ended()
    if tuner.done:
        listener.note(f"Buckets of {tuner.bucket_mb:g} MB are the fastest here.", bucket_sizes=tuner.table)


def _smooth_noise(parts: Parts, row: dict[str, Any], measured: list[float] | None) -> None:
    """Take a measurement, if this row's step has one, and put the noise scale into the row where it is known."""
    if measured is not None:
        parts.noise.update(*measured)
    if parts.noise.value is not None:
        row["noise_scale"] = parts.noise.value


def _advise(parts: Parts, step: Step, where: dict[str, Any], is_last: bool, listener: Listener) -> None:
    """Say once during the run, and at its end, if the batch is far too large.

    A quarter of the run must be over: at the beginning of every training the noise scale is small.
    """
    noise = parts.noise
    unasked = noise.told or where["epoch"] < parts.config.epochs / 4
    if not noise.settled or (unasked and not is_last):
        return
    sentence = advice(noise.value, step.workers, step.local_batch)
    if sentence is not None:
        noise.told = True
        listener.note(sentence, step=where["step"], noise_scale=noise.value)


def set_rates(parts: Parts, step: Step) -> float:
    """Set what changes from step to step in the optimizer, as a function of the epoch, and return the rate."""
    epoch = _epochs(parts, step.position)
    lr = parts.learning_rate(epoch, step.workers * step.local_batch)
    settings = {"lr": lr}
    rule = parts.config.optimizer
    if rule.entry.changing:
        try:
            settings |= load(rule.entry.changing)(rule, epoch, lr)
        except RunError as error:
            raise AgreedError(str(error)) from None
    for group in parts.optimizer.param_groups:
        group.update(settings)
    return lr


def resize(parts: Parts, epoch: int) -> None:
    """Progressive resizing: take the size that the recipe lists for this epoch."""
    listed = [size for size in parts.config.data.sizes if size.epoch <= epoch]
    if listed:
        parts.train_feed.resize(listed[-1].image_size, listed[-1].min_scale)


def _samples(parts: Parts, position: Position) -> int:
    return position.epoch * parts.sampler.size + position.offset


def _epochs(parts: Parts, position: Position) -> float:
    return position.epoch + position.offset / parts.sampler.size


def _crossed(parts: Parts, step: Step, position: Position, every: float) -> bool:
    """Whether a step went past a multiple of `every` epochs; 1e-9 forgives the rounding of fractions."""
    if not every:
        return False
    before, after = _epochs(parts, step.position), _epochs(parts, position)
    return math.floor(after / every + 1e-9) > math.floor(before / every + 1e-9)


def _traffic(parts: Parts) -> tuple[float, float]:
    """Seconds of exposed exchange and bytes sent by this rank, since the beginning."""
    return (parts.exchange.exposed_seconds, parts.exchange.bytes_sent) if parts.exchange else (0.0, 0.0)


def _last_finite(row: dict[str, Any], parts: Parts, before: float) -> float:
    """Return the loss of a row; where it is none, stop the run, or keep the one before if that step was skipped."""
    loss = float(row["loss"])
    if math.isfinite(loss):
        return loss
    if parts.config.nonfinite == "skip" or parts.scaler.is_enabled():  # the scaler skips such steps too
        return before
    raise AgreedError(
        f"The loss is {loss} at step {row['step']} (epoch {row['epoch']:.2f}, learning rate {row['lr']:.4g}); "
        "lower lr.base, lengthen the warm-up or shrink the batch."
    )
