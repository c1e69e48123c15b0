"""Runs that should agree bit for bit: exact runs of one configuration, on any ranks, over any collective."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bigstep.report.outcome import Outcome
from bigstep.report.words import clean, count, listing, plural

__all__ = ["same_bits"]

# what may differ between exact runs that end with the same weights
_FREE = ("ranks", "kernels", "exchange.collective", "exchange.grid", "exchange.bucket_mb", "exchange.timeout")
_SHOWN = 4


def same_bits(outcomes: Sequence[Outcome]) -> list[str]:
    """Say for each set of exact runs that should be equal, in one sentence, whether they are.

    Runs should be equal if they have the same configuration, seed, steps, program, versions and processor: an exact
    sum does not depend on its order, but another release or kind of processor may round differently in a forward.
    """
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.settings.get("exact") == "true" and _hash_of(outcome):
            found.setdefault(_promise(outcome), []).append(outcome)
    return [_judge(runs) for runs in found.values() if len(runs) > 1]


def _judge(runs: Sequence[Outcome]) -> str:
    hashes = {_hash_of(run) for run in runs}
    name = f"{count(len(runs))} exact runs of {runs[0].name} (seed {runs[0].seed})"
    if len(hashes) == 1:
        return f"{name} have the same weights in every bit."
    told = [f"{run.folder.name} on {plural(run.ranks, 'rank')}: {_hash_of(run)[:12]}" for run in runs]
    return (
        f"NOT EQUAL: {name} should have the same weights in every bit, but {count(len(hashes))} hashes were recorded "
        f"({clean(listing(told, _SHOWN))}): look for data that changed, faulty memory, or a model that is not "
        "deterministic."
    )


def _hash_of(outcome: Outcome) -> str:
    result = outcome.run.facts.get("result")
    return clean(result.get("weights_sha256") or "", 64) if isinstance(result, Mapping) else ""


def _promise(outcome: Outcome) -> str:
    """Everything that determines the bits of an exact run."""
    facts: Mapping[str, Any] = outcome.run.facts
    hardware = facts.get("hardware")
    processor = hardware.get("processor") if isinstance(hardware, Mapping) else None
    settings = {name: value for name, value in outcome.settings.items() if name not in _FREE}
    decides = [settings, outcome.seed, outcome.steps, processor, facts.get("commit"), facts.get("versions")]
    return json.dumps(decides, sort_keys=True, default=str)
