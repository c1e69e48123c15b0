"""The exchange on a CUDA stream: one NCCL rank, where every collective must give back what it was given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bigstep.exchange import Exchange
from bigstep.tables.codecs import CODECS
from test_comm_hook import BUCKET_MB, batch_of, make_model

pytestmark = pytest.mark.gpu


@pytest.fixture
def _nccl(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_nccl")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"collective": "torus", "codec": "bf16"},
        {"collective": "hierarchical"},
        {"collective": "halving", "codec": "fp16"},
        {"collective": "gather", "codec": "onebit"},
        {"collective": "gather", "codec": "onebit", "double_buffer": True},
        {"codec": "powersgd"},
        {"collective": "torus", "codec": "exact"},
        {"codec": "int8"},
        {"codec": "int4"},
        {"codec": "topk", "keep": 512, "decay": 1.0},
    ],
    ids=str,
)
def test_gradients_come_back_on_the_right_stream(settings: dict[str, Any]) -> None:
    """Sums over 30 steps of what went in and what came back agree, to rounding or to what is still carried."""
    model = make_model().cuda()
    ddp = DistributedDataParallel(model, device_ids=[0], bucket_cap_mb=BUCKET_MB)
    exchange = Exchange(**settings)
    exchange.attach(ddp)
    plain = make_model().cuda()
    expected = torch.zeros(sum(p.numel() for p in plain.parameters()), device="cuda")
    got = torch.zeros_like(expected)
    for step in range(30):
        inputs = batch_of(0, step).cuda()
        for each, total in ((ddp, got), (plain, expected)):
            each.zero_grad()
            each(inputs).square().mean().backward()
            total += torch.cat([p.grad.flatten() for p in each.parameters() if p.grad is not None])
    if exchange.flush():
        got += torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert exchange.seconds > 0
    assert exchange.bytes_sent == 0, "one rank sends nothing"
    lossy = CODECS[settings.get("codec", "none")].loses == "carried"
    assert float((got - expected).norm() / expected.norm()) <= (0.3 if lossy else 1e-2)
    assert float(got.norm()) > 0
    exchange.close()
