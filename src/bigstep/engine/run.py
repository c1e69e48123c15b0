"""One run with its folder: start or resume it, keep its records and checkpoints, sum it up."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from bigstep.config import RunConfig
from bigstep.config.text import config_to_mapping
from bigstep.engine.background import BackgroundWriter
from bigstep.engine.build import Own, Run, build
from bigstep.engine.checkpoint import weights_hash
from bigstep.engine.compiled import Preparation, facts_of, keep_compiled, prepares, shape_of
from bigstep.engine.exact import fixed_arithmetic, say_moved
from bigstep.engine.fusing import advise_precision
from bigstep.engine.heartbeat import Heartbeat, beating
from bigstep.engine.interruption import StoppedError, StopRequest, listening
from bigstep.engine.loop import Ending, train
from bigstep.engine.meetings import MeetingKeeper, forget_meetings
from bigstep.engine.methods.islands import Islands
from bigstep.engine.observers.base import Audience, Observer
from bigstep.engine.observers.busy import BusyWatch
from bigstep.engine.observers.noise import NoiseWatch
from bigstep.engine.observers.records import Records
from bigstep.engine.observers.watches import InputWatch, LossWatch, StragglerWatch, patience_of
from bigstep.engine.profile.profiler import StepProfiler
from bigstep.engine.ranks import SAME_CODE, AgreedError, Ranks, cores_of_rank
from bigstep.engine.rates import batch_plan
from bigstep.engine.resume import restore, saved_state
from bigstep.engine.state import Threads
from bigstep.engine.survivors import Survivor
from bigstep.engine.weights import FILE as WEIGHTS_FILE
from bigstep.engine.weights import save_weights
from bigstep.errors import BigstepError, ConfigError, RunError
from bigstep.exchange.groups import lending
from bigstep.records import RunWriter, locked, median_of_last_epochs, write_atomically

__all__ = ["FitResult", "Order", "run"]


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
    said: tuple[str, ...] = ()
    """Remarks of the caller, for the records."""
    survivors: bool = False
    """A rank was lost on this machine; the others may have saved their islands as they stood."""


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What a run reached; `facts` is the object that `bigstep train --json` prints."""

    accuracy: float | None
    loss: float
    seconds: float
    steps: int
    weights_sha256: str
    facts: dict[str, Any]

    @classmethod
    def of(cls, facts: dict[str, Any]) -> FitResult:
        """Pick out what most callers want."""
        names = ("accuracy", "loss", "seconds", "steps", "weights_sha256")
        return cls(**{name: facts[name] for name in names}, facts=facts)


def run(order: Order, ranks: Ranks, observers: Iterable[Observer] = (), own: Own = Own()) -> dict[str, Any]:  # noqa: B008
    """Carry out an order on all ranks and return the result.

    Every rank calls this. Only rank 0 touches the folder, so it need not be shared between machines.

    Args:
        order: What to run.
        ranks: This process among its peers.
        observers: Further observers of the run; only those of rank 0 are used.
        own: A user's model, data and loss.
    """
    with contextlib.ExitStack() as stack:
        _keep_folder(order, ranks, stack)
        stop = stack.enter_context(listening())
        heartbeat = stack.enter_context(beating(ranks))
        if order.config.exact:
            stack.enter_context(fixed_arithmetic(ranks.device))
        stack.enter_context(lending())
        try:
            saved, remarks = _saved_state(order, ranks)
            built = build(order.config, ranks, own)
            with contextlib.closing(built):
                watching = Audience(observers if ranks.first else ())
                return _carry_out(order, built, own, watching, saved, remarks, stop, heartbeat)
        except BigstepError as error:
            alone = isinstance(error, RunError) and not isinstance(error, AgreedError)
            if alone and (missing := heartbeat.missing()):
                raise RunError(f"{str(error).rstrip('.')}; {missing}.") from error
            raise
        except Exception as error:
            # the traceback is for the author of the model, the sentence for its user
            _leave_details(order.folder, ranks, traceback.format_exc())
            sentence = f"Rank {ranks.rank} failed at step {heartbeat.step} in {heartbeat.doing}"
            missing = heartbeat.missing()
            raise RunError(f"{sentence}: {_reason(error)}{'; ' + missing if missing else ''}") from error


def _reason(error: Exception) -> str:
    """Return the kind of an error and the first line of what it says.

    >>> _reason(ValueError("it is odd" + chr(10) + "and more"))
    'ValueError: it is odd'
    """
    lines = str(error).strip().splitlines() or [""]
    if lines[0].startswith("Caught ") and "DataLoader worker" in lines[0]:  # the loader's own error comes further down
        traced = max((place for place, line in enumerate(lines) if "Traceback (most recent" in line), default=0)
        raised = [line for line in lines[traced + 1 :] if line.strip() and not line.startswith(" ")]
        return (raised or lines)[0]
    return f"{type(error).__name__}: {lines[0]}"


