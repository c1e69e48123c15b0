"""One run with its folder: start or resume it, keep its records and checkpoints, sum it up."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from bigstep.config import RunConfig
from bigstep.config.text import config_from_mapping, config_to_mapping
from bigstep.data.sampler import Position
from bigstep.engine.background import BackgroundWriter
from bigstep.engine.build import Parts, assemble, batch_plan
from bigstep.engine.checkpoint import load_latest, weights_hash
from bigstep.engine.connect import connect
from bigstep.engine.heartbeat import Heartbeat, beating
from bigstep.engine.interruption import StoppedError, StopRequest, listening
from bigstep.engine.loop import Ending, train
from bigstep.engine.methods.graphed import graph
from bigstep.engine.profile.profiler import profiler_of
from bigstep.engine.ranks import AgreedError, Ranks
from bigstep.errors import BigstepError, ConfigError, DataError, RunError
from bigstep.exchange.error_feedback import owed
from bigstep.records import RunWriter, locked, write_atomically

__all__ = ["Audience", "Order", "capture", "changed_setting", "restore", "run"]

_FREE_TO_CHANGE = {"data.path", "data.loaders", "checkpoint", "kernels"}
"""Fields that do not decide the path, so a resumed run may change them."""


class Audience(Protocol):
    """Whoever watches a run."""

    def train(self, row: Mapping[str, Any]) -> None:
        """See a training row."""

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """See an evaluation row."""

    def note(self, text: str) -> None:
        """See a remark."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """What to run, and where its folder is."""

    config: RunConfig
    folder: Path
    resume: bool = False
    max_steps: int | None = None
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the records say about the run besides its configuration."""
    profile: int = 0
    """Steps to profile."""


@dataclasses.dataclass
class _Scribe:
    """Rank 0's listener: rows go to the records and to the audience."""

    writer: RunWriter
    audience: Audience

    def train(self, row: dict[str, Any]) -> None:
        self.writer.add([row])
        self.audience.train(row)

    def evaluation(self, row: dict[str, Any]) -> None:
        self.writer.add([row])
        self.audience.evaluation(row)

    def note(self, text: str, **facts: Any) -> None:
        self.writer.note(text, **facts)
        self.audience.note(text)


class _Silent:
    """The listener of every other rank."""

    def train(self, row: dict[str, Any]) -> None:
        """Rank 0 tells."""

    def evaluation(self, row: dict[str, Any]) -> None:
        """Rank 0 tells."""

    def note(self, text: str, **facts: Any) -> None:
        """Rank 0 tells."""


def run(order: Order, ranks: Ranks, audience: Audience, **own: Any) -> dict[str, Any]:
    """Carry out an order on all ranks and return the result; `own` are a user's model, data and loss.

    Every rank calls this. Only rank 0 touches the folder, so it need not be shared between machines.
    """
    with contextlib.ExitStack() as stack:
        _keep_folder(order.folder, ranks, stack)
        stop = stack.enter_context(listening())
        heartbeat = stack.enter_context(beating(ranks))
        try:
            return _run(order, ranks, audience, stop, heartbeat, own)
        except BigstepError as error:
            alone = isinstance(error, RunError) and not isinstance(error, AgreedError)
            if alone and (missing := heartbeat.missing()):
                raise RunError(f"{str(error).rstrip('.')}; {missing}.") from error
            raise
        except Exception as error:
            # the traceback is for whoever wrote the model; the sentence is for whoever runs it
            _leave_details(order.folder, ranks, traceback.format_exc())
            reason = (str(error).strip().splitlines() or [""])[0]
            sentence = f"Rank {ranks.rank} failed at step {heartbeat.step} in {heartbeat.doing}"
            missing = heartbeat.missing()
            raise RunError(
                f"{sentence}: {type(error).__name__}: {reason}{'; ' + missing if missing else ''}"
            ) from error


def _keep_folder(folder: Path, ranks: Ranks, stack: contextlib.ExitStack) -> None:
    """Lock the folder on rank 0; all ranks leave with its sentence if another run has it."""
    refusal: str | None = None
    if ranks.first:
        try:
            stack.enter_context(locked(folder))
        except ConfigError as error:
            refusal = str(error)
    refusal = ranks.from_first(refusal)
    if refusal:
        raise ConfigError(refusal)


