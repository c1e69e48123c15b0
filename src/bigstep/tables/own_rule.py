"""A user's own update rule, named by its import path: `optimizer: {name: package.module:Class, settings: {…}}`."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from bigstep.errors import ConfigError
from bigstep.tables.optimizers import Optimizer, OptimizerConfig

__all__ = ["FORM", "OWN", "OwnSettings", "own_rule"]


@dataclass(frozen=True, kw_only=True)
class OwnSettings(OptimizerConfig):
    """Settings of a rule of which only the import path is known.

    >>> OwnSettings(name="torch.optim:RAdam", settings={"betas": (0.9, 0.99)}).arguments()
    {'betas': [0.9, 0.99]}
    """

    settings: dict = field(default_factory=dict)  # type: ignore[type-arg]  # whatever its constructor takes
    """Arguments of its constructor by name, besides parameters and rate; plain values."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            plain = json.loads(json.dumps(self.settings, allow_nan=False))
        except (TypeError, ValueError):
            raise ConfigError(
                f"optimizer.settings is {self.settings!r:.80}, but its values must be plain: numbers, words and lists."
            ) from None
        object.__setattr__(self, "settings", _Frozen(plain))

    def arguments(self, *, on_gpu: bool = False) -> dict[str, Any]:
        """Return what was given."""
        return dict(self.settings)


class _Frozen(dict[str, Any]):
    """Plain values that a frozen dataclass can be hashed with."""

    def __hash__(self) -> int:  # type: ignore[override]  # it is never changed
        return hash(json.dumps(self, sort_keys=True))


FORM = "package.module:Class"
OWN = Optimizer(
    about="your own: any class like torch's optimizers, with its arguments under `settings`",
    home=FORM,
    settings=OwnSettings,
    batch_rule="sqrt",
    methods=("synchronous",),
    state_bytes=8,
)
"""What is assumed of such a rule."""


def own_rule(name: str) -> Optimizer:
    """Return the entry of a rule at `package.module:Class`.

    >>> own_rule("torch.optim:RAdam").home
    'torch.optim:RAdam'
    """
    return dataclasses.replace(OWN, home=name)