def _noise_watch(config: RunConfig) -> NoiseWatch:
    """Return the watch of the noise scale, whose advice on batches names an optimizer for which it is only a guide."""
    proportional = config.optimizer.batch_rule == "linear"
    return NoiseWatch(config.epochs, "" if proportional else config.optimizer.name)


def _keep_folder(order: Order, ranks: Ranks, stack: contextlib.ExitStack) -> None:
    """Lock the folder on rank 0; if another run has it, all ranks raise the same error."""
    refusal: str | None = None
    if ranks.first:
        try:
            stack.enter_context(locked(order.folder, fresh=not order.resume))
        except ConfigError as error:
            refusal = str(error)
    refusal = ranks.from_first(refusal)
    if refusal:
        raise ConfigError(refusal)
    if not order.resume:
        forget_meetings(order.folder)


def _saved_state(order: Order, ranks: Ranks) -> tuple[dict[str, Any] | None, list[str]]:
    if not order.resume:
        return None, []
    return saved_state(order.folder, order.config, ranks, survivors=order.survivors)


def _carry_out(
    order: Order,
    built: Run,
    own: Own,
    watching: Audience,
    saved: dict[str, Any] | None,
    remarks: list[str],
    stop: StopRequest,
    heartbeat: Heartbeat,
) -> dict[str, Any]:
    ranks, state, noise = built.ranks, built.state, _noise_watch(order.config)
    state.register(**noise.parts(), observers=watching)
    if saved is not None:
        restore(built, saved, order.folder / "checkpoints")
    with _opened_records(order, built, own) as writer:
        audience = Audience([*_own_observers(order, built, noise, writer), *watching.observers])
        checkpoints = BackgroundWriter(order.folder / "checkpoints", order.config.checkpoint.keep, audience.noted)

        def save() -> None:
            captured = state.capture()  # every rank takes part
            if ranks.first:
                checkpoints.submit(state.position.step, captured)

        keep = _keeper(order, built, audience)
        survivor = None if keep is None or order.config.exact else Survivor(keep, built)
        if survivor is not None:
            audience = Audience([*audience.observers, survivor])
        try:
            watching.noted(_announcement(order, built, own))  # the records hold these facts already
            moved = say_moved(writer.sessions) if writer is not None and order.config.exact else None
            said = [*order.said, *remarks, *([moved] if moved else [])]
            _announce(built, audience, said, resumed=order.resume)
            keeping = keep or (lambda: None)
            ending = train(built, audience, save, keeping, max_steps=order.max_steps, stop=stop, heartbeat=heartbeat)
            result = _result(built, ending, noise, order)
            result["accuracy_last5"] = ranks.from_first(median_of_last_epochs(writer.evaluations) if writer else None)
            if math.isnan(result["loss"]):  # no step was left to take
                result["loss"] = ranks.from_first(writer.last_loss if writer else None)
            result["model"] = str(_save_weights(order, built, "" if own.model is not None else order.config.model))
            if not checkpoints.wait():
                raise RunError(
                    f"The run has reached its end at step {state.position.step}, but its last checkpoint could not be "
                    f"written to {order.folder}: make room, then repeat the last steps with --resume."
                )
        except StoppedError as stopped:
            if writer is not None:
                writer.update(stopped=str(stopped))
            saved_to_disk = False
            with contextlib.suppress(RunError):  # a full disk may refuse the note about a failed checkpoint, too
                saved_to_disk = checkpoints.wait()
            if not saved_to_disk:
                raise StoppedError(stopped.number, stopped.step, saved=False) from None
            raise
        except AgreedError:
            raise
        except Exception:
            if survivor is not None:  # a rank may be lost: save the islands of this one
                survivor.keep()
            raise
        finally:
            with contextlib.ExitStack() as closing:  # on a full disk, any of these may raise; the others follow
                if keep is not None:
                    closing.callback(keep.close)
                closing.callback(checkpoints.wait)
                closing.callback(audience.close)
        ranks.from_first(None)  # a barrier: the last checkpoint is written, and holds all islands
        forget_meetings(order.folder)
        if writer is not None:
            writer.finish(result)
        return result


def _keeper(order: Order, built: Run, audience: Audience) -> MeetingKeeper | None:
    """Return what saves the islands of this rank at every meeting, if the configuration asks for it."""
    if not order.config.checkpoint.meetings or not isinstance(built.method, Islands):
        return None
    return MeetingKeeper(order.folder, built.state, built.method, audience.noted)


