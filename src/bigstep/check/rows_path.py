"""Many steps: the same path on any number of ranks, one network at evaluation, and no trace of an interruption."""

from __future__ import annotations

import math
from dataclasses import replace

from bigstep.check.laboratory import Laboratory
from bigstep.check.observe import Journey, composed, gradients, journey, resumed
from bigstep.check.shrink import few_workers
from bigstep.check.subject import Trial
from bigstep.check.verdict import PATH_BOUND, Verdict, difference, judged, not_applicable
from bigstep.tables.codecs import CODECS

__all__ = [
    "graphs_are_steps", "hold", "journey_on", "loop_is_its_steps", "resume_elsewhere", "resume_here", "same_path",
    "same_statistics", "scale_changes_nothing", "waiting_ranks_change_nothing",
]  # fmt: skip


def same_path(lab: Laboratory) -> Verdict:
    """All steps of the run give the losses and the final weights of one rank."""
    if not lab.several:
        return not_applicable("one rank only; name more with --ranks 1,2,4")
    alone = journey_on(lab, lab.lossless, 1)[0]
    if not all(map(math.isfinite, alone.losses)):
        return Verdict(
            status="fail",
            words="the loss of this small run is not finite even on one rank, so there is no path to compare",
            remedy="lower lr.base, or lengthen the warm-up.",
        )
    worst, fault = 0.0, ""
    for ranks in lab.several:
        seen = journey_on(lab, lab.lossless, ranks)
        if len({rank.digest for rank in seen}) > 1:
            worst, fault = float("inf"), f"the {ranks} ranks end with different weights"
        apart, step = _first_apart(seen[0].losses, alone.losses)
        weights, where = difference(seen[0].weights, alone.weights)
        if max(apart, weights) > worst:
            worst = max(apart, weights)
            parted = f"part at step {step}" if step else f"agree, the weights do not ({where})"
            fault = f"on {ranks} ranks the losses {parted}"
    codec = lab.trial.config.exchange.codec
    note = "" if CODECS[codec].loses == "nothing" else f"; with codec none, since {codec} quantises per rank"
    if lab.trial.config.exchange.double_buffer:
        note += "; without double_buffer, since on one rank nothing is late"
    if lab.trial.config.optimizer.before_exchange:
        note += "; with adagrad=after, since before scales per rank"
    return judged(
        worst,
        lab.path_bound,
        "relative difference of losses and weights from one rank's",
        words=f"{len(alone.losses)} steps with batch plan, schedule, augmentation and incomplete batches{note}",
        fault=fault,
        remedy="fix the rows above first; if they pass, look for what differs between ranks over time: an optimizer "
        "that updates on some ranks only, buffers that are broadcast, a rate set on rank 0 alone.",
    )


def waiting_ranks_change_nothing(lab: Laboratory) -> Verdict:
    """A run that begins and ends with one worker takes the path of one rank, although most ranks wait meanwhile."""
    if lab.subject.train is None:
        return not_applicable("the loop is given in pieces only")
    if lab.trial.config.islands.count > 1:
        return not_applicable("every stage has workers for every island")
    if not lab.several:
        return not_applicable("one rank only; name more with --ranks 1,2,4")
    trial, most = few_workers(lab.lossless), lab.ranks[-1]
    remedy = (
        "give a joining rank the weights and the optimizer state of those that trained, and a waiting one the weights "
        "before it evaluates."
    )
    seen, alone = journey_on(lab, trial, most), journey_on(lab, trial, 1)[0]
    verdict = hold(
        seen[0],
        alone,
        lab.path_bound,
        f"relative difference between {most} ranks, most of which wait, and one",
        words=f"one worker, then {trial.config.plan[0].count}, then one again",
        fault=f"on {most} ranks a run with fewer workers than ranks takes a different path",
        remedy=remedy,
    )
    if verdict.status == "pass" and len({(rank.digest, rank.statistics_digest) for rank in seen}) > 1:
        words = "the ranks that waited end with other weights or statistics than those that trained"
        return Verdict(status="fail", words=words, remedy=remedy)
    return verdict


def loop_is_its_steps(lab: Laboratory) -> Verdict:
    """On one rank the loop does what its pieces do when composed by hand: rate, gradient, update."""
    if lab.subject.train is None:
        return not_applicable("the loop is given in pieces only, and these are what is run")
    loop, hand = journey_on(lab, lab.synchronous, 1)[0], lab.see(composed, lab.synchronous, 1)[0]
    return hold(
        loop,
        hand,
        0.0,
        "relative difference between the loop and rate, gradient, update by hand",
        words=f"{len(hand.losses)} steps, evaluations and checkpoints between them, the same bits",
        fault="the loop does something other than its steps",
        remedy="set the rate before the step it is for, update once a step, and go back to training mode after an "
        "evaluation.",
    )


