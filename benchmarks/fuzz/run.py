"""Mutated configurations, suites, cluster files, records, checkpoints, data, packed files and wire messages.

    python benchmarks/fuzz/run.py                      # 2,400 cases; writes fuzz.json and fuzz.md
    python benchmarks/fuzz/run.py --share 0.05         # a sample
    python benchmarks/fuzz/run.py --only records --seed 7

Every case is read in this process, as a command would read it, with five seconds of processor time and a gibibyte
above what the program holds at rest. A case is good if it is read, or refused with one sentence: a line that can be
printed, of 600 characters at most. A traceback, the time or the memory running out is a fault. Whole commands on
mutated files, each in a process of its own, are in `benchmarks/faults/mutations.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from kinds import KINDS

from bigstep.errors import BigstepError
from bigstep.records import describe_machine

SECONDS = 5
"""Of processor time; a case that waits for something has ten times as many."""
ROOM_BYTES = 2**30
LONGEST = 600


class TooSlow(BaseException):
    """Not an Exception, so that nobody takes it for a bad file."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Memory for the process, and a clock for each case."""

    def ring(*_: object) -> None:
        raise TooSlow

    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    handlers = {number: signal.signal(number, ring) for number in (signal.SIGPROF, signal.SIGALRM)}
    resource.setrlimit(resource.RLIMIT_AS, (held + ROOM_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def judge(case: Any, chance: random.Random) -> tuple[str, str]:
    """How a case ended: read, refused (with what sentence), or a fault."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 10 * SECONDS)
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case(chance)
        return "read", ""
    except BigstepError as error:
        said = str(error)
        good = said.isprintable() and 0 < len(said) <= LONGEST
        return ("refused", said) if good else ("fault", f"not one sentence: {said!r:.800}")
    except TooSlow:
        return "fault", f"not done after {SECONDS} s"
    except BaseException:
        return "fault", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def fuzz(name: str, cases: int, seed: int, folder: Path) -> dict[str, Any]:
    """All cases of one kind."""
    folder.mkdir()
    case, began = KINDS[name][0](folder), time.monotonic()
    ends, faults = {"read": 0, "refused": 0, "fault": 0}, []
    with bounded():
        for number in range(cases):
            end, said = judge(case, random.Random(f"{name} {seed} {number}"))
            ends[end] += 1
            if end == "fault":
                faults.append({"case": number, "said": said})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"cases": cases, **ends, "faults": faults, "seconds": time.monotonic() - began, "peak_mib": peak}


def table(found: dict[str, Any]) -> str:
    machine, kinds = found["machine"], found["kinds"]
    total, faults = sum(kind["cases"] for kind in kinds.values()), sum(kind["fault"] for kind in kinds.values())
    lines = [
        "# Mutated input", "",
        f"{total:,} cases, {faults} faults, seed {found['seed']}. {machine['hardware']['processor']}, "
        f"{machine['hardware']['cores']} cores, torch {machine['versions']['torch']}, commit {machine['commit']}. Made "
        "by `benchmarks/fuzz/run.py`.", "",
        "| kind | cases | read | refused with one sentence | faults | seconds | memory so far, MiB |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, kind in kinds.items():
        lines.append(
            f"| {name} | {kind['cases']} | {kind['read']} | {kind['refused']} | {kind['fault']} | "
            f"{kind['seconds']:.1f} | {kind['peak_mib']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(KINDS))
    parser.add_argument("--share", type=float, default=1.0, help="of the cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds = {}
    with tempfile.TemporaryDirectory(prefix="bigstep-fuzz-") as scratch:
        for name in [options.only] if options.only else KINDS:
            cases = max(1, round(options.share * KINDS[name][1]))
            kinds[name] = fuzz(name, cases, options.seed, Path(scratch) / name.replace(" ", "-"))
            for fault in kinds[name]["faults"]:
                print(f"{name}, case {fault['case']}: {fault['said']}", flush=True)
            print(name, {key: value for key, value in kinds[name].items() if key != "faults"}, flush=True)
    found = {"seed": options.seed, "machine": describe_machine(), "kinds": kinds}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "fuzz.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.out / "fuzz.md").write_text(table(found))
    return 1 if any(kind["fault"] for kind in kinds.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
