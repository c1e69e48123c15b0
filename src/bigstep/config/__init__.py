"""A run as data: what there is to choose (`schema`), how it is written (`text`), how it is changed (`edit`)."""

from __future__ import annotations

from bigstep.config.exchange import ExchangeConfig
from bigstep.config.schema import (
    AsynchronousConfig,
    CheckpointConfig,
    DataConfig,
    LossConfig,
    LrConfig,
    NormConfig,
    OptimizerConfig,
    Piece,
    Published,
    Resize,
    RunConfig,
    Stage,
    WorkersConfig,
    require,
)

__all__ = [
    "AsynchronousConfig", "CheckpointConfig", "DataConfig", "ExchangeConfig", "LossConfig", "LrConfig", "NormConfig",
    "OptimizerConfig", "Piece", "Published", "Resize", "RunConfig", "Stage", "WorkersConfig", "require",
]  # fmt: skip
