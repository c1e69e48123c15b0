"""What a fit reports: speed, losses, conflicts, sparsity."""

from __future__ import annotations

import dataclasses
from typing import Any

from bigstep.sparse.sparsity import Sparsity

__all__ = ["FitReport", "Part", "Tally"]

Part = tuple[float, int, int, int]
"""What a thread counted: sum of losses, updates, watched updates, conflicts."""


@dataclasses.dataclass
class Tally:
    """Counts that the threads of all epochs add to."""

    examples: int = 0
    updates: int = 0
    watched: int = 0
    conflicts: int = 0
    seconds: float = 0.0
    losses: list[float] = dataclasses.field(default_factory=list)

    def add(self, parts: list[Part], examples: int, seconds: float) -> None:
        """Add what each thread returned for one epoch."""
        total, updates, watched, conflicts = (sum(column) for column in zip(*parts, strict=True))
        self.examples += examples
        self.updates += int(updates)
        self.watched += int(watched)
        self.conflicts += int(conflicts)
        self.seconds += seconds
        self.losses.append(float(total) / examples)

    @property
    def examples_per_s(self) -> float:
        """Examples a second, over the epochs only."""
        return self.examples / max(self.seconds, 1e-9)


@dataclasses.dataclass(frozen=True)
class FitReport:
    """Speed, collisions and sparsity of one fit."""

    mode: str
    n_threads: int
    epochs: int
    examples_per_s: float
    """Examples a second over all epochs, shuffling included; preparing the data is `prepare_s`."""
    seconds: float
    prepare_s: float
    """Seconds for checking, counting and arranging the data, once per fit."""
    losses: tuple[float, ...]
    """Mean loss of each epoch, each example seen before its own update."""
    updates: int
    """Examples that changed the weights."""
    watched: int
    """Updates that were watched: those at every 64th position of the order."""
    conflicts: int
    """Watched updates that found a shared weight changed by another thread between their read and their write."""
    sparsity: Sparsity
    prediction: str
    """What the paper predicts for this data and number of threads, in a sentence."""

    @classmethod
    def of(cls, tally: Tally, mode: str, n_threads: int, prepare_s: float, sparsity: Sparsity) -> FitReport:
        """Sum up a fit."""
        return cls(
            mode=mode,
            n_threads=n_threads,
            epochs=len(tally.losses),
            examples_per_s=tally.examples_per_s,
            seconds=tally.seconds,
            prepare_s=prepare_s,
            losses=tuple(tally.losses),
            updates=tally.updates,
            watched=tally.watched,
            conflicts=tally.conflicts,
            sparsity=sparsity,
            prediction=sparsity.prediction(n_threads),
        )

    @property
    def conflict_rate(self) -> float:
        """Share of the watched updates that met a conflict."""
        return self.conflicts / self.watched if self.watched else 0.0

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> FitReport:
        """Read what `as_dict` wrote."""
        fields = {field.name: facts[field.name] for field in dataclasses.fields(cls)}
        sparsity = Sparsity(**facts["sparsity"])
        return cls(**{**fields, "losses": tuple(facts["losses"]), "sparsity": sparsity})

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for records and JSON."""
        return {**dataclasses.asdict(self), "losses": list(self.losses), "conflict_rate": self.conflict_rate}
