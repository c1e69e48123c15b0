"""Every preset at a paper's scale, under its documented launch line, held to the planner."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from bigstep.plan import Cluster, Scheme, Workload, predict
from bigstep.plan.rows import _AKIBA, _GOYAL, _JIA, _MIKAMI, Assumed, _yamazaki
from bigstep.plan.search import candidate_schemes
from bigstep.recipes import SYNCHRONOUS, describe, load
from bigstep.tables.collectives import RUNNABLE, choose_grid

LAUNCH = re.compile(r"torchrun (?:--nnodes (\d+) )?--nproc-per-node (\d+) -m bigstep train \w+ --preset (\w+)")
LINES = [
    (name, match[3], int(match[1] or 1), int(match[2]))
    for name in SYNCHRONOUS
    for match in LAUNCH.finditer(describe(name).docstring)
]
# the machine of each paper, and the scheme with which its published rows were met
CLUSTERS = {"fair": "big_basin", "pfn": "mn1", "sony": "abci", "fujitsu": "abci", "tencent": "tencent_p40"}
VALIDATED = {
    ("fair", "paper"): _GOYAL,
    ("pfn", "paper"): _AKIBA,
    ("tencent", "paper"): _JIA,
    ("tencent", "paper_alexnet"): _JIA,
    ("sony", "paper"): replace(_MIKAMI, grid=(72, 48)),
    ("sony", "paper_v1"): replace(_MIKAMI, grid=(64, 34)),
    ("fujitsu", "paper"): _yamazaki(Assumed()),
}


def launched(name: str, preset: str, nodes: int, per_node: int) -> tuple[Workload, Cluster, int, float, Scheme]:
    """What a launch line runs, as the planner sees it; a paper without a machine of its own gets DGX A100."""
    config, devices = load(name, preset), nodes * per_node
    chosen = config.exchange
    cluster = Cluster.load(CLUSTERS.get(name, "dgx_a100"))
    assert cluster.devices_per_node == per_node
    grid = chosen.grid if chosen.grid != "auto" else choose_grid(devices, per_node)
    scheme = Scheme(
        collective=chosen.collective,
        codec=chosen.codec,
        grid=grid if chosen.collective == "torus" else None,
        bucket_mb=chosen.bucket_mb,
        double_buffer=chosen.double_buffer,
        optimizer=config.optimizer.name,
    )
    return Workload.load(config.model), cluster, devices, config.batch / devices, scheme


def test_every_paper_preset_has_a_launch_line_of_its_size() -> None:
    papers = {(name, preset) for name in SYNCHRONOUS for preset in describe(name).presets if preset.startswith("paper")}
    assert {(name, preset) for name, preset, _, _ in LINES} == papers
    for name, preset, nodes, per_node in LINES:
        assert load(name, preset).workers.count == nodes * per_node


@pytest.mark.parametrize("name, preset, nodes, per_node", LINES)
def test_a_launch_line_is_no_slower_than_what_was_validated(name: str, preset: str, nodes: int, per_node: int) -> None:
    workload, cluster, devices, local, scheme = launched(name, preset, nodes, per_node)
    step = predict(workload, cluster, devices=devices, local_batch=local, scheme=scheme).step_s
    if (name, preset) in VALIDATED:
        known = replace(VALIDATED[name, preset], optimizer=scheme.optimizer)
        validated = predict(workload, cluster, devices=devices, local_batch=local, scheme=known).step_s
        assert step <= 1.02 * validated, "2 %: the grid of `auto` is not the paper's own"
    tried = [
        predict(workload, cluster, devices=devices, local_batch=local, scheme=other).step_s
        for other in candidate_schemes(cluster, devices, codec=scheme.codec, optimizer=scheme.optimizer)
        if other.collective in RUNNABLE
    ]
    # a published collective need not be the best one, but another choice of grid or bucket may not cost several steps
    assert step <= 1.5 * min(tried)


def test_the_grid_of_a_launch_line_takes_few_rounds_and_whole_nodes() -> None:
    for nodes, per_node in ((864, 4), (544, 4), (512, 4), (128, 8), (8, 4), (2, 8), (7, 4)):
        X, Y = choose_grid(nodes * per_node, per_node)
        assert nodes * per_node == X * Y
        assert X % per_node == 0
        # no divisor of the nodes gives fewer rounds
        assert min(per_node * j + nodes // j for j in range(1, nodes + 1) if nodes % j == 0) == X + Y
    assert choose_grid(32, 4) == (4, 8), "of equally many rounds, those that send the fewest bytes between nodes"
