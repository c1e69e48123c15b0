"""One run as reports see it: names, settings and figures from its records, with None for what they lack."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bigstep.config.edit import decides_path, flatten
from bigstep.records import Run, in_use, median_of_last_epochs
from bigstep.report.words import clean, number
from bigstep.tables.datasets import DATASETS

__all__ = ["PARTS", "Outcome", "flatten", "outcome_of", "unit_of"]

PARTS = ("compute", "exchange", "data")
"""Where the time of a step goes; exchange is the part that computation does not hide."""

NAMED_APART = ("recipe", "preset", "seed")
"""Settings that a report shows elsewhere."""


Status = Literal["finished", "diverged", "failed", "running", "stopped", "unfinished"]


@dataclass(frozen=True)
class Outcome:
    """A run in figures; None means that the records do not say."""

    run: Run
    name: str
    """What its user or a suite calls it, or its recipe."""
    without: str
    """The technique that a suite left out of the recipe to see what it brings; empty where nothing is left out."""
    recipe: str
    preset: str
    model: str
    data: str
    task: str
    """The data set and, if recorded, its fingerprint; accuracies compare only within a task."""
    unit: str
    """What its samples are called: images, sequences or, for a user's own data, samples."""
    seed: int | None
    settings: dict[str, str]
    status: Status
    """Stopped: it was asked to stop and can be resumed; unfinished: it ended without recording why."""
    failure: str
    """Its error, as a suite recorded it, or else empty."""
    accuracy: float | None
    accuracy_last5: float | None
    """Median of the last five epochs."""
    bits_per_byte: float | None
    perplexity: float | None
    eval_loss: float | None
    loss: float | None
    seconds: float | None
    epochs: float | None
    """Epochs completed, which may be fewer than were asked for."""
    steps: int | None
    samples: int | None
    batch: int | None
    batches: str
    workers: int | None
    ranks: int | None
    images_per_s: float | None
    length: float | None
    """Tokens per sample; None where samples are not sequences."""
    per_1000: dict[str, float]
    """Seconds that 1,000 samples take, by part."""
    bytes_sent: float | None
    noise_scale: float | None
    """Gradient noise scale at the end of the run, in samples."""
    hardware: str
    evaluations: list[dict[str, Any]]
    train: list[dict[str, Any]]

    @property
    def folder(self) -> Path:
        """Where the run was recorded."""
        return self.run.folder

    @property
    def evaluated_loss(self) -> float | None:
        """Loss of the last evaluation: the only result where outputs are not class scores."""
        return number(self.evaluations[-1].get("eval_loss")) if self.evaluations else None

    @property
    def top5(self) -> float | None:
        """Share of images whose class was among the five highest scores of the last evaluation."""
        return number(self.evaluations[-1].get("top5")) if self.evaluations else None

    @property
    def tokens_per_s(self) -> float | None:
        """Speed in tokens, for sequences."""
        return self.images_per_s * self.length if self.images_per_s and self.length else None

    @property
    def speed(self) -> tuple[float | None, str]:
        """Training speed per second, and its unit: tokens where samples are sequences."""
        return (self.tokens_per_s, "tokens") if self.length else (self.images_per_s, self.unit)

    def score(self, key: str) -> float | None:
        """Return a result by its name in the rows of an evaluation."""
        found: float | None = getattr(self, key)
        return found

    def seconds_to(self, target: float, key: str = "accuracy", *, falls: bool = False) -> float | None:
        """Return the time of the first evaluation that reached the target, or None if none did.

        At most the time of the whole run: an asynchronous run's last evaluation ends after training, on weights that
        were reached by then.
        """
        for row in self.evaluations:
            score = number(row.get(key))
            if score is not None and (score <= target if falls else score >= target):
                seconds = number(row.get("seconds"))
                return seconds if seconds is None or self.seconds is None else min(seconds, self.seconds)
        return None


def unit_of(data: str) -> str:
    """Return what the samples of a data set are called, by its name.

    >>> unit_of("cifar10"), unit_of("shakespeare"), unit_of("my_package:data")
    ('images', 'sequences', 'samples')
    """
    kinds = {"images": "images", "tokens": "sequences"}
    return kinds.get(DATASETS[data].input, "samples") if data in DATASETS else "samples"


