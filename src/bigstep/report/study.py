"""All runs of a report as one study, and what it says in words: what was reached, what won, how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from bigstep.errors import DataError
from bigstep.records import Run
from bigstep.report.compare import MATTER, Group, Verdict, group_runs, naming_facts, told_apart
from bigstep.report.effects import Effect, effects_of
from bigstep.report.measure import ACCURACY, Measure, measure_of
from bigstep.report.outcome import Outcome, outcome_of
from bigstep.report.paper import BesidePaper, beside_paper
from bigstep.report.promises import same_bits
from bigstep.report.words import clean, count, duration, listing, plural

__all__ = ["Study", "study_of"]


@dataclass(frozen=True)
class Study:
    """The runs of one report, grouped over seeds, best group first."""

    outcomes: tuple[Outcome, ...]
    groups: tuple[Group, ...]
    target: float | None
    """The result that the time-to-target figures are for, in the study's measure."""
    measure: Measure = ACCURACY

    @property
    def title(self) -> str:
        """The headline, in one line."""
        best = self.groups[0]
        if len(self.outcomes) == 1:
            outcome = self.outcomes[0]
            name = f"{outcome.recipe} ({outcome.preset})" if outcome.preset not in ("", "custom") else outcome.recipe
            ended = "" if outcome.status == "finished" else f", {outcome.status}"
            if best.median is None and outcome.evaluated_loss is not None:
                return f"{name}: loss {outcome.evaluated_loss:.4g} in {duration(outcome.seconds)}{ended}"
            if best.median is None:
                return f"{name}: no evaluation recorded{ended}"
            return f"{name}: {self.measure.text(best.median)} in {duration(outcome.seconds)}{ended}"
        if best.median is None:
            lacking = "none with an accuracy" if self._losses() else "none evaluated"
            return f"{count(len(self.outcomes))} runs, {lacking}"
        if len(self.leaders) > 1:
            told = [f"{group.label} leads on {_data_of(group)}" for group in self.leaders.values()]
            return listing(told, 3)
        if len(self.groups) == 1:
            return f"{best.label}: {self.measure.text(best.median)} over {plural(best.n, 'seed')}"
        alike = self.peers("alike")
        if alike and len(alike) == len(self.groups) - 1:
            return f"{len(self.groups)} ways to train that cannot be told apart"
        if alike:
            return f"{best.label} leads with {self.measure.text(best.median)}, not clearly ahead of {listing(alike, 2)}"
        unsure = ", with too few seeds to be sure" if self.unsure else ""
        return f"{best.label} leads with {self.measure.text(best.median)}{unsure}"

    @property
    def unit(self) -> str:
        """What samples are called: the runs' common word for them, or else samples."""
        units = {outcome.unit for outcome in self.outcomes}
        return units.pop() if len(units) == 1 else "samples"

    @property
    def is_text(self) -> bool:
        """Whether all runs are about sequences, so that tokens can be counted."""
        return all(outcome.length is not None for outcome in self.outcomes)

    @property
    def speed_unit(self) -> str:
        """What speeds count: tokens, or what samples are called."""
        return "tokens" if self.is_text else self.unit

    @property
    def speed_name(self) -> str:
        """The figure of an outcome that holds its speed."""
        return "tokens_per_s" if self.is_text else "images_per_s"

    @cached_property
    def leaders(self) -> dict[str, Group]:
        """The best group on each data set: results on different data cannot be compared."""
        found: dict[str, Group] = {}
        for group in self.groups:
            if group.median is not None:
                found.setdefault(group.outcomes[0].task, group)
        return found

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """How each group compares with the leader on its data; a leader is level with itself."""
        return [self._verdict(group) for group in self.groups]

    def _verdict(self, group: Group) -> Verdict:
        leader = self.leaders.get(group.outcomes[0].task, group)
        return "alike" if leader is group else told_apart(leader.scores, group.scores)

    def standing(self, position: int) -> str:
        """How a group stands, in a word or two."""
        group = self.groups[position]
        place = {"alike": "level", "apart": "behind", "too few": "too few seeds"}[self.verdicts[position]]
        if group.median is None:
            place = "no result"
        elif any(group is leader for leader in self.leaders.values()):
            place = "best"
        troubles = ((group.running, "running"), (group.failures, "failed"), (group.stopped, "stopped"))
        return ", ".join([place, *(f"{count(number)} {what}" for number, what in troubles if number)])

    @property
    def unsure(self) -> list[str]:
        """Names of the groups that more seeds could show to be level with the first; none whose runs all failed."""
        failed = {group.label for group in self.groups if group.failures == len(group.outcomes)}
        return [label for label in self.peers("too few") if label not in failed]

    @cached_property
    def effects(self) -> list[Effect]:
        """What each technique brings, where groups leave one out."""
        return effects_of(self.groups, self.measure)

    def peers(self, verdict: Verdict) -> list[str]:
        """Names of the groups that have this verdict against the first, on the same data."""
        task = self.groups[0].outcomes[0].task
        pairs = zip(self.groups[1:], self.verdicts[1:], strict=True)
        return [
            group.label
            for group, found in pairs
            if found == verdict and group.median is not None and group.outcomes[0].task == task
        ]

    def sentences(self) -> list[str]:
        """The summary: what was run, what it reached, how sure that is, and what a reader must know."""
        return self._one() if len(self.outcomes) == 1 else [*self._several(), *same_bits(self.outcomes)]

    @property
    def published(self) -> list[tuple[Outcome, BesidePaper]]:
        """For each recipe that has a published figure, one run and that figure."""
        found: dict[str, tuple[Outcome, BesidePaper]] = {}
        # the recipe itself before variants of it that a suite named
        for group in sorted(self.groups, key=lambda group: group.outcomes[0].name != group.outcomes[0].recipe):
            outcome = group.outcomes[0]
            if (
                outcome.recipe not in found
                and (published := beside_paper(outcome, group.median, self.measure)) is not None
            ):
                found[outcome.recipe] = (outcome, published)
        return list(found.values())

    def _one(self) -> list[str]:
        run = self.outcomes[0]
        hosted = f" on {plural(run.ranks, 'rank')}" if run.ranks else ""
        said = [
            f"The recipe {run.recipe} trained the model “{run.model or 'unknown'}” on “{run.data or 'unknown'}” data "
            f"for {plural(run.epochs or 0, 'epoch')} with a batch of {run.batches} {run.unit} from "
            f"{plural(run.workers, 'worker')}{hosted} ({run.hardware})."
        ]
        reached, (rate, of_what) = self.groups[0].median, run.speed
        speed = f", at {count(rate)} {of_what} a second" if rate else ""
        if reached is not None:
            more = f" (a perplexity of {run.perplexity:.2f})" if run.perplexity is not None else ""
            said.append(f"It reached {self.measure.text(reached)}{more} in {duration(run.seconds)}{speed}.")
            if len(run.evaluations) >= 5 and self.measure.key == "accuracy":
                said.append(f"The median of its last five epochs is {self.measure.text(run.accuracy_last5)}.")
        elif run.evaluated_loss is not None:
            said.append(
                f"Its loss on the evaluation set was {run.evaluated_loss:.4g} after {duration(run.seconds)}{speed}."
            )
        if run.status == "diverged":
            said.append("The loss was not finite at the end: the run diverged.")
        elif run.status == "failed":
            said.append(f"The run failed: {run.failure}")
        elif run.status == "stopped":
            said.append(f"{clean(run.run.facts['stopped'])}")
        elif run.status == "running":
            said.append("The run is still in progress; what follows is what it has recorded so far.")
        elif run.status == "unfinished":
            said.append("The run did not finish; what follows is what it recorded.")
        if run.per_1000:
            total = sum(run.per_1000.values())
            parts = [f"{100 * seconds / total:.0f} % {part}" for part, seconds in run.per_1000.items()]
            said.append(f"Its time went into {listing(parts)} (exchange counts only what computation does not hide).")
        said.append("One seed cannot say how much of this is luck; run several to find out.")
        return said

    def _several(self) -> list[str]:
        best, groups = self.groups[0], self.groups
        fewest, most = min(group.n for group in groups), max(group.n for group in groups)
        seeds = plural(most, "seed") if fewest == most else f"{fewest} to {most} seeds"
        said = [f"{count(len(self.outcomes))} runs in {plural(len(groups), 'group')}, {seeds} each."]
        if best.median is None:
            return [*said, *(self._losses() or ["None of them has an evaluation."])]
        if len(groups) == 1:
            low, high = (self.measure.cell(score) for score in (best.scores[0], best.scores[-1]))
            between = f", from {low} to {high}" if best.n > 1 else ""
            said.append(f"The median is {self.measure.text(best.median)}{between}.")
        else:
            said += self._ranking()
        said += self._reasons() + self._speed() + self._scaling() + self._techniques() + self._cautions()
        return said

    def _losses(self) -> list[str]:
        """Losses of runs whose outputs are not class scores; losses of different tasks are not ranked."""
        known = [
            (group.label, loss) for group in self.groups if (loss := group.median_of("evaluated_loss")) is not None
        ]
        told = listing([f"{label} {loss:.4g}" for label, loss in known], 10)
        return [f"None of them has an accuracy; their losses on the evaluation sets (medians): {told}."] if told else []

    @property
    def _best_median(self) -> str:
        measure = self.measure
        return f"{'lowest' if measure.falls else 'highest'} median {'of ' if measure.unit else ''}{measure.name}"

    def _ranking(self) -> list[str]:
        measure = self.measure
        if len(self.leaders) > 1:
            return [
                f"On {_data_of(group)}, {group.label} has the {self._best_median}, {measure.cell(group.median)}."
                for group in self.leaders.values()
            ]
        best, runner = self.groups[0], self.groups[1]
        assert best.median is not None
        said = []
        if runner.median is None:
            said.append(f"{best.label} reached {measure.text(best.median)}; no other group has an evaluation.")
        else:
            said.append(
                f"{best.label} has the {self._best_median}, {measure.cell(best.median)} "
                f"({f'range {measure.gap(best.spread)} over ' if best.n > 1 else ''}{plural(best.n, 'seed')}), "
                f"{measure.gap(best.median - runner.median)} {'below' if measure.falls else 'above'} {runner.label}."
            )
        alike, apart, few = self.peers("alike"), self.peers("apart"), self.peers("too few")
        if alike:
            said.append(f"Not distinguishable from it with these seeds: {listing(alike, 10)}.")
        if apart:
            said.append(f"Behind it by more than the seeds explain: {listing(apart, 10)}.")
        if few:
            said.append(f"Too few seeds (fewer than three) to rank against it: {listing(few, 10)}.")
        far = [
            f"{group.label} ({measure.cell(group.median)})"
            for group in self.groups[1:]
            if group.median is not None and measure.gain(best.median, group.median) > measure.far
        ]
        if far:
            said.append(f"More than {measure.scale * measure.far:g}{measure.of_gap} behind: {listing(far, 10)}.")
        return said

    def _reasons(self) -> list[str]:
        """Settings that the leaders share and the others lack: a hint at why they lead."""
        known = [group for group in self.groups if group.median is not None]
        level = {*self.peers("alike"), known[0].label}
        leaders = [group for group in known if group.label in level]
        if len(self.leaders) > 1 or not len(leaders) < len(known) or len(known) < 3:
            return []
        shared = [field for field in MATTER if (values := _values(leaders, field)) and len(values) == 1]
        others = [group for group in known if group not in leaders]
        told = []
        for field in shared:
            (value,), rest = _values(leaders, field), _values(others, field)
            if rest and value not in rest:
                told.append(f"{field.removesuffix('.name')} {value} (others {listing(sorted(rest), 3)})")
        if not told:
            return []
        who = "The leader alone has" if len(leaders) == 1 else f"The {len(leaders)} leaders share"
        return [f"{who} {listing(told[:2])}."]

    def _speed(self) -> list[str]:
        if self.target is None or len(self.leaders) > 1:
            return []
        timed = [(s, group.label) for group in self.groups if (s := group.seconds_to(self.target)) is not None]
        goal = self.measure.goal(self.target)
        if not timed:
            return []
        seconds, label = min(timed)
        if len(self.groups) == 1:
            return [f"It took {duration(seconds)} to {goal}."]
        missing = [group.label for group in self.groups if group.label not in {name for _, name in timed}]
        never = f" Not reached by {listing(missing)}." if missing else ""
        return [f"First to {goal}: {label}, after {duration(seconds)}.{never}"]

    def _scaling(self) -> list[str]:
        """What more ranks (or replicas) brought, for each subject that ran on different numbers of them."""
        speeds: dict[tuple[str, str, str], dict[float, float]] = {}
        for group in self.groups:
            ranks, rate = group.median_of("ranks"), group.median_of(self.speed_name)
            if ranks and rate and group.got_going:
                speeds.setdefault(group.subject, {}).setdefault(ranks, rate)
        said = []
        for (name, _, _), rates in [each for each in speeds.items() if len(each[1]) > 1][:8]:
            fewest = min(rates)
            told = [
                f"{rates[ranks] / rates[fewest]:.2f} times as fast on {plural(ranks, 'rank')} "
                f"({100 * rates[ranks] / rates[fewest] * fewest / ranks:.0f} % of ideal)"
                for ranks in sorted(rates)[1:]
            ]
            said.append(f"{name} is {listing(told)} as on {count(fewest)}.")
        return said

    def _techniques(self) -> list[str]:
        known = [effect for effect in self.effects if effect.brings is not None]
        if not known:
            return []
        sure = sorted((e for e in known if e.verdict == "apart"), key=lambda e: -abs(e.brings or 0.0))
        measure = self.measure
        told = [f"{e.technique} in {e.system} ({e.words[2]}{measure.of_gap})" for e in sure]
        return [
            f"Of {plural(len(known), 'technique')} left out in turn, {count(len(sure))} made a difference that seeds "
            f"do not explain{': ' + listing(told, 8) if told else ''}."
        ]

    def _cautions(self) -> list[str]:
        said = []
        broken = [group.label for group in self.groups if group.failures]
        if broken:
            failures = sum(group.failures for group in self.groups)
            said.append(f"{plural(failures, 'run')} diverged or did not finish: {listing(broken, 10)}.")
            reasons = {o.failure: group.label for group in self.groups for o in group.outcomes if o.failure}
            said += [f"{label} failed: {reason}" for reason, label in list(reasons.items())[:3]]
        running = [group.label for group in self.groups if group.running]
        if running:
            said.append(f"Still running: {listing(running, 10)}.")
        stopped = [group.label for group in self.groups if group.stopped]
        if stopped:
            said.append(f"Stopped before the end, and ready to continue with --resume: {listing(stopped, 10)}.")
        seen: dict[int, list[str]] = {}
        for group in self.groups:
            samples = group.median_of("samples")
            if samples is not None:
                seen.setdefault(round(samples), []).append(group.label)
        if len(seen) > 1 and min(seen) < 0.99 * max(seen):
            usual = max(seen, key=lambda samples: len(seen[samples]))
            if len(seen[usual]) > 1:
                odd = [f"{n} ({count(s)})" for s, ns in seen.items() if abs(s - usual) > 0.01 * usual for n in ns]
                told = f"most groups saw {count(usual)} samples, but {listing(odd, 10)} did not"
            else:
                told = "samples seen: " + listing([f"{n} {count(s)}" for s, ns in seen.items() for n in ns], 10)
            said.append(f"Not on equal terms: {told}.")
        for name, what in (("model", "models"), ("data", "data sets"), ("hardware", "machines")):
            kinds = sorted({getattr(outcome, name) for outcome in self.outcomes})
            if len(kinds) > 1:
                said.append(f"The runs used different {what}: {listing(kinds)}.")
        return said


def _data_of(group: Group) -> str:
    return group.outcomes[0].data or "unknown data"


def _values(groups: Sequence[Group], field: str) -> set[str]:
    return {value for group in groups if (value := naming_facts(group.outcomes[0]).get(field))}


def study_of(runs: Sequence[Run] | Study, target: float | None = None) -> Study:
    """Group runs and choose the target of the times: one point below the best median, rounded down to a whole percent.

    For text and losses it is a twentieth above the lowest median, rounded up to a multiple of a twentieth.

    A `Study` is returned unchanged, so that several outputs can share one.
    """
    if isinstance(runs, Study):
        return runs
    if not runs:
        raise DataError("A report needs at least one run folder (one that holds run.json), but none was given.")
    outcomes = tuple(outcome_of(run) for run in runs)
    measure = measure_of(outcomes)
    groups = tuple(group_runs(outcomes, measure))
    if target is None and (best := groups[0].median) is not None:
        target = measure.target_below(best)
    return Study(outcomes, groups, target, measure)
