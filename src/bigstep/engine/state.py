"""All that a run carries from step to step, as named parts: exactly what a checkpoint holds.

Every object that carries something is registered here under a name; this one state is saved, restored and compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from torch import nn

from bigstep.config import RunConfig
from bigstep.config.text import config_to_mapping
from bigstep.data.sampler import Position
from bigstep.errors import DataError

__all__ = ["Carried", "Count", "Identity", "State", "Threads", "Weights"]


class Carried(Protocol):
    """A part of the state; both functions are called on every rank at the same step, so they may use collectives."""

    def state_dict(self) -> Any:
        """Return tensors and plain values; rank 0's answer is what is saved, for all ranks."""

    def load_state_dict(self, state: Any, /) -> object:
        """Go on from what `state_dict` gave, on any number of ranks."""


class Count:
    """A number that a run carries."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> int:
        """Return the number."""
        return self.value

    def load_state_dict(self, state: int) -> None:
        """Go on from a number."""
        self.value = int(state)


@dataclass(frozen=True)
class Weights:
    """A model's parameters and buffers."""

    model: nn.Module

    def state_dict(self) -> dict[str, Any]:
        """Return them by name."""
        return self.model.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them over."""
        self.model.load_state_dict(state)


@dataclass(frozen=True)
class Identity:
    """What must be the same when a run is resumed, identified by its fingerprint."""

    what: str
    fingerprint: str

    def state_dict(self) -> str:
        """Return the fingerprint."""
        return self.fingerprint

    def load_state_dict(self, state: str) -> None:
        """Refuse another one."""
        if state != self.fingerprint:
            raise DataError(
                f"{self.what} has changed since the run was started (its fingerprint is {self.fingerprint}, and was "
                f"{state!s:.40}); bring it back, or start a new run with another --out."
            )


class Threads:
    """How many threads a forward takes; on a CPU their number decides the last bits of sums."""

    def __init__(self, now: int) -> None:
        self.now = self.before = now

    def state_dict(self) -> int:
        """Return the number now."""
        return self.now

    def load_state_dict(self, state: int) -> None:
        """Remember the number before."""
        self.before = int(state)

    def changed(self) -> str | None:
        """Return a remark if the resumed run has another number."""
        if self.before == self.now:
            return None
        before, now = (f"{n} thread{'s' if n > 1 else ''}" for n in (self.before, self.now))
        return (
            f"The forward pass took {before} before the run was resumed and takes {now} now. torch divides sums among "
            f"them, so the last bits may differ; OMP_NUM_THREADS={self.before} keeps them."
        )


@dataclass
class State:
    """Where a run stands: its position, the seconds it took, and what its parts carry."""

    config: RunConfig
    position: Position = Position()  # noqa: RUF009 - frozen
    seconds: float = 0.0
    parts: dict[str, Carried] = field(default_factory=dict)

    def register(self, **parts: Carried) -> None:
        """Add parts under their names."""
        taken = self.parts.keys() & parts.keys()
        assert not taken, f"{sorted(taken)} are registered already"
        self.parts |= parts

    def capture(self, instead: Mapping[str, Carried] = {}) -> dict[str, Any]:  # noqa: B006 - never changed
        """Collect everything that decides how the run continues; every rank must call this at the same step.

        Args:
            instead: Parts to collect in place of those of the same name.
        """
        parts = {**self.parts, **instead}
        return {
            "config": config_to_mapping(self.config),
            "position": asdict(self.position),
            "seconds": self.seconds,
            **{name: part.state_dict() for name, part in parts.items()},
        }

    def restore(self, saved: Mapping[str, Any], samples: int) -> None:
        """Go on from what `capture` collected, on any number of ranks.

        Args:
            saved: The capture; a part that it lacks (an older release did not carry it) stays as it is.
            samples: Size of the training set, which the position must fit.
        """
        unknown = [name for name, value in saved.items() if value is not None and not self._knows(name)]
        if unknown:
            raise ValueError(f"it carries {', '.join(unknown)}, which this run does not")
        position = Position(**saved["position"])
        if min(position.step, position.epoch, position.offset) < 0 or position.offset > samples:
            raise ValueError(f"the position {position} lies outside the run")
        self.position, self.seconds = position, float(saved["seconds"])
        for name, part in self.parts.items():
            if name in saved:
                part.load_state_dict(saved[name])

    def _knows(self, name: str) -> bool:
        return name in self.parts or name in {"config", "position", "seconds"}
