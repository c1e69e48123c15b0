"""From many losses to one gradient: clipping, accumulation, and means over unequal numbers of targets."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from bigstep.doctor.facts import Backward, Batch, Clip, Collective, Forward, Loss, Update
from bigstep.doctor.finding import Case, Finding, Rule, Unseen
from bigstep.doctor.world import Process, World

__all__ = ["RULES"]


@dataclass
class Stretch:
    """What a rank did between two updates."""

    backwards: list[Backward] = field(default_factory=list)
    forwards: list[Forward] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    clips: list[Clip] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    clipped_then: str = ""
    """The line of a clip after which gradients were exchanged or added to."""
    cause: str = ""
    anew: bool = False
    """Gradients were cleared on the way, so that the update has less than all backward passes."""

    @property
    def adds_up(self) -> bool:
        """Whether several forward passes, each over samples of its own, make one gradient."""
        count = len(self.backwards)
        if self.anew or count < 2 or count != len(self.forwards) or len({b.loader for b in self.batches}) > 1:
            return False  # a loss for each of several data sets is no accumulation
        looped = len({b.line for b in self.backwards if b.synchronised}) < 2  # two losses are written in two lines
        if len(self.batches) == 1:  # it may have been cut into micro-batches; two views of it are no accumulation
            parts = [row for forward in self.forwards for row in forward.rows]
            return looped and 0 < len(parts) == len(set(parts)) and set(parts) <= set(self.batches[0].rows)
        return looped or len(self.batches) > 1


def stretches(process: Process) -> list[tuple[Stretch, Update]]:
    """Cut a rank's events at its updates; only updates that were looked at in detail."""
    found: list[tuple[Stretch, Update]] = []
    now = Stretch()
    clip = ""
    for event in process.events:
        if isinstance(event, Update):
            if event.grown and not now.clipped_then:
                now.clipped_then, now.cause = clip, "more gradients were added afterwards"
            if event.norms:
                found.append((now, event))
            now = Stretch()
        elif isinstance(event, Backward):
            if event.anew:  # a scaler has skipped the update, or the gradient before was for another purpose
                now.clips, now.anew = [], True
            now.backwards.append(event)
        elif isinstance(event, Forward) and event.training:
            now.forwards.append(event)
        elif isinstance(event, Loss):
            now.losses.append(event)
        elif isinstance(event, Clip):
            now.clips.append(event)
            clip = event.line
        elif isinstance(event, Batch):
            now.batches.append(event)
        elif isinstance(event, Collective) and event.target == "gradient" and now.clips and not now.clipped_then:
            now.clipped_then, now.cause = now.clips[-1].line, "gradients were exchanged afterwards"
    return found


def _any_world(case: Case) -> World:
    world = case.many or case.one
    if world is None or not world.ranks:
        raise Unseen("no rank trained")
    return world


def clipped_early(case: Case) -> Iterator[Finding]:
    """Gradients are clipped before they are whole: before the exchange, the unscaling, or the last micro-batch."""
    found = stretches(_any_world(case).ranks[0])
    clips = [clip for stretch, _ in found for clip in stretch.clips]
    if not clips:
        raise Unseen("no clipping was seen")
    early = [stretch for stretch, _ in found if stretch.clipped_then]
    scaled = [clip for clip in clips if clip.scaled]
    if early:
        exchanged = "exchanged" in early[0].cause
        yield Finding(
            name="clipped-early",
            title="gradients are clipped before the exchange"
            if exchanged
            else "gradients are clipped while they add up",
            evidence=f"in {len(early)} of {len(found)} updates clipping came first, and {early[0].cause}",
            cost="each rank is cut by its own norm, so that the mean is not the gradient and its norm is not bounded"
            if exchanged
            else "what came before is cut again with every micro-batch, and the last ones weigh most",
            remedy="clip after the all-reduce, just before optimizer.step()"
            if exchanged
            else "clip once, after the last backward, just before optimizer.step()",
            likelihood=0.95,
            line=early[0].clipped_then,
        )
    elif scaled:
        yield Finding(
            name="clipped-early",
            title="gradients are clipped before they are unscaled",
            evidence=f"clip_grad ran in {len(scaled)} of {len(clips)} cases while gradients still carried the "
            f"scaler's factor",
            cost=f"the bound of {scaled[0].most:g} is divided by the scale (65,536 at the start): nearly "
            f"nothing is left",
            remedy="call scaler.unscale_(optimizer) before clip_grad_norm_",
            likelihood=0.95,
            line=scaled[0].line,
        )