@contextlib.contextmanager
def _opened_records(order: Order, built: Run, own: Own) -> Iterator[RunWriter | None]:
    """Open the records on rank 0, and close them, however the run ends."""
    if not built.ranks.first:
        yield None
        return
    device = built.ranks.device
    writer = RunWriter(
        order.folder,
        config_to_mapping(order.config),
        keep_until_step=built.state.position.step,
        ranks=built.ranks.size,
        used=built.describe(own),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        data_fingerprint=built.state.parts["data"].state_dict(),
        **order.facts,
    )
    built.train_feed.source.keep(order.folder)
    with contextlib.closing(writer):
        yield writer


def _own_observers(order: Order, built: Run, noise: NoiseWatch, writer: RunWriter | None) -> list[Observer]:
    """Return the observers of every run; the noise scale comes first, since it adds its value to the rows."""
    config = order.config
    watches: list[Observer] = [
        noise, LossWatch(patience_of(config)), StragglerWatch(config.islands.count),
        InputWatch(built.train_feed.loaders, cores_of_rank(built.ranks), built.train_feed.spent),
    ]  # fmt: skip
    if built.ranks.device.type == "cuda" and prepares(config):  # on every rank: each compiles
        watches.append(Preparation(keep_compiled(facts_of(built.ranks.device)), shape_of(config)))
    if built.ranks.device.type == "cpu" and built.ranks.first:
        watches.append(BusyWatch(torch.get_num_threads(), built.ranks.rank))
    if writer is not None:
        watches.append(Records(writer))
    if order.profile and built.ranks.first:
        watches.append(
            StepProfiler(
                order.folder, order.profile, built.ranks.device, config.precision, rehearse=built.method.rehearse
            )
        )
    return watches


def _announce(built: Run, audience: Audience, remarks: list[str], *, resumed: bool) -> None:
    if built.kernels is not None:
        audience.noted(str(built.kernels), kernels=dataclasses.asdict(built.kernels))
    if (advice := advise_precision(built.config, built.ranks.device)) is not None:
        audience.noted(advice)
    for remark in remarks:
        audience.noted(remark)
    if why := built.train_feed.decoding.why:
        audience.noted(why, decoder=built.train_feed.decoding.name)
    if resumed:
        step = built.state.position.step
        audience.noted(f"Resumed at step {step}." if step else "Nothing to resume: started anew.")
    threads = built.state.parts["threads"]
    if isinstance(threads, Threads) and (sentence := threads.changed()) is not None:
        audience.noted(sentence)
    for observer in audience.observers:
        if isinstance(observer, Preparation):
            audience.noted(observer.announcement())


def _result(built: Run, ending: Ending, noise: NoiseWatch, order: Order) -> dict[str, Any]:
    digest = weights_hash(built.learner.model)
    built.ranks.require_same(digest, "The final weights", SAME_CODE)
    state, config, scale = built.state, order.config, noise.scale.value
    return {
        **ending.evaluation.facts(),
        "loss": ending.loss,
        "seconds": state.seconds,
        "steps": state.position.step,
        "samples": built.sampler.samples_at(state.position),
        "batch": config.batch,
        "workers": config.workers.count,
        "ranks": built.ranks.size,
        "weights_sha256": digest,
        "run": str(order.folder),
        "skipped_steps": state.parts["skipped"].state_dict(),
        "noise_scale": None if scale is None else max(scale, 1.0),  # at least one sample
        **({} if built.growth is None else {"plan": built.growth.told()}),
    }


def _save_weights(order: Order, built: Run, name: str) -> Path:
    """Write the weights for other tools; every rank takes part, since each holds a share of the statistics."""
    with built.method.evaluation() as model:
        if built.ranks.first:
            save_weights(model, order.folder, name, built.train_feed)
    return order.folder / WEIGHTS_FILE


def _announcement(order: Order, built: Run, own: Own) -> str:
    config, ranks, used = order.config, built.ranks, built.describe(own)
    model, data = used.get("model", config.model), used.get("data", config.data.name)
    stages = [(stage.workers, stage.local_batch) for stage in batch_plan(config).stages]
    batches = " → ".join(f"{count * local:,} ({count} × {local})" for count, local in stages)
    if built.growth is not None:
        batches += f" up to {built.growth.largest_batch:,} as the gradient noise scale grows"
    length = f"{config.epochs:g} epoch{'' if config.epochs == 1 else 's'}"
    if order.max_steps is not None:
        length = f"at most {order.max_steps:,} step{'' if order.max_steps == 1 else 's'} of {length}"
    plural = "" if ranks.size == 1 else "s"
    return (
        f"{config.recipe} · {model} on {data} · batch {batches} · {length} · {ranks.size} rank{plural} · {order.folder}"
    )


def _leave_details(folder: Path, ranks: Ranks, details: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"error-rank-{ranks.rank}.txt", details.encode())
    except OSError:
        print(details, file=sys.stderr)