def outcome_of(run: Run) -> Outcome:
    """Take from a run's records what reports show."""
    used, result = _mapping(run.facts.get("used")), _mapping(run.facts.get("result"))
    config = _as_used(_mapping(run.facts.get("config")), used, run.facts.get("data_fingerprint"))
    bench = _mapping(run.facts.get("bench"))
    recipe, failure = clean(config.get("recipe", "custom"), 60) or "custom", clean(bench.get("failure") or "")
    evaluations, train = run.evaluations, run.train
    last = evaluations[-1] if evaluations else {}
    final = train[-1] if train else {}
    workers = _mapping(config.get("workers"))
    ranks = _first(result.get("ranks"), run.facts.get("ranks"))
    diverged = bool(train) and number(final.get("loss")) is None
    # what a failed run had reached before it failed is not a result
    accuracy = None if failure else _first(result.get("accuracy"), last.get("accuracy"))
    seconds = _first(result.get("seconds"), last.get("seconds"), final.get("seconds"))
    samples = _first(result.get("samples"), last.get("samples"), final.get("samples"))
    seed = number(config.get("seed"))
    batch, batches = _batches(config, result)
    batch = batch if batch is not None else _first(result.get("batch"), final.get("batch"))
    return Outcome(
        run=run,
        name=clean(run.facts.get("name") or bench.get("label") or "", 80) or recipe,
        without=clean(bench.get("without") or _told_by_label(bench, recipe), 80),
        recipe=recipe,
        preset=clean(config.get("preset", ""), 60),
        model=clean(config.get("model", ""), 80),
        data=(data := clean(_mapping(config.get("data")).get("name", ""), 80)),
        task=f"{data} {clean(_mapping(config.get('data')).get('fingerprint', ''), 80)}".strip(),
        unit=clean(used.get("unit") or unit_of(data), 20),
        seed=None if seed is None else int(seed),
        settings=_settings(config, ranks, run.facts.get("device"), _cut_short(config, result, last, final)),
        status=_status(diverged, run, failure),
        failure=failure,
        accuracy=accuracy,
        accuracy_last5=None if failure else _first(result.get("accuracy_last5"), median_of_last_epochs(evaluations)),
        bits_per_byte=None if failure else _first(result.get("bits_per_byte"), last.get("bits_per_byte")),
        perplexity=None if failure else _first(result.get("perplexity"), last.get("perplexity")),
        eval_loss=None if failure else _first(result.get("eval_loss"), last.get("eval_loss")),
        loss=_first(result.get("loss"), final.get("loss")),
        seconds=seconds,
        epochs=_tidy(_first(last.get("epoch"), final.get("epoch"), config.get("epochs"))),
        steps=_whole(_first(result.get("steps"), last.get("step"), final.get("step"))),
        samples=_whole(samples),
        batch=_whole(batch),
        batches=batches or (f"{int(batch):,}" if batch is not None else "–"),
        workers=_whole(_first(result.get("workers"), workers.get("count"))),
        ranks=_whole(ranks),
        images_per_s=_rate(train, samples, seconds),
        length=(length := _length(train)),
        per_1000=_split(train),
        bytes_sent=_bytes(result, train),
        noise_scale=_first(result.get("noise_scale"), final.get("noise_scale")),
        hardware=_hardware(run.facts),
        evaluations=_counted(evaluations, length),
        train=_counted(train, length),
    )


def _as_used(config: dict[str, Any], used: Mapping[str, Any], fingerprint: object) -> dict[str, Any]:
    """The configuration with a user's own pieces in place of the names that they replaced."""
    own = {name: used[name] for name in ("model", "parameters", "loss", "optimizer") if name in used}
    if "data" in used:
        named = _mapping(config.get("data"))
        own["data"] = {**named, "name": used["data"]}
        if fingerprint and not named.get("holdout"):  # the held-out samples, and so the fingerprint, depend on the seed
            own["data"]["fingerprint"] = fingerprint
    return {**config, **own}


def _status(diverged: bool, run: Run, failure: str) -> Status:
    if diverged:
        return "diverged"
    if run.facts.get("result"):
        return "finished"
    if failure:
        return "failed"
    return "running" if in_use(run.folder) else "stopped" if run.facts.get("stopped") else "unfinished"


def _told_by_label(bench: Mapping[str, Any], recipe: str) -> str:
    """Records of the first release name the omitted technique in the label only."""
    return str(bench.get("label", "")).removeprefix(recipe).partition(" without ")[2]


def _tidy(epochs: float | None) -> float | None:
    return None if epochs is None else round(epochs, 2)


