"""One run of a suite as data: the arguments of `bigstep train`, and the configuration that they lead to."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bigstep import recipes
from bigstep.config import RunConfig
from bigstep.config.edit import finish_on_one, stretch
from bigstep.config.text import apply_settings

__all__ = ["Network", "Planned"]


@dataclass(frozen=True, kw_only=True)
class Network:
    """Hosts of the network laboratory, each one rank, on links of chosen speed."""

    hosts: int
    rate: str
    """Speed of a host's link, as `tc` writes it; with several nodes, inside a node."""
    nodes: int = 1
    rate_between: str = ""
    """Speed between nodes."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One run to make, or made already.

    >>> run = Planned(label="plain", recipe="plain", settings=("lr.base=0.1",), epochs=4, procs=2, seed=1)
    >>> " ".join(run.arguments())
    'train plain --preset mini --epochs 4 --set lr.base=0.1 --set seed=1 --procs 2'
    >>> run.name, run.config().seed
    ('plain-seed1', 1)
    """

    label: str
    """What reports call the runs that differ from this one in the seed only."""
    variant: str = ""
    """Follows the label in the folder's name, where runs with one label differ in more than the seed."""
    without: str = ""
    """The technique of the recipe that is left out, to see what it brings."""
    recipe: str
    preset: str = "mini"
    settings: tuple[str, ...] = ()
    epochs: float | None = None
    finish_on_one: float | None = None
    procs: int = 1
    """Ranks; an asynchronous run starts its own processes and takes 1."""
    seed: int = 0
    network: Network | None = None
    """Run on hosts of the network laboratory instead of `procs` ranks."""

    @property
    def name(self) -> str:
        """The name of its folder."""
        words = re.sub(r"(?:[^\w.]|_)+", "-", f"{self.label} {self.variant}".lower()).strip("-")
        return f"{words}-seed{self.seed}"

    @property
    def ranks(self) -> int:
        """Processes that compute gradients together."""
        return self.network.hosts if self.network else self.procs

    def config(self) -> RunConfig:
        """Return the configuration that `arguments` leads to."""
        config = recipes.load(self.recipe, self.preset)
        if self.epochs is not None:
            config = stretch(config, self.epochs)
        config = apply_settings(config, [*self.settings, f"seed={self.seed}"])
        return config if self.finish_on_one is None else finish_on_one(config, self.finish_on_one)

    def arguments(self) -> list[str]:
        """Return what to type after `bigstep` to make the same run, without its folder."""
        words = ["train", self.recipe, "--preset", self.preset]
        if self.epochs is not None:
            words += ["--epochs", str(self.epochs)]  # every digit, or the run would not be the one that was planned
        for setting in (*self.settings, f"seed={self.seed}"):
            words += ["--set", setting]
        if self.finish_on_one is not None:
            words += ["--finish-on-one", str(self.finish_on_one)]
        if self.procs > 1 and self.network is None:
            words += ["--procs", str(self.procs)]
        return words
