"""Checkpoints: does each file have one writer, and hold all that the next step needs?"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator

from bigstep.doctor.facts import Event, Load, Save, Schedule, Update
from bigstep.doctor.finding import Case, Finding, Rule, Unseen
from bigstep.doctor.world import Process

__all__ = ["RULES"]

_LOSS = {
    "optimizer": "momentum and second moments start from zero",
    "scheduler": "the schedule of the rate starts over",
    "scaler": "the loss scale is searched again, and the first steps are skipped",
}


def same_file(case: Case) -> Iterator[Finding]:
    """Several ranks write the same file at the same time."""
    writers: dict[str, dict[int, Save]] = defaultdict(dict)
    for world in case.worlds:
        for process in world.ranks:
            for save in process.all(Save):
                writers[save.path][process.rank] = save
    if not writers:
        raise Unseen("no checkpoint was written")
    for path, saves in writers.items():
        if len(saves) > 1:
            yield Finding(
                name="same-file",
                title="several ranks write the same checkpoint",
                evidence=f"ranks {', '.join(map(str, sorted(saves)))} all write {path}",
                cost="the file is corrupted whenever two of them write at once, which is often on a shared disk",
                remedy="save on rank 0 only (if dist.get_rank() == 0, accelerator.is_main_process), then "
                "dist.barrier()",
                likelihood=0.93,
                line=next(iter(saves.values())).line,
            )
            return


def _reads_first(process: Process, saved: set[str]) -> bool:
    """Whether a rank reads a file that was saved before it trains; pretrained weights and later reads do not count."""
    return any(isinstance(event, Load) and _series(event.path) in saved for event in _before_training(process))


def _before_training(process: Process) -> Iterator[Event]:
    return itertools.takewhile(lambda event: not isinstance(event, Update), process.events)


def _series(path: str) -> str:
    """Mask the numbers in a path, so that the checkpoints of different epochs are alike."""
    return re.sub(r"\d+", "#", path)


def _restored_without(case: Case) -> tuple[str, ...]:
    """Return what the resumed run had though the file lacks it, such as a scheduler made with last_epoch."""
    if case.resumed is None or not case.resumed.ranks or case.many is None or not case.many.ranks:
        return ()
    events = case.many.ranks[0].events
    last = max((i for i, event in enumerate(events) if isinstance(event, Save) and "weights" in event.holds), default=0)
    saved = max((event.position for event in events[:last] if isinstance(event, Schedule)), default=0)
    found = [event.position for event in _before_training(case.resumed.ranks[0]) if isinstance(event, Schedule)]
    return ("scheduler",) if 0 < saved <= max(found, default=0) else ()


def incomplete_checkpoint(case: Case) -> Iterator[Finding]:
    """A checkpoint for resuming lacks something that the next step needs."""
    worlds = [world for world in (case.one, *case.worlds) if world is not None]
    saves = [save for world in worlds for save in world.all(Save) if save.updates and "weights" in save.holds]
    if not saves:
        raise Unseen("no checkpoint was written")
    again = [*worlds, case.resumed] if case.resumed is not None else worlds
    saved = {_series(save.path) for save in saves}
    reads = any(_reads_first(process, saved) for world in again for process in world.ranks)
    beside: dict[int, set[str]] = defaultdict(set)  # optimizer and weights may be in separate files
    for save in (save for world in worlds for save in world.all(Save)):
        beside[save.updates].update(save.holds)
    found = {save: beside[save.updates].union(_restored_without(case)) for save in saves}
    lacking = {save: [part for part in save.lacks if part not in found[save]] for save in saves}
    for save, lacks in lacking.items():
        if all(lacking.values()):
            lost = "; ".join(_LOSS[part] for part in lacks)
            meant = save.resumable or reads
            yield Finding(
                name="incomplete-checkpoint",
                title=f"the checkpoint lacks the {' and the '.join(lacks)}",
                evidence=f"{save.path} holds {', '.join(part for part in save.holds if part != 'counter')}"
                + (" and a counter to resume from" if "counter" in save.holds else ""),
                cost=f"a run resumed from it takes another path: {lost}",
                remedy="save and load "
                + ", ".join(f"{part}.state_dict()" for part in lacks)
                + " beside the model's (accelerator.save_state does)",
                likelihood=0.85 if meant else 0.35,
                level="fault" if meant else "advice",
                line=save.line,
            )
            return


def broken_resume(case: Case) -> Iterator[Finding]:
    """The resumed program takes other steps than it would have taken without the interruption."""
    if case.resumed is None or not case.resumed.ranks or case.many is None:
        raise Unseen("no run was resumed from a checkpoint")
    before, after = case.many.ranks[0], case.resumed.ranks[0]
    load, first = after.first(Load), after.first(Update)
    saves = [save for save in before.all(Save) if load is not None and save.path == load.path and save.updates]
    if load is None or first is None or not saves:
        raise Unseen("the program, started again, did not resume from its checkpoint")
    # the file holds what was saved last before the run was stopped
    there = next((u for u in before.all(Update) if u.number == saves[-1].updates), None)
    if there is None or not there.norms or not first.norms:
        raise Unseen("the step after the checkpoint was not seen in both runs")
    if first.after == there.after:
        return
    step = f"update {there.number + 1}"
    if first.rates != there.rates:
        cause, remedy = f"its rate is {first.rates[0]:g} instead of {there.rates[0]:g}", "the scheduler's state"
    elif first.norms == there.norms:
        cause, remedy = "its gradient is the same, but the weights after it are not", "the optimizer's state"
    else:
        cause, remedy = "its gradient is different", "epoch, sampler and generators, besides weights and buffers"
    yield Finding(
        name="broken-resume",
        title="a resumed run takes another path than one without interruption",
        evidence=f"{step}, repeated from {load.path}: {cause}",
        cost="every interruption changes the training, usually for the worse",
        remedy=f"save and restore {remedy}",
        likelihood=0.8 if first.rates != there.rates or first.norms == there.norms else 0.45,
        level="fault" if first.rates != there.rates or first.norms == there.norms else "advice",
        line=load.line,
    )


RULES: tuple[Rule, ...] = (same_file, incomplete_checkpoint, broken_resume)
