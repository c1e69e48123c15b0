"""What every update rule has: an entry in the table, and settings that know which rule they are for.

The rules themselves are in `bigstep.tables.optimizers`, whose settings are classes below `OptimizerConfig`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from bigstep.errors import require
from bigstep.tables import load
from bigstep.validate import NotNegative, check_ranges, require_name

__all__ = ["Optimizer", "OptimizerConfig", "rules_with"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The update rule and its settings; `OptimizerConfig(name=...)` gives the settings class of that name.

    >>> OptimizerConfig(name="lars", trust_coefficient=0.01)
    LarsSettings(name='lars', weight_decay=0.0, decay_all=False, clip=0.0, momentum=0.9, nesterov=False, \
trust_coefficient=0.01, eps=1e-09)
    """

    name: str = "sgd"
    """One of {optimizers}, or package.module:Class; it decides which settings there are; others are refused."""
    weight_decay: NotNegative = 0.0
    """Decay of the weights; biases and norm parameters get none unless decay_all is set."""
    decay_all: bool = False
    """Decay biases and norm parameters too."""
    clip: NotNegative = 0.0
    """Scale the gradient down if its norm over all parameters is larger than this; 0 for none."""

    if TYPE_CHECKING:  # besides the name, the settings of any rule may be given

        def __init__(self, *, name: str = "sgd", **settings: Any) -> None: ...

    def __new__(cls, **settings: Any) -> Self:
        """Create an instance of the settings class that `name` asks for; pickle and copy give no settings."""
        return super().__new__(cls.choose(settings)[0])

    def __post_init__(self) -> None:
        require_name(self.name, rules(), "optimizer.name")
        expected = rules()[self.name].settings
        require(
            type(self) is expected,
            f"optimizer.name is {self.name}, whose settings are {expected.__name__}, not {type(self).__name__}; "
            "change the name with `switch`.",
        )
        check_ranges(self, "optimizer")

    @classmethod
    def choose(cls, settings: Mapping[str, Any]) -> tuple[type[Self], Mapping[str, Any]]:
        """Return the class for some settings, without the settings that belong to other rules.

        Files of version 0.1 hold the settings of all rules together.
        """
        if cls is not OptimizerConfig:
            return cls, settings
        name = settings.get("name", "sgd")
        require(isinstance(name, str), f"optimizer.name takes text, but got {name!r:.60}.")
        require_name(name, rules(), "optimizer.name")
        chosen: Any = rules()[name].settings
        own = ":" in name  # none of its settings can be another rule's
        kept = {key: value for key, value in settings.items() if own or name in rules_with(key) or not rules_with(key)}
        return chosen, kept

    def switch(self, name: str) -> OptimizerConfig:
        """Return the settings of another rule, with what means the same in both: decay, clipping and momentum.

        >>> OptimizerConfig(name="lars", momentum=0.8, eps=0.0).switch("sgd")
        SgdSettings(name='sgd', weight_decay=0.0, decay_all=False, clip=0.0, momentum=0.8, nesterov=False, \
adagrad='none', eps=1e-09)
        """
        if name == self.name:
            return self
        require_name(name, rules(), "optimizer.name")
        chosen = rules()[name].settings
        shared = _fields(chosen) & (_fields(OptimizerConfig) | {"momentum", "nesterov"}) & _fields(type(self))
        return chosen(**{**{key: getattr(self, key) for key in shared}, "name": name})

    @property
    def entry(self) -> Optimizer:
        """What the table says about this rule."""
        return rules()[self.name]

    @property
    def home(self) -> str:
        """Where the class is that takes the step."""
        return self.entry.home

    @property
    def before_exchange(self) -> str:
        """Where the class is that scales each rank's own gradient before the exchange; usually empty."""
        return ""

    def arguments_before(self) -> dict[str, Any]:
        """Return what the constructor at `before_exchange` is given besides the model and its groups."""
        return {}

    @property
    def batch_rule(self) -> Literal["linear", "sqrt"]:
        """How the rate follows the batch unless something else decides it."""
        return self.entry.batch_rule

    @property
    def shares_update(self) -> bool:
        """Whether ranks divide the work of an update; if so, the optimizer has a `process_group` to set."""
        return False

    def stretch(self, ratio: float) -> OptimizerConfig:
        """Return the settings for a run of `ratio` times the epochs."""
        return self

    def arguments(self, *, on_gpu: bool = False) -> dict[str, Any]:
        """Return what the constructor at `home` is given besides parameter groups and rate."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in _fields(OptimizerConfig)]
        fused = {"fused": True} if on_gpu and self.entry.fused else {}
        return {name: getattr(self, name) for name in names} | fused


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What is known about an update rule."""

    about: str
    """One sentence, for help and documents."""
    home: str
    """Where its class is."""
    settings: type[OptimizerConfig]
    """Its settings."""
    batch_rule: Literal["linear", "sqrt"]
    """How its rate follows the batch: linearly if a step grows with the gradient, else by the square root."""
    methods: tuple[str, ...] = ("synchronous", "islands")
    """The methods that it goes with."""
    fused: bool = False
    """Whether the constructor takes `fused=True` for torch's kernel on a GPU."""
    state_bytes: int
    """Bytes that it keeps for each parameter, in float32."""
    traffic: float | None = None
    """Bytes per parameter that an update moves through device memory; None if arithmetic takes longer than that."""
    changing: str = ""
    """Where the function is that gives what changes besides the rate: (settings, epoch, lr) -> values of the groups."""


def rules() -> Mapping[str, Optimizer]:
    """Return the table; it is imported late, since it is made of subclasses of `OptimizerConfig`."""
    table: Mapping[str, Optimizer] = load("bigstep.tables.optimizers:OPTIMIZERS")
    return table


def _fields(settings: type[OptimizerConfig]) -> set[str]:
    return {field.name for field in dataclasses.fields(settings)}


def rules_with(setting: str) -> list[str]:
    """Return the names of the rules that have a setting.

    >>> rules_with("trust_coefficient")
    ['lars']
    """
    return [name for name, entry in rules().items() if setting in _fields(entry.settings)]
