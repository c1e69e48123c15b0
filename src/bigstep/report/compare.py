"""Runs grouped over their seeds, and whether two groups can be told apart.

Runs belong together when they differ in nothing but the seed (and in settings that cannot change the result, such as
where checkpoints go). Two groups are **told apart** when an exact two-sided permutation test on the difference of their
mean results (accuracies, or bits per byte) gives p <= 0.05. Three seeds against three (or four) cannot reach 0.05
whatever they show; there, all of one group must lie above all of the other, and the medians must differ by more than
the wider of the two ranges: with normal noise, two equal recipes pass that in 4.5 % of cases. Fewer than three seeds on
a side decide nothing.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from bigstep.report.measure import ACCURACY, Measure
from bigstep.report.outcome import Outcome

__all__ = ["MATTER", "RULE", "Group", "Verdict", "group_runs", "naming_facts", "permutation_p", "told_apart"]

RULE = (
    "Two groups count as told apart when an exact two-sided permutation test on their mean results gives p ≤ 0.05. "
    "Three seeds against three or four cannot reach that; there, every run of one must beat every run of the other and "
    "the medians must differ by more than the wider range (equal recipes pass this in 4.5 % of cases). With fewer than "
    "three seeds on a side nothing is claimed. Each pair is judged alone, so among many pairs a few false claims are "
    "to be expected."
)

Verdict = Literal["apart", "alike", "too few"]
EXACT_SPLITS = 20_000
DRAWN_SPLITS = 2_000
STEPS_OF_A_SPEED = 10


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed."""

    label: str
    outcomes: tuple[Outcome, ...]
    measure: Measure = ACCURACY
    """What they are ranked by."""

    @cached_property
    def counted(self) -> tuple[Outcome, ...]:
        """Runs whose figures count: those that ended, or, if none has, all of them as far as they got."""
        return tuple(o for o in self.outcomes if o.status not in ("running", "stopped", "unfinished")) or self.outcomes

    @cached_property
    def scores(self) -> list[float]:
        """One result a seed, in rising order; repeats of a seed are not independent, so their median counts once."""
        seeds: dict[object, list[float]] = {}
        for position, outcome in enumerate(self.counted):
            if (score := outcome.score(self.measure.key)) is not None:
                key = ("unknown", position) if outcome.seed is None else outcome.seed
                seeds.setdefault(key, []).append(score)
        return sorted(statistics.median(values) for values in seeds.values())

    @property
    def n(self) -> int:
        """Seeds with a result."""
        return len(self.scores)

    @property
    def median(self) -> float | None:
        """Median result over seeds."""
        return statistics.median(self.scores) if self.scores else None

    @property
    def spread(self) -> float:
        """Largest result less the smallest."""
        return self.scores[-1] - self.scores[0] if self.scores else 0.0

    @property
    def subject(self) -> tuple[str, str, str]:
        """Name, model and task: only groups that share all three belong on one curve of results or speeds."""
        first = self.outcomes[0]
        return first.name, first.model, first.task

    @property
    def failures(self) -> int:
        """Runs that diverged, failed or ended without recording why; one that was asked to stop has not failed."""
        return sum(outcome.status not in ("finished", "running", "stopped") for outcome in self.outcomes)

    @property
    def stopped(self) -> int:
        """Runs that were asked to stop and can be resumed."""
        return sum(outcome.status == "stopped" for outcome in self.outcomes)

    @property
    def running(self) -> int:
        """Runs still in progress."""
        return sum(outcome.status == "running" for outcome in self.outcomes)

    @property
    def got_going(self) -> bool:
        """Whether it took enough steps for a speed: in a very short run, the slow first step dominates."""
        return (self.median_of("steps") or math.inf) >= STEPS_OF_A_SPEED

    def median_of(self, name: str) -> float | None:
        """Median over the runs of one figure of `Outcome`; failed runs count only if all failed."""
        whole = [outcome for outcome in self.counted if not outcome.failure] or self.counted
        values = [value for outcome in whole if (value := getattr(outcome, name)) is not None]
        return statistics.median(values) if values else None

    def seconds_to(self, target: float) -> float | None:
        """Median time to the target, infinite for a run that never reached it; None unless more than half did."""
        key, falls = self.measure.key, self.measure.falls
        found = (outcome.seconds_to(target, key, falls=falls) for outcome in self.counted)
        middle = statistics.median(math.inf if seconds is None else seconds for seconds in found)
        return None if math.isinf(middle) else middle


