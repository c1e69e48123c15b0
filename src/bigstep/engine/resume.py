"""What a resumed run starts from: the newest checkpoint, a later meeting of islands, or what surviving ranks saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bigstep.config import RunConfig
from bigstep.config.edit import find_change
from bigstep.engine.build import Run
from bigstep.engine.checkpoint import load_latest
from bigstep.engine.meetings import find_meeting, forget_meetings
from bigstep.engine.ranks import Ranks
from bigstep.engine.survivors import join_survivors
from bigstep.errors import ConfigError, DataError

__all__ = ["restore", "saved_state"]


def saved_state(
    folder: Path, config: RunConfig, ranks: Ranks, *, survivors: bool
) -> tuple[dict[str, Any] | None, list[str]]:
    """Load rank 0's newest whole checkpoint, or a meeting that islands have saved since, for every rank.

    Args:
        folder: That of the run.
        config: What it is resumed with; a change that makes it another run is refused.
        ranks: All ranks; each must call this.
        survivors: A rank was lost on this machine; the others may have saved their islands as they stood.

    Returns:
        The state, if there is one, and remarks about where it comes from.
    """
    state: dict[str, Any] | None = None
    remarks: list[str] = []
    met, joined = None, False
    if survivors and ranks.first and (apart := join_survivors(folder, config.islands)) is not None:
        (state, remarks), joined = apart, True
    elif ranks.first:
        state, problems = load_latest(folder / "checkpoints")
        remarks = [f"{problem} The one before it is used." for problem in problems]
    if config.checkpoint.meetings and config.islands.count > 1 and not ranks.from_first(joined):
        behind = ranks.from_first(_step_of(state))
        met = find_meeting(folder, ranks, config.islands.count, behind=behind, whole=config.exact)
    if met is not None:
        state, remarks = met.state, [*remarks, *_lost_islands(met.lost)]
    refusal = ranks.from_first(_why_another_run(state, config) if ranks.first else None)
    if refusal:
        raise ConfigError(f"The run in {folder} {refusal}, or start anew with another --out.")
    if met is None:
        state = ranks.from_first(state)
    forget_meetings(folder, behind=_step_of(state))
    return state, remarks


def restore(run: Run, saved: dict[str, Any], checkpoints: Path) -> None:
    """Continue from a saved state, or raise an error that says that it does not fit this run."""
    try:
        run.state.restore(saved, run.sampler.size)
    except DataError:
        raise
    except Exception as error:  # a state of other names, shapes or types can raise nearly anything
        reason = (str(error).strip().splitlines() or [""])[0]
        raise DataError(
            f"The newest checkpoint in {checkpoints} does not fit this run ({type(error).__name__}: {reason:.200}); "
            "remove it to go on from the one before it."
        ) from error


def _why_another_run(state: dict[str, Any] | None, config: RunConfig) -> str | None:
    """Return the rest of a sentence that says which change makes this another run; None if none does."""
    if state is None:
        return None
    was = state.get("config")
    if not isinstance(was, dict):
        return "has a checkpoint without a configuration; remove that file"
    change = find_change(was, config)
    return None if change is None else f"{change}; leave that out"


def _step_of(state: dict[str, Any] | None) -> int:
    """Return the step of a saved state; one that is not that of a run is refused when it is restored."""
    position = {} if state is None else state.get("position")
    step = position.get("step") if isinstance(position, dict) else 0
    return step if isinstance(step, int) else 0


def _lost_islands(lost: list[int]) -> list[str]:
    """Return a remark that names the islands that restart from the agreed weights."""
    if not lost:
        return []
    names = f"Island {lost[0]} has" if len(lost) == 1 else f"Islands {', '.join(map(str, lost))} have"
    return [f"{names} lost what was kept of the last meeting, and went on from the agreed weights."]
