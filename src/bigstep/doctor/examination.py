"""The examination: run the program on one rank and on several, gather the facts, apply every rule."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import bigstep
from bigstep.doctor.facts import Group, Spawn, Update, Wrote
from bigstep.doctor.finding import Case, Finding, Unseen
from bigstep.doctor.findings import RULES
from bigstep.doctor.findings.time import timed_updates
from bigstep.doctor.launch import Limits, explain
from bigstep.doctor.runs import observe
from bigstep.doctor.world import World, load_world, write_world
from bigstep.errors import ConfigError

__all__ = ["Examination", "diagnose", "examine", "load_case"]


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Where a rank's step spends its time."""

    rank: int
    ranks: int
    parts: dict[str, float]
    """Milliseconds, by part; `exchange` counts only collectives that the script calls itself."""
    samples: float


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What was found in a program, what was looked for, and what could not be."""

    command: str
    findings: Sequence[Finding]
    """Faults, the surest first, and then advice."""
    checked: Sequence[str]
    """Rules that had what they needed and found nothing."""
    unseen: dict[str, str]
    """Rules that lacked the facts to judge, and what was missing."""
    notes: Sequence[str] = ()
    """How the runs went: what ended them, what was changed for them, what they wrote outside their copy."""
    times: Sequence[StepTime] = ()
    trouble: str = ""
    """Why the program could not be examined to the end."""
    seconds: float = 0.0

    @property
    def healthy(self) -> bool:
        """Whether the program was examined to the end and no fault was found."""
        return not self.faults and not self.trouble

    @property
    def faults(self) -> list[Finding]:
        """Findings that are mistakes."""
        return [finding for finding in self.findings if finding.level == "fault"]

    @property
    def advice(self) -> list[Finding]:
        """Findings worth knowing that may be intended."""
        return [finding for finding in self.findings if finding.level == "advice"]

    def speeds(self) -> list[str]:
        """Return the speed of each run as a sentence."""
        found: dict[int, float] = {}
        for row in self.times:
            if row.samples and row.parts["total"]:
                found[row.ranks] = found.get(row.ranks, 0.0) + 1000 * row.samples / row.parts["total"]
        return [f"{_ranks(ranks)}: {speed:,.0f} samples a second." for ranks, speed in found.items()]

    def to_mapping(self) -> dict[str, Any]:
        """Return the examination as plain values, for --json."""
        return {
            "bigstep": bigstep.__version__,
            "command": self.command,
            "healthy": self.healthy,
            "trouble": self.trouble,
            "findings": [finding.to_mapping() for finding in self.faults],
            "advice": [finding.to_mapping() for finding in self.advice],
            "checked": list(self.checked),
            "unseen": dict(self.unseen),
            "notes": list(self.notes),
            "times": [asdict(row) for row in self.times],
            "seconds": round(self.seconds, 2),
        }


def examine(
    command: Sequence[str],
    *,
    ranks: int = 2,
    steps: int = 12,
    only: str = "",
    device: str = "auto",
    limits: Limits | None = None,
    keep: Path | None = None,
    watch: Callable[[str], None] = lambda stage: None,
) -> Examination:
    """Run a program on one rank and on several, and say what is wrong with it on several.

    Args:
        command: The script and its arguments, or -m, a module and its arguments.
        ranks: Ranks of the larger run.
        steps: Updates after which a run is stopped.
        only: A family of findings to look for, such as "time"; empty looks for all.
        device: cpu hides the GPUs; auto uses them if there is one for each rank.
        limits: Seconds that each run may take.
        keep: A folder in which to keep the facts of each run, for `load_case`.
        watch: Called with a few words when a run begins.
    """
    if ranks < 2:
        raise ConfigError(f"--ranks is {ranks}, but the doctor compares one rank with several; give 2 or more.")
    if steps < 2:
        raise ConfigError(f"--steps is {steps}, but the doctor compares one update with the next; give 2 or more.")
    if only and only not in RULES:
        raise ConfigError(f"--only is {only!r}, but it must be one of {', '.join(RULES)}.")
    if device not in ("auto", "cpu"):
        raise ConfigError(
            f"--device is {device!r:.60}, but it must be auto or cpu; auto uses the GPUs if there is one for each rank."
        )
    began = time.monotonic()
    case, runs = observe(
        command, ranks=ranks, steps=steps, only=only, device=device, limits=limits or Limits(), watch=watch
    )
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        for name, world in vars(case).items():
            if world is not None:
                write_world(world, keep / f"{name}.jsonl")
    return diagnose(case, " ".join(command), only=only, seconds=time.monotonic() - began, runs=runs)


def load_case(folder: Path) -> Case:
    """Read the facts that an examination kept."""
    return Case(**{path.stem: load_world(path) for path in folder.glob("*.jsonl")})


def diagnose(
    case: Case, command: str, *, only: str = "", seconds: float = 0.0, runs: Sequence[World] = ()
) -> Examination:
    """Apply every rule to a case.

    Args:
        case: What was seen of the program.
        command: How the program was started.
        only: A family of rules; empty applies all.
        seconds: How long the runs took.
        runs: The runs that the report describes, in order.
    """
    findings: list[Finding] = []
    checked: list[str] = []
    unseen: dict[str, str] = {}
    for family, rules in RULES.items():
        for rule in rules if only in ("", family) else ():
            name = rule.__name__.replace("_", "-")
            try:
                found = [Finding(**{**f.to_mapping(), "family": family}) for f in rule(case)]
            except Unseen as reason:
                unseen[name] = str(reason)
                continue
            except (ArithmeticError, LookupError, ValueError) as error:  # unforeseen facts: the other rules go on
                unseen[name] = f"the rule stumbled over unexpected facts ({type(error).__name__}: {error})"
                continue
            findings += found
            if not found:
                checked.append(name)
    trouble = _trouble(runs)
    findings.sort(key=lambda finding: (finding.level != "fault", -finding.likelihood))
    return Examination(
        command=command,
        findings=findings,
        checked=checked,
        unseen=unseen,
        notes=_notes(runs, told="" if any(finding.level == "fault" for finding in findings) else trouble),
        times=_times(case),
        trouble=trouble,
        seconds=seconds,
    )


def _trouble(runs: Sequence[World]) -> str:
    """Return in a few words why a run failed, hung or was late, or why there is nothing to compare; or ''."""
    ended = next((explain(world) for world in runs if world.ended in ("failed", "hung", "late")), "")
    trained = any(process.all(Update) for world in runs for process in world.everything)
    return ended or ("" if trained or not runs else "no update of a torch optimizer was seen in it")


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _notes(runs: Sequence[World], told: str) -> list[str]:
    """Say how the runs went; a reason that the verdict or an earlier note has given is not repeated."""
    notes: list[str] = []
    reasons = {told}
    for world in runs:
        if world.ended in ("failed", "hung", "late"):
            updates = max((len(process.all(Update)) for process in world.ranks), default=0)
            reason = explain(world)
            why = ", for the same reason" if reason in reasons else f": {reason}"
            reasons.add(reason)
            done = "1 update" if updates == 1 else f"{updates or 'no'} updates"
            notes.append(f"The run on {_ranks(world.started)} ended after {done}{why}.")
        written = [event for process in world.everything for event in process.all(Wrote) if not event.refused]
        notes += [f"The program wrote {event.path}, which is outside its folder." for event in written]
        joined = [event for process in world.ranks for event in process.all(Group) if event.asked]
        notes += [f"The ranks ran without GPUs, so {e.backend} took the place of {e.asked}." for e in joined]
        if any(event.changed for process in world.everything for event in process.all(Spawn)):
            notes.append("The program starts its ranks itself; for the run on one rank their number was set to 1.")
    return list(dict.fromkeys(notes))


def _times(case: Case) -> list[StepTime]:
    """Return the median time of each part of a step, rank by rank, over the steps that were only timed."""
    rows = []
    for world in (world for world in (case.one, case.many) if world is not None):
        for process in world.ranks:
            updates = timed_updates(process)
            if updates:
                parts = {
                    name: 1000 * median(getattr(update, f"{name}_s") for update in updates)
                    for name in ("input", "forward", "backward", "exchange", "step", "total")
                }
                total = parts.pop("total")
                parts |= {"other": max(0.0, total - sum(parts.values())), "total": total}
                samples = median(update.samples for update in updates)
                rows.append(StepTime(rank=process.rank, ranks=world.size, parts=parts, samples=samples))
    return rows