def undivided_accumulation(case: Case) -> Iterator[Finding]:
    """Micro-batches are added up, but the loss is not divided by their number, or divided twice."""
    world = _any_world(case)
    found = [(s, u) for s, u in stretches(world.ranks[0]) if s.adds_up]
    if len(found) < 2:
        raise Unseen("no accumulation over micro-batches was seen")
    stretch, update = found[0]
    k = len(stretch.backwards)
    factors = [backward.factor for s, _ in found for backward in s.backwards]
    if any(loss.reduction == "sum" for loss in stretch.losses) or len(found) < len(stretches(world.ranks[0])) / 2:
        return
    same = [[u for u in process.all(Update) if u.number == update.number] for process in world.ranks]
    local = sum(u.local for each in same for u in each) / world.size
    applied = update.used / local if local else 1.0  # the gradient itself may have been divided
    line = stretch.backwards[0].line
    if all(math.isclose(f, 1.0, rel_tol=1e-3) for f in factors) and not math.isclose(applied, 1 / k, rel_tol=0.05):
        yield Finding(
            name="undivided-accumulation",
            title="micro-batches are added up, but not averaged",
            evidence=f"{k} backward passes an update, each from the whole loss",
            cost=f"the gradient is {k} times too large: the effective rate is {k} times the one that is set, "
            f"and clipping "
            f"cuts {k} times as much",
            remedy=f"loss = loss / {k} before backward (accelerator.accumulate and Lightning do it for you)",
            likelihood=0.88,
            line=line,
        )
    elif k > 1 and all(math.isclose(f, 1 / k**2, rel_tol=1e-3) for f in factors):
        yield Finding(
            name="undivided-accumulation",
            title="the loss is divided by the number of micro-batches twice",
            evidence=f"{k} backward passes an update, each from the loss divided by {k * k}",
            cost=f"the effective rate is 1/{k} of the one that is set",
            remedy="leave the division to accelerator.accumulate or the trainer, or do it yourself, but not both",
            likelihood=0.9,
            line=line,
        )


def uncleared_gradients(case: Case) -> Iterator[Finding]:
    """Nothing clears the gradients, or some of them: each update uses the sum of all so far."""
    groups: dict[int, list[Update]] = defaultdict(list)
    for _, update in stretches(_any_world(case).ranks[0]):
        if any(update.norms):
            groups[update.which].append(update)
    later = [group[1:] for group in groups.values() if len(group) > 1]  # of each optimizer, the first has no past
    if not later:
        raise Unseen("fewer than two updates of an optimizer were seen")
    worst = max(later, key=lambda group: sum(update.kept > 0 for update in group) / len(group))
    kept = [update for update in worst if update.kept]
    if len(kept) <= len(worst) / 2:
        return
    whole = all(update.kept >= _with_gradient(update) for update in kept)
    which = "all gradients" if whole else f"the gradients of {kept[0].kept} of {_with_gradient(kept[0])} parameters"
    whose = f" of {kept[0].optimizer}" if len(groups) > 1 else ""
    yield Finding(
        name="uncleared-gradients",
        title="gradients are not cleared: each update uses the sum of all before it"
        if whole
        else "some gradients are not cleared: each update uses the sum of all before it",
        evidence=f"in {len(kept)} of {len(worst)} updates{whose} {which} of the update before were still there when "
        "backward began",
        cost="the weights follow a sum that only grows: the loss falls at first, as with too much momentum, and "
        "then swings or breaks",
        remedy="call optimizer.zero_grad() once an update, before the first backward of the next"
        + ("" if whole else "; zero_grad() of one module leaves out what else the optimizer holds"),
        likelihood=0.97,
        line=kept[0].line,
    )


def _with_gradient(update: Update) -> int:
    """Return how many parameters had a gradient; of sharded ones the norm is not known."""
    return sum(norm not in (0.0, -1.0) for norm in update.norms) or len(update.norms)


def mean_of_means(case: Case) -> Iterator[Finding]:
    """Losses are means over unequal numbers of targets, and the mean of those is not the mean over targets."""
    world = _any_world(case)
    updates = list(zip(*(stretches(process) for process in world.ranks), strict=False))
    uneven, worst, line = 0, 1.0, ""
    parts = 0
    for update in updates:
        losses = [loss for stretch, _ in update for loss in stretch.losses if loss.reduction == "mean" and loss.targets]
        factors = [backward.factor for stretch, _ in update for backward in stretch.backwards]
        if len(losses) != len(factors) or len(losses) < 2:
            continue
        alike: dict[str, list[tuple[float, Loss]]] = defaultdict(list)
        for factor, loss in zip(factors, losses, strict=True):
            alike[loss.line].append((factor, loss))  # losses of two lines are of two kinds, and no parts of one mean
        several = [pairs for pairs in alike.values() if len(pairs) > 1]
        parts += bool(several)
        ratios = [(_unevenness(pairs), pairs[0][1].line) for pairs in several]
        ratio, where = max(ratios, default=(1.0, ""))
        if ratio > 1.3:
            uneven, line = uneven + 1, where
            worst = max(worst, ratio)
    if not parts:
        raise Unseen("no update was made of several mean losses")
    if uneven > parts / 2:
        yield Finding(
            name="mean-of-means",
            title="a mean of means over unequal numbers of targets",
            evidence=f"in {uneven} of {parts} updates the losses that were averaged counted unequal numbers of "
            f"targets, up "
            f"to {worst:.1f} to 1",
            cost=f"a target in a short part weighs up to {worst:.1f} times as much as one in a long part, and "
            f"the result "
            "changes with the number of ranks and micro-batches",
            remedy="use reduction='sum', all-reduce the number of targets of the whole update, and divide by it "
            "(times the "
            "world size, since DDP averages)",
            likelihood=0.8,
            line=line,
        )


def _unevenness(pairs: list[tuple[float, Loss]]) -> float:
    """Return the ratio of the numbers of targets of losses that are weighed alike; 1 where weights make up for it."""
    factors = [factor for factor, _ in pairs]
    counts = [loss.targets for _, loss in pairs]
    weights = [factor / count for factor, count in zip(factors, counts, strict=True)]
    if max(factors) > 1.01 * min(factors) or max(weights) <= 1.2 * min(weights):
        return 1.0
    return max(counts) / min(counts)


RULES: tuple[Rule, ...] = (clipped_early, undivided_accumulation, uncleared_gradients, mean_of_means)
