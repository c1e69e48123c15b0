"""Small programs of strangers, run on one rank: of the right ones nothing is said, of the others what is wrong."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from bigstep.doctor.examination import diagnose
from bigstep.doctor.facts import Backward, Collective, Forward, Save, State, Update, Wrote
from bigstep.doctor.finding import Case
from bigstep.doctor.launch import Limits, run_world
from bigstep.doctor.runs import _can_resume
from bigstep.doctor.settings import Settings
from bigstep.doctor.world import Process, World

NO_COMPILER = """
import sys, types
sys.modules["torch._dynamo"] = types.SimpleNamespace(disable=lambda f, *_, **__: f, graph_break=lambda: None)
"""
"""torch's optimizers import its compiler only to exclude themselves from it: half of the time of such a program."""
USES_COMPILER = ("checkpoint(", "process_group(")
HEAD = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
x, y = torch.randn(64, 8), torch.randint(3, (64,))
body, head = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 3)
first, second = torch.optim.SGD(body.parameters(), lr=0.01), torch.optim.SGD(head.parameters(), lr=0.01)
"""
PROGRAMS = {
    "one optimizer steps with every second batch, and before the other": """
for step in range(8):
    F.cross_entropy(head(body(x)), y).backward()
    if step % 2:
        first.step()
        first.zero_grad()
    second.step()
    second.zero_grad()
""",
    "the second of two optimizers clears nothing: uncleared-gradients": """
for step in range(8):
    first.zero_grad()
    F.cross_entropy(head(body(x)), y).backward()
    first.step()
    second.step()
""",
    "gradients of another network are left where they fall": """
for step in range(8):
    second.zero_grad()
    F.cross_entropy(head(body(x).detach()), y).backward()
    second.step()
    first.zero_grad()
    F.cross_entropy(head(body(x)), 2 - y).backward()
    first.step()
""",
    "of two networks with the same names one is never cleared: uncleared-gradients": """
other = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
second = torch.optim.SGD(other.parameters(), lr=0.01)
for step in range(8):
    body(x).square().mean().backward()
    first.step()
    second.zero_grad()
    (other(x) - body(x)).square().mean().backward()
    second.step()
""",
    "each network is clipped behind its own backward": """
for step in range(8):
    first.zero_grad()
    second.zero_grad()
    h = body(x)
    h.square().mean().backward()
    nn.utils.clip_grad_norm_(body.parameters(), 1.0)
    F.cross_entropy(head(h.detach()), y).backward()
    nn.utils.clip_grad_norm_(head.parameters(), 1.0)
    first.step()
    second.step()
""",
    "the second backward reaches what was clipped: clipped-early": """
for step in range(8):
    first.zero_grad()
    second.zero_grad()
    body(x).square().mean().backward()
    nn.utils.clip_grad_norm_(body.parameters(), 1.0)
    F.cross_entropy(head(body(x)), y).backward()
    first.step()
    second.step()
""",
    "the norm is asked for while gradients add up": """
for step in range(8):
    for part, target in zip(x.chunk(2), y.chunk(2)):
        (F.cross_entropy(head(body(part)), target) / 2).backward()
        nn.utils.clip_grad_norm_([*body.parameters(), *head.parameters()], float("inf"))
    for optimizer in (first, second):
        optimizer.step()
        optimizer.zero_grad()
""",
    "a scaler skips the first steps": """
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
for step in range(60):
    first.zero_grad()
    second.zero_grad()
    scaler.scale(1e4 * F.cross_entropy(head(body(x)), y)).backward()
    scaler.unscale_(first)
    scaler.unscale_(second)
    nn.utils.clip_grad_norm_(body.parameters(), 1.0)
    scaler.step(first)
    nn.utils.clip_grad_norm_(head.parameters(), 1.0)
    scaler.step(second)
    scaler.update()
""",
    "only the other optimizer's gradients are unscaled: clipped-early": """
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for step in range(8):
    first.zero_grad()
    second.zero_grad()
    scaler.scale(F.cross_entropy(head(body(x)), y)).backward()
    scaler.unscale_(first)
    nn.utils.clip_grad_norm_(head.parameters(), 1.0)
    scaler.step(first)
    scaler.step(second)
    scaler.update()
""",
    "activations are computed twice, segment by segment": """
