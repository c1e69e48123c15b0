"""What a rule says about a program: a cause with its evidence, or that it could not be looked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from bigstep.doctor.world import World

__all__ = ["Case", "Finding", "Rule", "Unseen"]

Level = Literal["fault", "advice"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One cause."""

    name: str
    """The rule that found it."""
    title: str
    """What is wrong, in a few words."""
    evidence: str
    """What was seen: figures, ranks, samples."""
    cost: str
    """What it does to the training."""
    remedy: str
    """What to change, in the words of the API that the script uses."""
    likelihood: float
    """How sure it is that this is a mistake, from 0 to 1; findings are listed in this order."""
    level: Level = "fault"
    """A fault is a mistake; advice is worth knowing and may be intended."""
    line: str = ""
    """The line of the script, as file:number."""
    family: str = ""

    def to_mapping(self) -> dict[str, Any]:
        """Return the finding as plain values."""
        return asdict(self)


class Unseen(Exception):  # noqa: N818 - not an error, but an answer
    """The runs did not show what a rule judges; the message says what was missing."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """All that was seen of a program: its runs on one rank and on several."""

    one: World | None = None
    many: World | None = None
    short: World | None = None
    """A run on several ranks whose passes over the data were cut short, to see what happens between them."""
    resumed: World | None = None
    """The program started again in the copy in which the run on several ranks had saved."""

    @property
    def ranks(self) -> int:
        """Ranks of the larger run."""
        return self.several.size

    @property
    def several(self) -> World:
        """The run on several ranks."""
        if self.many is None or self.many.size < 2:
            raise Unseen("no run on several ranks")
        return self.many

    @property
    def single(self) -> World:
        """The run on one rank."""
        if self.one is None or not self.one.ranks:
            raise Unseen("no run on one rank")
        return self.one

    @property
    def worlds(self) -> list[World]:
        """The runs on several ranks, the whole one first."""
        return [world for world in (self.many, self.short) if world is not None and world.size > 1]


Rule = Callable[[Case], Iterator[Finding] | Sequence[Finding]]
