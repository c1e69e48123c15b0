"""The provenance of every number: settings, machine, versions, commit, seeds and folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bigstep.report.figures import style_of
from bigstep.report.grid import DETAILED, anchor
from bigstep.report.measure import Measure
from bigstep.report.outcome import Outcome
from bigstep.report.study import Study
from bigstep.report.words import clean, duration

__all__ = ["details_of"]

LISTED = 200
"""Runs with a line of their own in the sections, over all groups."""


def details_of(study: Study) -> dict[str, Any]:
    """Gather what all groups share, once, and for each group what is specific to it."""
    groups = study.groups[:DETAILED]
    shared = dict(groups[0].outcomes[0].settings)
    for group in groups:
        own = group.outcomes[0].settings
        shared = {name: value for name, value in shared.items() if own.get(name) == value}
    listed = max(3, LISTED // len(groups))
    machines = _distinct([_machine(outcome) for outcome in study.outcomes])
    sections = []
    for index, group in enumerate(groups):
        first = group.outcomes[0]
        own = {name: value for name, value in first.settings.items() if name not in shared}
        sections.append(
            {
                "anchor": anchor(index),
                "label": group.label,
                "color": style_of(index)[0],
                "result": group.measure.cell(group.median),
                "preset": first.preset,
                "settings": own,
                "runs": [_run(outcome, group.measure) for outcome in group.outcomes[:listed]],
                "hidden": max(0, len(group.outcomes) - listed),
                "machines": _distinct([_machine(run) for run in group.outcomes]) if len(machines) > 1 else [],
                "notes": _distinct([clean(note) for outcome in group.outcomes for note in outcome.run.notes])[:10],
            }
        )
    machine = machines[0] if len(machines) == 1 else ""
    return {"shared": shared, "machine": machine, "sections": sections, "hidden": len(study.groups) - len(groups)}


def _run(outcome: Outcome, measure: Measure) -> dict[str, str]:
    facts = outcome.run.facts
    result = facts.get("result")
    command = facts.get("command")
    return {
        "seed": "–" if outcome.seed is None else str(outcome.seed),
        "result": measure.cell(outcome.score(measure.key)),
        "seconds": duration(outcome.seconds),
        "status": outcome.status,
        "folder": clean(outcome.folder),
        "started": clean(facts.get("started") or "–", 40),
        "command": clean(" ".join(map(str, command)) if isinstance(command, list) else command or "–"),
        "weights": clean(result.get("weights_sha256") or "–", 64)[:16] if isinstance(result, Mapping) else "–",
    }


def _machine(outcome: Outcome) -> str:
    """Hardware, versions and commit as one line."""
    facts = outcome.run.facts
    versions = facts.get("versions")
    parts = [outcome.hardware]
    if isinstance(versions, Mapping):
        parts.append(", ".join(f"{clean(name, 40)} {clean(value, 40)}" for name, value in versions.items()))
    if facts.get("kernels"):
        parts.append(f"kernels {clean(json.dumps(facts['kernels'], default=str), 200)}")
    parts.append(f"commit {clean(facts.get('commit') or 'unknown', 60)}")
    return "; ".join(parts)


def _distinct(texts: list[str]) -> list[str]:
    return list(dict.fromkeys(texts))
