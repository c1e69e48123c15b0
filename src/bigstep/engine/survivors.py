"""Islands that continue when a rank is lost: each keeps its progress, and the lost one restarts from agreed weights.

Between meetings islands do not need one another, so the loss of one should cost the others nothing. A rank whose
exchange fails saves its islands as they are and ends; when the ranks are started again, they continue from there. They
may then be at different steps, since they meet only now and then. So the run goes back to the last step that all ranks
have recorded, and an island that is ahead takes no step until the run has caught up with it (`Islands.ahead`). The lost
island takes these steps, from the agreed weights: that is all that the others wait for.

A meeting may succeed on some ranks and fail on others. All had sent their parts, and those on which it succeeded hold
the newly agreed weights, so the others take these from them.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bigstep.config import IslandsConfig
from bigstep.data.sampler import Position
from bigstep.engine.build import Run
from bigstep.engine.checkpoint import load_checkpoint, save_checkpoint
from bigstep.engine.islands_of import APART
from bigstep.engine.meetings import MeetingKeeper, meetings_kept
from bigstep.engine.meter import Flush
from bigstep.engine.methods.islands import Islands
from bigstep.engine.methods.islands_state import join_shares
from bigstep.engine.methods.outer import cut_into_fragments
from bigstep.engine.observers.base import Observer
from bigstep.errors import DataError
from bigstep.records import read_run

__all__ = ["Survivor", "join_survivors"]


class Survivor(Observer):
    """Saves the islands of this rank as they are when another is lost; every rank has one.

    Args:
        keeper: Saves this rank's meetings.
        run: The run, as it starts or resumes.
    """

    def __init__(self, keeper: MeetingKeeper, run: Run):
        assert isinstance(run.method, Islands)
        self._keeper, self._method, self._sampler = keeper, run.method, run.sampler
        self._recorded = deque([run.state.position], maxlen=2)
        """Positions after the last two flushes: rows up to the first are certainly written, those after it maybe."""

    def flushed(self, flush: Flush) -> tuple[()]:
        """Note the position after the rows of a flush."""
        self._recorded.append(self._sampler.after(flush.step))
        return ()

    def keep(self) -> None:
        """Save what this rank holds, if that needs no other rank: whole islands, and no mean in flight."""
        method = self._method
        if method.rounds is None or method.config.overlap or not method.hosts_whole_islands:
            return
        share = self._keeper.capture()
        share["islands"] |= {
            "taken": method.taken,
            "recorded": [dataclasses.asdict(position) for position in self._recorded],
            "sent": {str(island): owed for island, owed in method.rounds.sent.items()},
        }
        save_checkpoint(self._keeper.folder / "apart", method.taken, share, keep=1, sync=False)


class Joined(NamedTuple):
    """The state from which a run continues without a lost rank."""

    state: dict[str, Any]
    """In the form of a checkpoint's."""
    remarks: list[str]


def join_survivors(folder: Path, config: IslandsConfig) -> Joined | None:
    """Put together what ranks saved of themselves when another was lost; None if that is not possible.

    Args:
        folder: That of the run, which all its ranks share.
        config: The islands of the run.
    """
    shares = [share for path in sorted(folder.glob(APART)) if (share := _load(path)) is not None]
    begin = _last_recorded(folder, [share["islands"] for share in shares])
    if begin is None:
        return None
    newest = max(shares, key=lambda share: share["islands"]["met"])
    told = newest["islands"]
    parted = told["taken"] - told["steps"]
    if begin.step < parted:  # islands had not begun there
        return None
    for share in shares:
        if share["islands"]["met"] < told["met"]:
            _catch_up(share["islands"], told, config.fragments)
    joined = join_shares([share["islands"] for share in shares])
    met_at = parted + told["met"][0]
    ahead = {number: _reached(share["islands"], number) for share in shares for number in share["islands"]["islands"]}
    lost = [number for number in range(config.count) if str(number) not in ahead]
    donor = next(iter(joined["islands"].values()))["statistics"]
    for number in lost:
        kept, owed = _last_meeting(folder, number)
        joined["islands"][str(number)] = {"statistics": donor, **kept}
        joined["outer"]["kept"] |= {str(number): owed} if owed else {}
    joined |= {
        "steps": begin.step - parted,
        "ahead": ahead | {str(number): met_at for number in lost},
        "unheard": lost,
    }
    state = {**newest, "position": dataclasses.asdict(begin), "islands": joined}
    return Joined(state, [_tell(lost, begin.step, met_at, max(ahead.values()))] if lost else [])


def _reached(share: Mapping[str, Any], number: str) -> int:
    """Return how many steps an island has computed; after an earlier loss it may still have been ahead of the run."""
    return max(int(share["taken"]), int(share["ahead"].get(number, 0)))


def _tell(lost: Sequence[int], begin: int, met_at: int, reached: int) -> str:
    who = f"Island {lost[0]}" if len(lost) == 1 else f"Islands {', '.join(map(str, lost))}"
    steps = max(begin - met_at, 0)
    return (
        f"{who} came back at step {max(begin, met_at)} with the weights agreed on at step {met_at}; lost: {steps} "
        f"step{'' if steps == 1 else 's'}. The others go on from step {reached} and have lost none."
    )


def _last_recorded(folder: Path, shares: Sequence[Mapping[str, Any]]) -> Position | None:
    """Return the last position that all shares name and that the written records have reached."""
    if not shares:
        return None
    common = set.intersection(*({Position(**place) for place in share["recorded"]} for share in shares))
    rows = read_run(folder).train
    written = rows[-1]["step"] if rows else 0
    return max((place for place in common if place.step <= written), key=lambda place: place.step, default=None)


def _catch_up(share: dict[str, Any], told: Mapping[str, Any], fragments: int) -> None:
    """Apply to islands a meeting that failed here but not elsewhere, and to which they had sent their parts."""
    _, _, number = told["met"]
    agreed = told["outer"]["agreed"][number]
    for name, island in share["islands"].items():
        indices = cut_into_fragments([weight.numel() for weight in island["weights"]], fragments)[number]
        if told["present"][number][int(name)]:
            island["samples"][number] = 0
            pieces = agreed.split_with_sizes([island["weights"][index].numel() for index in indices])
            for index, piece in zip(indices, pieces, strict=True):
                island["weights"][index] = piece.view(island["weights"][index].shape).clone()
        if name in share["sent"]:
            share["outer"]["kept"].setdefault(name, {})[str(number)] = share["sent"][name]


def _last_meeting(folder: Path, number: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return what a lost island had saved besides its weights, and its residuals; both empty if nothing is left."""
    kept = [each for each in meetings_kept(folder) if number in each.islands]
    for each in sorted(kept, reverse=True, key=lambda each: each.step):
        share = _load(Path(each.path))
        if share is not None:
            own = share["islands"]["islands"][str(number)]
            without = {name: part for name, part in own.items() if name not in ("weights", "samples", "losses")}
            return without, share["islands"]["outer"]["kept"].get(str(number), {})
    return {}, {}


def _load(path: Path) -> dict[str, Any] | None:
    try:
        return load_checkpoint(path)
    except DataError:  # torn: it counts as lost
        return None
