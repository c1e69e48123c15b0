"""The runs of an examination: which ones a program needs, each in a scratch copy of the working directory."""

from __future__ import annotations

import itertools
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bigstep.doctor.facts import Pass, Save, Schedule, Spawn, Update
from bigstep.doctor.finding import Case
from bigstep.doctor.launch import Limits, run_world
from bigstep.doctor.scratch import copy_tree
from bigstep.doctor.settings import Settings
from bigstep.doctor.world import World
from bigstep.errors import ConfigError, require

__all__ = ["Patient", "observe"]

SHORT_BATCHES = 3
"""Batches of a pass in the run that looks at what happens between passes."""
SHORT_UPDATES = 300
_LAUNCHER = re.compile(r"python[\d.]*|torchrun|accelerate|deepspeed|mpirun|mpiexec|srun")
ATTEMPTS = 3
"""Runs are tried again because another process may take the free port before the ranks do."""


@dataclass(kw_only=True)
class Patient:
    """A program that is to be run several times."""

    command: Sequence[str]
    ranks: int
    steps: int
    only_time: bool
    gpus: bool
    limits: Limits
    place: Path
    """The folder for the scratch copies and the facts."""
    watch: Callable[[str], None]
    script: Path | None = None
    """None where a module is run."""
    starts_itself: bool = False
    began: float = field(default_factory=time.time)

    def run(
        self, name: str, ranks: int, *, updates: int, short: int = 0, again_in: str = "", limits: Limits | None = None
    ) -> World:
        """Run the program once and return what its processes did.

        Args:
            name: The name of the run, and of its scratch copy.
            ranks: Number of ranks.
            updates: Updates after which it is stopped.
            short: Batches after which a pass is cut off; 0 for whole passes.
            again_in: The run whose scratch copy is used again, with all that was written there.
            limits: Its limits, if not the usual ones.
        """
        self.watch(name)
        root = self.place / (again_in or name)
        if not again_in:
            copy_tree(Path.cwd(), root)
        for attempt in range(ATTEMPTS):
            facts = self.place / f"{name}-facts-{attempt}"
            facts.mkdir()
            settings = Settings(
                facts=str(facts),
                root=str(root),
                original=os.getcwd(),
                own=str(self.script.parent.resolve()) if self.script else str(root),
                steps=updates,
                ranks=ranks,
                starts_itself=self.starts_itself,
                only_time=self.only_time,
                began=self.began,
                short=short,
            )
            world = run_world(self.command, settings, root, limits or self.limits, gpus=self.gpus)
            if "EADDRINUSE" not in world.message:
                break
        return world


def observe(
    command: Sequence[str],
    *,
    ranks: int,
    steps: int,
    only: str,
    device: str,
    limits: Limits,
    watch: Callable[[str], None],
) -> tuple[Case, list[World]]:
    """Run a program on one rank and on several; where that shows more, with short passes and from its checkpoint."""
    script = _script_of(command)
    if script is not None:
        path = script.resolve()
        if path.is_relative_to(Path.cwd()):
            path = path.relative_to(Path.cwd())  # names the script in the copy, not the original
        command = [str(path), *command[1:]]  # from within the copy ../train.py would be another file
    with tempfile.TemporaryDirectory(prefix="bigstep-doctor-") as folder:
        patient = Patient(
            command=command,
            ranks=ranks,
            steps=steps,
            only_time=only == "time",
            gpus=device != "cpu" and len(list(Path("/dev").glob("nvidia[0-9]*"))) >= ranks,
            limits=limits,
            place=Path(folder).resolve(),
            watch=watch,
            script=script,
        )
        one = patient.run("one rank", 1, updates=steps)
        if one.size > 1:  # it starts its ranks itself, and their number could not be set to 1
            return Case(many=one), [one]
        patient.starts_itself = any(process.all(Spawn) for process in one.everything)
        if one.ended in ("hung", "late") and not one.all(Update):
            return Case(one=one), [one]
        name = f"{ranks} ranks"
        many = patient.run(name, ranks, updates=steps)
        short = resumed = None
        if only != "time" and not _saw_passes(many) and many.ended in ("stopped", "hung", "late"):
            most = Limits(total_s=min(limits.total_s, 15 + 1.5 * many.seconds), stall_s=limits.stall_s)
            title = f"{name}, short passes"
            short = patient.run(title, ranks, updates=SHORT_UPDATES, short=SHORT_BATCHES, limits=most)
        if only in ("", "checkpoint") and _can_resume(many, patient.place / name, script):
            resumed = patient.run(f"{name}, resumed", ranks, updates=2, again_in=name)
    case = Case(one=one, many=many, short=short if short and short.size else None, resumed=resumed)
    return case, [one, many]


def _script_of(command: Sequence[str]) -> Path | None:
    if not command:
        raise ConfigError("No script was given; write bigstep doctor train.py, or bigstep doctor -m package.module.")
    first = command[0]
    if first == "-m":
        require(len(command) > 1, "-m names no module; write bigstep doctor -m package.module.")
        return None
    script = Path(first)
    if script.is_file():
        require(
            script.suffix != ".ipynb",
            f"{first} is a notebook, which Python cannot run; convert it with `jupyter nbconvert --to script {first}` "
            "and give the script.",
        )
        return script
    require(
        not first.startswith("-"),
        f"There is no option {first!r:.60}; the doctor's go before the script, and `bigstep doctor --help` lists them.",
    )
    if _LAUNCHER.fullmatch(script.name):
        named = next((word for word in command[1:] if word.endswith(".py")), "train.py")
        raise ConfigError(
            f"{first} is a launcher, not a script; leave it and its options out, since the doctor starts the ranks "
            f"itself: bigstep doctor {named}."
        )
    if script.is_dir():
        raise ConfigError(f"{first} is a folder; give the path of a Python file in it, or -m and a module.")
    raise ConfigError(f"The script {first} is not there; give the path of a Python file, or -m and a module.")


def _saw_passes(world: World) -> bool:
    """Whether a second pass was seen, and no schedule makes the total number of passes matter."""
    return any(event.number >= 1 for event in world.all(Pass)) and not any(e.horizon for e in world.all(Schedule))


def _can_resume(many: World, root: Path, script: Path | None) -> bool:
    """Whether the program has saved something, and it or a module in its folder reads such files."""
    saved = any(save.updates and "weights" in save.holds for save in many.all(Save))
    sources = itertools.chain(filter(None, [script]), root.rglob("*.py"))
    return saved and any("load_state_dict" in path.read_text(errors="replace") for path in sources if path.is_file())
