"""The examination: run the program on one rank and on several, gather the facts, ask every rule."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import bigstep
from bigstep.doctor.facts import Pass, Save, Schedule, Spawn, Update, Wrote
from bigstep.doctor.finding import Case, Finding, Unseen
from bigstep.doctor.findings import RULES
from bigstep.doctor.findings.time import timed_updates
from bigstep.doctor.launch import Limits, explain, run_world
from bigstep.doctor.scratch import copy_tree
from bigstep.doctor.settings import Settings
from bigstep.doctor.world import World, load_world, write_world
from bigstep.errors import ConfigError

__all__ = ["Examination", "diagnose", "examine", "load_case"]

SHORT_BATCHES = 3
"""Batches of a pass in the run that looks at what happens between passes."""
SHORT_UPDATES = 300


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
    checked: Sequence[str]
    """Rules that had what they needed and found nothing."""
    unseen: dict[str, str]
    """Rules that could not be asked, and why."""
    notes: Sequence[str] = ()
    """How the runs went: what ended them, what was changed for them, what they wrote elsewhere."""
    times: Sequence[StepTime] = ()
    trouble: str = ""
    """Why the program could not be examined to the end."""
    seconds: float = 0.0

    @property
    def faults(self) -> list[Finding]:
        """Findings that are mistakes."""
        return [finding for finding in self.findings if finding.level == "fault"]

    def speeds(self) -> list[str]:
        """Say how fast the runs were."""
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
            "healthy": not self.faults and not self.trouble,
            "trouble": self.trouble,
            "findings": [finding.to_mapping() for finding in self.findings],
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
        only: A family of findings to look for, as in "time"; empty looks for all.
        device: cpu hides the GPUs; auto uses them if there is one for each rank.
        limits: Seconds that each run may take.
        keep: A folder that takes the facts of each run, for `load_case`.
        watch: Called with a few words when a run begins.
    """
    if ranks < 2:
        raise ConfigError(f"--ranks is {ranks}, but a program is compared on one rank and on several; give 2 or more.")
    if only and only not in RULES:
        raise ConfigError(f"--only is {only!r}, but it must be one of {', '.join(RULES)}.")
    script = _script_of(command)
    began = time.monotonic()
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="bigstep-doctor-") as folder:
        place = Path(folder).resolve()

        def run(name: str, size: int, *, short: int = 0, again_in: str = "", updates: int = steps) -> World:
            watch(name)
            root, facts = place / (again_in or name), place / f"{name}-facts"
            facts.mkdir()
            if not again_in:
                copy_tree(Path.cwd(), root)
            settings = Settings(
                facts=str(facts),
                root=str(root),
                original=os.getcwd(),
                own=str(script.parent.resolve()) if script else str(root),
                steps=updates,
                ranks=size,
                starts_itself=starts_itself,
                only_time=only == "time",
                began=time.time(),
                short=short,
            )
            own = limits if not short else Limits(total_s=min(20.0, limits.total_s), stall_s=limits.stall_s)
            return run_world(command, settings, root, own, gpus=_use_gpus(device, ranks))

        starts_itself = False
        one = run("one rank", 1)
        starts_itself = any(process.all(Spawn) for process in one.everything) or one.size > 1
        # a program that cannot be held to one rank has shown several already
        many = run(f"{ranks} ranks", ranks) if _can_go_on(one) and one.size < 2 else None
        short = None
        if many is not None and only != "time" and not _saw_passes(many) and many.ended in ("stopped", "hung"):
            short = run(f"{ranks} ranks, short passes", ranks, short=SHORT_BATCHES, updates=SHORT_UPDATES)
        resumed = None
        if many is not None and only in ("", "checkpoint") and _can_resume(many, script):
            resumed = run(f"{ranks} ranks, resumed", ranks, again_in=f"{ranks} ranks", updates=2)
    larger = many or (one if one.size > 1 else None)
    case = Case(one=one if one.size == 1 else None, many=larger, short=short, resumed=resumed)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        for name, world in vars(case).items():
            if world is not None:
                write_world(world, keep / f"{name}.jsonl")
    return diagnose(case, " ".join(command), only=only, seconds=time.monotonic() - began, runs=(one, many, short))


