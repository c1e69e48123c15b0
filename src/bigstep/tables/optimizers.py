"""Update rules by name, each with a small dataclass of its settings.

A field of a settings class is an argument of the rule's constructor, unless `arguments` says otherwise; learning rate
and parameter groups come from the caller that builds it: `load(rule.home)(groups, lr=1.0, **rule.arguments())`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from bigstep.tables.optimizer_config import Optimizer, OptimizerConfig, rules_with
from bigstep.tables.plugins import Table
from bigstep.validate import Count, Fraction, NotNegative, Positive, Range

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
    """Momentum SGD, optionally with AdaGrad in front of it."""

    adagrad: Literal["none", "before", "after"] = "none"
    """AdaGrad in front of sgd: before the exchange, on each rank's own gradient, or after it, on the mean."""
    eps: NotNegative = 1e-9
    """Added to AdaGrad's denominators."""

    @property
    def home(self) -> str:
        """AdaGrad after the exchange is part of the step, so it has another class."""
        return "bigstep.optim.adagrad:AdaGradSGD" if self.adagrad == "after" else self.entry.home

    @property
    def before_exchange(self) -> str:
        """AdaGrad before the exchange is apart from the step."""
        return "bigstep.optim.adagrad:RankAdaGrad" if self.adagrad == "before" else ""

    def arguments_before(self) -> dict[str, Any]:
        """Only eps: each rank keeps sums of its own."""
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
        """All but the blend, which changes from step to step."""
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
    """Adam with decoupled weight decay."""

    name: str = "adamw"

    def arguments(self, *, on_gpu: bool = False) -> dict[str, Any]:
        """Use torch's fused kernel on a CPU too, where its other forms go tensor by tensor."""
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
    """How much of the averages of the rest is kept from step to step (adamw)."""
    eps: Positive = 1e-8
    """Added to the denominators of the rest (adamw)."""
    share: bool = True
    """Each rank orthogonalises a share of the matrices and gets the rest (not with exact); false: each does all."""

    @property
    def shares_update(self) -> bool:
        """Orthogonalising takes enough work to be worth dividing."""
        return self.share

    def arguments(self, *, on_gpu: bool = False) -> dict[str, Any]:
        """All but `share`: which ranks divide the work is set when a step is taken."""
        given = super().arguments(on_gpu=on_gpu)
        return {key: value for key, value in given.items() if key != "share"}


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
        methods=("synchronous", "islands", "locked", "hogwild"),  # a shard of a parameter server sees no whole layers
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
        about="Adam with decoupled weight decay (Loshchilov, Hutter 2017)",
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
