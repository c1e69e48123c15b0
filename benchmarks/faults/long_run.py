"""Memory, file descriptors, threads and processes over 20,000 steps of a small run on two ranks: all must stay level.

    python benchmarks/faults/long_run.py [--steps 20000] [--exact]

Looks at every process of the run twice a second, from outside (/proc), and writes long_run.json, long_run.md and
long_run.svg. The first fifth is the warm-up, in which allocators and caches fill. After it a process may hold 2 % more
memory at its end than at its beginning (medians of a tenth of the time each), and no descriptor or thread more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bigstep.records import describe_machine

SETTINGS = [
    "model=mlp", "workers.count=4", "workers.local_batch=4", "lr.base=0.001", "lr.scaling=none",
    "checkpoint.every=2", "evaluate_every=4", "data.augment=none",
]  # fmt: skip
STEPS_AN_EPOCH = 750  # 12,000 images, 16 a step
GROWTH = 0.02


def command(folder: Path, steps: int, exact: bool) -> list[str]:
    settings = [*SETTINGS, f"epochs={-(-steps // STEPS_AN_EPOCH)}"]
    more = [part for setting in settings for part in ("--set", setting)]
    program = [sys.executable, "-m", "bigstep", "train", "--device", "cpu", "--json", "--no-report", "--procs", "2"]
    return [*program, "--steps", str(steps), "--out", str(folder), *more, *(["--exact"] if exact else [])]


def processes_of(first: int) -> list[int]:
    """A process and all that came from it."""
    found = [first]
    for pid in found:
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:  # it has just ended
            continue
    return found


def name_of(pid: int) -> str:
    for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if entry.startswith(b"RANK="):
            return f"rank {entry[5:].decode()}"
    return "launcher"


def look(pid: int) -> dict[str, float]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "mib": int(status["VmRSS"].split()[0]) / 1024,
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
    }


def last_step(folder: Path) -> int:
    try:
        with (folder / "metrics.jsonl").open("rb") as rows:
            rows.seek(max(0, rows.seek(0, 2) - 4000))
            lines = rows.read().splitlines()[:-1]
        return max((json.loads(line).get("step", 0) for line in lines[1:]), default=0)
    except (OSError, ValueError):
        return 0


def watch(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run it; return what was seen on the way."""
    seen = []
    run = subprocess.Popen(command(folder, options.steps, options.exact), stdout=subprocess.DEVNULL)
    try:
        while run.poll() is None:
            time.sleep(0.5)
            step = last_step(folder)
            try:
                pids = processes_of(run.pid)
                found = {name_of(pid): look(pid) for pid in pids}
            except (OSError, KeyError):  # one has just ended
                continue
            if step:
                seen.append({"step": step, "processes": len(pids), "by": found})
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 0, f"the run ended with status {run.returncode}"
    assert last_step(folder) >= options.steps, "the run ended early"
    return seen


def judge(seen: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """First and last tenth of what follows the warm-up, for every process."""
    steady = [row for row in seen if steps / 5 <= row["step"] < steps]
    tenth = max(1, len(steady) // 10)
    ends: dict[str, Any] = {}
    for name in steady[0]["by"]:
        both = [[row["by"][name] for row in rows if name in row["by"]] for rows in (steady[:tenth], steady[-tenth:])]
        ends[name] = {
            field: [statistics.median(look[field] for look in looks) for looks in both]
            for field in ("mib", "threads", "descriptors")
        }
    counts = sorted({row["processes"] for row in steady})
    level = len(counts) == 1 and all(
        now["mib"][1] <= (1 + GROWTH) * now["mib"][0]
        and now["threads"][1] <= now["threads"][0]
        and now["descriptors"][1] <= now["descriptors"][0]
        for now in ends.values()
    )
    return {"level": level, "processes": counts, "ends": ends, "looks": len(steady)}


def draw(seen: list[dict[str, Any]], path: Path) -> None:
    """Memory, descriptors and threads of every process over the steps, each from 0, as SVG without any package."""
    width, height, left, most = 760, 150, 90, seen[-1]["step"]
    panes = (("mib", "memory, MiB"), ("descriptors", "descriptors"), ("threads", "threads"))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {3 * height + 30}" font-family="sans-serif" '
        'font-size="13"><rect width="100%" height="100%" fill="#fff"/>'
    ]
    for pane, (field, label) in enumerate(panes):
        bottom, top = (pane + 1) * height, 1.15 * max(look[field] for row in seen for look in row["by"].values())
        parts.append(f'<text x="8" y="{bottom - height / 2:.0f}">{label}</text>')
        for value in (0, top / 1.15):
            y = bottom - (height - 20) * value / top
            parts.append(f'<path d="M{left} {y:.1f}H{width - 90}" stroke="#ddd"/>')
            parts.append(f'<text x="{left - 6}" y="{y - 3:.1f}" text-anchor="end">{value:.0f}</text>')
        for color, name in zip(("#2f7fd6", "#d9622b", "#6b7785"), sorted(seen[-1]["by"], reverse=True), strict=False):
            points = [
                f"{left + (width - 90 - left) * row['step'] / most:.1f},{bottom - (height - 20) * y / top:.1f}"
                for row in seen
                if (y := row["by"].get(name, {}).get(field)) is not None
            ]
            end = float(points[-1].split(",")[1]) + {"rank 1": 0, "rank 0": 13}.get(name, 4)
            parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}"/>')
            parts.append(f'<text x="{width - 86}" y="{end:.1f}" fill="{color}">{name}</text>')
    parts.append(f'<text x="{width - 90}" y="{3 * height + 22}" text-anchor="end">step {most:,}</text></svg>')
    path.write_text("".join(parts) + "\n")


def table(result: dict[str, Any]) -> str:
    machine, judged = result["machine"], result["judged"]
    lines = [
        f"# {result['steps']:,} steps of a small run on two ranks", "",
        f"{'Level' if judged['level'] else 'NOT level'}: medians of the first and of the last tenth of "
        f"{judged['looks']} looks behind the warm-up (a fifth); {judged['processes']} processes; "
        f"{result['seconds']:.0f} s. "
        f"{machine['hardware']['processor']}, {machine['hardware']['cores']} cores, torch "
        f"{machine['versions']['torch']}, commit {machine['commit']}. Made by `benchmarks/faults/long_run.py`"
        f"{' --exact' if result['exact'] else ''}; [figure](long_run.svg).", "",
        "| process | memory, MiB | descriptors | threads |", "|---|---|---|---|",
    ]  # fmt: skip
    for name, ends in judged["ends"].items():
        cells = [f"{ends[field][0]:.1f} → {ends[field][1]:.1f}" for field in ("mib", "descriptors", "threads")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bigstep-long-") as scratch:
        seen = watch(Path(scratch) / "run", options)
    judged = judge(seen, options.steps)
    result = {
        "steps": options.steps, "exact": options.exact, "seconds": time.monotonic() - began, "judged": judged,
        "settings": SETTINGS, "machine": describe_machine(), "seen": seen[:: max(1, len(seen) // 200)],
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "long_run.json").write_text(json.dumps(result) + "\n")
    (options.out / "long_run.md").write_text(table(result))
    draw(seen, options.out / "long_run.svg")
    print(table(result))
    return 0 if judged["level"] else 1


if __name__ == "__main__":
    sys.exit(main())
