"""Every Python program of the README and of the pages runs as it is printed.

Some pages show what belongs into a program of the reader's; each test gives what such a program would have already.
"""

from __future__ import annotations

import gzip
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bigstep.check import Pool
from bigstep.config import AsynchronousConfig, LrConfig, RunConfig, WorkersConfig
from test_testing import Net, samples

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
PROPERTIES = ["same start on every rank", "gradient of P ranks = of one"]
Running = Callable[..., list[dict[str, Any]]]
Bigstep = Callable[..., tuple[int, str, str]]


def programs_of(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)


PROGRAMS = {page: found for page in PAGES if (found := programs_of((ROOT / page).read_text(encoding="utf-8")))}


def rate_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[nn.parallel.DistributedDataParallel]:
    """A wrapped model in a group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    dist.destroy_process_group()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Running:
    """Run the programs of a page one after the other, each with what is said to be there before it."""
    monkeypatch.chdir(tmp_path)

    def run(page: str, *before: dict[str, Any]) -> list[dict[str, Any]]:
        programs = PROGRAMS[page]
        assert len(before) in (0, len(programs)), f"{page} has {len(programs)} programs: say what is there before each"
        ran = [{"__name__": "__main__", **names} for names in before or [{}] * len(programs)]
        for number, (program, names) in enumerate(zip(programs, ran, strict=True)):
            exec(compile(program, f"{page}, program {number + 1}", "exec"), names)
        return ran

    return run


def small(**fields: Any) -> RunConfig:
    rate = LrConfig(base=0.1, scaling="none")
    return RunConfig(workers=WorkersConfig(count=2, local_batch=8), epochs=1, lr=rate, **fields)


def test_the_readme_and_the_pages_on_plans_and_data(run: Running) -> None:
    assert run("README.md")[0]["rate"](5) == 29.0
    assert 0.5 < run("docs/planner.md")[0]["step"].efficiency < 1
    run("docs/data.md")


def test_the_tour_loads_what_it_trained(run: Running, bigstep: Bigstep) -> None:
    words = "train sony --device cpu --steps 1 --model mlp --workers 2 --batch 16 --no-report --out runs/sony-mini"
    status, _, err = bigstep(*words.split())
    assert status == 0, err
    assert run("docs/tour.md")[-1]["config"].recipe == "sony"


def test_the_page_on_the_exchange(
    run: Running, alone: nn.parallel.DistributedDataParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bigstep.comm import Exchange
    from bigstep.lab.hosts import Lab

    another = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    inputs = torch.randn(2, 4)
    monkeypatch.setattr(Lab, "__enter__", lambda lab: lab)  # hosts need root; test_lab.py and test_hosts.py make them
    monkeypatch.setattr(Lab, "__exit__", lambda *_: None)
    monkeypatch.setattr(Lab, "run", lambda lab, script: [{}] * lab.hosts)
    parts = {
        "Exchange": Exchange,
        "ddp": another,
        "workers": 2,
        "mine": [0, 1],
        "loss": lambda w: another(inputs)[w, 0],
    }
    assert len(run("docs/exchange.md", {"ddp": alone}, parts, {"Lab": Lab})[2]["results"]) == 8
    gradient = another.module.weight.grad
    assert gradient is not None
    assert torch.allclose(gradient[0], inputs.sum(0), rtol=1e-5), "float32, and the sum over both parts"


def test_the_page_on_kernels(run: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    from bigstep import gpu
    from bigstep.models import build_model

    emulated = partial(gpu.GraphedStep, precision="float32", emulate=True)
    monkeypatch.setattr(gpu, "GraphedStep", emulated)  # a graph needs a GPU; the tape that stands for it does not
    model = build_model("small", classes=10, channels=1, image_size=28)
    batches = [(torch.randn(4, 1, 28, 28), torch.arange(4))] * 2
    names = {"model": model, "loss": nn.CrossEntropyLoss(), "optimizer": rate_sgd(model.parameters())}
    assert run("docs/kernels.md", {**names, "batches": batches})[0]["loss_value"].isfinite()


def test_the_page_on_reliability(run: Running, check_pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    from bigstep import check as package

    monkeypatch.setattr(package, "check", partial(package.check, pool=check_pool, only=PROPERTIES, ranks=(1, 2)))
    own = {"build_network": Net, "my_loss": nn.functional.cross_entropy, "my_optimizer": rate_sgd}
    report = run("docs/reliability.md", {**own, "train_set": samples(), "test_set": samples()})[0]["report"]
    assert report.passed


def test_the_page_on_pieces_of_your_own(run: Running, check_pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    from bigstep import testing

    same = partial(testing.assert_same_on_ranks, pool=check_pool, only=PROPERTIES, ranks=(1, 2))
    monkeypatch.setattr(testing, "assert_same_on_ranks", same)
    mine = ModuleType("mine")
    own = {"Network": Net, "Large": Net, "loss": nn.functional.cross_entropy, "samples": samples}
    mine.__dict__.update(own)
    monkeypatch.setitem(sys.modules, "mine", mine)
    first, second, third = run("docs/extending.md", {}, {"pytest": pytest, **own}, {"__name__": __name__})
    first["test_one_two_and_three_ranks_train_the_same"]()
    second["test_the_large_model_too"](same)
    assert third["LION"].settings.beta == 0.9


def test_the_page_on_asynchronous_training(run: Running, bigstep: Bigstep, tmp_path: Path) -> None:
    rows = "".join(f"{1 if n % 2 else -1} {1 + n % 2}:1 {3 + n % 5}:0.5\n" for n in range(40))
    for name in ("rcv1_train.svm.gz", "rcv1_test.svm.gz"):
        (tmp_path / name).write_bytes(gzip.compress(rows.encode()))
    status, _, err = bigstep("train", "hogwild", "--data", "rcv1_train.svm.gz", "--no-report")
    assert status == 0, err
    config = small(asynchronous=AsynchronousConfig(method="hogwild", replicas=1))
    own = {"config": config, "model": Net(), "loss": nn.functional.cross_entropy}
    result = run("docs/asynchronous.md", {}, {}, {**own, "train_set": samples(), "test_set": samples()})[2]["result"]
    assert result.facts["updates_per_s"] > 0


def test_no_page_with_a_program_is_left_out() -> None:
    assert set(re.findall(r'run\("([^"]+)"', Path(__file__).read_text())) == set(PROGRAMS)


def test_programs_are_found() -> None:
    assert programs_of("```python\na = 1\n```\n```\nbigstep\n```\n```python\nb = 2\n```\n") == ["a = 1\n", "b = 2\n"]
