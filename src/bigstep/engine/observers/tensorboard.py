"""TensorBoard events beside the records, for those who watch their runs there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bigstep.engine.observers.base import Observer
from bigstep.errors import ConfigError

__all__ = ["TensorBoard"]


class TensorBoard(Observer):
    """Writes every number of a row as a scalar, by samples seen."""

    def __init__(self, folder: Path):
        """`folder` is that of the run; events go to its folder `tensorboard`."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError("--tensorboard needs the package tensorboard; install it or leave that out.") from None
        self._writer = SummaryWriter(str(folder / "tensorboard"))  # type: ignore[no-untyped-call]  # torch's own

    def row(self, row: Mapping[str, Any]) -> None:
        """Write a training row."""
        self._write("train", row)

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Write an evaluation row, and make it visible at once."""
        self._write("evaluation", row)
        self._writer.flush()  # type: ignore[no-untyped-call]

    def closed(self) -> tuple[()]:
        """Leave nothing unwritten."""
        self._writer.close()  # type: ignore[no-untyped-call]
        return ()

    def _write(self, kind: str, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if isinstance(value, (int, float)) and name not in {"step", "samples"}:
                self._writer.add_scalar(f"{kind}/{name}", value, row["samples"])  # type: ignore[no-untyped-call]
