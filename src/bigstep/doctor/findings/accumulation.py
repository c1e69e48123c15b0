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
    """Gradients were cleared in between, so that the update does not hold all backward passes."""

    @property
    def adds_up(self) -> bool:
        """Whether several forward passes, each over samples of its own, add up to one gradient."""
        count = len(self.backwards)
        if self.anew or count < 2 or count != len(self.forwards) or len({b.loader for b in self.batches}) > 1:
            return False  # one loss for each of several data sets is not accumulation
        looped = len({b.line for b in self.backwards if b.synchronised}) < 2  # two kinds of losses have two lines
        if len(self.batches) == 1:  # it may have been cut into micro-batches; two views of it are not accumulation
            parts = [row for forward in self.forwards for row in forward.rows]
            return looped and 0 < len(parts) == len(set(parts)) and set(parts) <= set(self.batches[0].rows)
        return looped or len(self.batches) > 1


def stretches(process: Process) -> list[tuple[Stretch, Update]]:
    """Split a rank's events at its updates; return the updates that were looked at in detail."""
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
            if event.anew:  # a scaler skipped the update, or the last gradient had another purpose
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
    """Gradients are clipped before they are complete: before the exchange, the unscaling, or the last micro-batch."""
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
            else "gradients are clipped while they still accumulate",
            evidence=f"in {len(early)} of {len(found)} updates clipping came first, and {early[0].cause}",
            cost="each rank scales its gradient by its own norm: the mean over ranks is not the clipped gradient"
            if exchanged
            else "earlier micro-batches are clipped again with each later one, so that the last ones weigh most",
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
            evidence=f"in {len(scaled)} of {len(clips)} calls of clip_grad the gradients still carried the "
            "scaler's factor",
            cost=f"in effect the bound of {scaled[0].most:g} is divided by the scale (65,536 at the start), so nearly "
            f"nothing of the gradient is left",
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
            evidence=f"{k} backward passes per update, each from the undivided loss",
            cost=f"the gradient is {k} times too large: with SGD the effective rate is {k} times the one that is set, "
            f"and clipping cuts {k} times as much",
            remedy=f"loss = loss / {k} before backward (accelerator.accumulate and Lightning do it for you)",
            likelihood=0.88,
            line=line,
        )
    elif k > 1 and all(math.isclose(f, 1 / k**2, rel_tol=1e-3) for f in factors):
        yield Finding(
            name="undivided-accumulation",
            title="the loss is divided by the number of micro-batches twice",
            evidence=f"{k} backward passes per update, each from the loss divided by {k * k}",
            cost=f"with SGD the effective rate is 1/{k} of the one that is set",
            remedy="leave the division to accelerator.accumulate or the trainer, or do it yourself, but not both",
            likelihood=0.9,
            line=line,
        )


def uncleared_gradients(case: Case) -> Iterator[Finding]:
    """The gradients, or some of them, are never cleared: each update uses the sum of all so far."""
    groups: dict[int, list[Update]] = defaultdict(list)
    for _, update in stretches(_any_world(case).ranks[0]):
        if any(update.norms):
            groups[update.which].append(update)
    later = [group[1:] for group in groups.values() if len(group) > 1]  # an optimizer's first update inherits nothing
    if not later:
        raise Unseen("fewer than two updates of any optimizer were seen")
    worst = max(later, key=lambda group: sum(update.kept > 0 for update in group) / len(group))
    kept = [update for update in worst if update.kept]
    if len(kept) <= len(worst) / 2:
        return
    whole = all(update.kept >= _with_gradient(update) for update in kept)
    which = "all gradients" if whole else f"the gradients of {kept[0].kept} of {_with_gradient(kept[0])} parameters"
    whose = f" of {kept[0].optimizer}" if len(groups) > 1 else ""
    yield Finding(
        name="uncleared-gradients",
        title="gradients are not cleared: each update uses the sum of all so far"
        if whole
        else "some gradients are not cleared: each update uses the sum of all so far",
        evidence=f"in {len(kept)} of {len(worst)} updates{whose} {which} were left over from the previous update when "
        "backward began",
        cost="the sum only grows, like momentum that never decays: the loss falls at first, then oscillates or "
        "diverges",
        remedy="call optimizer.zero_grad() once per update, before the first backward of the next one"
        + ("" if whole else "; zero_grad() of a module misses whatever else the optimizer holds"),
        likelihood=0.97,
        line=kept[0].line,
    )


def _with_gradient(update: Update) -> int:
    """Return how many parameters had a gradient; all of them if no norm is known, as with sharded ones."""
    return sum(norm not in (0.0, -1.0) for norm in update.norms) or len(update.norms)


def mean_of_means(case: Case) -> Iterator[Finding]:
    """Losses are means over unequal numbers of targets, so that their mean is not the mean over all targets."""
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
            alike[loss.line].append((factor, loss))  # losses on two lines are of two kinds, not parts of one mean
        several = [pairs for pairs in alike.values() if len(pairs) > 1]
        parts += bool(several)
        ratios = [(_unevenness(pairs), pairs[0][1].line) for pairs in several]
        ratio, where = max(ratios, default=(1.0, ""))
        if ratio > 1.3:
            uneven, line = uneven + 1, where
            worst = max(worst, ratio)
    if not parts:
        raise Unseen("no update combined several mean losses")
    if uneven > parts / 2:
        yield Finding(
            name="mean-of-means",
            title="means over unequal numbers of targets are averaged with equal weights",
            evidence=f"in {uneven} of {parts} updates the averaged losses are means over unequal numbers of targets, "
            f"up to {worst:.1f} to 1",
            cost=f"a target in a short part weighs up to {worst:.1f} times as much as one in a long part, and the "
            "result changes with the number of ranks and micro-batches",
            remedy="use reduction='sum', all-reduce the number of targets of the whole update, divide by it, and "
            "multiply by the world size, since DDP averages",
            likelihood=0.8,
            line=line,
        )


def _unevenness(pairs: list[tuple[float, Loss]]) -> float:
    """Return the ratio between the targets of losses with equal weights; 1 where unequal weights make up for it."""
    factors = [factor for factor, _ in pairs]
    counts = [loss.targets for _, loss in pairs]
    weights = [factor / count for factor, count in zip(factors, counts, strict=True)]
    if max(factors) > 1.01 * min(factors) or max(weights) <= 1.2 * min(weights):
        return 1.0
    return max(counts) / min(counts)


RULES: tuple[Rule, ...] = (clipped_early, undivided_accumulation, uncleared_gradients, mean_of_means)