def load_case(folder: Path) -> Case:
    """Read the facts that an examination kept."""
    return Case(**{path.stem: load_world(path) for path in folder.glob("*.jsonl")})


def diagnose(
    case: Case, command: str, *, only: str = "", seconds: float = 0.0, runs: Sequence[World | None] = ()
) -> Examination:
    """Ask every rule about a case."""
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
            findings += found
            if not found:
                checked.append(name)
    findings.sort(key=lambda finding: (finding.level != "fault", -finding.likelihood))
    return Examination(
        command=command,
        findings=findings,
        checked=checked,
        unseen=unseen,
        notes=_notes(runs),
        times=_times(case),
        trouble=_trouble(runs),
        seconds=seconds,
    )


def _trouble(runs: Sequence[World | None]) -> str:
    """Return in a few words why a run came to no good end; a cut run may be ended by the clock."""
    for world in runs[:2]:
        if world is not None and world.ended in ("failed", "hung"):
            return explain(world)
    return ""


def _script_of(command: Sequence[str]) -> Path | None:
    if not command:
        raise ConfigError("No script was given; write bigstep doctor train.py, or bigstep doctor -m package.module.")
    if command[0] == "-m":
        return None
    script = Path(command[0])
    if not script.is_file():
        raise ConfigError(f"The script {command[0]} is not there; give the path of a Python file, or -m and a module.")
    return script


def _use_gpus(device: str, ranks: int) -> bool:
    return device != "cpu" and len(list(Path("/dev").glob("nvidia[0-9]*"))) >= ranks


def _can_go_on(one: World) -> bool:
    """Whether a run on several ranks can show more: the one before must have started at all."""
    return one.ended != "hung" or bool(one.all(Update))


def _can_resume(many: World, script: Path | None) -> bool:
    """Whether the program has saved something, and reads such files when it starts."""
    saved = any(save.updates and "weights" in save.holds for save in many.all(Save))
    return saved and script is not None and "load_state_dict" in script.read_text(errors="replace")


def _saw_passes(world: World) -> bool:
    """Whether a loader was seen in a second pass, and no schedule asks how many passes there will be."""
    return any(event.number >= 1 for event in world.all(Pass)) and not any(e.horizon for e in world.all(Schedule))


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _notes(runs: Sequence[World | None]) -> list[str]:
    notes: list[str] = []
    names = ("on one rank", "on several ranks", "with short passes")
    for name, world in zip(names, runs, strict=False):
        if world is None:
            continue
        updates = max((len(process.all(Update)) for process in world.ranks), default=0)
        if world.ended == "failed" or (world.ended == "hung" and "short" not in name):
            notes.append(f"The run {name} ended after {updates} updates: {explain(world)}.")
        notes += [f"It wrote {e.path} {name}." for e in world.all(Wrote) if not e.refused]
        if any(e.changed for process in world.everything for e in process.all(Spawn)):
            notes.append("It starts its ranks itself; for the run on one rank that number was set to 1.")
    return list(dict.fromkeys(notes))


def _times(case: Case) -> list[StepTime]:
    """Return where the steps that were only timed spend their time, rank by rank, in the median."""
    rows = []
    for world in (world for world in (case.one, case.many) if world is not None):
        for process in world.ranks:
            updates = timed_updates(process)
            if updates:
                parts = {
                    name: 1000 * median(getattr(update, f"{name}_s") for update in updates)
                    for name in ("input", "forward", "backward", "exchange", "step", "total")
                }
                samples = median(update.samples for update in updates)
                rows.append(StepTime(rank=process.rank, ranks=world.size, parts=parts, samples=samples))
    return rows
