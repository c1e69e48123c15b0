"""Gradients: is the gradient that each rank applies the mean over all ranks, no more and no less?"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

from bigstep.doctor.facts import Backward, Collective, End, Forward, Group, Loss, Update, Wrap
from bigstep.doctor.finding import Case, Finding, Rule, Unseen
from bigstep.doctor.world import Process, World

__all__ = ["RULES", "detailed_updates", "differ", "exchanged"]

_UNFINISHED = "Expected to have finished reduction in the prior iteration"
"""Words in the error of DistributedDataParallel where some parameters got no gradient in the step before."""
NEAR = 0.02
"""Relative distance within which functionals of gradients count as equal: the order of a sum matters far less."""


def detailed_updates(process: Process) -> list[Update]:
    """Return the updates whose gradients were looked at and not sharded."""
    return [update for update in process.all(Update) if update.norms and not update.sharded]


def _steps(world: World) -> list[tuple[Update, ...]]:
    """Return the updates of all ranks, step by step, as far as every rank got."""
    steps = list(zip(*(detailed_updates(process) for process in world.ranks), strict=False))
    if not steps:
        raise Unseen("no update was seen on every rank")
    return steps


def differ(updates: tuple[Update, ...]) -> list[int]:
    """Return the parameters whose gradients are not the same on all ranks."""
    count = min(len(update.norms) for update in updates)
    norms = [update.norms for update in updates]
    return [i for i in range(count) if len({str(n[i]) for n in norms}) > 1]  # compared as text, NaN equals NaN


def _first_apart(world: World) -> tuple[int, list[int]]:
    """Return the first step whose gradients differ between ranks, while weights do not yet, and which of them do."""
    steps = _steps(world)
    for number, step in enumerate(steps):
        different = differ(step)
        if different or len({update.after for update in step}) > 1:
            return number, different
    return 0, []


def exchanged(world: World) -> bool:
    """Whether the ranks applied the same gradients in the first step, before anything can drift."""
    return not differ(_steps(world)[0])


# long: nine causes of one symptom, told apart in order
def unexchanged_gradients(case: Case) -> Iterator[Finding]:
    """Ranks apply gradients of their own: the exchange is missing, or the program bypasses it."""
    world = case.several
    steps = _steps(world)
    number, different = _first_apart(world)
    if not different:
        return
    step = steps[number]
    if len({forward.rows for process in world.ranks for forward in process.all(Forward)[:1]}) == 1:
        return  # the same samples but different gradients: the weights differ, which is for another rule
    total, first = len(step[0].norms), world.ranks[0]
    past = next((f for f in first.all(Forward) if f.training and f.route == "past"), None)
    wrap, group = world.first(Wrap), world.first(Group)
    hand = [c for c in first.all(Collective) if c.target == "gradient" and c.done]
    apart = functools.partial(
        Finding,
        name="unexchanged-gradients",
        cost=f"{world.size} separate models are trained, each on its share of the data, and only one is kept",
    )
    averaged = _averages_weights(first)
    if averaged is not None:
        yield Finding(
            name="unexchanged-gradients",
            title="weights are averaged from time to time, instead of gradients at every step",
            evidence=f"gradients differ between ranks, and {averaged.operation} is called on weights between updates",
            cost="this is local SGD: it sends less, but usually has a higher loss after the same number of samples",
            remedy="keep it if the network is slow; otherwise wrap the model in DistributedDataParallel",
            likelihood=0.3,
            level="advice",
            line=averaged.line,
        )
    elif wrap is not None and any(_UNFINISHED in end.message for end in world.all(End)):
        yield apart(
            title="DDP waits for gradients that never come, and does not exchange the others",
            evidence=f"{len(different)} of {total} gradients differ between ranks in update {number + 1}, and a later "
            "forward failed because DDP had not finished its exchange",
            cost="each rank steps with a gradient of its own, and the next forward ends the run with an error",
            remedy="create or replace parameters before DistributedDataParallel wraps the module: it waits for those "
            "that it found there; if some take no part in the loss, give it find_unused_parameters=True",
            likelihood=0.97,
            line=wrap.line,
        )
    elif len(different) < total and (wrap or hand):
        yield _missed(world, step, different)
    elif past is not None:
        yield apart(
            title="the model is called without its DDP wrapper, so no gradients are averaged",
            evidence=f"{past.module} is called directly although {wrap.wrapper if wrap else 'DDP'} wraps it; the "
            f"gradients of all {total} parameters differ between ranks",
            remedy="call the wrapper, model(x), instead of model.module(x) or the module that was wrapped",
            likelihood=0.98,
            line=past.line,
        )
    elif group is None:
        yield apart(
            title="the ranks never join a process group: each trains a model of its own",
            evidence=f"no process group was created; the gradients of all {total} parameters differ between ranks",
            remedy="call torch.distributed.init_process_group and wrap the model in DistributedDataParallel",
            likelihood=0.97,
            line=step[0].line,
        )
    elif wrap is not None and not any(b.synchronised for b in first.all(Backward)):
        yield apart(
            title="every backward runs inside no_sync, so no gradients are averaged",
            evidence=f"{len(first.all(Backward))} backward passes, none of which exchanged anything",
            remedy="run the last backward before each optimizer.step() outside no_sync",
            likelihood=0.97,
            line=first.all(Backward)[-1].line,
        )
    elif wrap is not None and (last := _last_backward(first, step[0])) is not None and not last.synchronised:
        yield apart(
            title="optimizer.step() follows a backward inside no_sync",
            evidence=f"the last backward before update {number + 1} exchanged nothing; {len(different)} of {total} "
            "gradients differ between ranks",
            remedy="run the last backward before each optimizer.step() outside no_sync: both must count "
            "micro-batches alike",
            likelihood=0.96,
            line=last.line,
        )
    elif wrap is None and not hand:
        yield apart(
            title="gradients are never exchanged",
            evidence=f"{world.size} ranks joined, but the model was not wrapped and no gradient was reduced; the "
            f"gradients of all {total} parameters differ between ranks",
            remedy="wrap the model in DistributedDataParallel, or all-reduce each p.grad and divide by the world size",
            likelihood=0.97,
            line=step[0].line,
        )
    else:
        yield apart(
            title="ranks apply different gradients",
            evidence=f"{len(different)} of {total} gradients differ in "
            + ("the first step" if not number else f"update {number + 1}, the first in which they do"),
            remedy="check what changes p.grad between backward and optimizer.step(): the exchange must come last",
            likelihood=0.85,
            line=step[0].line,
        )


def _averages_weights(process: Process) -> Collective | None:
    """Return the first exchange of weights after an update."""
    updated = False
    for event in process.events:
        updated = updated or isinstance(event, Update)
        if updated and isinstance(event, Collective) and event.target == "parameter" and "reduce" in event.operation:
            return event
    return None


def _last_backward(process: Process, update: Update) -> Backward | None:
    """Return the last backward before an update."""
    before = itertools.takewhile(lambda event: event is not update, process.events)
    return next((event for event in reversed(list(before)) if isinstance(event, Backward)), None)


def _missed(world: World, updates: tuple[Update, ...], different: list[int]) -> Finding:
    names = [updates[0].names[i] or f"parameter {i}" for i in different]
    return Finding(
        name="unexchanged-gradients",
        title="some parameters are left out of the exchange",
        evidence=f"the gradients of {len(different)} of {len(updates[0].norms)} parameters differ between ranks: "
        f"{', '.join(names[:4])}{', …' if len(names) > 4 else ''}",
        cost="these parameters drift apart between ranks, and the checkpoint holds those of one rank",
        remedy="create all parameters before DistributedDataParallel wraps the module (it does not notice later "
        "ones); if you reduce gradients yourself, reduce every p.grad",
        likelihood=0.97,
        line=updates[0].line,
    )


def stale_optimizer(case: Case) -> Iterator[Finding]:
    """The optimizer holds parameters that no backward reaches: copies, or those of a model that was replaced."""
    world = case.many or case.one
    if world is None or not any(detailed_updates(process) for process in world.ranks):
        raise Unseen("no update was seen")
    updates = [update for process in world.ranks for update in detailed_updates(process)]
    idle = [u for u in updates if u.strange == len(u.norms) and all(norm < 0 for norm in u.norms)]
    if len(idle) == len(updates):
        yield Finding(
            name="stale-optimizer",
            title="the optimizer holds parameters that the model does not use",
            evidence=f"none of the {len(idle[0].norms)} parameters of {idle[0].optimizer} belongs to the model that is "
            f"called, and none got a gradient in {len({update.number for update in idle})} updates",
            cost="nothing is trained: the loss changes only from batch to batch",
            remedy="create the optimizer from the parameters of the model that is called, after that model has been "
            "moved, copied, converted or wrapped",
            likelihood=0.97,
            line=idle[0].line,
        )


def scaled_gradients(case: Case) -> Iterator[Finding]:
    """The gradient is N times too large or too small: summed instead of averaged, or divided twice."""
    world = case.several
    updates = _steps(world)[0]
    if not exchanged(world):
        raise Unseen("the ranks apply different gradients")
    mean = sum(update.local for update in updates) / world.size
    hand = next((c for c in world.ranks[0].all(Collective) if c.target == "gradient"), None)
    if mean == 0 or not math.isfinite(mean):
        raise Unseen("the gradients of the first step are zero or not finite")
    if hand and any(update.clipped for update in updates):
        raise Unseen("gradients are clipped and exchanged by hand")
    reduced = updates[0].used / mean
    factor = reduced / _applied_alone(case) * _loss_ratio(case)
    if any(update.scaled for update in updates):
        raise Unseen("a GradScaler changes the size of gradients")
    first = world.ranks[0]
    line = hand.line if hand else updates[0].line
    if math.isclose(factor, world.size, rel_tol=0.15):
        if _is_plain_sum(first):
            return  # on one rank, too, the gradient is an undivided sum over the batch
        yield Finding(
            name="scaled-gradients",
            title="gradients are summed over ranks instead of averaged",
            evidence=f"the gradient of the first step is {reduced:.3g} times the mean over {world.size} ranks",
            cost=f"with SGD the effective rate is {world.size} times the one that is set, and grows with every "
            "added rank",
            remedy="divide by dist.get_world_size() after all_reduce, or use op=ReduceOp.AVG",
            likelihood=0.96,
            line=line,
        )
    elif math.isclose(factor, 1 / world.size, rel_tol=0.15):
        yield Finding(
            name="scaled-gradients",
            title="gradients are divided by the number of ranks twice",
            evidence=f"the gradient of the first step is {reduced:.3g} times the mean over {world.size} ranks"
            if abs(reduced - 1) > NEAR
            else f"compared with one rank the loss is multiplied by {_loss_ratio(case):.3g}, and the exchange averages "
            f"once more",
            cost=f"with SGD the effective rate is 1/{world.size} of the one that is set",
            remedy="leave the division to DistributedDataParallel, which averages: divide neither the loss nor p.grad "
            "by the world size",
            likelihood=0.94,
            line=line if abs(reduced - 1) > NEAR else first.all(Backward)[0].line,
        )


def _applied_alone(case: Case) -> float:
    """Return the factor that one rank puts on its gradient before the step, such as one over the micro-batches."""
    alone = detailed_updates(case.one.ranks[0])[:1] if case.one is not None and case.one.ranks else []
    ratio = alone[0].used / alone[0].local if alone and alone[0].local and not alone[0].scaled else 1.0
    return ratio if ratio and math.isfinite(ratio) else 1.0


def _loss_ratio(case: Case) -> float:
    """Return the weight of the loss in an update on several ranks, relative to one rank, if it is N or 1/N; else 1.

    It compares the factors by which the loss was multiplied before backward, summed over the micro-batches of an
    update, and over the samples where the loss is their sum: unlike losses, these do not vary from batch to batch.
    """
    if case.one is None:
        return 1.0
    sums = []
    for world in (case.single, case.several):
        found = [sum(_weights(process)) for process in world.ranks]
        sums.append(sum(found) / len(found) if found else 0.0)
    ratio = sums[1] / sums[0] if sums[0] else 1.0
    return next((k for k in (case.ranks, 1 / case.ranks) if math.isclose(ratio, k, rel_tol=0.05)), 1.0)


def _is_plain_sum(process: Process) -> bool:
    """Whether the loss of the first update is a sum over samples that nothing divides."""
    before = list(itertools.takewhile(lambda event: not isinstance(event, Update), process.events))
    losses = [event for event in before if isinstance(event, Loss)]
    backwards = [event for event in before if isinstance(event, Backward)]
    sums = all(loss.reduction == "sum" for loss in losses) if losses else all(b.summed for b in backwards)
    return bool(backwards) and sums and all(b.factor == 1 for b in backwards)


def _weights(process: Process) -> Iterator[float]:
    """Yield the weight of each backward pass before the first update: a mean counts as one, a sum as its samples."""
    targets = samples = 0
    for event in process.events:
        if isinstance(event, Update):
            return
        if isinstance(event, Loss):
            targets += event.targets if event.reduction == "sum" else 0
        elif isinstance(event, Forward) and event.training:
            samples += event.samples
        elif isinstance(event, Backward):
            yield event.factor * (targets or (samples if event.summed else 0) or 1)
            targets = samples = 0


RULES: tuple[Rule, ...] = (unexchanged_gradients, stale_optimizer, scaled_gradients)
