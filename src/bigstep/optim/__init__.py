"""Update rules of the large-batch papers, as ordinary `torch.optim` optimizers."""

from __future__ import annotations

from bigstep.optim.adagrad import AdaGradSGD, RankAdaGrad
from bigstep.optim.lamb import LAMB
from bigstep.optim.lars import LARS
from bigstep.optim.muon import Muon
from bigstep.optim.parameter_groups import parameter_groups
from bigstep.optim.rmsprop_warmup import RMSpropWarmup

__all__ = ["LAMB", "LARS", "AdaGradSGD", "Muon", "RMSpropWarmup", "RankAdaGrad", "parameter_groups"]
