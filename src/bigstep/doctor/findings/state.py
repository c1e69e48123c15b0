"""Start, randomness and state: do ranks share what they must share, and keep apart what they must not repeat?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from bigstep.doctor.facts import Backward, Forward, Seed, State, Update, Weights, Worker, Wrap
from bigstep.doctor.finding import Case, Finding, Rule, Unseen
from bigstep.doctor.findings.gradients import detailed_updates, differ, exchanged
from bigstep.doctor.world import Process, World

__all__ = ["RANDOMNESS", "STATE"]


def same_randomness(case: Case) -> Iterator[Finding]:
    """Ranks draw the same random numbers, so that dropout and augmentation repeat on all of them."""
    world = case.several
    forwards = [[f for f in process.all(Forward) if f.training] for process in world.ranks]
    calls = [call for call in zip(*forwards, strict=False) if all(f.generator for f in call)]
    dropout = [call for call in calls if len({f.generator for f in call}) == 1]
    states = [
        {(e.loader, e.worker, e.generator): e.state for p in group for e in reversed(p.all(Worker))}
        for group in _with_helpers(world)
    ]
    shared = set.intersection(*(set(each) for each in states)) if states else set()
    augmentation = [key for key in shared if len({each[key] for each in states}) == 1]
    if not calls and not shared:
        raise Unseen("no random number was drawn in a forward or while reading samples")
    if not (calls and len(dropout) > len(calls) / 2) and not augmentation:
        return
    seeds = [e for e in world.ranks[0].all(Seed) if e.generator in ("torch", "numpy", "random")]
    own = next((e for e in seeds if e.own), None)
    what = "dropout" if dropout else "augmentation"
    seen = (
        f"in {len(dropout)} of {len(calls)} calls of the model all {world.size} ranks drew from the same state"
        if dropout
        else f"all {world.size} ranks began to draw from {augmentation[0][2]} in the same state"
    )
    yield Finding(
        name="same-randomness",
        title=f"every rank draws the same random numbers: {what} repeats",
        evidence=seen + (f"; torch.manual_seed({own.value}) on every rank" if own else ""),
        cost=f"{world.size} ranks see one pattern where they should see {world.size}: the noise of a step does "
        f"not average out",
        remedy="seed with the rank as well, torch.manual_seed(seed + rank), after the model is created; Accelerate: "
        "set_seed(seed, device_specific=True)",
        likelihood=0.75 if own else 0.35,
        level="fault" if own else "advice",
        line=own.line if own else (seeds[0].line if seeds else ""),
    )


def _with_helpers(world: World) -> list[list[Process]]:
    """Group the processes by rank: a rank and its loader processes."""
    groups: dict[int, list[Process]] = defaultdict(list)
    for process in world.everything:
        groups[process.rank].append(process)
    return [groups[rank] for rank in sorted(groups)] if len(groups) == world.size else []


def different_start(case: Case) -> Iterator[Finding]:
    """Ranks begin with different weights."""
    world = case.several
    starts = [process.first(Weights) for process in world.ranks]
    known = [start for start in starts if start is not None]
    if len(known) < world.size:
        raise Unseen("the weights at the start were not seen on every rank")
    if len({start.parameters for start in known}) > 1:
        seed = world.ranks[0].first(Seed)
        apart = all(detailed_updates(process) for process in world.ranks) and not exchanged(world)
        yield Finding(
            name="different-start",
            title="ranks start from different weights",
            evidence=f"{len({start.parameters for start in known})} different sets of weights on {world.size} "
            f"ranks before the first step",
            cost="gradients of different models are applied as if they came from one: the models never become equal"
            if not apart
            else "the models have nothing in common from the first step on",
            remedy="broadcast the parameters from rank 0 before training (DistributedDataParallel does), or use "
            "the same seed on all ranks until the model is created",
            likelihood=0.98 if not apart else 0.9,  # where nothing is exchanged either, that comes first
            line=seed.line if seed and seed.line else known[0].line,
        )


def drifting_weights(case: Case) -> Iterator[Finding]:
    """Ranks apply the same gradients and yet end with different weights."""
    world = case.several
    idle = [p.rank for p in world.ranks if not p.all(Update) and len(p.all(Backward)) > 1]
    active = [p for p in world.ranks if p.all(Update)]
    if idle and active:
        yield Finding(
            name="drifting-weights",
            title="only some ranks take steps",
            evidence=f"optimizer.step() ran on ranks {', '.join(str(p.rank) for p in active)} only; ranks "
            f"{', '.join(map(str, idle))} ran backward and never called it",
            cost="the other ranks compute gradients for weights that never change",
            remedy="call optimizer.step() on every rank: all have the same gradients, and so keep the same weights",
            likelihood=0.95,
            line=active[0].all(Update)[0].line,
        )
        return
    steps = list(zip(*(detailed_updates(process) for process in world.ranks), strict=False))
    starts = {start.parameters for process in world.ranks if (start := process.first(Weights))}
    if not steps or len(starts) != 1:
        raise Unseen("no common start was seen, or no update on every rank")
    if not exchanged(world):
        return
    for step in steps:
        if differ(step):
            return  # the gradients themselves differ, which is another rule
        if len({update.after for update in step}) > 1:
            yield _drift(step, "ranks drift apart though they apply the same gradients")
            return
    every = (step for each in case.worlds for step in zip(*(p.all(Update) for p in each.ranks), strict=False))
    for step in every:  # rates are known for all updates of all runs
        if len({update.rates for update in step}) > 1 and len({update.optimizer for update in step}) == 1:
            yield _drift(step, "ranks step with different rates")
            return


def _drift(step: tuple[Update, ...], title: str) -> Finding:
    rates = [update.rates for update in step]
    group = next((i for i, each in enumerate(zip(*rates, strict=False)) if len(set(each)) > 1), None)
    told = "" if group is None else f"the rates are {', '.join(f'{each[group]:g}' for each in rates)}"
    apart = "the weights differ" if len({update.after for update in step}) > 1 else ""
    return Finding(
        name="drifting-weights",
        title=title,
        evidence=f"after update {step[0].number + 1} " + "; ".join(filter(None, (apart, told))),
        cost="each rank trains a model of its own from here on",
        remedy="set the same rate on every rank (a scheduler that follows a metric must see the reduced metric)"
        if told
        else "look for what changes weights on single ranks: weight clipping, averaging, optimizer state",
        likelihood=0.92,
        line=step[0].line,
    )


def different_buffers(case: Case) -> Iterator[Finding]:
    """Batch-norm statistics differ from rank to rank, or come from one rank's small share."""
    world = case.several
    states = [{e.name: e.digest for e in process.all(State) if e.what == "buffers"} for process in world.ranks]
    names = set.intersection(*(set(each) for each in states))
    if not names:
        raise Unseen("no buffers that training changes")
    wrap = world.first(Wrap)
    different = [name for name in sorted(names) if len({each[name] for each in states}) > 1]
    trained = {e.name: e.digest for e in world.ranks[0].all(State) if e.what == "parameters"}
    if not different or not trained:
        return
    if wrap is None or not wrap.broadcast_buffers:
        yield Finding(
            name="different-buffers",
            title="every rank has batch-norm statistics of its own",
            evidence=f"the buffers of {', '.join(different)} differ between ranks, and nothing synchronises them"
            + (" (broadcast_buffers=False)" if wrap else ""),
            cost=f"each rank evaluates a different model, and the checkpoint holds statistics of 1/{world.size} of "
            f"the data",
            remedy="nn.SyncBatchNorm.convert_sync_batchnorm(model), or average the buffers over ranks before "
            "evaluation",
            likelihood=0.88,
            line=wrap.line if wrap else "",
        )
        return
    update = world.first(Update)
    if wrap.batch_norms and update is not None and 0 < update.samples < 16:
        yield Finding(
            name="different-buffers",
            title="batch-norm statistics come from rank 0 alone",
            evidence=f"{wrap.batch_norms} batch norms, {update.samples} samples a rank; DDP sends rank 0's "
            f"buffers to all",
            cost=f"the statistics come from {update.samples} samples at a time, and from 1/{world.size} of the data",
            remedy="nn.SyncBatchNorm.convert_sync_batchnorm(model) before wrapping, or a larger batch for each rank",
            likelihood=0.4,
            level="advice",
            line=wrap.line,
        )


