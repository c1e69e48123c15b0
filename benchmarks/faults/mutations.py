"""Mutated checkpoints, configurations, records and data files: each must be read or refused with one sentence.

    python benchmarks/faults/mutations.py                # 500 cases; writes mutations.json and mutations.md
    python benchmarks/faults/mutations.py --cases 60     # as the test suite does

Every case runs in a process of its own with a gibibyte of memory above what the program holds at rest, and a minute of
time. It is the real command: `train --resume`, `train --config`, `report`, `data --verify`. A case is good if the
command ends with status 0, 1 or 2 and what it was given is unchanged on disk; a traceback, a signal, the time or the
memory running out, or a file that was changed is a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image

from bigstep.cli import main as bigstep
from bigstep.engine.checkpoint import load_checkpoint, save_checkpoint
from bigstep.records import describe_machine

ROOM_BYTES = 2**30
SECONDS = 60
TRAIN = ["train", "--device", "cpu", "--json", "--steps", "3", "--set", "model=mlp",
         "--set", "workers.count=2", "--set", "workers.local_batch=8", "--set", "checkpoint.every=0.0014"]  # fmt: skip


# mutations of bytes


def truncate(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))] if content else b""


def flip(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 3, 20))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def flip_head(content: bytes, chance: random.Random) -> bytes:
    head = min(len(content), 64)
    return flip(content[:head], chance) + content[head:]


def huge(content: bytes, chance: random.Random) -> bytes:
    """Numbers near the beginning, where sizes stand, become the largest."""
    at = chance.randrange(min(len(content), 32))
    return content[:at] + b"\xff\xff\xff\x7f" + content[at + 4 :]


def splice(content: bytes, chance: random.Random) -> bytes:
    at, end = sorted(chance.randrange(len(content) + 1) for _ in range(2))
    return content[:at] + chance.randbytes(chance.randrange(200)) + content[end:]


def repeat(content: bytes, chance: random.Random) -> bytes:
    at, end = sorted(chance.randrange(len(content) + 1) for _ in range(2))
    return content[:end] + content[at:]


BYTES = (truncate, flip, flip_head, huge, splice, repeat)


# mutations of values

STRANGE = [None, True, -1, 0, 2**31, 10**30, 1e308, -1e308, float("nan"), float("inf"), "", "x" * 100_000, "../../etc",
           [], {}, [[]], {"a": {"b": []}}, [1] * 1000, 10**400]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in nested dicts and lists."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def strange(value: Any, chance: random.Random, more: list[Any] | None = None) -> Any:
    """Put something strange somewhere, or take something out."""
    path = chance.choice(places(value)[1:] or [()])
    if not path:
        return chance.choice(STRANGE)
    place = value
    for key in path[:-1]:
        place = place[key]
    if chance.random() < 0.2:
        del place[path[-1]]
    else:
        place[path[-1]] = chance.choice(STRANGE + (more or []))
    return value


# cases: each lays out a folder, and returns the command and the files that it may change

Case = Callable[[Path, Path, random.Random], tuple[list[str], str]]


def damage(path: Path, chance: random.Random) -> str:
    mutation = chance.choice(BYTES)
    path.write_bytes(mutation(path.read_bytes(), chance))
    return mutation.__name__


def resume_command(folder: Path) -> list[str]:
    """As after a kill at its very end: without a result, the run's checkpoint must be read."""
    path = folder / "run" / "run.json"
    with contextlib.suppress(ValueError, AttributeError):  # mutated beyond that
        facts = json.loads(path.read_text())
        if facts.pop("result", None):
            path.write_text(json.dumps(facts))
    return [*TRAIN, "--out", str(folder / "run"), "--resume"]


def checkpoint_bytes(base: Path, folder: Path, chance: random.Random) -> tuple[list[str], str]:
    shutil.copytree(base / "run", folder / "run")
    paths = sorted((folder / "run" / "checkpoints").iterdir())
    which = [paths[-1]] if chance.random() < 0.5 else paths
    name = "+".join(damage(path, chance) for path in which)
    return resume_command(folder), name


def checkpoint_sealed(base: Path, folder: Path, chance: random.Random) -> tuple[list[str], str]:
    """A checkpoint that was damaged and given a checksum that holds."""
    import hashlib

    shutil.copytree(base / "run", folder / "run")
    path = max((folder / "run" / "checkpoints").iterdir())
    payload, mutation = path.read_bytes()[40:], chance.choice(BYTES)
    payload = mutation(payload, chance)
    path.write_bytes(b"bigstep1" + hashlib.sha256(payload).digest() + payload)
    return resume_command(folder), mutation.__name__


