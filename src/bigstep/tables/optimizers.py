"""Update rules by name, each with a small dataclass of its settings.

A field of a settings class is an argument of the rule's constructor, unless `arguments` says otherwise; learning rate
and parameter groups come from whoever builds it: `load(rule.home)(groups, lr=1.0, **rule.arguments())`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from bigstep.errors import require
from bigstep.tables.plugins import Table
from bigstep.validate import Count, Fraction, NotNegative, Positive, Range, check_ranges, require_name

__all__ = [
    "OPTIMIZERS", "AdagradSettings", "AdamWSettings", "LambSettings", "LarsSettings", "MuonSettings", "Optimizer",
    "OptimizerConfig", "RMSpropWarmupSettings", "SgdSettings", "rules_with",
]  # fmt: skip

Betas = Annotated[
    tuple[float, ...],
    Range(
        lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
        "be two numbers, each at least 0 and less than 1",
    ),
]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The update rule and its settings; `OptimizerConfig(name=...)` gives the settings class of that name.

    >>> OptimizerConfig(name="lars", trust_coefficient=0.01)
    LarsSettings(name='lars', weight_decay=0.0, decay_all=False, clip=0.0, momentum=0.9, nesterov=False, \
trust_coefficient=0.01, eps=1e-09)
    """

    name: str = "sgd"
    """One of {optimizers}, or package.module:Class; it decides which settings there are, and no others are taken."""
    weight_decay: NotNegative = 0.0
    """Decay of the weights; biases and norm parameters get none unless decay_all is set."""
    decay_all: bool = False
    """Decay biases and norm parameters too."""
    clip: NotNegative = 0.0
    """Scale a gradient down whose norm over all parameters is larger than this; 0 for none."""

    if TYPE_CHECKING:  # beside the name any rule's settings may be given

        def __init__(self, *, name: str = "sgd", **settings: Any) -> None: ...

    def __new__(cls, **settings: Any) -> Self:
        """Make room for the settings that `name` asks for; pickle and copy give none."""
        return super().__new__(cls.choose(settings)[0])

    def __post_init__(self) -> None:
        require_name(self.name, OPTIMIZERS, "optimizer.name")
        expected = OPTIMIZERS[self.name].settings
        require(
            type(self) is expected,
            f"optimizer.name is {self.name}, whose settings are {expected.__name__}, not {type(self).__name__}; "
            "change the name with `switch`.",
        )
        check_ranges(self, "optimizer")

    @classmethod
    def choose(cls, settings: Mapping[str, Any]) -> tuple[type[Self], Mapping[str, Any]]:
        """Return the class for some settings, and those of them that are not another rule's.

        Files of version 0.1 hold the settings of all rules together.
        """
        if cls is not OptimizerConfig:
            return cls, settings
        name = settings.get("name", "sgd")
        require(isinstance(name, str), f"optimizer.name takes text, but got {name!r:.60}.")
        require_name(name, OPTIMIZERS, "optimizer.name")
        chosen: Any = OPTIMIZERS[name].settings
        own = ":" in name  # nothing of it can be another rule's
        kept = {key: value for key, value in settings.items() if own or name in rules_with(key) or not rules_with(key)}
        return chosen, kept

    def switch(self, name: str) -> OptimizerConfig:
        """Return the settings of another rule, with what means the same in both: decay, clipping and momentum.

        >>> LarsSettings(momentum=0.8, eps=0.0).switch("sgd")
        SgdSettings(name='sgd', weight_decay=0.0, decay_all=False, clip=0.0, momentum=0.8, nesterov=False, \
adagrad='none', eps=1e-09)
        """
        if name == self.name:
            return self
        require_name(name, OPTIMIZERS, "optimizer.name")
        chosen = OPTIMIZERS[name].settings
        shared = _fields(chosen) & (_fields(OptimizerConfig) | {"momentum", "nesterov"}) & _fields(type(self))
        return chosen(**{**{key: getattr(self, key) for key in shared}, "name": name})

    @property
    def entry(self) -> Optimizer:
        """What the table says of this rule."""
        return OPTIMIZERS[self.name]

    @property
    def home(self) -> str:
        """Where the class is that takes the step."""
        return self.entry.home

    @property
    def before_exchange(self) -> str:
        """Where the class is that scales each rank's own gradient before ranks exchange theirs; mostly empty."""
        return ""

    def arguments_before(self) -> dict[str, Any]:
        """Return what the constructor at `before_exchange` is given besides the model and its groups."""
        return {}

    @property
    def batch_rule(self) -> Literal["linear", "sqrt"]:
        """How the rate follows the batch where nothing else says so."""
        return self.entry.batch_rule

    @property
    def shares_update(self) -> bool:
        """Whether ranks divide the work of an update: the rule then has a `process_group` to be set."""
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
class _Momentum(OptimizerConfig):
    """What rules with a velocity share."""

    momentum: Fraction = 0.9
    """How much of the velocity is kept from step to step."""
    nesterov: bool = False
    """Nesterov's form of the momentum."""


