"""Time: what a step waits for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median

from bigstep.doctor.facts import Group, Loader, Update, Wrap
from bigstep.doctor.finding import Case, Finding, Rule, Unseen
from bigstep.doctor.world import Process, World

__all__ = ["RULES", "timed_updates"]

LEAST_S = 0.004
"""Seconds of a step below which nothing is reported: figures so small show mostly the cost of watching."""


def timed_updates(process: Process) -> list[Update]:
    """Return the updates that were only timed, except the first."""
    return [update for update in process.all(Update) if not update.norms][1:]


def _timed(world: World) -> list[list[Update]]:
    found = [timed_updates(process) for process in world.ranks]
    if not all(len(each) >= 3 for each in found):
        raise Unseen("fewer than three undisturbed steps were timed")
    return found


def _least(values: Iterable[float]) -> float:
    """Return the lower quartile: other work on the machine can only add time, to any step of any rank."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4]


def slow_input(case: Case) -> Iterator[Finding]:
    """The step waits for its samples."""
    for world in [case.several] if case.many else [case.single]:
        ranks = _timed(world)
        waits = [_least(u.input_s for u in updates) for updates in ranks]
        totals = [_least(u.total_s for u in updates) for updates in ranks]
        share, wait, total = min((wait / total, wait, total) for wait, total in zip(waits, totals, strict=True))
        if share > 0.3 and min(waits) > LEAST_S:
            loader = world.first(Loader)
            workers = loader.workers if loader else 0
            yield Finding(
                name="slow-input",
                title="every step waits for its samples",
                evidence=f"{100 * share:.0f} % of a step ({1000 * wait:.1f} of {1000 * total:.1f} ms) is spent "
                f"waiting for the DataLoader, which has num_workers={workers}",
                cost=f"without the wait a step would be {1 / (1 - share):.1f} times as fast",
                remedy="load in separate processes: num_workers=4 (or more), persistent_workers=True, pin_memory=True"
                if not workers
                else "use more num_workers or a larger prefetch_factor, or decode the samples once and keep them",
                likelihood=0.85,
                line=loader.line if loader else "",
            )


def uneven_ranks(case: Case) -> Iterator[Finding]:
    """One rank works longer than the others, and all wait for it."""
    world = case.several
    if world.first(Group) is None:
        raise Unseen("the ranks never join a process group")
    ranks = _timed(world)
    # waiting happens inside backward and collectives, so what is left is a rank's own work
    own = [_least(u.total_s - u.backward_s - u.exchange_s for u in updates) for updates in ranks]
    total = median(u.total_s for u in ranks[0])
    slow, extra = max(range(len(own)), key=own.__getitem__), max(own) - median(own[:-1] if len(own) > 2 else [min(own)])
    if extra > 2 * LEAST_S and extra > 0.25 * total and max(own) > 1.6 * min(own):
        inputs = [_least(u.input_s for u in updates) for updates in ranks]
        reading = inputs[slow] - min(inputs) > extra / 2
        yield Finding(
            name="uneven-ranks",
            title=f"rank {slow} is slower than the others, and all wait for it",
            evidence=f"outside backward, a step takes {1000 * own[slow]:.1f} ms on rank {slow} and "
            f"{1000 * min(own):.1f} ms "
            "on the fastest" + ("; the difference is in its DataLoader" if reading else ""),
            cost=f"{100 * extra / total:.0f} % of every step, on every rank",
            remedy="move what only that rank does (logging, metrics, saving) out of the step, or do it in "
            "every hundredth step only",
            likelihood=0.82,
            line=ranks[slow][0].line,
        )


def needless_search(case: Case) -> Iterator[Finding]:
    """DDP searches for unused parameters in every step, and there are none."""
    world = case.several
    wrap = world.first(Wrap)
    if wrap is None:
        raise Unseen("no DistributedDataParallel")
    updates = [u for u in world.all(Update) if u.norms]
    if wrap.find_unused and updates and not any(u.untouched for u in updates):
        yield Finding(
            name="needless-search",
            title="DDP searches for unused parameters, and there are none",
            evidence=f"find_unused_parameters=True, and all {len(updates[0].norms)} parameters got a gradient in all "
            f"{len({u.number for u in updates})} updates that were looked at",
            cost="every step traverses the autograd graph before the first bucket can be sent",
            remedy="leave find_unused_parameters out of DistributedDataParallel (Lightning: strategy='ddp'; Trainer: "
            "ddp_find_unused_parameters=False)",
            likelihood=0.86 if wrap.own else 0.35,
            level="fault" if wrap.own else "advice",
            line=wrap.line,
        )


def synchronising_calls(case: Case) -> Iterator[Finding]:
    """Single values are fetched from the device in every step."""
    world = case.several if case.many else case.single
    ranks = _timed(world)
    calls = median(u.syncs for u in ranks[0])
    line = next((u.sync_line for u in ranks[0] if u.sync_line), "")
    if calls >= 1:
        share = median(u.sync_s / u.total_s for u in ranks[0])
        costly = share > 0.05 and median(u.total_s for u in ranks[0]) > LEAST_S
        yield Finding(
            name="synchronising-calls",
            title="single values are fetched from tensors in every step",
            evidence=f"calls of item() or the like per step: {calls:g}, taking {100 * share:.1f} % of its time here",
            cost="on a GPU each call waits until all queued work is done, so that the next step starts late",
            remedy="keep the running loss as a tensor (total += loss.detach()) and fetch it every hundredth step",
            likelihood=0.6 if costly else 0.3,
            level="fault" if costly else "advice",
            line=line,
        )


def exposed_exchange(case: Case) -> Iterator[Finding]:
    """The exchange is done by hand after backward, so that nothing overlaps with it."""
    ranks = _timed(case.several)
    exchange = min(_least(u.exchange_s for u in updates) for updates in ranks)
    total = median(u.total_s for u in ranks[0])
    if exchange > 0.3 * total and exchange > LEAST_S:
        yield Finding(
            name="exposed-exchange",
            title="the exchange overlaps with no computation",
            evidence=f"{100 * exchange / total:.0f} % of a step ({1000 * exchange:.1f} ms) is spent in "
            "collectives that the script calls itself",
            cost=f"hidden behind backward, a step would be up to {total / (total - exchange):.1f} times as fast",
            remedy="DistributedDataParallel sends buckets while backward still runs; metrics need not be "
            "reduced every step",
            likelihood=0.45,
            level="advice",
        )


RULES: tuple[Rule, ...] = (
    slow_input,
    uneven_ranks,
    needless_search,
    synchronising_calls,
    exposed_exchange,
)