def _mapping(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _first(*values: object) -> float | None:
    return next((found for value in values if (found := number(value)) is not None), None)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _cut_short(config: Mapping[str, Any], result: Mapping[str, Any], *last: Mapping[str, Any]) -> int | None:
    """The steps of a run that was limited to fewer than its epochs have: its result is that of a shorter run."""
    asked, reached = number(config.get("epochs")), [number(row.get("epoch")) or 0.0 for row in last if row]
    early = asked is not None and bool(reached) and max(reached) < asked * (1 - 1e-9)
    return _whole(number(result.get("steps"))) if early else None


def _settings(config: Mapping[str, Any], ranks: object, device: object, steps: int | None) -> dict[str, str]:
    """Everything that makes two runs different experiments, in short form."""
    # where and how fast it computed, and where it ended
    facts = {"ranks": ranks, "device": device, "kernels": config.get("kernels"), "steps": steps}
    pairs = [*flatten(config), *((name, value) for name, value in facts.items() if value is not None)]
    return {
        clean(name, 80): _short(value)
        for name, value in pairs
        if name in facts or (name not in NAMED_APART and decides_path(name))
    }


def _short(value: object) -> str:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, float):
        return f"{value:g}"
    tidy = json.loads(json.dumps(value, default=str), parse_float=lambda digits: float(f"{float(digits):.6g}"))
    return clean(json.dumps(tidy), 2_000)


def _batches(config: Mapping[str, Any], result: Mapping[str, Any]) -> tuple[float | None, str]:
    """The first global batch, and all stages of batch-size control as text; with plan auto, those it decided on."""
    stages = [_mapping(config.get("workers"))]
    if _mapping(config.get("asynchronous")).get("method", "none") != "none":
        stages[0] = {**stages[0], "count": 1}  # each update uses one worker's share
    later = result.get("plan") if config.get("plan") == "auto" else config.get("plan")
    stages += [_mapping(stage) for stage in later] if isinstance(later, list | tuple) else []
    found = []
    for stage in stages:
        workers, local = number(stage.get("count")), number(stage.get("local_batch"))
        if workers is None or local is None:
            return None, ""
        found.append(workers * local)
    return found[0], " → ".join(f"{batch:,.0f}" for batch in found)


def _rate(train: list[dict[str, Any]], samples: float | None, seconds: float | None) -> float | None:
    rates = sorted(rate for row in train if (rate := number(row.get("images_per_s"))) is not None)
    if rates:
        return rates[len(rates) // 2]
    return samples / seconds if samples and seconds else None


def _length(train: list[dict[str, Any]]) -> float | None:
    """Tokens per sample: the ratio of two recorded speeds of the same step."""
    for row in train:
        tokens, samples = number(row.get("tokens_per_s")), number(row.get("images_per_s"))
        if tokens and samples:
            return round(tokens / samples, 6)
    return None


def _counted(rows: list[dict[str, Any]], length: float | None) -> list[dict[str, Any]]:
    """The rows, with the number of tokens seen added where samples are sequences."""
    if length is None:
        return rows
    return [{**row, "tokens": samples * length} if (samples := number(row.get("samples"))) else row for row in rows]


def _split(train: list[dict[str, Any]]) -> dict[str, float]:
    images = sum(number(row.get("batch")) or 0.0 for row in train)
    spent = {part: sum(number(row.get(f"{part}_s")) or 0.0 for row in train) for part in PARTS}
    return {part: 1_000 * s / images for part, s in spent.items()} if images and any(spent.values()) else {}


def _bytes(result: Mapping[str, Any], train: list[dict[str, Any]]) -> float | None:
    """Bytes that a rank sent: the result's figure, or the mean of the recorded steps times all steps."""
    told = number(result.get("bytes_sent"))
    if told is not None:
        return told
    rows = [sent for row in train if (sent := number(row.get("bytes_sent"))) is not None]
    steps = _first(result.get("steps"), train[-1].get("step") if train else None)
    return sum(rows) / len(rows) * steps if rows and steps else None


def _hardware(facts: Mapping[str, Any]) -> str:
    hardware = facts.get("hardware")
    if not isinstance(hardware, Mapping):
        return clean(hardware or "–", 120)
    gpu = next((hardware[name] for name in ("gpus", "gpu", "accelerator") if hardware.get(name)), None)
    if gpu:
        return clean(", ".join(map(str, gpu)) if isinstance(gpu, list) else gpu, 120)
    processor, cores = clean(hardware.get("processor", ""), 80), hardware.get("cores")
    return ", ".join(part for part in (processor, f"{cores} cores" if cores else "") if part) or "–"