def checkpoint_values(base: Path, folder: Path, chance: random.Random) -> tuple[list[str], str]:
    shutil.copytree(base / "run", folder / "run")
    checkpoints = folder / "run" / "checkpoints"
    newest = max(checkpoints.iterdir())
    tensors = [
        torch.zeros(0),
        torch.full((3, 3), float("nan")),
        torch.zeros(1).expand(10**6),
        torch.zeros(2, dtype=torch.int8),
    ]
    state = strange(load_checkpoint(newest), chance, tensors)
    with contextlib.suppress(OverflowError):
        save_checkpoint(checkpoints, int(newest.stem[5:]), state, keep=2)
    return resume_command(folder), "strange"


def config(base: Path, folder: Path, chance: random.Random) -> tuple[list[str], str]:
    path = folder / "run.yaml"
    shutil.copy(base / "run.yaml", path)
    if chance.random() < 0.4:
        name = damage(path, chance)
    else:
        values = strange(yaml.safe_load(path.read_text()), chance)
        path.write_text(
            yaml.safe_dump(values) if chance.random() < 0.8 else "a: &a [x]\n" + path.read_text() + "b: *a\n"
        )
        name = "strange"
    return config_command(path, folder / "new"), name


def config_command(path: Path, out: Path) -> list[str]:
    return ["train", "--config", str(path), "--device", "cpu", "--steps", "1", "--json", "--out", str(out)]


def records(base: Path, folder: Path, chance: random.Random) -> tuple[list[str], str]:
    shutil.copytree(base / "run", folder / "run")
    path = folder / "run" / chance.choice(("run.json", "metrics.jsonl"))
    if chance.random() < 0.4:
        name = damage(path, chance)
    elif path.suffix == ".json":
        path.write_text(json.dumps(strange(json.loads(path.read_text()), chance)))
        name = "strange"
    else:
        lines = path.read_text().splitlines()
        at = chance.randrange(len(lines))
        lines[at] = json.dumps(strange(json.loads(lines[at]), chance))
        path.write_text("\n".join(lines) + "\n")
        name = "strange"
    if chance.random() < 0.3:
        return resume_command(folder), f"{path.name} {name}, resumed"
    return ["report", str(folder / "run"), "--html", str(folder / "page.html"), "--json"], f"{path.name} {name}"


def data(kind: str) -> Case:
    def case(base: Path, folder: Path, chance: random.Random) -> tuple[list[str], str]:
        shutil.copytree(base / kind, folder / "data")
        files = sorted(path for path in (folder / "data").rglob("*") if path.is_file())
        name = damage(chance.choice(files), chance)
        command = ["data", str(folder / "data"), "--verify", "--json"]
        if chance.random() < 0.3:
            command = [*TRAIN, "--set", "data.image_size=32", "--data", str(folder / "data"),
                       "--set", "data.loaders=0", "--out", str(folder / "new")]  # fmt: skip
        return command, name

    return case


CASES: dict[str, Case] = {
    "checkpoint: bytes": checkpoint_bytes, "checkpoint: sealed": checkpoint_sealed,
    "checkpoint: values": checkpoint_values, "config": config, "records": records, "IDX": data("idx"),
    "CIFAR, pickled": data("cifar-py"), "CIFAR, binary": data("cifar-bin"), "JPEG folder": data("jpeg"),
}  # fmt: skip


