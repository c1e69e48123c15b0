"""What several GPUs ask of a program, as far as it can be seen without them: cores, messages, launches."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bigstep
import bigstep.engine.ranks as ranks_module
from bigstep import described
from bigstep.engine.ranks import Ranks, joined_ranks, on_host
from bigstep.errors import ConfigError
from bigstep.exchange.messages import is_gloo
from worlds import World

SOURCES = sorted(Path(bigstep.__file__).parent.rglob("*.py"))


def arrivals() -> list[object]:
    """What each way of sending an object brings, of a weight that is still tied to its graph."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    state = {"weight": [2 * nn.Parameter(torch.full((2,), 1.0 + ranks.rank))], "name": ("a", 1)}
    return [ranks.gather(state), ranks.to_first(state), ranks.from_first(state)]


def test_objects_travel_by_way_of_the_host(world: Callable[[int], World]) -> None:
    first, second = world(2).run(arrivals)
    expected = [{"weight": [torch.full((2,), 2.0 * n)], "name": ("a", 1)} for n in (1, 2)]
    assert str(first) == str([expected, expected, expected[0]])  # a tensor with a graph, or on a device, says so
    assert str(second) == str([expected, None, expected[0]])


def test_what_is_on_the_host_is_copied_only_where_it_is_asked_for() -> None:
    here = torch.ones(3)
    there, copied = on_host({"a": [here]}), on_host({"a": [here]}, copy=True)
    assert there["a"][0] is here or there["a"][0].data_ptr() == here.data_ptr()
    assert copied["a"][0].data_ptr() != here.data_ptr()


@pytest.mark.parametrize(
    ("seen", "local_rank", "place"), [(1, 3, 0), (4, 3, 3), (2, 3, None)], ids=["its own", "all", "too few"]
)
def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one_that_its_launcher_shows_it(
    seen: int, local_rank: int, place: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    if place is None:
        with pytest.raises(ConfigError, match="4 ranks were asked for on this machine, but it has 2 GPUs"):
            ranks_module._device("auto", local_rank, 4)
    else:
        assert ranks_module._device("auto", local_rank, 4) == torch.device("cuda", place)


def pretend_gpus(local_sizes: list[int], gpus: list[str], file: str) -> tuple[str, dict[str, object]]:
    """Join as ranks that see one GPU each, up to where NCCL would be asked; return a refusal, or what is asked."""
    rank, asked = dist.get_rank(), dict[str, object]()

    def ask(*words: object, **named: object) -> None:
        asked.update(named, backend=words)
        raise ConfigError("There is no NCCL here.")

    places = {"RANK": rank, "WORLD_SIZE": len(gpus), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": local_sizes[rank]}
    with pytest.MonkeyPatch.context() as pretended:
        for name, value in {**places, ranks_module.STORE_VARIABLE: file}.items():
            pretended.setenv(name, str(value))
        for name, answer in {"is_available": True, "device_count": 1, "set_device": None}.items():
            pretended.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
        pretended.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=gpus[rank]))
        pretended.setattr(dist, "is_initialized", lambda: False)
        pretended.setattr(dist, "init_process_group", ask)
        with pytest.raises(ConfigError) as refused, joined_ranks():
            pass
    return str(refused.value), {name: str(asked.get(name)) for name in ("backend", "device_id", "world_size")}


def test_ranks_that_see_one_gpu_each_join_alike_however_many_are_on_their_machines(
    world: Callable[[int], World], tmp_path: Path
) -> None:
    # three tasks of Slurm on two nodes, with a GPU for each task
    first, *others = world(3).run(pretend_gpus, [2, 2, 1], ["a", "b", "c"], str(tmp_path / "store"))
    assert first == ("There is no NCCL here.", {"backend": "('nccl',)", "device_id": "cuda:0", "world_size": "3"})
    assert others == [first, first]


