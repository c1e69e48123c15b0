"""Rate and schedule: do they follow the batch, and does the schedule end when the training does?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from bigstep.doctor.facts import Pass, Schedule, Update
from bigstep.doctor.finding import Case, Finding, Rule, Unseen
from bigstep.doctor.findings.samples import training_loaders
from bigstep.doctor.world import World

__all__ = ["RULES"]


def _batch(world: World) -> float:
    """Return the samples of one update, over all ranks."""
    counts = [[u.samples for u in process.all(Update) if u.samples] for process in world.ranks]
    if not all(counts):
        raise Unseen("the number of samples of an update is not known")
    return sum(median(each) for each in counts)


def _rate(world: World) -> float:
    update = world.first(Update)
    if update is None or not update.rates:
        raise Unseen("no rate was seen")
    return update.base or update.rates[0]


def wrong_rate(case: Case) -> Iterator[Finding]:
    """The rate changes with the number of ranks in a way that the batch does not explain."""
    batches = _batch(case.single), _batch(case.several)
    rates = _rate(case.single), _rate(case.several)
    if not rates[0]:
        raise Unseen("the first rate is 0")
    batch, rate = batches[1] / batches[0], rates[1] / rates[0]
    update = case.several.first(Update)
    assert update is not None
    figures = f"on {case.ranks} ranks the batch {_became(*batches)} and the rate {_became(*rates)}"
    if _near(rate, 1):
        if batch > 1.5:
            yield _unscaled(case, batch, rates[0], figures, update)
    elif _near(batch, 1):
        yield Finding(
            name="wrong-rate",
            title="the rate changes with the number of ranks though the batch stays the same",
            evidence=figures,
            cost=f"the rate is {rate:g} times what the same batch had on one rank",
            remedy="scale the rate with the global batch, not with the world size: here, leave it as it is on one rank",
            likelihood=0.92,
            line=update.line,
        )
    elif not _near(rate, batch) and not _near(rate, math.sqrt(batch)):
        if _moves_by_hand(case.single) or _moves_by_hand(case.several):
            raise Unseen("the program sets the rate itself in every step, and the rate it warms up to is not known")
        yield Finding(
            name="wrong-rate",
            title="the rate does not follow the batch",
            evidence=figures,
            cost=f"the batch is {batch:g} times as large and the rate {rate:g} times; the linear rule gives "
            f"{batch * rates[0]:.3g}, the square-root rule {math.sqrt(batch) * rates[0]:.3g}",
            remedy="multiply the rate once, by the ratio of the global batches (SGD) or by its square root (Adam)",
            likelihood=0.85,
            line=update.line,
        )


def _moves_by_hand(world: World) -> bool:
    """Whether the rate changes from update to update, and no scheduler has recorded its base."""
    updates = [u for u in world.ranks[0].all(Update) if u.rates] if world.ranks else []
    return len({u.rates[0] for u in updates}) > len(updates) / 2 > 1 and updates[0].base == updates[0].rates[0]


def _became(before: float, now: float) -> str:
    """Say how a number changed.

    >>> _became(8, 16), _became(0.1, 0.1)
    ('is 16 instead of 8', 'stays at 0.1')
    """
    return f"stays at {now:g}" if _near(now, before) else f"is {now:g} instead of {before:g}"


def _unscaled(case: Case, batch: float, rate: float, figures: str, update: Update) -> Finding:
    adam = any(word in update.optimizer.lower() for word in ("adam", "lamb", "lion", "adagrad", "rmsprop"))
    rule, value = ("square-root", math.sqrt(batch) * rate) if adam else ("linear", batch * rate)
    return Finding(
        name="wrong-rate",
        title="the batch grows with the number of ranks, but the rate stays the same",
        evidence=figures,
        cost=f"{batch:g} times fewer updates per epoch at the same rate: training makes less progress per sample",
        remedy=f"try a rate of {value:.3g}, as the {rule} rule says for {update.optimizer}, with a warm-up; or divide "
        "each rank's batch by the number of ranks",
        likelihood=0.5 if not adam else 0.4,
        level="advice",
        line=update.line,
    )


def _near(value: float, other: float) -> bool:
    return math.isclose(value, other, rel_tol=0.1)


def misplaced_schedule(case: Case) -> Iterator[Finding]:
    """The schedule ends long before or after the training does, because it counts other steps than are taken."""
    world = case.several
    event = world.ranks[0].first(Schedule) or (case.short.ranks[0].first(Schedule) if case.short else None)
    if event is None:
        raise Unseen("no scheduler was stepped")
    many = _passes_to_end(world, case.short)
    passes = _planned_passes(case)
    one = _passes_to_end(case.one, None) if case.one is not None and case.one.ranks else None
    if many is None:
        raise Unseen(f"{event.scheduler} has no end that can be read, or its steps per pass are not known")
    if _ends_with_the_training(case):
        return
    if passes:
        share = passes / many
        before = passes / one if one else None
        if share < 0.7 or share > 1.4:
            # sure if it fits on one rank or is off by the number of micro-batches; otherwise it may be intended
            micro = median(u.micro_steps for u in world.ranks[0].all(Update)) or 1
            by_ranks = before is not None and 0.8 < before < 1.2
            likelihood = 0.93 if by_ranks else 0.85 if micro > 1 and math.isclose(share, micro, rel_tol=0.15) else 0.4
            yield _misplaced(case, event, share, likelihood, f"over the {passes} passes of the training")
    elif one and not 0.7 < many / one < 1.4:
        fast = many < one
        yield _misplaced(
            case, event, one / many, 0.88 if fast else 0.5, f"against one rank, where it ends after {one:.3g} passes,"
        )


def _misplaced(case: Case, event: Schedule, share: float, likelihood: float, against: str) -> Finding:
    fast = share > 1
    often = [e for e in case.several.ranks[0].all(Schedule)]
    updates = len([u for u in case.several.ranks[0].all(Update)])
    return Finding(
        name="misplaced-schedule",
        title="the schedule runs ahead of the training" if fast else "the schedule never reaches its end",
        evidence=f"{event.scheduler} ends after {event.horizon:,} steps; {against} it is stepped {share:.2g} "
        f"times as far ({len(often)} steps in {updates} updates on rank 0)",
        cost=f"the schedule is over after 1/{share:.2g} of the training: the rest is wasted, or the rate rises again"
        if fast
        else f"the training ends at {100 * share:.0f} % of the schedule, while the rate is still high",
        remedy="set the length of the schedule in updates of this run: len(loader) after the sampler or "
        "accelerator.prepare has split it, divided by the accumulation steps, times the epochs; Accelerate steps a "
        "prepared scheduler once for each process",
        likelihood=likelihood,
        level="fault" if likelihood > 0.6 else "advice",
        line=event.line,
    )


def _passes_to_end(world: World | None, short: World | None) -> float | None:
    """Return after how many passes over the data the schedule ends."""
    if world is None or not world.ranks:
        return None
    rank = world.ranks[0]
    loaders = training_loaders(world)
    # of several optimizers only the first step has backward passes before it; of several schedulers count one
    events, updates = _of_one(rank.all(Schedule)), [u for u in rank.all(Update) if u.micro_steps] or rank.all(Update)
    source = events or (short.ranks[0].all(Schedule) if short and short.ranks else [])
    horizon = next((e.horizon for e in source if e.horizon), 0)
    if not horizon or not loaders or loaders[0].drawn < 1 or loaders[0].batch < 1 or not updates:
        return None
    batches = loaders[0].drawn / loaders[0].batch
    micro = median([u.micro_steps for u in updates]) or 1
    if len(events) >= len(updates) / 2:  # with batches or updates; a step ahead of its update counts too
        return horizon / (batches / micro * (len(events) / max(1, len(updates))))
    return float(horizon)  # once a pass


def _of_one(events: list[Schedule]) -> list[Schedule]:
    """Return the steps of one scheduler: those of several that are stepped together have the same positions."""
    return list({event.position: event for event in reversed(events)}.values())[::-1]


def _ends_with_the_training(case: Case) -> bool:
    """Whether a run that was seen to its end made as many updates as its schedule has steps, in whatever passes."""
    for world in (case.short, case.many):
        if world is not None and world.ended == "finished" and world.ranks:
            steps, updates = _of_one(world.ranks[0].all(Schedule)), world.ranks[0].all(Update)
            last = steps[-1] if steps else None
            if last is None or not last.horizon or abs(len(updates) - len(steps)) > 1:
                continue
            if abs(last.position - last.horizon) <= 1 + last.horizon / 100:  # an end found by search is only near
                return True
    return False


def _planned_passes(case: Case) -> int:
    """Return how many passes the program makes in all, where a run was seen to its end; 0 where none was."""
    for world in (case.short, case.many):
        if world is not None and world.ended == "finished" and world.ranks:
            train = {loader.loader for loader in training_loaders(world)}
            return 1 + max((p.number for p in world.ranks[0].all(Pass) if p.loader in train), default=-1)
    return 0


RULES: tuple[Rule, ...] = (wrong_rate, misplaced_schedule)
