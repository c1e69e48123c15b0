"""Packing and reading packed images: time, size, crops a second; killed at random moments it ends with the same bytes.

    PYTHONPATH=src python benchmarks/input/pack.py --images 1000 --names 25 --kills 5 --out benchmarks/input/results

writes pack.json and pack.md. The photographs are those of run.py, evaluated on themselves, so twice as many images are
packed as there are files. `--names` gives each photograph several names: each is read, decoded and packed by itself,
and only making them is spared. Beside the clock stands the packer's processor time, which other programs do not change.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from run import CLASSES, make_folder

from bigstep.data import open_data
from bigstep.records import describe_machine

FORMS = {
    "as they are": [],
    "--side 400": ["--side", "400"],
    "--side 256": ["--side", "256"],
    "--side 256 --raw": ["--side", "256", "--raw"],
}
SIZE, CHUNK = 224, 64


def start(folder: Path, out: Path, options: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "bigstep", "data", "pack", str(folder), str(out), *options, "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def packed(folder: Path, out: Path, options: list[str]) -> tuple[dict[str, float], float]:
    """Pack; return what the command printed, and the processor seconds that it took."""
    before = os.times()
    facts = json.loads(start(folder, out, options).communicate()[0])
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return facts, spent


def contents(folder: Path) -> dict[str, str]:
    found = {}
    for path in folder.iterdir():
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def crops_a_second(name: str, path: Path, rounds: int = 3) -> float:
    """Random crops in a second of processor time, which other programs do not change much; the median of rounds."""
    source = open_data(name, str(path)).train
    rates = []
    for epoch in range(rounds + 1):
        began = time.process_time()
        for first in range(0, min(len(source), 4 * CHUNK), CHUNK):
            chosen = list(range(first, min(first + CHUNK, len(source))))
            source.load_random_crops(chosen, SIZE, 0, epoch, 0.08)
        rates.append(min(len(source), 4 * CHUNK) / (time.process_time() - began))
    return statistics.median(rates[1:])


def survive(folder: Path, out: Path, whole: dict[str, str], kills: int, chance: random.Random) -> dict[str, object]:
    """Kill the packer some times, then let it end."""
    killed = 0
    for _ in range(kills):
        process = start(folder, out, [])
        try:
            process.wait(chance.uniform(2.0, 8.0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            killed += 1
        process.wait()
    last = start(folder, out, [])
    last.communicate()
    left = contents(out)
    leftovers = sorted(name for name in left if name.endswith(".part"))
    same = {name: digest for name, digest in left.items() if name not in leftovers} == whole
    return {"killed": killed, "status": last.returncode, "same bytes": same, "torn files left": len(leftovers)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--names", type=int, default=1, help="of each photograph")
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=FORMS)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_folder(Path(scratch) / "set", options.images)
        for path in sorted((folder / "train").rglob("*.JPEG")):
            for name in range(1, options.names):
                os.link(path, path.with_name(f"{path.stem}-{name}.JPEG"))
        stored = sum(path.stat().st_size for path in (folder / "train").rglob("*.JPEG"))
        rows = [{"form": "folder", "MB": 2 * stored / 1e6, "crops a second": crops_a_second("folder", folder)}]
        for name in options.forms:
            flags = FORMS[name]
            out = Path(scratch) / f"out{len(rows)}"
            facts, spent = packed(folder, out, flags)
            rows.append(
                {
                    "form": name,
                    "MB": facts["bytes"] / 1e6,
                    "seconds to pack": facts["seconds"],
                    "images a second": facts["images"] / facts["seconds"],
                    "processor seconds": spent,
                    "images a processor second": facts["images"] / spent,
                    "crops a second": crops_a_second("packed", out),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
            if flags:
                shutil.rmtree(out)  # pixels of 50,000 photographs take 13 GB
        kills = survive(
            folder, Path(scratch) / "killed", contents(Path(scratch) / "out1"), options.kills, random.Random(0)
        )
    images = 2 * options.names * (options.images // CLASSES * CLASSES)
    result = {
        "images": images,
        "photographs": options.images,
        "rows": rows,
        "kills": kills,
        **describe_machine(),
        "load": os.getloadavg(),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "pack.json").write_text(json.dumps(result, indent=1) + "\n")
    lines = [f"{images:,} images, {options.images:,} different ones.", ""]
    lines += ["| form | MB | seconds | images a second | the same of one core | crops of 224 a second of one core |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in rows:
        names = ("seconds to pack", "images a second", "images a processor second", "crops a second")
        told = " | ".join(f"{row[name]:,.0f}" if name in row else "" for name in names)
        lines.append(f"| {row['form']} | {row['MB']:,.0f} | {told} |")
    lines.append(f"\nKilled {kills['killed']} times: exit status {kills['status']}, same bytes: {kills['same bytes']}.")
    (options.out / "pack.md").write_text("\n".join(lines) + "\n")
    print((options.out / "pack.md").read_text())


if __name__ == "__main__":
    main()