def group_runs(outcomes: Sequence[Outcome], measure: Measure = ACCURACY) -> list[Group]:
    """Group runs over seeds and name the groups, best median first.

    A group has the name of its recipe, or the one that a suite gave it; where several groups share a name, the
    settings in which they differ are added.
    """
    found: dict[tuple[object, ...], list[Outcome]] = {}
    for outcome in outcomes:
        whole_name = str(outcome.run.facts.get("name") or outcome.name)  # the displayed name may be truncated
        key = (whole_name, outcome.recipe, outcome.preset, *sorted(outcome.settings.items()))
        found.setdefault(key, []).append(outcome)
    namesakes: dict[str, list[list[Outcome]]] = {}
    for members in found.values():
        namesakes.setdefault(members[0].name, []).append(members)
    groups, used = [], set()
    for name, variants in namesakes.items():
        telling = _telling([members[0] for members in variants])
        for members in variants:
            label = base = " · ".join([name, *filter(None, (_words(field, members[0]) for field in telling))])
            for copy in itertools.count(2):
                if label not in used:
                    break
                label = f"{base} #{copy}"
            used.add(label)
            groups.append(Group(label, tuple(sorted(members, key=lambda o: (o.seed or 0, str(o.folder)))), measure))
    return sorted(groups, key=lambda group: -math.inf if group.median is None else measure.gain(group.median, 0.0),
                  reverse=True)  # fmt: skip


MATTER = ("data.name", "model", "loss", "preset", "batch", "epochs", "optimizer.name", "lr.base",
          "exchange.collective", "exchange.codec", "precision", "asynchronous.replicas", "ranks")  # fmt: skip
"""Settings that people compare, in the order in which a name lists them. Others, such as a schedule that was stretched
with the epochs, appear only where two groups would otherwise have the same name."""


def _telling(outcomes: Sequence[Outcome]) -> list[str]:
    """Choose the settings that name the groups: up to three that differ and matter, then any that keep two apart."""
    tables = [naming_facts(outcome) for outcome in outcomes]
    names = list(dict.fromkeys(name for table in tables for name in table))
    differing = [name for name in names if len({table.get(name, "") for table in tables}) > 1]
    if "asynchronous.replicas" in differing and "ranks" in differing:
        differing.remove("ranks")  # the same number under another name
    chosen = sorted((name for name in differing if name in MATTER), key=MATTER.index)[:3]
    for name in sorted(differing, key=lambda name: (name not in MATTER, name.startswith("workers."))):
        apart = {tuple(table.get(field, "") for field in chosen) for table in tables}
        further = {tuple(table.get(field, "") for field in (*chosen, name)) for table in tables}
        if len(further) > len(apart):
            chosen.append(name)
    return chosen


def naming_facts(outcome: Outcome) -> dict[str, str]:
    """Return what may name a group: its settings, its preset, and its batch with all stages."""
    return {"preset": outcome.preset, "batch": outcome.batches, **outcome.settings}


def _words(field: str, outcome: Outcome) -> str:
    value = naming_facts(outcome).get(field, "")
    if not value:  # only another group of this name sets it
        return ""
    short = value if len(value) <= 24 else value[:23] + "…"
    return short if field in ("preset", "model", "data.name") else f"{field.rpartition('.')[2]} {short}"


def permutation_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided permutation test: how often a random split of the pooled values differs as much as the real one.

        p = #{splits with |mean - mean'| >= |mean(a) - mean(b)|} / #splits

    All splits are counted where there are at most 20,000; otherwise 2,000 are drawn with a fixed seed.

    >>> permutation_p([0.91, 0.92, 0.93], [0.81, 0.82, 0.83])
    0.1
    >>> permutation_p([0.91, 0.92, 0.93, 0.94], [0.81, 0.82, 0.83, 0.84]) < 0.05
    True

    Reference: Fisher, The Design of Experiments, 1935, section 21.
    """
    pooled, n = [*a, *b], len(a)
    total = sum(pooled)

    def difference(part: Sequence[float]) -> float:
        return abs(sum(part) / n - (total - sum(part)) / len(b))

    observed = difference(a) - 1e-12  # equal differences must count as equal in spite of rounding
    if math.comb(len(pooled), n) <= EXACT_SPLITS:
        found = [difference(part) >= observed for part in itertools.combinations(pooled, n)]
        return sum(found) / len(found)
    import numpy as np

    drawn = np.random.default_rng(0).permuted(np.tile(pooled, (DRAWN_SPLITS, 1)), axis=1)[:, :n].sum(axis=1)
    hits = np.abs(drawn / n - (total - drawn) / len(b)) >= observed
    return (int(hits.sum()) + 1) / (DRAWN_SPLITS + 1)


def told_apart(a: Sequence[float], b: Sequence[float]) -> Verdict:
    """Judge whether two sets of results differ by more than their seeds do (the module's docstring has the rule).

    >>> told_apart([0.88, 0.881, 0.882], [0.80, 0.801, 0.802])
    'apart'
    >>> told_apart([0.88, 0.881, 0.882], [0.879, 0.881, 0.883])
    'alike'
    >>> told_apart([0.88], [0.1])
    'too few'
    """
    if min(len(a), len(b)) < 3:
        return "too few"
    if 2 / math.comb(len(a) + len(b), len(a)) <= 0.05:
        return "apart" if permutation_p(a, b) <= 0.05 else "alike"
    gap = abs(statistics.median(a) - statistics.median(b))
    separate = min(a) > max(b) or min(b) > max(a)
    return "apart" if separate and gap > max(max(a) - min(a), max(b) - min(b)) else "alike"