from torch.utils.checkpoint import checkpoint_sequential
net = nn.Sequential(body, head)
class Saving(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net
    def forward(self, x):
        return checkpoint_sequential(self.net, 2, x.requires_grad_(), use_reentrant=True)
net = Saving()
rate = torch.optim.lr_scheduler.CosineAnnealingLR(first, 8)
for step in range(8):
    first.zero_grad()
    second.zero_grad()
    F.cross_entropy(net(x), y).backward()
    first.step()
    second.step()
    rate.step()
""",
    "activations are computed twice, and micro-batches add up: undivided-accumulation": """
from torch.utils.checkpoint import checkpoint
net = nn.Sequential(body, head)
class Saving(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net
    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=False)
net = Saving()
for step in range(8):
    for part, target in zip(x.chunk(2), y.chunk(2)):
        F.cross_entropy(net(part), target).backward()
    for optimizer in (first, second):
        optimizer.step()
        optimizer.zero_grad()
""",
    "a schedule has no answer behind its end": """
rate = torch.optim.lr_scheduler.LambdaLR(first, lambda step: (1 - step / 1001) ** 0.9)
table = torch.optim.lr_scheduler.LambdaLR(second, lambda step: [1.0 + i for i in range(50)][step])
for step in range(8):
    first.zero_grad()
    second.zero_grad()
    F.cross_entropy(head(body(x)), y).backward()
    first.step()
    second.step()
    rate.step()
    table.step()
""",
}


def watch(folder: Path, program: str) -> World:
    before = "" if any(word in program for word in USES_COMPILER) else NO_COMPILER
    (folder / "train.py").write_text(before + HEAD + program)
    (folder / "facts").mkdir()
    place = str(folder)
    settings = Settings(
        facts=f"{place}/facts", root=place, original=place, own=place, steps=8, ranks=1, began=time.time()
    )
    seen = run_world(["train.py"], settings, folder, Limits(total_s=60), gpus=False)
    assert seen.ended == "stopped", seen.output
    return seen


@pytest.mark.parametrize("name", PROGRAMS)
def test_of_a_program_nothing_is_said_but_what_is_wrong(tmp_path: Path, name: str) -> None:
    _, _, wrong = name.partition(": ")
    seen = watch(tmp_path, PROGRAMS[name])
    result = diagnose(Case(one=seen), "train.py", runs=[seen])
    assert [finding.name for finding in result.faults] == ([wrong] if wrong else [])


def test_a_backward_within_another_one_is_no_micro_batch(tmp_path: Path) -> None:
    seen = watch(tmp_path, PROGRAMS["activations are computed twice, segment by segment"])
    updates = seen.all(Update)
    assert updates
    assert [update.micro_steps for update in updates] == [1, 0] * (len(updates) // 2)
    assert len(seen.all(Backward)) == len(seen.all(Forward))


PARTLY = """
both = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.01)
for step in range(8):
    both.zero_grad()
    F.cross_entropy(head(body(x)), y).backward()
    nn.utils.clip_grad_norm_(body.parameters(), 0.01)
    nn.utils.clip_grad_norm_(head.parameters(), 0.01)
    both.step()
"""


def test_the_gradient_that_is_used_is_whole_where_its_parts_are_clipped_apart(tmp_path: Path) -> None:
    updates = [update for update in watch(tmp_path, PARTLY).all(Update) if update.norms]
    assert updates
    assert all(update.used == pytest.approx(update.local, rel=1e-9) for update in updates)


CALLS = """
import os
import torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=0, world_size=1)
group = dist.new_group([0])
for step in range(8):
    first.zero_grad()
    body(x).mean().backward()
    if step == SAVES:
        torch.save(body.state_dict(), "body.pt")
    for each in (None, group, dist.GroupMember.NON_GROUP_MEMBER):
        dist.all_reduce(torch.ones(3), group=each)
    first.step()
"""


def test_every_collective_of_a_rank_is_told_whether_it_saves_or_not(tmp_path: Path) -> None:
    told = []
    for saves in (6, 99):
        (tmp_path / str(saves)).mkdir()
        calls = watch(tmp_path / str(saves), CALLS.replace("SAVES", str(saves))).all(Collective)
        told.append([(call.values, call.done) for call in calls])
    assert told[0] == told[1] == [(3, done) for _ in range(16) for done in (False, True)]


RESIDUAL = """
residual = {name: torch.randn_like(p) * 1e-3 for name, p in body.named_parameters()}
average = {name: p.detach() * 0.9 for name, p in body.named_parameters()}
for step in range(8):
    first.zero_grad()
    F.cross_entropy(body(x), y).backward()
    first.step()
"""


def test_what_is_kept_by_the_names_of_weights_is_an_average_only_if_it_follows_them(tmp_path: Path) -> None:
    states = [state for state in watch(tmp_path, RESIDUAL).all(State) if state.what == "average"]
    assert len(states) == 1


TEMPORARY = """
import tempfile
with tempfile.NamedTemporaryFile("w+", dir="FOLDER") as file:
    file.write("x")
for step in range(8):
    first.zero_grad()
    body(x).mean().backward()
    first.step()
"""


def test_a_temporary_file_may_be_new_in_an_old_folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("old")
    os.utime(folder, (1, 1))
    assert watch(tmp_path, TEMPORARY.replace("FOLDER", str(folder))).all(Wrote) == []


@pytest.mark.parametrize("holds, again", [(("weights",), True), (("counter",), False)])
def test_what_has_saved_is_started_again_if_a_module_of_its_own_loads(
    tmp_path: Path, holds: tuple[str, ...], again: bool
) -> None:
    """As of `-m package.train`, or of a script that leaves checkpoints to a module."""
    ranks = [Process([Save(path="last.pt", holds=holds, updates=3)], 0, 1)]
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("from package.saving import save\n")
    assert not _can_resume(World(ranks), tmp_path, None)
    (tmp_path / "package" / "saving.py").write_text("model.load_state_dict(torch.load('last.pt'))\n")
    assert _can_resume(World(ranks), tmp_path, tmp_path / "package" / "train.py") == again


STREAM = """
import random
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
class Files(IterableDataset):
    def __init__(self):
        self.order, self.noise = random.Random(0), random.Random(0)
    def __iter__(self):
        files = list(range(64))
        self.order.shuffle(files)
        worker = get_worker_info()
        for file in files[worker.id :: worker.num_workers]:
            yield x[file] + NOISE, y[file]
for epoch in range(2):
    for points, labels in DataLoader(Files(), batch_size=4, num_workers=2):
        first.zero_grad()
        F.cross_entropy(body(points), labels).backward()
        first.step()
"""


@pytest.mark.parametrize("noise, wrong", [("0.0", []), ("self.noise.random()", ["alike-workers"])])
def test_loader_processes_may_order_a_stream_alike_before_they_share_it(
    tmp_path: Path, noise: str, wrong: list[str]
) -> None:
    seen = watch(tmp_path, STREAM.replace("NOISE", noise))
    found = diagnose(Case(one=seen), "train.py", runs=[seen]).faults
    assert [finding.name for finding in found] == wrong