def different_averages(case: Case) -> Iterator[Finding]:
    """A moving average of the weights differs from rank to rank."""
    for world in case.worlds:
        states = [[e for e in process.all(State) if e.what == "average"] for process in world.ranks]
        weights = [{e.digest for e in process.all(State) if e.what == "parameters"} for process in world.ranks]
        if not all(states) or len({tuple(sorted(each)) for each in weights}) > 1:
            continue
        for copies in zip(*states, strict=False):
            if len({copy.digest for copy in copies}) > 1:
                yield Finding(
                    name="different-averages",
                    title="a moving average of the weights differs by rank",
                    evidence=f"a copy of the model ({copies[0].name}) differs between ranks after "
                    f"{copies[0].updates} updates, though the weights are the same",
                    cost="which average is evaluated or saved depends on the rank that does it",
                    remedy="update the average on every rank, after optimizer.step(), from the same weights; or "
                    "keep it on rank 0 only and evaluate there",
                    likelihood=0.92,
                )
                return
    if not any(e.what == "average" for world in case.worlds for e in world.all(State)):
        raise Unseen("no copy of the model was kept beside it")


RANDOMNESS: tuple[Rule, ...] = (same_randomness,)
STATE: tuple[Rule, ...] = (different_start, drifting_weights, different_buffers, different_averages)
