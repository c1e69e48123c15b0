"""From JPEG to weights on one GPU: ResNet-50 end to end from a plain folder and from packed files, by decoder.

    PYTHONPATH=src python benchmarks/input/gpu.py --out $OUT --seconds 200

writes gpu.json after every part, and gpu.md at the end. Each part is a process of its own with a limit, the most
interesting ones first: what does not fit into --seconds is left out and named. The files are made here (500 x 375
pixels, about 90 kB) and lie in the page cache; each has several names, so that no epoch ends within a measurement.
Where the GPU decodes, a part also tells what the thread did that lets it: microseconds for each image in which it
waited for `files`, made a `batch` (of that, `decode` for the device and `launch` of the crops), and waited until the
batch was `taken`; the first and the last of these are idle time. `--photos FOLDER` compares photographs of your own,
in FOLDER/CLASS/*, instead of those that are made. `--tiny` runs every line that needs no GPU in a minute or two: a
small network, small images, few steps, and Pillow for the GPU's decoders.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from run import photograph

from bigstep.data.names import INDEX
from bigstep.records import describe_machine, read_run

HERE = Path(__file__).parent
SEED_OF_500_BY_375 = 5  # `photograph` makes 500 x 375 pixels of every multiple of 5
QUALITY = 92  # about 90 kB
PACKED_FOR_EVALUATION = 8  # one of so many files: a packer decodes all of them, which takes its time
TURNS = (None, Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.FLIP_TOP_BOTTOM, Image.Transpose.ROTATE_180)


OTHERWISE = {
    "by torchvision": "BIGSTEP_NVJPEG_DECODERS=0",
    "by 1 decoder": "BIGSTEP_NVJPEG_DECODERS=1",
    "by 3 decoders": "BIGSTEP_NVJPEG_DECODERS=3",
    "pinned": "PINNED_FILES=1",
    "lock handed on sooner": "SWITCH_S=0.0005",
    "eight queues": "CUDA_DEVICE_MAX_CONNECTIONS=8",
}
"""Ways in which `nvjpeg` may be run, beside two decoders."""


@dataclass
class Sizes:
    """How large everything is."""

    files: int = 10_240
    names: int = 11
    """Of each file in train."""
    val_names: int = 5
    """51,200 images, as many as ImageNet has for it."""
    classes: int = 128
    batch: int = 256
    steps: int = 400
    warm: int = 80
    image_size: int = 224
    settings: list[str] = field(default_factory=lambda: ["precision=fp16"])
    compared: int = 10_000


TINY = Sizes(
    files=64, names=4, val_names=1, classes=4, batch=16, steps=14, warm=2, image_size=32, compared=64,
    settings=["precision=float32", "model=small", "norm.zero_gamma=false"],
)  # fmt: skip


def write_turned(job: tuple[str, int]) -> None:
    """Write one photograph and its mirror images, which compress and decode to other bytes: drawing takes longest."""
    folder, first = job
    picture = photograph(SEED_OF_500_BY_375 * first)
    for number, turn in enumerate(TURNS, first):
        (picture if turn is None else picture.transpose(turn)).save(f"{folder}/{number}.JPEG", quality=QUALITY)


def make_files(root: Path, sizes: Sizes) -> dict[str, Any]:
    """Make the files once, and give them names in train/CLASS and val/CLASS."""
    began = time.perf_counter()
    (root / "files").mkdir(parents=True)
    jobs = [(str(root / "files"), first) for first in range(0, sizes.files, len(TURNS))]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(write_turned, jobs, chunksize=8))
    for split, names in (("train", sizes.names), ("val", sizes.val_names), ("once/train", 1), ("once/val", 1)):
        for label in range(sizes.classes):
            (root / "set" / split / f"{label:04d}").mkdir(parents=True)
        for n in range(sizes.files // PACKED_FOR_EVALUATION if split == "once/val" else sizes.files):
            for copy in range(names):
                os.link(
                    root / "files" / f"{n}.JPEG", root / "set" / split / f"{n % sizes.classes:04d}" / f"{n}-{copy}.JPEG"
                )
    weights = [path.stat().st_size for path in (root / "files").iterdir()]
    return {
        "files": sizes.files, "names": sizes.names, "kB": sum(weights) / len(weights) / 1e3,
        "seconds": time.perf_counter() - began,
    }  # fmt: skip


def make_packed(root: Path, sizes: Sizes, limit_s: float) -> dict[str, Any]:
    """Pack each file once, and give each record as many places in the index as the file has names in the folder."""
    out = root / "packed"
    options = [str(root / "set" / "once"), str(out), "--side", "400", "--json"]
    told = run_limited([sys.executable, "-m", "bigstep", "data", "pack", *options], limit_s)
    head = json.loads((out / INDEX).read_bytes())
    for split, names in (("train", sizes.names), ("val", sizes.val_names * PACKED_FOR_EVALUATION)):
        for kind, checksum in (("records", "sha256"), ("names", "names_sha256")):
            path = out / head["splits"][split][kind]
            np.save(path, np.repeat(np.load(path), names))
            head["splits"][split][checksum] = hashlib.sha256(path.read_bytes()).hexdigest()
    (out / INDEX).write_text(json.dumps(head))
    return json.loads(told)


def between_flushes(rows: list[dict[str, Any]], warm: int) -> tuple[float, list[dict[str, Any]]]:
    """Return the rows behind the first flush after `warm` steps and what they took; rows of a flush share its time."""
    last = rows[-1]["seconds"]
    early = [row for row in rows if row["seconds"] < last]
    if not early:
        raise RuntimeError(f"all {len(rows)} steps were told at once; take more")
    first = next((row for row in early if row["step"] >= warm), early[-1])["seconds"]
    return last - first, [row for row in rows if row["seconds"] > first]


def train(
    folder: Path, out: Path, sizes: Sizes, decoder: str, cores: int, loaders: int, settled: str, limit_s: float
) -> dict[str, Any]:
    """Run `bigstep train` on some cores, and read from its records how fast it was and how long the GPU waited.

    `settled` is a variable of its environment, as in `OTHERWISE`.
    """
    settings = [
        *sizes.settings, f"workers.local_batch={sizes.batch}", f"data.loaders={loaders}", f"data.decoder={decoder}",
        f"data.image_size={sizes.image_size}", "lr.base=0.1", "checkpoint.every=0",
    ]  # fmt: skip
    profile = out.with_suffix(".profile.json")
    command = [
        "env", settled, *(["REHEARSED=1"] if sizes is TINY else []),
        sys.executable, str(HERE / "gpu_train.py"), str(profile),
        "train", "fujitsu", "--preset", "paper", "--data", str(folder),
        "--workers", "1", "--steps", str(sizes.steps), "--out", str(out), "--no-report", "--json",
        *(word for setting in settings for word in ("--set", setting)),
    ]  # fmt: skip
    began = time.perf_counter()
    run_limited(command, limit_s, cores)
    found = read_run(out)
    shutil.copy(out / "metrics.jsonl", out.with_suffix(".metrics.jsonl"))
    elapsed, rows = between_flushes(found.train, sizes.warm)
    images = sum(row["batch"] for row in rows)
    evaluation_s = found.evaluations[-1]["seconds"] - rows[-1]["seconds"] if found.evaluations else None
    return {
        "decoder": decoder, "cores": cores, "images_per_s": images / elapsed, "steps": len(rows),
        "waited": sum(row["data_s"] for row in rows) / elapsed,
        "evaluation_images_per_s": sizes.files * sizes.val_names / evaluation_s if evaluation_s else None,
        "wall_s": time.perf_counter() - began, "profile": json.loads(profile.read_text()), "notes": found.notes,
    }  # fmt: skip


def profile(folder: Path, out: Path, sizes: Sizes, cores: int, kept: Path, limit_s: float) -> dict[str, Any]:
    """A short run whose kernels are kept, in every stream: those of the step, of the decoders and of the crops."""
    settings = [
        *sizes.settings, f"workers.local_batch={sizes.batch}", f"data.loaders={cores}", "evaluate_every=1000",
        f"data.image_size={sizes.image_size}", "lr.base=0.1", "checkpoint.every=0",
    ]  # fmt: skip
    command = [
        sys.executable, "-m", "bigstep", "train", "fujitsu", "--preset", "paper", "--data", str(folder),
        "--workers", "1", "--steps", str(min(60, sizes.steps)), "--out", str(out), "--no-report", "--json",
        "--profile", "5", *(word for setting in settings for word in ("--set", setting)),
    ]  # fmt: skip
    run_limited(command, limit_s, cores)
    for name in ("trace.json.gz", "profile.md"):
        shutil.copy(out / name, kept / name)
    return {"kept": sorted(path.name for path in out.iterdir())}


def run_limited(command: list[str], limit_s: float, cores: int = 0) -> str:
    """Run a command of ours on the first of the cores, or on all; raise with its last words if it fails or is late."""
    chosen = sorted(os.sched_getaffinity(0))[: cores or None]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: os.sched_setaffinity(0, chosen),  # before it has threads
    )  # fmt: skip
    try:
        out, told = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        raise RuntimeError(f"took more than {limit_s:.0f} s") from None
    if process.returncode:
        raise RuntimeError(f"exit status {process.returncode}: {told[-1500:]}")
    return out


def part(name: str, folder: Path, sizes: Sizes, cores: int, limit_s: float, photos: Path | None = None) -> Any:
    """Run a part of gpu_parts.py in a process of its own; it prints JSON on its last line."""
    options = [] if photos is None else ["--photos", str(photos)]
    options += ["--folder", str(folder), "--batch", str(sizes.batch), "--size", str(sizes.image_size)]
    options += ["--count", str(sizes.compared), "--cores", str(cores), "--warm", str(sizes.warm // 4)]
    out = run_limited([sys.executable, str(HERE / "gpu_parts.py"), name, *options], limit_s)
    return json.loads(out.strip().splitlines()[-1])


def library(folder: Path, tiny: bool, limit_s: float) -> Any:
    """Call nvJPEG directly beside the step, by number of decoders and by option; see gpu_library.py."""
    options = ["--tiny"] if tiny else ["--folder", str(folder)]
    out = run_limited([sys.executable, str(HERE / "gpu_library.py"), *options], limit_s)
    return json.loads(out.strip().splitlines()[-1])


class Book:
    """Results so far, on disk after every part; nothing begins that would end too late."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.seconds, self.began = path, seconds, time.perf_counter()
        self.result: dict[str, Any] = {"machine": describe_machine(), "parts": {}, "left_out": []}

    def left(self) -> float:
        return self.seconds - (time.perf_counter() - self.began)

    def run(self, name: str, needs_s: float, work: Any) -> None:
        """Do a part if there is time for it; its limit is what is left, 150 s at most."""
        if self.left() < needs_s:
            self.result["left_out"].append(name)
        else:
            try:
                self.result["parts"][name] = work(min(self.left(), 150.0))
            except Exception as error:
                self.result["parts"][name] = {"error": f"{type(error).__name__}: {error}"}
        self.path.write_text(json.dumps(self.result, indent=1) + "\n")
        told = json.dumps(self.result["parts"].get(name, "left out"))
        told = told if len(told) < 1800 else f"{told[:900]} ... {told[-900:]}"  # the end of an error says what it was
        print(f"{time.perf_counter() - self.began:5.0f} s  {name}: {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--seconds", type=float, default=530.0, help="for everything")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal without a GPU")
    parser.add_argument("--only", nargs="*", help="names of parts; all if not given")
    parser.add_argument("--photos", type=Path, help="a folder of CLASS/* to compare instead of what is made")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    sizes, cores = TINY if args.tiny else Sizes(), len(os.sched_getaffinity(0))
    book = Book(args.out / "gpu.json", args.seconds)
    book.result["sizes"], book.result["cores"] = vars(sizes), cores
    book.result["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory(dir="/dev/shm" if args.tiny else None) as scratch:
        root = Path(scratch)
        folder, packed = root / "set", root / "packed"

        def end_to_end(
            where: Path, decoder: str, of: int, settled: str = "BIGSTEP_NVJPEG_DECODERS=2", loaders: int = 0
        ) -> Any:
            out = root / f"run-{where.name}-{decoder}-{of}-{loaders}-{settled.replace('=', '-')}"
            return lambda limit_s: train(where, out, sizes, decoder, of, loaders or of, settled, limit_s)

        plan: list[tuple[str, float, Any]] = [
            ("files", 0, lambda limit_s: make_files(root, sizes)),
            ("model", 20, lambda limit_s: part("model", folder, sizes, cores, limit_s)),
            ("algorithms", 25, lambda limit_s: part("algorithms", folder, sizes, cores, limit_s)),
            ("folder, auto", 40, end_to_end(folder, "auto", cores)),
            ("folder, nvjpeg", 40, end_to_end(folder, "nvjpeg", cores)),
            ("feed", 20, lambda limit_s: part("feed", folder, sizes, cores, limit_s)),
            ("library", 80, lambda limit_s: library(folder, args.tiny, limit_s)),
            ("pack", 20, lambda limit_s: make_packed(root, sizes, limit_s)),
            ("packed, auto", 35, end_to_end(packed, "auto", cores)),
            # as many as a run has by default: fewer threads want Python's lock while a step is launched
            ("packed, auto, 2 loaders", 35, end_to_end(packed, "auto", cores, loaders=2)),
            ("folder, auto, 2 loaders", 35, end_to_end(folder, "auto", cores, loaders=2)),
            ("profile", 30, lambda limit_s: profile(folder, root / "profiled", sizes, cores, args.out, limit_s)),
            ("compare", 25, lambda limit_s: part("compare", folder, sizes, cores, min(limit_s, 60), args.photos)),
            ("kernel", 20, lambda limit_s: part("kernel", folder, sizes, cores, limit_s)),
            ("loop", 40, lambda limit_s: part("loop", folder, sizes, cores, limit_s)),
            *((f"folder, auto, {few} cores", 40, end_to_end(folder, "auto", few)) for few in (2, 4, 8) if few < cores),
            ("folder, pillow", 45, end_to_end(folder, "pillow", cores)),
            ("folder, torchvision", 40, end_to_end(folder, "torchvision", cores)),
            ("folder, both", 40, end_to_end(folder, "both", cores)),
            *(
                (f"folder, nvjpeg, {how}", 40, end_to_end(folder, "nvjpeg", cores, told))
                for how, told in OTHERWISE.items()
            ),
        ]
        for name, needs_s, work in plan:
            if args.only is None or name in args.only or name == "files":
                book.run(name, needs_s / 20 if args.tiny else needs_s, work)
        for path in root.glob("*.metrics.jsonl"):
            shutil.copy(path, args.out)
        shutil.rmtree(root / "set", ignore_errors=True)
    (args.out / "gpu.md").write_text(markdown(book.result))
    print(markdown(book.result))


def markdown(result: dict[str, Any]) -> str:
    machine = result["machine"]
    lines = [
        "# From JPEG to weights on one GPU", "",
        f"{result['device']}, {result['cores']} cores of {machine['hardware']['processor']}; "
        + ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        + f"; commit {machine['commit'] or 'unknown'}.", "",
        "| part | cores | images/s | GPU waited | evaluation, images/s |", "|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    others, profiles = [], []
    for name, row in result["parts"].items():
        if "images_per_s" not in row:
            others.append(f"- {name}: {json.dumps(row)[:600]}")
            continue
        waited = f"{100 * row['waited']:.1f} %" if "waited" in row else ""
        judged = row.get("evaluation_images_per_s")
        judged = f"{judged:,.0f}" if judged else ""
        lines.append(f"| {name} | {row.get('cores', '')} | {row['images_per_s']:,.0f} | {waited} | {judged} |")
        profiles += [f"- {name}, {json.dumps(row['profile'])}"] if row.get("profile") else []
    if profiles:
        others = ["Microseconds for each image, of the thread that lets the GPU decode:", "", *profiles, "", *others]
    left = f"\nLeft out for want of time: {', '.join(result['left_out'])}." if result["left_out"] else ""
    return "\n".join([*lines, "", *others]) + left + "\n"


if __name__ == "__main__":
    main()
