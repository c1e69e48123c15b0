"""Ways of taking a step by name; `asynchronous.method` names those that wait for nobody."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ASYNCHRONOUS", "METHODS", "Method"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """What is known about a method besides the optimizers that go with it, which `tables.optimizers` lists."""

    about: str
    """One sentence, for help and documents."""
    waits: bool = True
    """Whether all workers take a step together."""
    same_path: bool = True
    """Whether the same run takes the same path on any number of ranks."""
    resumes: bool = True
    """Whether a run can be interrupted and resumed."""


METHODS: dict[str, Method] = {
    "synchronous": Method(about="all workers' gradients are averaged in every step"),
    "islands": Method(about="workers live on islands with weights of their own; the islands meet every H steps"),
    "locked": Method(
        about="processes of one machine update shared weights, one at a time", waits=False, same_path=False,
        resumes=False,
    ),
    "hogwild": Method(
        about="processes of one machine update shared weights without locks (Niu et al. 2011)", waits=False,
        same_path=False, resumes=False,
    ),
    "downpour": Method(
        about="replicas push gradients to a parameter server and fetch weights from it (Dean et al. 2012)",
        waits=False, same_path=False,
    ),
}  # fmt: skip

ASYNCHRONOUS = tuple(name for name, method in METHODS.items() if not method.waits)
"""The methods that wait for nobody."""
