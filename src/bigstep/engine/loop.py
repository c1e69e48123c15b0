"""The training loop, straight from top to bottom: rate, step, notes, evaluation, checkpoint.

It knows no method, optimizer, codec or observer by name: a method takes the step, observers hear of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bigstep.engine.agenda import Agenda
from bigstep.engine.build import Run
from bigstep.engine.evaluate import Evaluation
from bigstep.engine.heartbeat import Heartbeat
from bigstep.engine.interruption import StoppedError, StopRequest
from bigstep.engine.meter import Meter
from bigstep.engine.observers.base import Audience

__all__ = ["Ending", "train"]


@dataclass(frozen=True)
class Ending:
    """What a run reached; where it stands is in its state."""

    evaluation: Evaluation
    loss: float


def train(
    run: Run,
    audience: Audience,
    save: Callable[[], None] = lambda: None,
    keep: Callable[[], None] = lambda: None,
    *,
    max_steps: int | None = None,
    stop: StopRequest | None = None,
    heartbeat: Heartbeat | None = None,
) -> Ending:
    """Train from where the state stands to the end of the run, or until `max_steps` steps were taken in all.

    Every rank calls this; all of them reach every collective in the same order, since each decision below depends
    on the position, or on what a flush summed over ranks.

    Args:
        run: What to train, and how.
        audience: Hears what happens.
        save: Writes a checkpoint of the run's state; called on every rank at the same step.
        keep: Saves what this rank itself holds; called on every rank after a step whose outcome asks for it.
        max_steps: Where to stop, counted from the beginning of the run.
        stop: Passes on a signal's request to save and stop.
        heartbeat: Publishes what this rank is doing, so that others can name it if it hangs.
    """
    state, sampler, method = run.state, run.sampler, run.method
    stop, heartbeat = stop or StopRequest(), heartbeat or Heartbeat(run.ranks)
    agenda = Agenda(run.config, sampler, max_steps, run.growth)
    meter = Meter(run.ranks, state.seconds, run.train_feed.length, run.train_feed.waits)
    evaluation, saved_at = None, meter.seconds

    def save_here() -> None:
        heartbeat.at(state.position.step, "a checkpoint")
        with meter.pause():
            state.seconds = meter.seconds
            save()

    for steps in agenda.stretches(state.position):
        run.begin_epoch(steps[0].position.epoch)
        batches = audience.feed(iter(run.train_feed(method.requests(steps))))
        for step in steps:
            heartbeat.at(step.position.step, "forward and backward")
            meter.begin()
            lr = run.rates.set(step)
            outcome = method.step(step, batches)
            state.position, due = sampler.after(step), agenda.after(step)
            where = {"step": state.position.step, **sampler.where(state.position)}
            meter.add(step, outcome, **where, lr=lr, batch=step.size)
            with meter.pause():
                audience.stepped(step, outcome, pausing=due.pausing)
            asked, late = 0, 0.0
            if meter.due or due.pausing or outcome.keep:
                heartbeat.at(state.position.step, "the sum of losses")
                unsaved_s = meter.seconds - saved_at if run.ranks.first else 0.0  # rank 0's clock decides for all
                votes = [*stop.votes(), float(0 < run.config.checkpoint.seconds < unsaved_s)]
                # a resumed run must find the rows of all steps before; only a rank by itself may hold one back
                whole = due.pausing or outcome.keep or any(votes)
                flush = meter.flush(votes, whole=whole, final=due.last)
                audience.flushed(flush)
                for note in agenda.heed(flush, due):
                    audience.noted(note.text, **note.facts)
                *signals, late = flush.votes
                asked = stop.agree(signals)
            if due.stops:  # before finish(): a resumed run must find the state of a run that was never stopped here
                save_here()
            if due.last:
                method.finish()
            if due.evaluate:
                heartbeat.at(state.position.step, "evaluation")
                with meter.pause():
                    evaluation = run.evaluate()
                    audience.evaluated({"kind": "eval", **where, "seconds": meter.seconds, **evaluation.facts()})
            if (due.save or late or asked) and not due.stops:
                save_here()
                saved_at = meter.seconds
            if outcome.keep:  # after the flush: a run may be resumed from here, too
                with meter.pause():
                    state.seconds = meter.seconds
                    keep()
            if asked and not due.last:
                raise StoppedError(asked, state.position.step)
    if evaluation is None and not agenda.has_ended(state.position):  # max_steps had been reached before
        method.finish()
    state.seconds = meter.seconds
    return Ending(evaluation or run.evaluate(), meter.loss)
