"""A run as data: what there is to choose (`schema`), how it is written (`text`), how it is changed (`edit`)."""

from __future__ import annotations

from bigstep.config.data import DataConfig, Resize
from bigstep.config.exchange import ExchangeConfig
from bigstep.config.growth import GrowthConfig
from bigstep.config.methods import AsynchronousConfig, IslandsConfig, OuterConfig
from bigstep.config.rate import LrConfig, Piece, RateGroup
from bigstep.config.schema import CheckpointConfig, LossConfig, NormConfig, RunConfig, Stage, WorkersConfig
from bigstep.errors import require
from bigstep.published import Published
from bigstep.tables.optimizers import OptimizerConfig

__all__ = [
    "AsynchronousConfig", "CheckpointConfig", "DataConfig", "ExchangeConfig", "GrowthConfig", "IslandsConfig",
    "LossConfig", "LrConfig", "NormConfig", "OptimizerConfig", "OuterConfig", "Piece", "Published", "RateGroup",
    "Resize", "RunConfig", "Stage", "WorkersConfig", "require",
]  # fmt: skip