def _run(
    order: Order, ranks: Ranks, audience: Audience, stop: StopRequest, heartbeat: Heartbeat, own: dict[str, Any]
) -> dict[str, Any]:
    state, problems = _state_of_first(order, ranks, order.folder / "checkpoints")
    parts = assemble(order.config, ranks, **own)
    with contextlib.closing(parts.train_feed), contextlib.closing(parts.test_feed):
        return _run_parts(order, parts, audience, stop, heartbeat, state, problems)


def _run_parts(
    order: Order,
    parts: Parts,
    audience: Audience,
    stop: StopRequest,
    heartbeat: Heartbeat,
    state: dict[str, Any] | None,
    problems: list[str],
) -> dict[str, Any]:
    ranks, checkpoints = parts.ranks, order.folder / "checkpoints"
    connect(parts)
    begin, seconds_before = Position(), 0.0
    if state is not None:
        begin, seconds_before = _restored(parts, state, checkpoints)
    graph(parts)
    listener: _Scribe | _Silent = _Silent()
    if ranks.first:
        writer = RunWriter(
            order.folder,
            config_to_mapping(order.config),
            keep_until_step=begin.step,
            ranks=ranks.size,
            device=_device_name(ranks.device),
            **order.facts,
        )
        listener = _Scribe(writer, audience)
    profiler = profiler_of(parts, order.folder, order.profile, listener.note) if order.profile and ranks.first else None
    background = BackgroundWriter(checkpoints, order.config.checkpoint.keep, listener.note)

    def save(position: Position, seconds: float) -> None:
        captured = capture(parts, position, seconds)
        if ranks.first:
            background.submit(position.step, captured)

    try:
        if ranks.first:
            audience.note(_announcement(order, ranks))
            if parts.kernels is not None:
                listener.note(str(parts.kernels), kernels=dataclasses.asdict(parts.kernels))
            for problem in problems:
                listener.note(f"{problem} The one before it is used.")
            if order.resume:
                listener.note(f"Resumed at step {begin.step}." if begin.step else "Nothing to resume: started anew.")
        ending = train(
            parts,
            listener,
            save,
            begin=begin,
            seconds_before=seconds_before,
            max_steps=order.max_steps,
            stop=stop,
            heartbeat=heartbeat,
            profiler=profiler,
        )
        result = _result(parts, ending, order)
    except StoppedError as stopped:
        if not background.wait():
            raise StoppedError(stopped.number, stopped.step, saved=False) from None
        raise
    finally:
        try:
            if profiler is not None:
                profiler.close()
            if parts.exchange is not None:
                parts.exchange.close()
            background.wait()  # notes a checkpoint that failed, which a full disk refuses too
        finally:
            if isinstance(listener, _Scribe):
                listener.writer.close()
    if isinstance(listener, _Scribe):
        listener.writer.finish(result)
    return result


