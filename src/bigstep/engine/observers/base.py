"""Observers hear what happens in a run. None calls another: each returns its remarks, and the audience tells all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # showing progress needs no torch
    from bigstep.data.sampler import Step
    from bigstep.engine.meter import Flush
    from bigstep.engine.methods.base import Batches, Note, Outcome
    from bigstep.engine.state import Carried

__all__ = ["Audience", "Observer"]

Row = Mapping[str, Any]


class Observer:
    """Ignores all events; subclasses override what they need. All ranks call `stepped` and `flushed` alike."""

    def feed(self, batches: Batches) -> Batches:
        """Look at the batches of an epoch as they come."""
        return batches

    def stepped(self, step: Step, outcome: Outcome, *, pausing: bool) -> Iterable[Note]:
        """Hear of a step as soon as it is taken.

        Args:
            step: Which one.
            outcome: What it gave on this rank.
            pausing: Something other than a step comes next, such as an evaluation.
        """
        return ()

    def flushed(self, flush: Flush) -> Iterable[Note]:
        """Hear the results of some steps on all ranks, before their rows; facts may be added to the rows."""
        return ()

    def row(self, row: Row) -> None:
        """Hear a training row."""

    def evaluated(self, row: Row) -> None:
        """Hear an evaluation row."""

    def noted(self, text: str, **facts: Any) -> None:
        """Hear a remark."""

    def closed(self) -> Iterable[Note]:
        """Hear that the run has ended, successfully or not."""
        return ()

    def parts(self) -> Mapping[str, Carried]:
        """Return what this observer carries from step to step, by name."""
        return {}


class Audience:
    """The observers of a run, in the order in which they hear."""

    def __init__(self, observers: Iterable[Observer] = ()):
        self.observers = tuple(observers)

    def feed(self, batches: Batches) -> Batches:
        """Let each look at the batches."""
        for observer in self.observers:
            batches = observer.feed(batches)
        return batches

    def stepped(self, step: Step, outcome: Outcome, *, pausing: bool) -> None:
        """Pass on a step, and the remarks of the method and the observers."""
        self._tell(outcome.notes)
        for observer in self.observers:
            self._tell(observer.stepped(step, outcome, pausing=pausing))

    def flushed(self, flush: Flush) -> None:
        """Pass on the results of some steps, first as a whole, then row by row."""
        remarks = [note for observer in self.observers for note in observer.flushed(flush)]
        for row in flush.rows:
            self.row(row)
        self._tell(remarks)

    def row(self, row: Row) -> None:
        """Pass on a training row."""
        for observer in self.observers:
            observer.row(row)

    def evaluated(self, row: Row) -> None:
        """Pass on an evaluation row."""
        for observer in self.observers:
            observer.evaluated(row)

    def noted(self, text: str, **facts: Any) -> None:
        """Pass on a remark."""
        for observer in self.observers:
            observer.noted(text, **facts)

    def close(self) -> None:
        """Tell that the run has ended."""
        for observer in self.observers:
            self._tell(observer.closed())

    def state_dict(self) -> dict[str, Any] | None:
        """Return what the observers carry, by name; None for nothing."""
        return {name: part.state_dict() for name, part in self._parts().items()} or None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Let the present observers continue from what they carried."""
        for name, part in self._parts().items():
            if state is not None and name in state:
                part.load_state_dict(state[name])

    def _parts(self) -> dict[str, Carried]:
        return {name: part for observer in self.observers for name, part in observer.parts().items()}

    def _tell(self, notes: Iterable[Note]) -> None:
        for note in notes:
            self.noted(note.text, **note.facts)
