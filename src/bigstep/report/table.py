"""All runs as rows: for Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from bigstep.records import Run
from bigstep.report.outcome import PARTS
from bigstep.report.study import Study, study_of
from bigstep.report.words import clean, count, duration, size

__all__ = ["as_rows", "rows_of", "standings_of", "to_csv", "to_markdown"]


def as_rows(runs: Sequence[Run] | Study) -> list[dict[str, Any]]:
    """Return one flat row a run, best group first; plain numbers in SI units, accuracies as fractions."""
    return rows_of(study_of(runs))


def rows_of(study: Study) -> list[dict[str, Any]]:
    """Return the rows of a study that is already grouped."""
    rows = []
    for group in study.groups:
        for outcome in group.outcomes:
            facts, result = outcome.run.facts, outcome.run.facts.get("result")
            versions = facts.get("versions")
            rows.append(
                {
                    "group": group.label,
                    "recipe": outcome.recipe,
                    "preset": outcome.preset,
                    "seed": outcome.seed,
                    "status": outcome.status,
                    "accuracy": outcome.accuracy,
                    "accuracy_last5": outcome.accuracy_last5,
                    "top5": outcome.top5,
                    "bits_per_byte": outcome.bits_per_byte,
                    "perplexity": outcome.perplexity,
                    "loss": outcome.loss,
                    "seconds": outcome.seconds,
                    "target": study.target,
                    "seconds_to_target": None
                    if study.target is None
                    else outcome.seconds_to(study.target, study.measure.key, falls=study.measure.falls),
                    "epochs": outcome.epochs,
                    "steps": outcome.steps,
                    "samples": outcome.samples,
                    "batch": outcome.batch,
                    "workers": outcome.workers,
                    "ranks": outcome.ranks,
                    "images_per_s": outcome.images_per_s,
                    "tokens_per_s": outcome.tokens_per_s,
                    **{f"{part}_s_per_1000": outcome.per_1000.get(part) for part in PARTS},
                    "bytes_sent": outcome.bytes_sent,
                    "noise_scale": outcome.noise_scale,
                    "model": outcome.model,
                    "data": outcome.data,
                    "hardware": outcome.hardware,
                    "torch": clean(versions.get("torch", ""), 40) if isinstance(versions, dict) else "",
                    "commit": clean(facts.get("commit") or "", 60),
                    "weights_sha256": clean(result.get("weights_sha256", ""), 64) if isinstance(result, dict) else "",
                    "run": clean(outcome.folder),
                }
            )
    return rows


def standings_of(study: Study) -> list[dict[str, Any]]:
    """Return one row a group, best first: what it reached, how sure that is, how fast."""
    return [
        {
            "group": group.label,
            "standing": study.standing(position),
            "data": group.outcomes[0].data,
            "seeds": group.n,
            "runs": len(group.outcomes),
            "failed": group.failures,
            "stopped": group.stopped,
            "running": group.running,
            "accuracy": group.median_of("accuracy") if study.measure.falls else group.median,
            "accuracy_last5": group.median_of("accuracy_last5"),
            "bits_per_byte": group.median_of("bits_per_byte"),
            "measure": study.measure.key,
            "median": group.median,
            "lowest": group.scores[0] if group.scores else None,
            "highest": group.scores[-1] if group.scores else None,
            "seconds": group.median_of("seconds"),
            "target": study.target,
            "seconds_to_target": None if study.target is None else group.seconds_to(study.target),
            "images_per_s": group.median_of("images_per_s"),
            "tokens_per_s": group.median_of("tokens_per_s"),
            "bytes_sent": group.median_of("bytes_sent"),
        }
        for position, group in enumerate(study.groups)
    ]


def to_csv(runs: Sequence[Run] | Study) -> str:
    """Write all runs as CSV with a header; gaps are empty cells."""
    rows = as_rows(runs)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    # a spreadsheet would evaluate a cell that starts like a formula
    writer.writerows(
        {k: f"'{v}" if isinstance(v, str) and v[:1] in "=+-@" and v else v for k, v in r.items()} for r in rows
    )
    return text.getvalue()


def to_markdown(runs: Sequence[Run] | Study) -> str:
    """Write the groups as a Markdown table for a paper or a pull request, with the summary above it."""
    study = study_of(runs)
    measure = study.measure
    goal = f"time to {measure.goal(study.target)}" if study.target is not None else "time to target"
    head = ["group", "seeds", f"{measure.name} (median)", "range", goal, "time", "batch", f"{study.speed_unit}/s",
            "sent by a rank"]  # fmt: skip
    lines = [" ".join(study.sentences()), "", f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    for group in study.groups:
        cells = [
            group.label + (f" ({group.failures} failed)" if group.failures else ""),
            count(group.n),
            measure.cell(group.median),
            measure.gap(group.spread) if group.n > 1 else "–",
            duration(None if study.target is None else group.seconds_to(study.target)),
            duration(group.median_of("seconds")),
            group.outcomes[0].batches,
            count(group.median_of(study.speed_name)),
            size(group.median_of("bytes_sent")),
        ]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    if study.effects:
        unit = f" ({measure.of_gap.strip()})" if measure.of_gap else ""
        lines += ["", f"| system | technique | brings{unit} | sure? | costs (time) |", "|---|---|---:|---|---:|"]
    lines += [f"| {' | '.join(effect.words)} |" for effect in study.effects]
    return "\n".join(lines) + "\n"
