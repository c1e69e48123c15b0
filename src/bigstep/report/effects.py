"""What each technique brings: groups that leave one out, compared with the whole system."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bigstep.report.compare import Group, Verdict, told_apart
from bigstep.report.measure import ACCURACY, Measure
from bigstep.report.outcome import Outcome

__all__ = ["Effect", "effects_of"]

SURE: dict[Verdict, str] = {"alike": "not told apart", "apart": "yes", "too few": "too few seeds"}


@dataclass(frozen=True)
class Effect:
    """One technique of one system."""

    system: str
    technique: str
    brings: float | None
    """By how much the median is better with it than without it; None where one of them has no result."""
    costs: float | None
    """Seconds with it over seconds without it, less 1."""
    verdict: Verdict
    failures: int
    """Runs without it that failed."""
    measure: Measure = ACCURACY

    @property
    def words(self) -> tuple[str, str, str, str, str]:
        """System, technique, what it brings, whether that is sure, what it costs in time."""
        brings = "–" if self.brings is None else f"{self.measure.scale * self.brings:+.{self.measure.digits}f}"
        costs = "–" if self.costs is None else f"{100 * self.costs:+.0f} %"
        return self.system, self.technique, brings, SURE[self.verdict], costs


def effects_of(groups: Sequence[Group], measure: Measure = ACCURACY) -> list[Effect]:
    """Compare every group that leaves out a technique with its whole system; per system, the largest gain first."""
    found = []
    for group in groups:
        system, technique = group.outcomes[0].recipe, group.outcomes[0].without
        base = _whole_of(group.outcomes[0], groups)
        if not technique or base is None:
            continue
        known = base.median is not None and group.median is not None
        fast, slow = base.median_of("seconds"), group.median_of("seconds")
        found.append(
            Effect(
                system=system,
                technique=technique,
                brings=measure.gain(base.median, group.median) if known else None,  # type: ignore[arg-type]  # both are known
                costs=fast / slow - 1 if fast and slow else None,
                verdict=told_apart(base.scores, group.scores),
                failures=group.failures,
                measure=measure,
            )
        )
    return sorted(found, key=lambda effect: (effect.system, effect.brings is None, -(effect.brings or 0.0)))


def _whole_of(lacking: Outcome, groups: Sequence[Group]) -> Group | None:
    """The whole system, from the group with the nearest settings: other suites may have run it too, differently."""

    def differences(group: Group) -> int:
        first = group.outcomes[0]
        return (first.preset != lacking.preset) + len(first.settings.items() ^ lacking.settings.items())

    whole = [each for each in groups if each.outcomes[0].name == lacking.recipe and not each.outcomes[0].without]
    return min(whole, key=differences, default=None)
