"""The records of a run: rank 0 writes every row and remark into the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigstep.engine.observers.base import Observer
from bigstep.records import RunWriter

__all__ = ["Records"]


class Records(Observer):
    """Writes rows as they come."""

    def __init__(self, writer: RunWriter):
        self._writer = writer

    def row(self, row: Mapping[str, Any]) -> None:
        """Write a training row."""
        self._writer.add([row])

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Write an evaluation row."""
        self._writer.add([row])

    def noted(self, text: str, **facts: Any) -> None:
        """Write a remark."""
        self._writer.note(text, **facts)