def _state_of_first(order: Order, ranks: Ranks, checkpoints: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """Load rank 0's newest whole checkpoint and give it to every rank."""
    if not order.resume:
        return None, []
    state: dict[str, Any] | None = None
    problems: list[str] = []
    refusal: str | None = None
    if ranks.first:
        state, problems = load_latest(checkpoints)
        if state is not None:
            if isinstance(state.get("config"), dict):
                refusal = changed_setting(state["config"], order.config)
            else:
                refusal = "has a checkpoint that is none of a run"
    state, problems, refusal = ranks.from_first((state, problems, refusal))
    if refusal:
        raise ConfigError(f"The run in {order.folder} {refusal}; take it back, or start a new run with another --out.")
    return state, problems


def changed_setting(before: dict[str, Any], config: RunConfig) -> str | None:
    """Name the first setting that differs from those a run was started with, unless it is free to change.

    A field that did not exist then has its default.
    """
    with contextlib.suppress(ConfigError):  # one that no longer exists is named below
        before = config_to_mapping(config_from_mapping(before))
    return _changed_field(before, config_to_mapping(config))


def _changed_field(old: Any, new: Any, path: str = "") -> str | None:
    if path in _FREE_TO_CHANGE or old == new:
        return None
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            change = _changed_field(old.get(key), new.get(key), f"{path}.{key}" if path else key)
            if change:
                return change
        return None
    return f"was started with {path}={old!r:.60}, but now {path}={new!r:.60} is asked for"


def capture(parts: Parts, position: Position, seconds: float) -> dict[str, Any]:
    """Collect everything that decides the path; every rank must call this at the same step."""
    scaled = parts.scaler.is_enabled()
    return {
        "config": config_to_mapping(parts.config),
        "position": dataclasses.asdict(position),
        "seconds": seconds,
        "model": parts.model.state_dict(),
        "optimizer": parts.optimizer.state_dict(),
        "scaler": parts.graphed.scaler_state() if parts.graphed and scaled else parts.scaler.state_dict(),
        "statistics": parts.ranks.gather(parts.statistics.state_dict()),
        "exchange": parts.exchange.gather_state() if parts.exchange else None,
        "rank_adagrad": parts.ranks.to_first(parts.rank_adagrad.state_dict()) if parts.rank_adagrad else None,
        "skipped": parts.skipped,
        "noise": parts.noise.state_dict(),
    }


def restore(parts: Parts, state: dict[str, Any]) -> tuple[Position, float]:
    """Put what `capture` collected into fresh parts, on any number of ranks; return the position and the seconds."""
    parts.model.load_state_dict(state["model"])
    parts.optimizer.load_state_dict(state["optimizer"])
    parts.scaler.load_state_dict(state["scaler"])
    parts.statistics.load_state_dict(state["statistics"], parts.ranks.rank, parts.ranks.size)
    position = Position(**state["position"])
    if parts.exchange is None:
        parts.owed = owed(state["exchange"]) if state["exchange"] is not None else {}
    elif state["exchange"] is not None:
        parts.exchange.load_state_dict(state["exchange"])
    else:
        parts.exchange.steps = position.step  # one rank has run them: the warm-up does not begin again
    if parts.rank_adagrad is not None:
        parts.rank_adagrad.load_state_dict(state["rank_adagrad"], parts.ranks.rank, parts.ranks.size)
    parts.skipped = int(state.get("skipped", 0))
    if "noise" in state:  # the first release measured none
        parts.noise.load_state_dict(state["noise"])
    if min(position.step, position.epoch, position.offset) < 0 or position.offset > parts.sampler.size:
        raise ValueError(f"the position {position} lies outside the run")
    return position, float(state["seconds"])


def _restored(parts: Parts, state: dict[str, Any], checkpoints: Path) -> tuple[Position, float]:
    """Restore, or say that the checkpoint is of another run, however that shows."""
    try:
        return restore(parts, state)
    except Exception as error:  # a state of other names, shapes or types can raise nearly anything
        reason = (str(error).strip().splitlines() or [""])[0]
        raise DataError(
            f"The newest checkpoint in {checkpoints} does not fit this run ({type(error).__name__}: {reason:.200}); "
            "remove it to go on from the one before it."
        ) from error


def _result(parts: Parts, ending: Ending, order: Order) -> dict[str, Any]:
    digest = weights_hash(parts.model)
    parts.ranks.require_same(digest, "The final weights")
    position, config = ending.position, order.config
    return {
        "accuracy": ending.evaluation.accuracy,
        "loss": ending.loss,
        "eval_loss": ending.evaluation.loss,
        "seconds": ending.seconds,
        "steps": position.step,
        "samples": position.epoch * parts.sampler.size + position.offset,
        "batch": config.batch,
        "workers": config.workers.count,
        "ranks": parts.ranks.size,
        "weights_sha256": digest,
        "run": str(order.folder),
        "skipped_steps": parts.skipped,
        "noise_scale": None if parts.noise.value is None else max(parts.noise.value, 1.0),  # a sample at least
    }


def _announcement(order: Order, ranks: Ranks) -> str:
    config = order.config
    stages = [(stage.workers, stage.local_batch) for stage in batch_plan(config).stages]
    batches = " → ".join(f"{count * local:,} ({count} × {local})" for count, local in stages)
    plural = "" if ranks.size == 1 else "s"
    return (
        f"{config.recipe} · {config.model} on {config.data.name} · batch {batches} · {config.epochs:g} epochs · "
        f"{ranks.size} rank{plural} · {order.folder}"
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _leave_details(folder: Path, ranks: Ranks, details: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"error-rank-{ranks.rank}.txt", details.encode())
    except OSError:
        print(details, file=sys.stderr)
