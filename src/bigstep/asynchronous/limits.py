"""What an asynchronous run cannot do, refused before anything is started."""

from __future__ import annotations

from bigstep.config import RunConfig, require
from bigstep.engine.ranks import Ranks
from bigstep.errors import ConfigError
from bigstep.tables.methods import ASYNCHRONOUS, METHODS
from bigstep.tables.optimizers import OPTIMIZERS, SgdSettings

__all__ = ["require_runnable"]


def require_runnable(config: RunConfig, ranks: Ranks, *, resume: bool) -> None:
    """Refuse, in one sentence, what only the synchronous loop does."""
    method = config.asynchronous.method
    if method == "none":
        raise ConfigError(f"asynchronous.method is none; set it to one of {', '.join(ASYNCHRONOUS)}.")
    require(
        ranks.size == 1,
        f"A {method} run starts its own processes: leave out --procs and torchrun, and set asynchronous.replicas.",
    )
    require(
        not resume or METHODS[method].resumes,
        f"A {method} run cannot be resumed: its weights may be torn when it is interrupted; start it anew with "
        "another --out.",
    )
    allowed = [name for name, entry in OPTIMIZERS.items() if method in entry.methods]
    require(
        config.optimizer.name in allowed,
        f"optimizer.name is {config.optimizer.name}, but {method} takes {', '.join(allowed)}"
        + ("; a shard sees no whole layers." if method == "downpour" else "."),
    )
    require(
        not isinstance(config.optimizer, SgdSettings) or config.optimizer.adagrad == "none",
        f"optimizer.adagrad is set, but a {method} run has no exchange to put it before or "
        "after: use optimizer.name=adagrad.",
    )
    require(
        not config.arithmetic.loss_scale,
        f"precision is {config.precision}, whose loss scale all replicas of a {method} run must agree on; use bf16 or "
        "float32.",
    )
    require(
        config.nonfinite == "stop",
        f"nonfinite is {config.nonfinite}, but a {method} run stops at a gradient that is not finite; use stop.",
    )
    require(
        config.asynchronous.warm_start < config.epochs,
        f"asynchronous.warm_start is {config.asynchronous.warm_start:g}, but with {config.epochs:g} epochs no other "
        "replica would ever take part: lower it, or shorten the run with --epochs, which shortens it too.",
    )
    require(not config.lr.groups, f"lr.groups is set, but a {method} run has one rate; leave it empty.")
    require(not config.data.sizes, f"data.sizes is set, but a {method} run keeps one image size; leave it empty.")