def graphs_are_steps(lab: Laboratory) -> Verdict:
    """Steps that run as graphs take the path of steps run eagerly."""
    if lab.subject.train is None:
        return not_applicable("the loop has no graphs")
    if lab.trial.config.optimizer.before_exchange or lab.trial.config.islands.count > 1:
        return not_applicable("such steps do not run as one graph")
    if lab.trial.config.exact:
        return not_applicable("an exact step combines workers between backward and update")
    if unused := lab.see(gradients, lab.synchronous, 1)[0][0].unused:
        return not_applicable(f"{unused[0]} gets no gradient, and a graph updates every trainable parameter")
    trial = replace(lab.lossless, graphs=True)
    return hold(
        journey_on(lab, trial, 1)[0],
        journey_on(lab, lab.lossless, 1)[0],
        PATH_BOUND,
        "relative difference between steps as graphs and run eagerly",
        words="emulated on the CPU: a tape in place of the GPU's graph",
        fault="graphs take a different path",
        remedy="let a graph read from the device what changes from step to step (rate, loss scale), and begin each sum "
        "of parts from zero.",
    )


def scale_changes_nothing(lab: Laboratory) -> Verdict:
    """A loss that is scaled by a power of two gives the same bits, on one rank and on several.

    Exact sums do so only up to rounding: the levels to which they round are four binary digits apart.
    """
    if lab.subject.train is None:
        return not_applicable("the loop is given in pieces only")
    trial, exact = replace(lab.lossless, loss_scale=True), lab.trial.config.exact
    verdict = not_applicable("")
    for ranks in {1, lab.ranks[-1]}:
        verdict = hold(
            journey_on(lab, trial, ranks)[0],
            journey_on(lab, lab.lossless, ranks)[0],
            PATH_BOUND if exact else 0.0,
            "relative difference between a scaled and a plain loss",
            words=f"as fp16 scales it, in float64: the same bits{' up to rounding' if exact else ''}",
            fault=f"on {ranks} rank(s) scaling changes the path",
            remedy="divide gradients by the scale once, after the exchange and before clipping and update, and count "
            "a step as skipped only where a gradient is not finite.",
        )
        if verdict.status == "fail":
            return verdict
    return verdict


def hold(
    seen: Journey, expected: Journey, bound: float, measure: str, *, words: str, fault: str, remedy: str
) -> Verdict:
    """Compare a journey with the expected one: losses, rates and final weights."""
    apart, step = _first_apart(seen.losses, expected.losses, bound)
    rates, late = _first_apart(seen.rates, expected.rates, bound)
    weights, where = difference(seen.weights, expected.weights)
    place = f"the losses part at step {step}" if step else f"the weights part (most in {where})"
    if late and (not step or late <= step):
        place = f"the rate differs at step {late}"
    if len(seen.losses) != len(expected.losses):
        place = f"{len(seen.losses)} steps are taken instead of {len(expected.losses)}"
    return judged(max(apart, rates, weights), bound, measure, words=words, fault=f"{fault}: {place}", remedy=remedy)


def same_statistics(lab: Laboratory) -> Verdict:
    """At an evaluation every rank holds the same batch-norm statistics, those of all workers."""
    if lab.subject.evaluate is None:
        return not_applicable("the loop has no evaluation")
    alone = journey_on(lab, lab.lossless, 1)[0]
    if not alone.statistics:
        return not_applicable("the model keeps no running statistics")
    if not lab.several:
        return not_applicable("one rank only; name more with --ranks 1,2,4")
    worst, fault = 0.0, ""
    for ranks in lab.several:
        seen = journey_on(lab, lab.lossless, ranks)
        distinct = len({rank.statistics_digest for rank in seen})
        if distinct > 1:
            worst, fault = float("inf"), f"the {ranks} ranks evaluate {distinct} different networks"
        apart, where = difference(seen[0].statistics, alone.statistics)
        if apart > worst:
            worst = apart
            fault = f"the {ranks} ranks agree, but not on the mean over all workers (most in {where})"
    return judged(
        worst,
        lab.path_bound,
        "relative difference of the statistics that an evaluation uses",
        words=f"{lab.trial.config.norm.statistics} statistics, averaged over all workers",
        fault=fault,
        remedy="average running means and variances over all workers before every evaluation and checkpoint (rank 0's "
        "own describe its share of the data alone); bigstep.norm.WorkerStatistics and average_statistics do so.",
    )


