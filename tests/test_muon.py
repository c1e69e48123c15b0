"""Muon: equal to its equations, alike on any number of ranks, exact after a reload, split by a rule that is told."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigstep.errors import ConfigError
from bigstep.models import build_model
from bigstep.optim import Muon, orthogonal, parameter_groups
from bigstep.optim.muon import muon_reference
from bigstep.optim.orthogonal import batches_of, flops_of, orthogonalise, orthogonalise_all
from bigstep.optim.parameter_groups import kinds_of

SHAPES = [(4, 9), (9, 4), (4, 9), (6, 3, 3, 3), (6, 6), (12, 2, 2, 2)]


def tensors(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]
    made[3] = made[3].contiguous(memory_format=torch.channels_last)
    return made


def take_steps(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for param, grad in zip(params, tensors(step, params[0].dtype), strict=True):
            param.grad = grad
        optimizer.step()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("renormalise", [True, False])
def test_matrices_together_equal_matrices_one_by_one(nesterov: bool, renormalise: bool) -> None:
    settings = {"lr": 0.3, "momentum": 0.9, "nesterov": nesterov, "iterations": 5, "weight_decay": 0.1}
    settings["renormalise"] = renormalise
    params, weights, velocities = [nn.Parameter(t) for t in tensors(0)], tensors(0), [0 * t for t in tensors(0)]
    optimizer = Muon(params, **settings)
    for step in range(1, 5):
        take_steps(optimizer, params, range(step, step + 1))
        for weight, grad, velocity in zip(weights, tensors(step), velocities, strict=True):
            muon_reference(weight, grad, velocity, **settings)
    # products in another order; an iteration may triple an error of 1e-16, and four steps add theirs
    torch.testing.assert_close([p.detach() for p in params], weights, rtol=1e-11, atol=1e-11)


def test_the_step_is_that_of_the_polar_factor() -> None:
    """U V' of the gradient U S V', up to the 30 % by which the iteration leaves singular values off 1."""
    weight = nn.Parameter(torch.zeros(5, 8, dtype=torch.float64))
    optimizer = Muon([weight], lr=1.0, momentum=0.0, nesterov=False)
    weight.grad = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    u, _, vt = torch.linalg.svd(weight.grad, full_matrices=False)
    inside = u.T @ -weight.detach() @ vt.T
    off_diagonal = inside - torch.diag(inside.diagonal())
    assert float(off_diagonal.abs().max()) < 1e-12
    assert bool(((inside.diagonal() > 0.65) & (inside.diagonal() < 1.25)).all())


def test_a_step_does_not_depend_on_the_size_of_the_gradient_and_tall_matrices_take_longer_ones() -> None:
    for rows, cols, factor in ((4, 16, 1.0), (16, 4, 2.0)):
        steps = []
        for scale in (1e-3, 1.0, 1e3):
            weight = nn.Parameter(torch.zeros(rows, cols, dtype=torch.float64))
            optimizer = Muon([weight], lr=0.5)
            weight.grad = scale * torch.randn(rows, cols, generator=torch.Generator().manual_seed(1)).double()
            optimizer.step()
            steps.append(weight.detach())
        torch.testing.assert_close(steps[0], steps[2], rtol=1e-3, atol=0)  # 1e-7 is added to the norm
        plain = orthogonalise_all([weight.grad], 5)[0]
        torch.testing.assert_close(steps[1], -0.5 * factor * plain, rtol=1e-6, atol=0)


def test_renormalised_weights_have_the_length_of_the_root_of_their_outputs_before_each_step() -> None:
    weight = nn.Parameter(torch.randn(6, 3, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    optimizer = Muon([weight], lr=0.0, renormalise=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert float(weight.detach().norm()) == pytest.approx(6**0.5, rel=1e-12)


def test_the_rest_is_adamw_or_sgd_at_its_own_rate() -> None:
    ours, theirs = ([nn.Parameter(t) for t in tensors(0)] for _ in range(2))
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2}
    adamw = torch.optim.AdamW(theirs, lr=0.05, betas=(0.9, 0.95), weight_decay=0.2)
    take_steps(Muon([{"params": ours, "kind": "rest"}], rest_lr=0.5, **settings), ours, range(1, 4))
    take_steps(adamw, theirs, range(1, 4))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)  # another order of roundings

    ours, theirs = ([nn.Parameter(t) for t in tensors(0)] for _ in range(2))
    sgd = torch.optim.SGD(theirs, lr=0.05, momentum=0.9, nesterov=True)  # torch decays inside the gradient
    take_steps(
        Muon([{"params": ours, "kind": "rest"}], lr=0.1, momentum=0.9, rest="sgd", rest_lr=0.5), ours, range(1, 4)
    )
    take_steps(sgd, theirs, range(1, 4))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def on_ranks(steps: int, shared: bool) -> list[Tensor]:
    params = [nn.Parameter(t) for t in tensors(0)]
    group = dist.group.WORLD if shared else None
    take_steps(Muon(params, lr=0.3, weight_decay=0.1, group=group), params, range(1, steps + 1))
    return [p.detach() for p in params]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_the_work_take_the_path_of_one_that_does_all(world, ranks: int) -> None:
    alone = on_ranks(3, False)
    for shared in world(ranks).run(on_ranks, 3, True):
        torch.testing.assert_close(
            shared, alone, rtol=1e-11, atol=1e-11
        )  # batches of another size are summed otherwise


def test_more_ranks_than_matrices_leave_some_without_work(world) -> None:
    for results in world(4).run(few, 2):
        torch.testing.assert_close(results, orthogonalise_all(tensors(5)[:2], 5), rtol=1e-12, atol=1e-12)


def few(count: int) -> list[Tensor]:
    return orthogonalise_all(tensors(5)[:count], 5, dist.group.WORLD)


@pytest.mark.parametrize("rest", ["sgd", "adamw"])
def test_a_reload_goes_on_along_exactly_the_same_path(rest: str) -> None:
    params = [nn.Parameter(t) for t in tensors(0, torch.float32)]
    kinds = ["matrix"] * 4 + ["rest"] * 2
    optimizer = Muon([{"params": params, "kind": kinds}], lr=0.1, rest=rest, weight_decay=0.01)
    take_steps(optimizer, params, range(1, 4))
    file = io.BytesIO()
    torch.save((optimizer.state_dict(), [p.data for p in params]), file)
    file.seek(0)
    state, values = torch.load(file, weights_only=True)
    others = [nn.Parameter(value) for value in values]
    other = Muon([{"params": others, "kind": kinds}], lr=99.0)
    other.load_state_dict(state)
    for either, its in ((optimizer, params), (other, others)):
        take_steps(either, its, range(4, 7))
    assert all(torch.equal(one, two) for one, two in zip(params, others, strict=True))


def test_lr_may_be_a_tensor_that_is_changed_in_place() -> None:
    by_number, by_tensor = ([nn.Parameter(t) for t in tensors(0)] for _ in range(2))
    rate = torch.tensor(0.7, dtype=torch.float64)
    kinds = ["matrix"] * 4 + ["rest"] * 2
    one = Muon([{"params": by_number, "kind": kinds}], lr=0.7, weight_decay=0.1)
    two = Muon([{"params": by_tensor, "kind": kinds}], lr=rate, weight_decay=0.1)
    for step in range(1, 4):
        one.param_groups[0]["lr"] = 0.7 / step
        rate.fill_(0.7 / step)
        take_steps(one, by_number, range(step, step + 1))
        take_steps(two, by_tensor, range(step, step + 1))
    torch.testing.assert_close(by_number, by_tensor, rtol=1e-12, atol=1e-12)


def test_gradients_are_left_as_they_are_and_what_has_none_is_skipped() -> None:
    params = [nn.Parameter(t) for t in tensors(0)]
    unused = nn.Parameter(torch.ones(3, 3))
    take_steps(Muon([*params, unused], lr=0.1), params, range(1, 2))
    assert all(torch.equal(p.grad, g) for p, g in zip(params, tensors(1), strict=True))
    assert torch.equal(unused, torch.ones(3, 3))


def test_columns_of_zeros_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 9), (9, 4), (4, 30), (4, 5), (6, 6), (17, 6)]
    matrices = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    apart = orthogonalise_all(matrices, 5)
    seen: list[tuple[int, ...]] = []
    whole = orthogonal.orthogonalise
    monkeypatch.setattr(orthogonal, "orthogonalise", lambda x, n: seen.append(tuple(x.shape)) or whole(x, n))
    monkeypatch.setattr(orthogonal, "_spare", lambda matrices: 1e9)
    together = orthogonalise_all(matrices, 5)
    assert seen == [(2, 6, 17), (4, 4, 30)]
    torch.testing.assert_close(together, apart, rtol=1e-11, atol=1e-12)  # sums of other lengths


def test_resnet50_goes_through_in_seven_batches_that_waste_little(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = build_model("resnet50", classes=1000, channels=3, image_size=224)
    groups = parameter_groups(model, 0.0)
    matrices = [p for g in groups for p, kind in zip(g["params"], g["kind"], strict=True) if kind == "matrix"]
    shapes = [(min(m.flatten(1).shape), max(m.flatten(1).shape)) for m in matrices]
    batches = batches_of(shapes, orthogonal.SPARE)
    assert (len(shapes), len(set(shapes)), len(batches)) == (53, 14, 7)
    needed = sum(flops_of(*shape) for shape in shapes)
    done = sum(len(batch) * flops_of(*max(shapes[place] for place in batch)) for batch in batches)
    assert needed == pytest.approx(48.9e9, rel=0.01)  # an iteration: five take 0.8 ms at 300 TFLOP/s
    assert done < 1.1 * needed
    assert _kernels_of_one_update(shapes, monkeypatch) < 330  # 3 ms are 9 us for each; one by one they would be 1,500


def _kernels_of_one_update(shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> int:
    """Operations that write memory in a step on matrices of a sixteenth of the sides, under a loss scale."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            if name == "_foreach_copy_":  # into slices, and from bf16: at worst a launch a tensor
                self.count += len(args[0])
            elif name.endswith("baddbmm"):
                self.count += 2  # a copy and a product
            elif not func.is_view and not name.startswith("empty"):
                self.count += 1
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(orthogonal, "_spare", lambda matrices: orthogonal.SPARE / 16**3)
    params = [nn.Parameter(torch.randn(rows // 16, cols // 16)) for rows, cols in shapes]
    optimizer = Muon(params, lr=torch.tensor(0.1), renormalise=True)
    optimizer.create_state()
    for param in params:
        param.grad = torch.randn_like(param)
    with Counting() as counting:
        optimizer.step()
    return counting.count


@pytest.mark.parametrize("rest", ["sgd", "adamw"])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_under_a_grad_scaler_steps_are_those_without_and_one_that_overflows_changes_nothing(
    rest: str, renormalise: bool, dtype: torch.dtype
) -> None:
    kinds = ["matrix"] * 4 + ["rest"] * 2
    plain, scaled = ([nn.Parameter(t) for t in tensors(0, dtype)] for _ in range(2))
    settings = {"lr": 0.1, "rest": rest, "renormalise": renormalise, "weight_decay": 0.1}
    one, two = (Muon([{"params": each, "kind": kinds}], **settings) for each in (plain, scaled))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(1, 4):
        take_steps(one, plain, range(step, step + 1))
        before = copy.deepcopy([p.detach() for p in scaled]), copy.deepcopy(two.state_dict()["state"])
        for scale in (float("inf"), None):  # the first try is dropped
            factor = scaler.scale(torch.ones(())) * (scale or 1.0)
            for param, grad in zip(scaled, tensors(step, dtype), strict=True):
                param.grad = grad * factor
            scaler.step(two)
            scaler.update()
            if scale is not None and step > 1:  # in the first step there is no state before
                assert all(torch.equal(p, b) for p, b in zip(scaled, before[0], strict=True))
                torch.testing.assert_close(two.state_dict()["state"], before[1], rtol=0, atol=0)
    torch.testing.assert_close(scaled, plain, rtol=0, atol=0)  # a scale is a power of two


def test_five_iterations_bring_singular_values_near_one_whatever_they_were() -> None:
    g = torch.Generator().manual_seed(0)
    matrices = torch.randn(3, 16, 40, generator=g, dtype=torch.float64)
    matrices[1] *= torch.logspace(0, -2, 16, dtype=torch.float64)[:, None]  # far from orthogonal
    values = torch.linalg.svdvals(orthogonalise(matrices, 5))
    assert 0.3 < float(values.min()) < float(values.max()) < 1.3
    assert not torch.isnan(orthogonalise(torch.zeros(1, 3, 4), 5)).any()


def test_products_in_bf16_are_within_three_per_cent() -> None:
    """What a GPU does with float32 weights: fifteen products, each rounded to 8 bits (0.4 %), measured 1.5 %."""
    matrices = torch.randn(2, 64, 144, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = orthogonalise(matrices, 5)
    rounded = orthogonalise(matrices.bfloat16(), 5).double()
    assert float((rounded - exact).norm() / exact.norm()) < 0.03


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("renormalise", [True, False])
def test_on_a_gpu_steps_are_those_of_float64_within_what_bf16_rounds(renormalise: bool) -> None:
    exact = [nn.Parameter(t) for t in tensors(0)]
    there = [nn.Parameter(t.float().cuda()) for t in tensors(0)]
    settings: dict[str, Any] = {"lr": 0.1, "renormalise": renormalise}
    one, two = Muon(exact, **settings), Muon(there, **settings)
    for step in range(1, 4):
        before = [p.detach().clone() for p in exact]
        take_steps(one, exact, range(step, step + 1))
        for param, grad in zip(there, tensors(step), strict=True):
            param.grad = grad.float().cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            two.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for ours, theirs, old in zip(there, exact, before, strict=True):
            off = (ours.detach().cpu().double() - theirs.detach()).norm()
            # small matrices may be badly conditioned, and the errors of three steps add up
            assert float(off) < 0.1 * step * float((theirs.detach() - old).norm())


class Tower(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.place = nn.Parameter(torch.zeros(5, 8))
        self.attention = nn.MultiheadAttention(8, 2)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.memory = nn.LSTM(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = None if tied else nn.Linear(8, 20, bias=False)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_positions_heads_norms_and_biases_are_the_rest(tied: bool) -> None:
    model = Tower(tied)
    names = {parameter: name for name, parameter in model.named_parameters()}
    matrices = {names[p] for p, kind in kinds_of(model).items() if kind == "matrix"}
    assert matrices == {
        "attention.in_proj_weight", "attention.out_proj.weight", "mlp.0.weight", "mlp.2.weight",
        "memory.weight_ih_l0", "memory.weight_hh_l0",
    }  # fmt: skip
    optimizer = Muon(parameter_groups(model, 0.1), lr=0.1)
    optimizer.create_state()
    assert {names[p] for p in optimizer.state if "momentum_buffer" in optimizer.state[p]} == matrices


def test_a_transposed_convolution_at_the_end_is_the_head_too() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.ConvTranspose2d(8, 3, 3, bias=False))
    assert list(kinds_of(model).values()) == ["matrix", "rest", "matrix", "rest", "rest"]


@pytest.mark.parametrize(
    "mistake",
    [
        lambda p: Muon(p, lr=-1),
        lambda p: Muon(p, lr=0.1, momentum=1.0),
        lambda p: Muon(p, lr=0.1, iterations=0),
        lambda p: Muon(p, lr=0.1, rest="lion"),
        lambda p: Muon(p, lr=0.1, rest_lr=-1.0),
        lambda p: Muon(p, lr=0.1, betas=(1.0, 0.9)),
        lambda p: Muon(p, lr=0.1, betas=0.9),
        lambda p: Muon(p, lr=float("nan")),
        lambda p: Muon(p, lr="0.1"),
        lambda p: Muon(p, lr=torch.ones(1)),
        lambda p: Muon(p, lr=0.1, iterations=2.5),
        lambda p: Muon([{"params": p, "rest": "lion"}], lr=0.1),
        lambda p: Muon([{"params": p, "momentum": 1.5}], lr=0.1),
        lambda p: Muon([{"params": p, "kind": 5}], lr=0.1),
        lambda p: Muon([nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))], lr=0.1),
        lambda p: Muon([{"params": p, "kind": "head"}], lr=0.1),
        lambda p: Muon([{"params": p, "kind": ["matrix"]}], lr=0.1),
        lambda p: Muon([{"params": [nn.Parameter(torch.ones(3))], "kind": "matrix"}], lr=0.1),
    ],
)
def test_settings_out_of_range_are_refused_in_one_sentence(mistake: Any) -> None:
    with pytest.raises(ConfigError, match=r"given .*\.$"):
        mistake([nn.Parameter(t) for t in tensors(0)])


def test_a_group_that_is_refused_is_not_added_and_one_that_fits_takes_steps() -> None:
    params = [nn.Parameter(t) for t in tensors(0)]
    optimizer = Muon(params[:3], lr=0.1)
    with pytest.raises(ConfigError, match="rest='lion'"):
        optimizer.add_param_group({"params": params[3:], "rest": "lion"})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": params[3:], "rest": "sgd"})
    take_steps(optimizer, params, range(1, 2))
    assert not any(torch.equal(one, two) for one, two in zip(params, tensors(0), strict=True))


@pytest.mark.parametrize("rest", ["sgd", "adamw"])
def test_weights_and_gradients_may_lie_in_memory_in_any_way(rest: str) -> None:
    alike = [nn.Parameter(t) for t in tensors(0)]
    other = [nn.Parameter(torch.stack([t, t], -1)[..., 0]) for t in tensors(0)]  # with gaps
    kinds = ["matrix"] * 2 + ["rest"] * 4
    for params, order in ((alike, lambda g: g), (other, lambda g: g.transpose(0, 1).contiguous().transpose(0, 1))):
        optimizer = Muon([{"params": params, "kind": kinds}], lr=0.1, rest=rest)
        for step in (1, 2):
            for param, grad in zip(params, tensors(step), strict=True):
                param.grad = order(grad)
            optimizer.step()
    torch.testing.assert_close(other, alike, rtol=1e-11, atol=1e-11)  # columns may have another order


def test_weights_without_numbers_are_left_alone() -> None:
    params = [nn.Parameter(torch.zeros(shape)) for shape in ((0, 4), (4, 0), (0,), (3, 3))]
    optimizer = Muon(params, lr=0.1, renormalise=True)
    optimizer.create_state()
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert bool((params[3] < 0).all())


def test_a_copy_and_a_pickle_of_the_optimizer_go_on_alike() -> None:
    params = [nn.Parameter(t) for t in tensors(0)]
    optimizer = Muon(params, lr=0.1)
    take_steps(optimizer, params, range(1, 3))
    twin = copy.deepcopy(optimizer)
    others = twin.param_groups[0]["params"]
    take_steps(optimizer, params, range(3, 5))
    take_steps(twin, others, range(3, 5))
    assert all(torch.equal(one, two) for one, two in zip(params, others, strict=True))