def test_ranks_that_see_one_gpu_each_are_told_if_it_is_the_same(world: Callable[[int], World], tmp_path: Path) -> None:
    told = world(3).run(pretend_gpus, [3, 3, 3], ["a", "b", "a"], str(tmp_path / "store"))
    ((sentence, asked),) = {(sentence, asked["backend"]) for sentence, asked in told}
    assert sentence.startswith("Ranks 0 and 2 were started on one GPU; start one rank per GPU")
    assert asked == "None"


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("250000 100000", 3), ("50000 100000", 1), ("9900000 100000", 8), (None, 8)]
)
def test_a_process_counts_the_cores_that_it_may_use(
    quota: str | None, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(described, "_QUOTA", tmp_path / "cpu.max")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    assert described.usable_cores() == cores


def threads_of(cores: list[set[int]]) -> int:
    """Join as ranks of one machine whose launcher lets each use these cores; return the threads of a forward."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as pretended:
        pretended.delenv("OMP_NUM_THREADS", raising=False)
        pretended.setenv("LOCAL_WORLD_SIZE", str(len(cores)))
        pretended.setattr(os, "sched_getaffinity", lambda _: cores[dist.get_rank()])
        pretended.setattr(described, "_QUOTA", Path("/nowhere"))
        with joined_ranks("cpu"):
            found = torch.get_num_threads()
    torch.set_num_threads(before)
    return found


def test_ranks_divide_the_cores_that_they_share_and_keep_those_that_they_were_bound_to(
    world: Callable[[int], World],
) -> None:
    everywhere, here, there = set(range(6)), {0, 1, 2}, {3, 4, 5}
    assert world(3).run(threads_of, [everywhere] * 3) == [2, 2, 2]
    assert world(3).run(threads_of, [here, there, {6, 7}]) == [3, 3, 2], "as tasks of srun and mpirun are bound"
    assert world(3).run(threads_of, [here, here, there]) == [1, 1, 3]


@pytest.fixture
def carries_only_gpus() -> Iterator[None]:
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("carries_only_gpus")
def test_a_device_that_the_programs_own_group_does_not_carry_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"train on cpu, but .* only tensors on cuda: .*'cpu:gloo,cuda:nccl'"),
        joined_ranks("cpu"),
    ):
        pass


@pytest.mark.usefixtures("carries_only_gpus")
@pytest.mark.parametrize(("local_rank", "place"), [(None, 2), ("1", 1)], ids=["spawn", "torchrun"])
def test_a_program_with_a_group_of_its_own_keeps_the_gpu_it_has_chosen_unless_its_launcher_gives_one(
    local_rank: str | None, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    for name, answer in {"is_available": True, "device_count": 4, "current_device": 2, "set_device": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    with joined_ranks() as ranks:
        assert ranks.device == torch.device("cuda", place)


def gloo_by_device() -> list[bool]:
    group = dist.new_group([dist.get_rank()], backend="cpu:gloo", use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return [is_gloo(group, torch.empty(1, device=device)) for device in ("cpu", "meta")]


def test_who_carries_a_tensor_is_asked_of_its_kind_of_device(world: Callable[[int], World]) -> None:
    # `init_process_group()` without a name makes such groups
    assert world(2).run(gloo_by_device) == [[True, False]] * 2


def launches(path: Path) -> Iterator[tuple[str, bool]]:
    """Every launch of a Triton kernel in a file, and whether it is made on the device of its tensors."""

    def look(node: ast.AST, guarded: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.With):
            guarded |= any(ast.unparse(item.context_expr).startswith("on_device_of(") for item in node.items)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            name = ast.unparse(node.func.value)
            if name.endswith("_kernel"):
                yield f"{path.name}:{node.lineno} {name}", guarded
        for child in ast.iter_child_nodes(node):
            yield from look(child, guarded)

    return look(ast.parse(path.read_text()), False)


def test_kernels_are_launched_on_the_device_of_their_tensors() -> None:
    found = dict(launch for path in SOURCES for launch in launches(path))
    assert len(found) > 20, "the launches were not found"
    assert not [name for name, guarded in found.items() if not guarded], "Triton launches on the current device"
