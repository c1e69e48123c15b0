"""Whoever hears what happens in a run. None calls another: what one remarks goes back, and all are told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # whoever only shows progress needs no torch
    from bigstep.data.sampler import Step
    from bigstep.engine.meter import Flush
    from bigstep.engine.methods.base import Batches, Note, Outcome
    from bigstep.engine.state import Carried

__all__ = ["Audience", "Observer"]

Row = Mapping[str, Any]


class Observer:
    """Hears nothing of interest; subclasses take what they need. All ranks call `stepped` and `flushed` alike."""

    def feed(self, batches: Batches) -> Batches:
        """Look at the batches of an epoch as they come."""
        return batches

    def stepped(self, step: Step, outcome: Outcome, *, pausing: bool) -> Iterable[Note]:
        """Hear of a step, at once.

        Args:
            step: Which one.
            outcome: What it gave on this rank.
            pausing: Something that is no step comes next, such as an evaluation.
        """
        return ()

    def flushed(self, flush: Flush) -> Iterable[Note]:
        """Hear what some steps gave on all ranks, before their rows are told; facts may be added to the rows."""
        return ()

    def row(self, row: Row) -> None:
        """Hear a training row."""

    def evaluated(self, row: Row) -> None:
        """Hear an evaluation row."""

    def noted(self, text: str, **facts: Any) -> None:
        """Hear a remark."""

    def closed(self) -> Iterable[Note]:
        """The run has ended, well or not."""
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
        """Tell of a step, and of what the method and the observers remark."""
        self._tell(outcome.notes)
        for observer in self.observers:
            self._tell(observer.stepped(step, outcome, pausing=pausing))

    def flushed(self, flush: Flush) -> None:
        """Tell what some steps gave, first as a whole, then row by row."""
        remarks = [note for observer in self.observers for note in observer.flushed(flush)]
        for row in flush.rows:
            self.row(row)
        self._tell(remarks)

    def row(self, row: Row) -> None:
        """Tell a training row."""
        for observer in self.observers:
            observer.row(row)

    def evaluated(self, row: Row) -> None:
        """Tell of an evaluation."""
        for observer in self.observers:
            observer.evaluated(row)

    def noted(self, text: str, **facts: Any) -> None:
        """Tell a remark."""
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
        """Let those that are here go on from what they carried."""
        for name, part in self._parts().items():
            if state is not None and name in state:
                part.load_state_dict(state[name])

    def _parts(self) -> dict[str, Carried]:
        return {name: part for observer in self.observers for name, part in observer.parts().items()}

    def _tell(self, notes: Iterable[Note]) -> None:
        for note in notes:
            self.noted(note.text, **note.facts)
