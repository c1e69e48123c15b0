"""TensorBoard events beside the records, for those who watch their runs there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bigstep.engine.run import Audience
from bigstep.errors import ConfigError

__all__ = ["TensorBoard"]


class TensorBoard:
    """An audience that writes every number of a row as a scalar, by samples seen, and passes the row on."""

    def __init__(self, audience: Audience, folder: Path):
        """Args:
        audience: Who else sees the rows.
        folder: The run folder; events go to its `tensorboard` folder.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError("--tensorboard needs the package tensorboard; install it or leave that out.") from None
        self._audience = audience
        self._writer = SummaryWriter(str(folder / "tensorboard"))  # type: ignore[no-untyped-call]  # torch's own

    def train(self, row: Mapping[str, Any]) -> None:
        """Write a training row."""
        self._write("train", row)
        self._audience.train(row)

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """Write an evaluation row, and make it visible at once."""
        self._write("evaluation", row)
        self._writer.flush()  # type: ignore[no-untyped-call]
        self._audience.evaluation(row)

    def note(self, text: str) -> None:
        """Pass a remark on."""
        self._audience.note(text)

    def _write(self, kind: str, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if isinstance(value, (int, float)) and name not in {"step", "samples"}:
                self._writer.add_scalar(f"{kind}/{name}", value, row["samples"])  # type: ignore[no-untyped-call]
