"""What islands save of a meeting, each on its own machine, and how a run continues from it when a rank was lost.

A checkpoint is gathered on rank 0 from all islands, which is expensive over slow links. A meeting needs none of that:
after it every rank holds the agreed weights, so each saves its own islands in a file of its own. A run that has lost a
rank continues from the newest meeting that all islands have saved. If the files of an island are gone with its machine,
it restarts from the agreed weights and an empty optimizer state; an exact run goes back to where all islands are saved.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bigstep.engine.background import BackgroundWriter
from bigstep.engine.checkpoint import load_checkpoint
from bigstep.engine.islands_of import islands_of_rank
from bigstep.engine.methods.islands import Islands
from bigstep.engine.methods.islands_state import OwnBuffers, OwnShare
from bigstep.engine.ranks import Ranks
from bigstep.engine.state import Carried, State
from bigstep.errors import DataError

__all__ = ["MeetingKeeper", "find_meeting", "forget_meetings", "meetings_kept"]

_KEEP = 3
"""Meetings that stay on disk: when a rank begins to write one, the others are at most two behind."""


class Kept(NamedTuple):
    """A file: the islands of one rank after the meeting of a step."""

    step: int
    islands: range
    path: str


class Found(NamedTuple):
    """A state from which a run can continue."""

    state: dict[str, Any]
    """In the form of a checkpoint's, with at least the islands of this rank."""
    lost: list[int]
    """Islands whose files are gone."""


class MeetingKeeper:
    """Saves the islands of this rank; every rank has one.

    Args:
        folder: That of the run; the same path on every machine.
        state: That of the run.
        method: Its islands.
        problem: Called with a sentence about a file that could not be written.
    """

    def __init__(self, folder: Path, state: State, method: Islands, problem: Callable[[str], None]):
        self.folder = _folder(folder) / f"{method.hosted[0]}-{method.hosted[-1] + 1}"
        """Where the islands of this rank are saved."""
        self._state, self._method = state, method
        self._instead: dict[str, Carried] = {"model": OwnBuffers(method), "islands": OwnShare(method)}
        # not synced: a file survives the death of its process, and is lost with its machine anyway
        self._writer = BackgroundWriter(self.folder, _KEEP, problem, sync=False)

    def __call__(self) -> None:
        """Save what this rank holds; all ranks of an island take part, and the first of them writes."""
        share = self.capture()
        if self._method.first_of_island:
            self._writer.submit(self._state.position.step, share)

    def capture(self) -> dict[str, Any]:
        """Collect what this rank holds; all ranks of an island take part."""
        return self._state.capture(self._instead)

    def close(self) -> None:
        """Wait for the last file."""
        self._writer.wait()


def forget_meetings(folder: Path, *, behind: int = -1) -> None:
    """Remove what was saved on this machine of meetings after a step; several ranks may do so at once.

    At the end of a run that is all of it; a run that resumes at a step has not come to the later meetings yet.
    """
    for kept in meetings_kept(folder, behind):
        Path(kept.path).unlink(missing_ok=True)
    apart = [place / "apart" for place in _listed(_folder(folder))]  # saved at an earlier loss: engine/survivors.py
    for path in (file for place in apart for file in _listed(place)):
        path.unlink(missing_ok=True)
    for place in (*apart, *_listed(_folder(folder)), _folder(folder)):
        with contextlib.suppress(OSError):  # other files are in it, or another rank was quicker
            place.rmdir()


def find_meeting(folder: Path, ranks: Ranks, islands: int, *, behind: int, whole: bool) -> Found | None:
    """Return the newest meeting that a run can continue from, or None; every rank must call this.

    Args:
        folder: That of the run.
        ranks: Those that continue; each looks on its own machine.
        islands: The number of islands of the run.
        behind: The step of the newest checkpoint; only later meetings count.
        whole: Accept only a meeting that all islands have saved.
    """
    torn: set[str] = set()
    while True:
        seen = ranks.gather([kept for kept in meetings_kept(folder, behind) if kept.path not in torn])
        step = _choose_step({kept for each in seen for kept in each}, islands, whole=whole)
        if step is None:
            return None
        here = [[kept for kept in each if kept.step == step] for each in seen]
        loaded, broken = _load(_files_to_read(here, ranks.rank, islands))
        torn |= broken
        if not any(ranks.gather(bool(broken))):
            return _put_together(here, loaded, ranks, islands)