def resume_here(lab: Laboratory) -> Verdict:
    """Saved halfway and loaded into a fresh run on as many ranks: the same bits as without interruption."""
    if lab.subject.save is None or lab.subject.load is None:
        return not_applicable("the loop has no checkpoints")
    ranks = lab.several[0] if lab.several else 1
    whole, parts = journey_on(lab, lab.trial, ranks), _resumed(lab, lab.trial, ranks, ranks)
    left = parts[0].losses
    apart, step = _first_apart(left, whole[0].losses[len(whole[0].losses) - len(left) :])
    weights, where = difference(parts[0].weights, whole[0].weights)
    rates, late = _first_apart(parts[0].rates, whole[0].rates[len(whole[0].rates) - len(parts[0].rates) :])
    statistics, norm = difference(parts[0].statistics, whole[0].statistics)
    figure = max(apart, weights, rates, statistics)
    if not figure and [rank.digest for rank in parts] != [rank.digest for rank in whole]:
        figure = float("inf")
    if not figure and len(left) == len(whole[0].losses):  # starting over gives the same bits, too
        figure = float("inf")
        soon = f"all {len(left)} steps are taken again: nothing was resumed"
    elif rates:
        soon = f"the rate differs from step {late} after the checkpoint on"
    elif step:
        soon = f"the losses part at step {step} after the checkpoint"
    elif statistics > weights:
        soon = f"the statistics that an evaluation uses differ (most in {norm})"
    else:
        soon = f"the last update differs (most in {where})"
    codec = lab.trial.config.exchange.codec
    carried = f", residuals of {codec} included" if CODECS[codec].loses == "carried" else ""
    return judged(
        figure,
        0.0,
        f"relative difference from the uninterrupted run on {ranks} rank(s)",
        words=f"the same bits{carried}" if not figure else "",
        fault=soon,
        remedy="save all that decides the path: weights, optimizer state, position in the epoch, batch-norm averages, "
        "loss scale and the exchange's residuals; restore the position, do not begin the epoch again.",
    )


def resume_elsewhere(lab: Laboratory) -> Verdict:
    """Saved on some ranks and loaded on another number of them, a run continues the path of one rank."""
    if not lab.several:
        return not_applicable("one rank only; name more with --ranks 1,2,4")
    alone = journey_on(lab, lab.lossless, 1)[0]
    if lab.subject.save is None or lab.subject.load is None:
        return not_applicable("the loop has no checkpoints")
    most = lab.ranks[-1]
    pairs = [(1, most), (most, lab.ranks[-2])]
    worst, fault = 0.0, ""
    for before, after in pairs:
        journey_on(lab, lab.lossless, before)  # leaves the checkpoint
        seen = _resumed(lab, lab.lossless, before, after)
        apart, step = _first_apart(seen[0].losses, alone.losses[len(alone.losses) - len(seen[0].losses) :])
        weights, where = difference(seen[0].weights, alone.weights)
        again = not step and len(seen[0].losses) == len(alone.losses)
        if again or len({rank.digest for rank in seen}) > 1:
            apart = float("inf")
        if max(apart, weights) > worst:
            worst = max(apart, weights)
            at = f"part at step {step} after the checkpoint" if step else f"agree, the weights do not ({where})"
            at = f"are those of all {len(alone.losses)} steps again: nothing was resumed" if again else at
            fault = f"saved on {before} rank(s) and resumed on {after}, the losses {at}"
    return judged(
        worst,
        lab.path_bound,
        "relative difference from one rank without interruption",
        words=" and ".join(f"{before} -> {after}" for before, after in pairs) + " ranks",
        fault=fault,
        remedy="save nothing that belongs to a rank: key state by parameter, count samples (not steps of a rank's own "
        "loader), and let workers, not ranks, decide who sees what.",
    )


def journey_on(lab: Laboratory, trial: Trial, ranks: int) -> list[Journey]:
    """Return the whole run of a trial as each rank of a world saw it."""
    return lab.see(journey, trial, ranks, lab.folder(trial, ranks))


def _resumed(lab: Laboratory, trial: Trial, before: int, after: int) -> list[Journey]:
    return lab.see(resumed, trial, after, lab.folder(trial, before))


def _first_apart(left: tuple[float, ...], right: tuple[float, ...], bound: float = PATH_BOUND) -> tuple[float, int]:
    """Return the largest relative difference, and the number of the first step beyond the bound; 0 for none."""
    if len(left) != len(right):
        return float("inf"), min(len(left), len(right)) + 1
    apart = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(left, right, strict=True)]
    first = next((number for number, value in enumerate(apart, 1) if not value <= bound), 0)
    return max((value if value == value else float("inf") for value in apart), default=0.0), first
