"""A host unplugged from a run of three, and plugged in again: torchrun's elastic launch in the network laboratory.

    sudo python benchmarks/faults/unplug.py        # two to three minutes; writes unplug.json and unplug.md

Three hosts in network namespaces run one rank each under `torchrun --nnodes 2:3`. Once the run has checkpoints, the
link of one host goes down: the other two notice within --timeout, torchrun gathers them anew, and the run goes on from
its last checkpoint with two ranks. The link comes up again and torchrun is started there again, as a scheduler does:
the three go on together. The path must be that of one rank, to 1e-10 in float64.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bigstep import recipes
from bigstep.config.text import apply_settings
from bigstep.lab.hosts import Lab
from bigstep.records import describe_machine, read_run
from bigstep.train import fit

SETTINGS = [
    "model=mlp", "data.holdout=0.5", "workers.count=6", "workers.local_batch=16", "epochs=16", "precision=float64",
    "checkpoint.every=0.2", "evaluate_every=16", "lr.base=0.02", "lr.scaling=none",
]  # fmt: skip
TIMEOUT_S = 8


def start(lab: Lab, host: int, folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start torchrun on a host."""
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-id", "unplug", "--rdzv-endpoint", f"{lab.addresses[0]}:29400",
                  "--rdzv-conf", f"is_host={int(host == 0)},join_timeout=300,last_call_timeout=3"]  # fmt: skip
    command = [
        "ip", "netns", "exec", lab._host(host), sys.executable, "-m", "torch.distributed.run", "--nnodes", "2:3",
        "--nproc-per-node", "1", "--max-restarts", "10", *rendezvous, "--local-addr", lab.addresses[host],
        "-m", "bigstep", "train", "--device", "cpu", "--out", str(folder), "--resume", "--timeout", str(TIMEOUT_S),
        *settings,
    ]  # fmt: skip
    # a store that all rounds share is announced in the first only: a host that joins later would wait for it in vain
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment = {**os.environ, **own_store, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    with log.open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)


def link(lab: Lab, host: int, state: str) -> None:
    """Pull the plug at the switch, or put it back."""
    subprocess.run(["ip", "-n", f"{lab._name}-switch", "link", "set", f"p{host}", state], check=True)


def wait(condition: Callable[[], bool], what: str, processes: list[subprocess.Popen[bytes]], seconds: float) -> float:
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds or processes[0].poll() not in (None, 0):
            raise SystemExit(f"never seen: {what}")
        time.sleep(0.1)  # watching files that other programs write
    return time.monotonic() - began


def ranks_now(folder: Path) -> int:
    """How many ranks the run was last started with."""
    try:
        return int(read_run(folder).facts.get("ranks", 0))
    except Exception:  # between two starts
        return 0


def newest(folder: Path) -> str:
    return max((path.name for path in (folder / "checkpoints").glob("step-*.ckpt")), default="")


def story(scratch: Path) -> dict[str, Any]:
    folder, logs = scratch / "run", [scratch / f"host-{host}.log" for host in range(3)]
    times: dict[str, float] = {}
    with Lab(3, "1gbit") as lab:
        processes = [start(lab, host, folder, logs[host]) for host in range(3)]
        try:
            times["three at work"] = wait(lambda: newest(folder) > "", "a checkpoint", processes, 120)
            assert ranks_now(folder) == 3
            link(lab, 2, "down")
            times["two go on"] = wait(lambda: ranks_now(folder) == 2, "a run of two ranks", processes, 180)
            # what was left there must be gone before it can meet the others again, as a member of two rounds
            os.killpg(processes[2].pid, signal.SIGKILL)
            processes[2].wait()
            link(lab, 2, "up")
            processes[2] = start(lab, 2, folder, logs[2])
            times["three go on"] = wait(lambda: ranks_now(folder) == 3, "three ranks again", processes, 180)
            times["finished"] = wait(lambda: bool(read_run(folder).result), "the end", processes, 300)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    said = [line for log in logs for line in log.read_text(errors="replace").splitlines() if "bigstep: " in line]
    return {"seconds": times, "said": said, "notes": read_run(folder).notes}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bigstep-unplug-") as name:
        scratch = Path(name)
        try:
            told = story(scratch)
        except SystemExit:
            for log in sorted(scratch.glob("*.log")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")
            raise
        fit(apply_settings(recipes.load("plain", "mini"), SETTINGS), out=scratch / "one", device="cpu")
        losses = [[row["loss"] for row in read_run(scratch / run).train] for run in ("run", "one")]
    largest = max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True))
    results = {**told, "largest_difference": largest, "steps": len(losses[0]), "machine": describe_machine()}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "unplug.json").write_text(json.dumps(results, indent=1) + "\n")
    lines = ["# A host unplugged and plugged in again", "", f"Three hosts, --timeout {TIMEOUT_S}.", ""]
    lines += [f"- {what}: after {seconds:.1f} s" for what, seconds in told["seconds"].items()]
    lines += ["", "What was said:", "", *(f"- {line}" for line in (*told["said"], *told["notes"]))]
    lines += ["", f"Losses of all {len(losses[0])} steps are those of one rank to {largest:.1e}."]
    (options.out / "unplug.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0 if largest <= 1e-10 else 1


if __name__ == "__main__":
    sys.exit(main())
