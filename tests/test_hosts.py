"""torchrun with its rendezvous over three hosts in network namespaces, end to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigstep import recipes
from bigstep.config.text import apply_settings
from bigstep.lab.hosts import Lab, why_no_lab
from bigstep.records import read_run
from bigstep.train import fit
from programs import SETTINGS, arguments

reason = why_no_lab()
pytestmark = [pytest.mark.netns, pytest.mark.skipif(reason is not None, reason=reason or "")]

# a host's part: torchrun with the host's own address, and a line for the laboratory
TORCHRUN = """
import os, sys
from torch.distributed.run import main

mine = os.environ["ADDRESSES"].split()[int(os.environ["RANK"])]
host = "is_host=" + str(int(mine == os.environ["MASTER_ADDR"]))  # all namespaces share one host name
rendezvous = ["--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", os.environ["MASTER_ADDR"] + ":29400"]
main(["--nnodes", "3", "--nproc-per-node", "1", *rendezvous, "--rdzv-conf", host, "--local-addr", mine, *sys.argv[1:]])
print("null")
"""


@pytest.mark.timeout(400)
def test_three_hosts_take_the_path_of_one_rank(tmp_path: Path) -> None:
    script = tmp_path / "host.py"
    script.write_text(TORCHRUN)
    short = ["--steps", "8"]
    with Lab(3, "1gbit") as lab:
        addresses = {"ADDRESSES": " ".join(lab.addresses)}
        lab.run(script, *arguments(tmp_path / "three", *short), timeout=200, environment=addresses)
        sent = [each["bytes"] for each in lab.sent()]
    run = read_run(tmp_path / "three")
    assert run.result["ranks"] == 3
    assert run.result["steps"] == 8
    # every gradient crosses the links: a ring of 3 sends 4/3 of its bytes from each host
    weights_bytes = 8 * (784 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10)
    assert min(sent) > 8 * weights_bytes * 4 / 3

    config = apply_settings(recipes.load("plain", "mini"), SETTINGS)
    fit(config, out=tmp_path / "one", device="cpu", max_steps=8)
    alone = [row["loss"] for row in read_run(tmp_path / "one").train]
    assert [row["loss"] for row in run.train] == pytest.approx(alone, rel=1e-10)  # float64: the order of sums alone
