"""A run that outlives its ranks: those that are left continue from the last state, and lost ones come back.

The workers of a run are spread over whatever ranks there are, so a change of ranks changes nothing but the order of
floating-point sums. When a rank is lost, the others are ended (they wait in a collective that cannot complete) and the
run continues from its last checkpoint on the remaining ranks; once these have written a new checkpoint, the run is
saved, stopped, and continued on all ranks again. When an island is lost, the others continue from where they are
(`engine/survivors.py`); if that is impossible, all continue from what they saved of the last meeting.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from glob import iglob
from pathlib import Path

from bigstep.engine.islands_of import APART, fitting_ranks, islands_of_rank
from bigstep.engine.job import Job
from bigstep.engine.launch import started
from bigstep.errors import RunError

__all__ = ["launch_elastic"]

_MOST_FUTILE_STARTS = 3
"""After so many starts without a new checkpoint, something other than the loss of a rank is wrong."""


def launch_elastic(procs: int, job: Job) -> int:
    """Run a job as `procs` ranks, and keep it going while ranks are lost."""
    folder, ranks, futile, reached = job.folder, procs, 0, ""
    while True:
        saved, apart = _newest(folder), ""
        with started(ranks, job if ranks == procs else _without_grid(job)) as running:
            # with a rank missing, go on only until there is a new checkpoint
            running.watch(until=lambda: ranks < procs and _newest(folder) > saved)  # noqa: B023 - watched right here
            if running.processes[0].poll() == 0:  # it has reported the result: a rank lost now does not matter
                return 0
            failed = running.first_failed()
            if running.stop_number:
                return running.stopped()
            if failed is not None and not running.killed():
                running.wait(10, running.processes[:1])
                if not running.killed():  # a wrong setting or a bug: another start would only fail again
                    return running.explain(failed)
            said: tuple[str, ...] = ()
            if failed is None:
                running.send(signal.SIGTERM)  # save what the remaining ranks have reached
                running.wait(120)
                if running.stop_number:
                    return running.stopped()
                if running.processes[0].poll() == 0:  # it was done before the signal, and has reported the result
                    return 0
                ranks = procs
                _say(f"The lost ranks are back; going on with {procs}.")
            else:
                lost, islands = running.killed(), job.config.islands
                if islands.count > 1 and not job.config.exact:
                    running.wait(islands.wait, grace_s=islands.wait)  # the others notice, and save what they hold
                    apart = _newest(folder, APART)
                ranks, sentence = _shrink(lost, ranks, islands.count, apart=bool(apart))
                _say(sentence)
                said = (sentence,)
                if running.stop_number:
                    return running.stopped()
        futile = 0 if max(_newest(folder), apart) > max(saved, reached) else futile + 1
        reached = max(reached, apart)
        if futile == _MOST_FUTILE_STARTS:
            raise RunError(
                f"Ranks were lost {futile} times without a new checkpoint in between; lower checkpoint.seconds or look "
                "for what kills them (often the memory limit), then continue with --resume."
            )
        job = dataclasses.replace(job, resume=True, said=said, survivors=bool(apart))


def _shrink(lost: Sequence[int], ranks: int, islands: int, *, apart: bool = False) -> tuple[int, str]:
    """Return how many ranks continue, and what was lost; `apart` if the other islands have saved where they are."""
    left = fitting_ranks(islands, max(1, ranks - len(lost))) if islands > 1 else max(1, ranks - len(lost))
    who, since = f"Rank {', '.join(map(str, lost))}", "from the last checkpoint"
    if islands > 1:
        gone = sorted({number for rank in lost for number in islands_of_rank(islands, rank, ranks)})
        who += f" with island {', '.join(map(str, gone))}"
        since = "from where the others stand" if apart else "from the last meeting"
    return left, f"{who} was lost; going on with {left} of {ranks} ranks {since}."


def _without_grid(job: Job) -> Job:
    """Drop the configured grid, which is that of all ranks; fewer ranks derive theirs from their number."""
    config = job.config
    return dataclasses.replace(
        job, config=dataclasses.replace(config, exchange=dataclasses.replace(config.exchange, grid="auto"))
    )


def _say(sentence: str) -> None:
    print(f"bigstep: {sentence}", file=sys.stderr)


def _newest(folder: Path, *places: str) -> str:
    """Return the name of the newest checkpoint, or of what islands saved of a meeting; names sort by step."""
    places = places or ("checkpoints/step-*.ckpt", "meetings/*/step-*.ckpt")
    # not Path.glob: it raises if a rank removes a folder of meetings while it looks
    kept = (path for place in places for path in iglob(place, root_dir=folder))
    return max(map(os.path.basename, kept), default="")