@dataclass(frozen=True, kw_only=True)
class _Adam(OptimizerConfig):
    """What rules with Adam's two averages share."""

    betas: Betas = (0.9, 0.95)
    """How much of the averages of gradient and squared gradient is kept from step to step."""
    eps: Positive = 1e-8
    """Added to the root of the second average."""


@dataclass(frozen=True, kw_only=True)
class SgdSettings(_Momentum):
    """Momentum SGD, with AdaGrad in front of it where that is wanted."""

    adagrad: Literal["none", "before", "after"] = "none"
    """AdaGrad in front of sgd: each rank scales its gradient before the exchange, or the mean is scaled after it."""
    eps: NotNegative = 1e-9
    """Added to AdaGrad's denominators."""

    @property
    def home(self) -> str:
        """AdaGrad on the mean is part of the step."""
        return "bigstep.optim.adagrad:AdaGradSGD" if self.adagrad == "after" else self.entry.home

    @property
    def before_exchange(self) -> str:
        """AdaGrad on each rank's own gradient is not."""
        return "bigstep.optim.adagrad:RankAdaGrad" if self.adagrad == "before" else ""

    def arguments_before(self) -> dict[str, Any]:
        """Each rank keeps sums of its own."""
        return {"eps": self.eps}

    @property
    def batch_rule(self) -> Literal["linear", "sqrt"]:
        """AdaGrad's steps are as long as the rate, whatever the gradient."""
        return "linear" if self.adagrad == "none" else "sqrt"

    def arguments(self, *, on_gpu: bool = False) -> dict[str, Any]:
        """AdaGradSGD takes eps, torch's SGD a fused kernel."""
        momentum = {"momentum": self.momentum, "nesterov": self.nesterov}
        if self.adagrad == "after":
            return {**momentum, "eps": self.eps}
        return {**momentum, "fused": True} if on_gpu else momentum


@dataclass(frozen=True, kw_only=True)
class LarsSettings(_Momentum):
    """Layer-wise rates."""

    name: str = "lars"
    trust_coefficient: Positive = 0.001
    """eta of the paper, the size of a layer's step relative to its weights."""
    eps: NotNegative = 1e-9
    """Added to the denominator of a layer's rate."""


@dataclass(frozen=True, kw_only=True)
class RMSpropWarmupSettings(OptimizerConfig):
    """RMSprop at first, momentum SGD later."""

    name: str = "rmsprop_warmup"
    momentum: Fraction = 0.9
    """How much of the velocity is kept from step to step."""
    rms_decay: Fraction = 0.99
    """mu2 of the paper, how much of the squared-gradient average is kept."""
    rms_lr: Positive = 3e-4
    """eta_RMS, the rate of the pure RMSprop phase."""
    eps: NotNegative = 1e-9
    """Added to the root of that average."""
    blend_center: float = 10.0
    """The epoch at which SGD has half the weight."""
    blend_period: Positive = 5.0
    """The length of the transition in epochs."""

    def stretch(self, ratio: float) -> OptimizerConfig:
        """The transition keeps its place in the run."""
        return dataclasses.replace(self, blend_center=self.blend_center * ratio, blend_period=self.blend_period * ratio)

    def arguments(self, *, on_gpu: bool = False) -> dict[str, Any]:
        """The blend changes from step to step."""
        given = super().arguments(on_gpu=on_gpu)
        return {key: value for key, value in given.items() if not key.startswith("blend_")}


@dataclass(frozen=True, kw_only=True)
class AdagradSettings(OptimizerConfig):
    """AdaGrad without momentum."""

    name: str = "adagrad"
    eps: NotNegative = 1e-9
    """Added to the root of the summed squares."""


@dataclass(frozen=True, kw_only=True)
class AdamWSettings(_Adam):
    """Adam with decay apart from the gradient."""

    name: str = "adamw"

    def arguments(self, *, on_gpu: bool = False) -> dict[str, Any]:
        """Take torch's kernel on a CPU too, where its other forms go tensor by tensor."""
        return {**super().arguments(on_gpu=on_gpu), "fused": True}


@dataclass(frozen=True, kw_only=True)
class LambSettings(_Adam):
    """Adam's direction with LARS's layer-wise length."""

    name: str = "lamb"
    betas: Betas = (0.9, 0.999)
    eps: Positive = 1e-6