def _choose_step(kept: Iterable[Kept], islands: int, *, whole: bool) -> int | None:
    """Return the newest step that all islands have saved, else the newest of those that the most islands have saved.

    >>> kept = [Kept(10, range(0, 2), "a"), Kept(20, range(0, 2), "b"), Kept(10, range(2, 4), "c")]
    >>> _choose_step(kept, 4, whole=False)
    10
    >>> _choose_step(kept[:2], 4, whole=False), _choose_step(kept[:2], 4, whole=True)
    (20, None)
    """
    covered: dict[int, set[int]] = {}
    for each in kept:
        covered.setdefault(each.step, set()).update(each.islands)
    most = max(((len(numbers), step) for step, numbers in covered.items()), default=(0, 0))
    return most[1] if most[0] == islands or (most[0] and not whole) else None


def _files_to_read(here: Sequence[Sequence[Kept]], rank: int, islands: int) -> list[Kept]:
    """Return what a rank reads: its own islands, those of ranks that cannot see them, or any for the agreed weights."""
    wanted = set(islands_of_rank(islands, rank, len(here)))
    for other, files in enumerate(here):
        sees = {number for kept in files for number in kept.islands}
        needs = set(islands_of_rank(islands, other, len(here))) - sees
        wanted |= {number for number in needs if _first_that_sees(here, number) == rank}
    chosen = {number: kept for kept in here[rank] for number in kept.islands if number in wanted}
    return sorted(set(chosen.values()) or here[rank][:1], key=lambda kept: kept.path)


def _first_that_sees(here: Sequence[Sequence[Kept]], number: int) -> int | None:
    return next((rank for rank, files in enumerate(here) if any(number in kept.islands for kept in files)), None)


def _load(files: Sequence[Kept]) -> tuple[list[dict[str, Any]], set[str]]:
    """Return what the files hold, and the paths of those that cannot be read."""
    states, broken = [], set()
    for kept in files:
        try:
            states.append(load_checkpoint(Path(kept.path)))
        except DataError:
            broken.add(kept.path)
    return states, broken


def _put_together(
    here: Sequence[Sequence[Kept]], loaded: Sequence[Mapping[str, Any]], ranks: Ranks, islands: int
) -> Found:
    """Exchange what ranks cannot see themselves; an island that no rank has takes the statistics of another."""
    all_seen = {number for files in here for kept in files for number in kept.islands}
    lost = sorted(set(range(islands)) - all_seen)
    own = {number: state for share in loaded for number, state in share["islands"]["islands"].items()}
    owed = {number: kept for share in loaded for number, kept in share["islands"]["outer"]["kept"].items()}
    needed: set[int] = set()
    for rank, files in enumerate(here):
        sees = {number for kept in files for number in kept.islands}
        needed |= {n for n in islands_of_rank(islands, rank, len(here)) if n not in sees and n in all_seen}
    strangers = [rank for rank, files in enumerate(here) if not files]
    gives = ranks.rank == min(set(range(len(here))) - set(strangers))
    common = loaded[0] if gives and strangers else None
    donor = {"statistics": next(iter(own.values()))["statistics"]} if gives and lost else None
    sent = {str(n): (own[str(n)], owed.get(str(n), {})) for n in needed if _first_that_sees(here, n) == ranks.rank}
    answers = ranks.gather((common, donor, sent))
    base = loaded[0] if loaded else next(answer[0] for answer in answers if answer[0] is not None)
    for _, _, theirs in answers:
        own |= {number: state for number, (state, _) in theirs.items() if number not in own}
        owed |= {number: kept for number, (_, kept) in theirs.items() if kept and number not in owed}
    if lost:
        statistics = next(answer[1] for answer in answers if answer[1] is not None)
        own |= {str(number): statistics for number in lost}
    outer = {**base["islands"]["outer"], "kept": owed}
    return Found({**base, "islands": {**base["islands"], "islands": own, "outer": outer}}, lost)


def _folder(folder: Path) -> Path:
    return folder / "meetings"


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # not there, or not any more
        return []


def meetings_kept(folder: Path, behind: int = -1) -> list[Kept]:
    """List the files of this machine whose meetings were after a step."""
    found = []
    for path in (file for place in _listed(_folder(folder)) for file in _listed(place)):
        islands = re.fullmatch(r"(\d+)-(\d+)", path.parent.name)
        step = re.fullmatch(r"step-(\d+)\.ckpt", path.name)
        if islands and step and int(step[1]) > behind:
            found.append(Kept(int(step[1]), range(int(islands[1]), int(islands[2])), str(path)))
    return found
