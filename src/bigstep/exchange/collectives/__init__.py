"""Ways to combine the gradients of all ranks: one file each, with an entry in `bigstep.tables.collectives`."""

from __future__ import annotations

from bigstep.exchange.collectives.gather import Gather
from bigstep.exchange.collectives.halving import Halving
from bigstep.exchange.collectives.hierarchical import Hierarchical
from bigstep.exchange.collectives.hybrid import Hybrid
from bigstep.exchange.collectives.phases import Collective, sum_over_ranks
from bigstep.exchange.collectives.ring import Ring
from bigstep.exchange.collectives.torus import Torus

__all__ = ["Collective", "Gather", "Halving", "Hierarchical", "Hybrid", "Ring", "Torus", "sum_over_ranks"]