@dataclass(frozen=True, kw_only=True)
class MuonSettings(_Momentum):
    """Orthogonalised steps for matrices and filters, another rule for the rest."""

    name: str = "muon"
    momentum: Fraction = 0.95
    nesterov: bool = True
    iterations: Count = 5
    """Newton-Schulz iterations of each orthogonalisation."""
    renormalise: bool = False
    """Bring each filter bank back to the norm sqrt(outputs) before its update."""
    rest: Literal["sgd", "adamw"] = "adamw"
    """The rule for embeddings, heads, biases and norm parameters."""
    rest_lr: Positive = 1.0
    """Rate of the rest, as a multiple of the rate of the matrices."""
    betas: Betas = (0.9, 0.95)
    """Averages of the rest under adamw."""
    eps: Positive = 1e-8
    """Added to denominators of the rest under adamw."""
    share: bool = True
    """Each rank orthogonalises its share of the matrices and gets the others' (not with exact); false: all do all."""

    @property
    def shares_update(self) -> bool:
        """Orthogonalising is work that is worth dividing."""
        return self.share

    def arguments(self, *, on_gpu: bool = False) -> dict[str, Any]:
        """Who shares the work is known when a step is taken."""
        given = super().arguments(on_gpu=on_gpu)
        return {key: value for key, value in given.items() if key != "share"}


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What there is to know of an update rule."""

    about: str
    """One sentence, for help and documents."""
    home: str
    """Where its class is."""
    settings: type[OptimizerConfig]
    """Its settings."""
    batch_rule: Literal["linear", "sqrt"]
    """How its rate follows the batch: linearly where a step grows with the gradient, else by the square root."""
    methods: tuple[str, ...] = ("synchronous", "islands")
    """The methods that it goes with."""
    fused: bool = False
    """Whether the constructor takes `fused=True` for torch's kernel on a GPU."""
    state_bytes: int
    """Bytes that it keeps for each parameter, in float32."""
    traffic: float | None = None
    """Bytes a parameter that an update moves through a device's memory; None where arithmetic counts for more."""
    changing: str = ""
    """Where the function is that says what besides the rate changes: (settings, epoch, lr) -> values of the groups."""


EVERYWHERE = ("synchronous", "islands", "locked", "hogwild", "downpour")

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": Optimizer(
        about="SGD with momentum",
        home="torch.optim:SGD",
        settings=SgdSettings,
        batch_rule="linear",
        methods=EVERYWHERE,
        fused=True,
        state_bytes=4,
        traffic=20.0,
    ),
    "lars": Optimizer(
        about="momentum SGD with a rate for each layer, from the norms of its weights and gradient (You et al. 2017)",
        home="bigstep.optim.lars:LARS",
        settings=LarsSettings,
        batch_rule="sqrt",
        methods=("synchronous", "islands", "locked", "hogwild"),  # a shard of a server sees no whole layers
        state_bytes=4,
        traffic=28.0,  # weights and gradients are read once more for the norms
    ),
    "rmsprop_warmup": Optimizer(
        about="RMSprop that turns into momentum SGD (Akiba et al. 2017)",
        home="bigstep.optim.rmsprop_warmup:RMSpropWarmup",
        settings=RMSpropWarmupSettings,
        batch_rule="linear",
        changing="bigstep.optim.rmsprop_warmup:changing",
        state_bytes=8,
        traffic=28.0,
    ),
    "adagrad": Optimizer(
        about="torch's AdaGrad, without momentum",
        home="torch.optim:Adagrad",
        settings=AdagradSettings,
        batch_rule="sqrt",
        methods=EVERYWHERE,
        state_bytes=4,
        traffic=20.0,
    ),
    "adamw": Optimizer(
        about="Adam with decay apart from the gradient (Loshchilov, Hutter 2017)",
        home="torch.optim:AdamW",
        settings=AdamWSettings,
        batch_rule="sqrt",
        fused=True,
        state_bytes=8,
        traffic=28.0,
    ),
    "lamb": Optimizer(
        about="Adam's direction with a length for each layer (You et al. 2019)",
        home="bigstep.optim.lamb:LAMB",
        settings=LambSettings,
        batch_rule="sqrt",
        state_bytes=8,
        traffic=40.0,  # the update is written, measured and read again
    ),
    "muon": Optimizer(
        about="momentum, orthogonalised for matrices and filters (Jordan 2024)",
        home="bigstep.optim.muon:Muon",
        settings=MuonSettings,
        batch_rule="sqrt",
        state_bytes=4,
    ),
}

OPTIMIZERS = Table("optimizers", Optimizer, OPTIMIZERS, own="bigstep.tables.own_rule:own_rule")


def _fields(settings: type[OptimizerConfig]) -> set[str]:
    return {field.name for field in dataclasses.fields(settings)}


def rules_with(setting: str) -> list[str]:
    """Return the names of the rules that have a setting.

    >>> rules_with("trust_coefficient")
    ['lars']
    """
    return [name for name, entry in OPTIMIZERS.items() if setting in _fields(entry.settings)]
