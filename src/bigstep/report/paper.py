"""A run beside the figure its paper printed, and what differs between the two."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from bigstep.report.measure import ACCURACY, Measure
from bigstep.report.outcome import Outcome
from bigstep.report.words import clean, count, duration, number, percent, plural

__all__ = ["BesidePaper", "beside_paper"]


@dataclass(frozen=True)
class BesidePaper:
    """Rows (what, here, published) and the differences that limit a comparison."""

    system: str
    source: str
    link: str
    rows: tuple[tuple[str, str, str], ...]
    differences: tuple[str, ...]
    note: str

    def told(self, what: str) -> tuple[str, str]:
        """The cells of this run and of the paper in the row of this name; dashes where there is no such row."""
        return next(((here, there) for name, here, there in self.rows if name == what), ("–", "–"))


def beside_paper(outcome: Outcome, reached: float | None, measure: Measure = ACCURACY) -> BesidePaper | None:
    """Set a run and what it (or its group) reached beside the published result; None if the record has none."""
    facts = outcome.run.facts.get("published")
    if not isinstance(facts, Mapping) or not facts or facts.get("ours"):
        return None
    text = {name: clean(facts.get(name) or "–") for name in ("system", "source", "hardware", "batch", "note")}
    accuracy, seconds = number(facts.get("accuracy")), number(facts.get("seconds"))
    data = clean(facts.get("data") or ("–" if accuracy is None else "ImageNet"))
    results = [(measure.name, measure.cell(reached), "–" if measure.falls else percent(accuracy))]
    if measure.falls and accuracy is not None:  # a recipe for images on text: bits and a percentage get a row each
        results.append(("accuracy", "–", percent(accuracy)))
    rows = (
        *results,
        ("data", outcome.data or "–", data),
        ("batch", outcome.batches, text["batch"]),
        ("workers", count(outcome.workers), "–"),
        ("time", duration(outcome.seconds), duration(seconds)),
        ("hardware", outcome.hardware, text["hardware"]),
    )
    differences = []
    if outcome.data != data.lower().replace("-", ""):
        theirs = "others" if data == "–" else data
        differences.append(
            f"Data and model: {outcome.data or 'another set'} with {outcome.model or 'another model'} here, {theirs} "
            "in the paper. The results are not comparable; each compares only with others on the same data."
        )
    elif outcome.data != "imagenet":  # on ImageNet, everybody trains the same network
        differences.append(f"Model: {outcome.model or 'another'} here; the paper's own may differ.")
    if outcome.preset not in ("paper", ""):
        differences.append(f"Preset {outcome.preset}: batch, epochs and rates are chosen for it, not the paper's.")
    if outcome.ranks is not None and outcome.workers is not None and outcome.ranks < outcome.workers:
        differences.append(
            f"{count(outcome.workers)} logical workers shared {plural(outcome.ranks, 'rank')}: the mathematics of many "
            "workers, not their speed."
        )
    note = text["note"] if text["note"] != "–" else ""
    return BesidePaper(text["system"], text["source"], _link(text["source"]), rows, tuple(differences), note)


def _link(source: str) -> str:
    """The paper's address, from its arXiv number if it has one.

    >>> _link("You et al., 2017, arXiv 1708.03888"), _link("a thesis")
    ('https://arxiv.org/abs/1708.03888', '')
    """
    found = re.search(r"\b(\d{4}\.\d{4,5})\b", source)
    return f"https://arxiv.org/abs/{found[1]}" if found else ""