def lay_out(base: Path) -> None:
    """Whole files, to be mutated."""
    chance = np.random.default_rng(0)
    status = call([*TRAIN, "--out", str(base / "run")])[0]
    assert status == 0, "the run to be mutated failed"
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        sys.argv = ["bigstep", "recipes", "plain", "--yaml"]
        bigstep()
    small = out.getvalue().replace("model: small", "model: mlp")
    (base / "run.yaml").write_text(small.replace("count: 32", "count: 2"))
    assert call(config_command(base / "run.yaml", base / "new"))[0] == 0, "the configuration to be mutated is none"
    (base / "idx").mkdir()
    for split in ("train", "t10k"):
        images, labels = chance.integers(0, 256, 20 * 28 * 28, dtype=np.uint8), np.arange(20, dtype=np.uint8) % 10
        (base / "idx" / f"{split}-images-idx3-ubyte").write_bytes(
            bytes([0, 0, 8, 3, 0, 0, 0, 20, 0, 0, 0, 28, 0, 0, 0, 28]) + images.tobytes()
        )
        (base / "idx" / f"{split}-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 20]) + labels.tobytes())
    for form in ("py", "bin"):
        (base / f"cifar-{form}").mkdir()
        for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
            pixels, labels = chance.integers(0, 256, (10, 3072), dtype=np.uint8), np.arange(10, dtype=np.uint8)
            path = base / f"cifar-{form}" / (name if form == "py" else f"{name}.bin")
            batch = {b"data": pixels, b"labels": labels.tolist()}
            path.write_bytes(pickle.dumps(batch, 2) if form == "py" else np.c_[labels, pixels].tobytes())
    for split in ("train", "val"):
        for label in ("a", "b"):
            place = base / "jpeg" / split / label
            place.mkdir(parents=True)
            for number in range(9):
                Image.fromarray(chance.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(place / f"{number}.jpg")


def call(command: list[str]) -> tuple[int, str, str]:
    """Run the program in this process; anything but its own way of ending is an exception."""
    sys.argv = ["bigstep", *command]
    answer, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(answer), contextlib.redirect_stderr(errors):
        try:
            bigstep()
            status = 0
        except SystemExit as ending:
            status = int(ending.code or 0)
    return status, errors.getvalue(), answer.getvalue()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def judge(command: list[str], folder: Path) -> dict[str, Any]:
    """Run a case in this process, which is its own, and say how it ended."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + ROOM_BYTES, held + ROOM_BYTES))
    before = contents(folder)
    try:
        status, said, answer = call(command)
    except BaseException:
        return {"fault": traceback.format_exc()}
    if status not in (0, 1, 2):
        return {"fault": f"status {status}: {said[-500:]}"}
    if "Traceback" in said:
        return {"fault": said[-2000:]}
    after = contents(folder)
    # a run that goes on writes into its own folder; everything else must be as it was
    harmed = [
        name for name, content in before.items()
        if after.get(name) != content and not ("--resume" in command and name.startswith("run/"))
    ]  # fmt: skip
    if harmed:
        return {"fault": f"changed {harmed}"}
    sentence = [line for line in said.splitlines() if line.startswith("bigstep: ")]
    if status == 1 and "--verify" in command:  # what is corrupt is the answer that was asked for
        facts = json.loads(answer)
        sentence = [str(each) for part in ("train", "test") for each in facts[part].get("corrupt", [])][:1]
    if status and len(sentence) != 1:
        return {"fault": f"status {status} with {len(sentence)} sentences: {said[-500:]}"}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"fault": None, "status": status, "said": sentence[0][:300] if sentence else "", "peak_mib": peak}


def begin(command: list[str], folder: Path) -> tuple[int, int]:
    """Start a case in a process of its own; return its number and where its judgement will come from."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        with os.fdopen(send, "w") as pipe:
            json.dump(judge(command, folder), pipe)
        os._exit(0)
    os.close(send)
    return child, receive


def end(child: int, receive: int) -> dict[str, Any]:
    """Wait for a case and return its judgement."""
    with os.fdopen(receive) as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGALRM:
        return {"fault": f"not done after {SECONDS} s"}
    result: dict[str, Any] = json.loads(text) if status == 0 else {"fault": f"ended by signal {-status}"}
    return result


def table(results: dict[str, Any]) -> str:
    machine, cases = results["machine"], results["cases"]
    lines = [
        "# Mutated files", "",
        f"{len(cases)} cases, {results['faults']} faults, in {results['seconds']:.0f} s; torch "
        f"{machine['versions']['torch']}, commit {machine['commit']}. Made by `benchmarks/faults/mutations.py`.", "",
        "| kind | cases | read | refused | faults | largest memory, MiB |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for kind in CASES:
        mine = [case for case in cases if case["kind"] == kind]
        ends = Counter("faults" if c["fault"] else "refused" if c["status"] else "read" for c in mine)
        peak = max((case.get("peak_mib", 0.0) for case in mine), default=0.0)
        lines.append(f"| {kind} | {len(mine)} | {ends['read']} | {ends['refused']} | {ends['faults']} | {peak:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--kind", choices=list(CASES), help="only this kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began, cases = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="bigstep-mutations-") as scratch:
        base = Path(scratch) / "base"
        base.mkdir()
        lay_out(base)
        kinds, at_once = [options.kind] if options.kind else list(CASES), len(os.sched_getaffinity(0))
        for first in range(0, options.cases, at_once):
            begun = []
            for number in range(first, min(first + at_once, options.cases)):
                kind, chance = kinds[number % len(kinds)], random.Random(options.seed * 1_000_000 + number)
                folder = Path(scratch) / f"case-{number}"
                folder.mkdir()
                command, mutation = CASES[kind](base, folder, chance)
                begun.append((number, kind, mutation, command, folder, begin(command, folder)))
            for number, kind, mutation, command, folder, process in begun:
                result = end(*process)
                cases.append({"case": number, "kind": kind, "mutation": mutation, **result})
                if result["fault"]:
                    print(f"case {number}, {kind}, {mutation}: {' '.join(command)}\n{result['fault']}", flush=True)
                shutil.rmtree(folder)
    faults = sum(case["fault"] is not None for case in cases)
    results = {"faults": faults, "seconds": time.monotonic() - began, "machine": describe_machine(), "cases": cases}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "mutations.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "mutations.md").write_text(table(results))
    print(table(results))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
