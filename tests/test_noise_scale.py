"""The gradient noise scale: what is measured is what the closed form says, on any ranks, resumed or not."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigstep.config import DataConfig, ExchangeConfig, LrConfig, OptimizerConfig, RunConfig, WorkersConfig
from bigstep.data import DataPair
from bigstep.data.sampler import Position, Step
from bigstep.engine.build import Own, build
from bigstep.engine.methods.synchronous import Synchronous
from bigstep.engine.observers.noise import NoiseScale, NoiseWatch, advice
from bigstep.engine.observers.progress import Progress
from bigstep.engine.ranks import Ranks
from bigstep.engine.run import _noise_watch
from bigstep.errors import ConfigError
from bigstep.models import GPT
from bigstep.plan import cli_result
from bigstep.plan.accuracy import CIFAR10_EPOCHS, CIFAR10_LARS, law_from_runs
from bigstep.recipes import load
from bigstep.records import RunWriter, read_run
from bigstep.report.grid import runs_grid
from bigstep.report.study import study_of
from bigstep.report.table import rows_of
from bigstep.train import fit
from test_text import TEXT, windows
from worlds import World

WIDTH, SAMPLES = 64, 4096


def order(workers: int = 16, local_batch: int = 4, **changes: Any) -> RunConfig:
    base = RunConfig(
        workers=WorkersConfig(count=workers, local_batch=local_batch),
        epochs=6,
        precision="float64",
        lr=LrConfig(base=0.01, scaling="none"),
        optimizer=OptimizerConfig(name="sgd", momentum=0.9),
        data=DataConfig(loaders=0),
        evaluate_every=100,
    )
    return dataclasses.replace(base, **changes)


def samples(signal2: float, spread: float = 1.0) -> torch.utils.data.TensorDataset:
    """Vectors x with E[x] = mu, |mu|^2 = signal2, and tr(Cov x) = spread^2 * WIDTH."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(SAMPLES, WIDTH, dtype=torch.float64, generator=generator)
    return torch.utils.data.TensorDataset(math.sqrt(signal2 / WIDTH) + spread * noise, torch.zeros(SAMPLES))


def mean_output(output: Tensor, _: Tensor) -> Tensor:
    """A loss whose gradient of a sample is the sample itself: G and Sigma are those of the data, at any weights."""
    return output.mean()


def run(config: RunConfig, folder: str, signal2: float = 0.5, spread: float = 1.0, **arguments: Any) -> dict[str, Any]:
    data = samples(signal2, spread)
    model = nn.Linear(WIDTH, 1, bias=False)
    nn.init.zeros_(model.weight)
    result = fit(config, model, (data, data), mean_output, out=folder, device="cpu", **arguments)
    rows = read_run(Path(folder)).train if Path(folder, "run.json").exists() else []
    return {"scales": [row.get("noise_scale") for row in rows], **result.facts}


def test_it_is_the_closed_form_of_a_linear_model(tmp_path: Path) -> None:
    # B = 64 and B_noise = 32. One measurement has a relative spread of sqrt(2 / 64) = 0.18 in |noise|^2, which counts
    # half, and twice, in |G|^2 (of |g_B|^2 and of S / B), and 2 sqrt(1 / 64) / sqrt(2) = 0.18 of the product of G with
    # the noise: 0.22 in all. The running mean of 26 of them is worth 23 independent ones: 0.05, of which four are taken
    found = run(order(8, 8, epochs=4), str(tmp_path), signal2=2.0)
    assert len(found["scales"]) == 256
    assert found["scales"][-1] == pytest.approx(WIDTH / 2.0, rel=0.2)
    assert found["noise_scale"] == pytest.approx(WIDTH / 2.0, rel=0.2)


def test_the_estimate_has_no_bias() -> None:
    # 20,000 measurements of b = 4 in B = 16, in four dimensions: standard errors of 1 % in |G|^2 and of 0.8 % in S,
    # together 1.3 %; four of those
    generator = torch.Generator().manual_seed(0)
    mu = torch.tensor([0.6, -0.4, 0.2, 0.1], dtype=torch.float64)
    spreads = torch.tensor([2.0, 1.0, 0.5, 0.1], dtype=torch.float64)
    drawn = mu + spreads * torch.randn(20_000, 16, 4, dtype=torch.float64, generator=generator)
    small, big = drawn[:, :4].mean(1), drawn.mean(1)
    big2 = big.square().sum(1)
    small2 = big2 + (small - big).square().sum(1)  # what the probe gives
    scale = NoiseScale()
    scale.update(float(small2.mean()), 4, float(big2.mean()), 16)  # the estimates are linear in both
    assert scale.value == pytest.approx(float(spreads.square().sum() / mu.square().sum()), rel=0.05)  # see above
    plain = ((small.square().sum(1) - big2) / (1 / 4 - 1 / 16)).std()
    assert float(((small2 - big2) / (1 / 4 - 1 / 16)).std()) < 0.8 * float(plain), "the copy must be worth its price"


def run_scales(config: RunConfig, folder: str, signal2: float = 0.5) -> dict[str, Any]:
    return run(config, folder, signal2, max_steps=42)


@pytest.mark.parametrize(
    "workers, ranks",
    [(4, 2), (5, 2), (2, 2), (3, 3)],
    ids=["two forwards a rank", "unequal ranks", "one forward a rank: inside the exchange", "three ranks"],
)
def test_ranks_measure_what_one_rank_does(
    world: Callable[[int], World], tmp_path: Path, workers: int, ranks: int
) -> None:
    # 4096 is no multiple of 5 x 4: incomplete batches too
    config = order(workers, exchange=ExchangeConfig(bucket_mb=0.0001))
    alone = run_scales(config, str(tmp_path / "1"))
    together = world(ranks).run(run_scales, config, str(tmp_path / "n"))
    assert sum(scale is not None for scale in alone["scales"]) > 20
    assert together[0]["scales"] == pytest.approx(alone["scales"], rel=1e-9)  # sums over ranks in another order
    assert {result["noise_scale"] for result in together} == {together[0]["noise_scale"]}, "all ranks know it"


def test_a_lossy_exchange_measures_nothing(world: Callable[[int], World], tmp_path: Path) -> None:
    config = order(4, exchange=ExchangeConfig(collective="gather", codec="onebit"))
    found = world(2).run(run_scales, config, str(tmp_path), 80.0)  # so plain that even a wrong measurement would show
    assert found[0]["noise_scale"] is None
    assert set(found[0]["scales"]) == {None}


def test_one_worker_says_nothing(tmp_path: Path) -> None:
    found = run(order(1, 64), str(tmp_path), max_steps=21)
    assert found["noise_scale"] is None
    assert set(found["scales"]) == {None}


def test_a_resumed_run_goes_on_with_the_same_scale(tmp_path: Path) -> None:
    whole = run(order(), str(tmp_path / "whole"), max_steps=75)
    run(order(), str(tmp_path / "parts"), max_steps=33)
    parts = run(order(), str(tmp_path / "parts"), max_steps=75, resume=True)
    assert parts["scales"] == whole["scales"]
    assert parts["noise_scale"] == whole["noise_scale"]
    assert parts["weights_sha256"] == whole["weights_sha256"]


def test_a_checkpoint_without_it_still_loads() -> None:
    data = samples(0.5)
    made = [build(order(), Ranks(), Own(nn.Linear(WIDTH, 1), (data, data))) for _ in range(3)]
    watches = [NoiseWatch(epochs=1) for _ in made]
    for run, watch in zip(made, watches, strict=True):
        run.state.register(**watch.parts())
    watches[0].scale.update(2.0, 4, 1.0, 16)
    made[0].state.position = Position(step=3)
    saved = made[0].state.capture()
    made[1].state.restore(saved, samples=4096)
    assert watches[1].scale.state_dict() == watches[0].scale.state_dict()
    assert made[1].state.position == Position(step=3)
    del saved["noise"]
    made[2].state.restore(saved, samples=4096)
    assert watches[2].scale.count == 0


def test_equal_samples_have_no_noise(tmp_path: Path) -> None:
    found = run(order(), str(tmp_path), spread=0.0, max_steps=110)
    assert max(found["scales"]) < 1e-9
    assert found["noise_scale"] == 1.0, "no batch is smaller than a sample"


def test_a_batch_far_beyond_is_told_once_on_the_way_and_at_the_end(tmp_path: Path) -> None:
    run(order(epochs=4), str(tmp_path / "far"), signal2=80.0)  # B_noise 0.8, batch 64
    notes = [row for row in read_run(tmp_path / "far").rows if row["kind"] == "note" and "noise_scale" in row]
    assert [row["step"] for row in notes][1:] == [256]
    assert 64 <= notes[0]["step"] <= 110  # a quarter of 256 steps, and ten measurements at every tenth
    assert "workers.count=1)" in notes[0]["text"]
    run(order(epochs=2), str(tmp_path / "near"), signal2=1.0)
    assert not read_run(tmp_path / "near").notes


def test_advice_begins_beyond_four_noise_scales() -> None:
    assert advice(None, 64, 32) is None
    assert advice(512.0, 64, 32) is None
    told = advice(510.0, 64, 32)
    assert told is not None
    assert "512 (workers.count=16)" in told
    # steps (1 + 1) / (1 + 1/4), samples (1 + 1) / (1 + 4)
    assert "40 % of the samples in 1.6 times the steps" in told
    assert advice(3.0, 1, 32) is None, "there is no smaller number of workers"


def test_advice_says_where_its_assumption_does_not_hold() -> None:
    plain, under_adamw = advice(510.0, 64, 32), advice(510.0, 64, 32, "adamw")
    assert plain is not None
    assert under_adamw is not None
    assert "A rough guide" not in plain
    said = " A rough guide: that model is of plain SGD, and adamw's steps differ."
    assert under_adamw == plain + said
    rules = {name: _noise_watch(load(name))._rule for name in ("plain", "lars", "adamw", "lamb")}
    assert rules == {"plain": "", "lars": "lars", "adamw": "adamw", "lamb": "lamb"}


def test_noise_alone_gives_no_scale_and_infinity_and_one_gradient_are_left_out() -> None:
    scale = NoiseScale()
    scale.update(8.0, 1, 0.5, 8)
    assert scale.value is None
    scale.update(math.inf, 1, 0.5, 8)
    scale.update(math.nan, 1, math.nan, 8)
    scale.update(0.5, 8, 0.5, 8)
    assert scale.count == 1


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layers(inputs)
        return output.square()


@pytest.mark.parametrize("workers, first", [(4, 8), (5, 12)])
def test_a_step_of_one_forward_is_cut_in_two(workers: int, first: int) -> None:
    """As on a GPU, where all workers are one forward."""
    data, model = samples(0.5), TwoLayers().double()
    run = build(order(workers), Ranks(), Own(model, (data, data), mean_output))
    assert isinstance(run.method, Synchronous)
    forwards = dataclasses.replace(run.method.forwards, max_samples=64)
    method = Synchronous(run.learner, run.method.passes, forwards, run.ranks, seed=0)
    steps = [Step(Position(0, 0, number), workers * 4, workers, 4) for number in (0, 1, 51_200 // (workers * 4))]
    assert [method.measures(step) for step in steps] == [True, False, True]
    assert [len(list(method.requests([step]))) for step in steps] == [2, 1, 2]
    gradients, pairs = [], []
    for step in steps[:2]:
        run.learner.optimizer.zero_grad()
        pairs.append(method.accumulate(step, iter(run.train_feed(method.requests([step])))).noise)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert pairs[0] is not None
    assert pairs[1] is None
    measured = pairs[0].tolist()
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-14)  # float64, summed in another order

    inputs = data.tensors[0][run.sampler.order(0)[: workers * 4]]
    halves = [torch.autograd.grad(model(part).mean(), list(model.parameters())) for part in (inputs[:first], inputs)]
    small, big = (torch.cat([gradient.flatten() for gradient in half]) for half in halves)
    expected = [float(big.square().sum() + (small - big).square().sum()), first, float(big.square().sum()), workers * 4]
    assert measured == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("batch, every", [(16, 400), (64, 100), (2048, 10)])
def test_on_a_gpu_text_is_measured_more_often_than_images(batch: int, every: int) -> None:
    """A text of ten million tokens in windows of 256 has 40,000 samples: one in 51,200 would be a single look."""
    text = DataPair(windows(TEXT * 40, length=15), windows(TEXT[:400], length=15))
    images = samples(0.5), samples(0.5)
    gpu = Ranks(device=torch.device("cuda"))  # named, never used
    for data, wanted in ((text, every), (images, max(10, 51_200 // batch))):
        model = GPT(vocabulary=256, length=15, depth=1, width=8, heads=1) if data is text else TwoLayers()
        run = build(order(batch // 4), Ranks(), Own(model.double(), data, mean_output))
        assert isinstance(run.method, Synchronous)
        forwards = dataclasses.replace(run.method.forwards, max_samples=8192)
        method = Synchronous(run.learner, run.method.passes, forwards, gpu, seed=0)
        steps = [Step(Position(0, 0, number), batch, batch // 4, 4) for number in (0, wanted - 1, wanted, 2 * wanted)]
        assert [method.measures(step) for step in steps] == [True, False, True, True]


def recorded(folder: Path, batch: int, epochs: float, scale: float | None) -> None:
    writer = RunWriter(folder, {})
    row = {"kind": "train", "step": 1, "epoch": 1.0, "samples": 1, "loss": 1.0, "lr": 0.1, "images_per_s": 1.0}
    writer.add([row | {"batch": batch, "noise_scale": scale}])
    writer.add([{"kind": "eval", "epoch": epochs, "samples": 1, "accuracy": 0.93, "eval_loss": 1.0}])
    writer.finish({"noise_scale": scale})


def test_the_plan_takes_it_as_critical_batch_where_one_batch_was_run(tmp_path: Path) -> None:
    recorded(tmp_path / "a", 512, 15.0, 1000.0)
    recorded(tmp_path / "b", 512, 17.0, 4000.0)
    law = law_from_runs([tmp_path], 92.0)
    assert law.critical_batch == pytest.approx(2000)  # geometric mean
    assert law.epochs(512) == pytest.approx(16)
    assert law.epochs(2000) == pytest.approx(2 * 16 / (1 + 512 / 2000))
    assert "noise scale of 2,000 as the critical batch" in law.source
    answer = cli_result(cluster="dgx_h100", gpus=8, target=92.0, law_runs=[tmp_path])
    assert answer["law"]["source"] == law.source
    assert answer["law"]["critical_batch"] == pytest.approx(2000)

    recorded(tmp_path / "c", 2048, 30.0, 2000.0)  # two batches: the epochs themselves decide
    assert law_from_runs([tmp_path], 92.0).epochs(2048) == pytest.approx(30)
    recorded(tmp_path / "without", 512, 15.0, None)
    with pytest.raises(ConfigError, match="two or more batches, or one such run with"):
        law_from_runs([tmp_path / "without"], 92.0)


def test_it_is_shown(tmp_path: Path) -> None:
    recorded(tmp_path / "a", 512, 15.0, 1234.0)
    study = study_of([read_run(tmp_path / "a")])
    assert rows_of(study)[0]["noise_scale"] == 1234.0
    grid = runs_grid(study)
    column = [column["name"] for column in grid["columns"]].index("Noise scale")
    assert grid["rows"][0][column] == ["1,234", 1234.0]
    shown = Progress("plain", 10, live=False)
    shown._row = {"noise_scale": 1234.4}
    assert shown._facts()["noise"] == "noise scale 1,234"


def test_epochs_on_cifar10_follow_a_line_whose_critical_batch_is_near_the_noise_scale() -> None:
    assert max(abs(epochs - CIFAR10_LARS.epochs(batch)) for batch, epochs in CIFAR10_EPOCHS) < 0.35
    book = Path(__file__).parent.parent / "benchmarks/cifar10/results/runs.jsonl"
    rows = [json.loads(line) for line in book.read_text().splitlines() if '"law lars ' in line]
    # at the end of the law's longest run at each batch beyond the critical one
    longest = {int(row["name"].split()[2]): row for row in sorted(rows, key=lambda row: float(row["epochs"]))}
    ends = {batch: row["noise"][-1][1] for batch, row in longest.items() if batch > CIFAR10_LARS.critical_batch}
    assert set(ends) == {2048, 8192, 16384}
    assert all(0.5 < end / CIFAR10_LARS.critical_batch < 2 for end in ends.values())
    plan = cli_result(model="resnet9", cluster="dgx_h200", gpus=8)
    assert plan["law"]["critical_batch"] == pytest.approx(CIFAR10_LARS.critical_batch)
    assert plan["target"] == 90.0
    with pytest.raises(ConfigError, match="law for resnet9 ends at 90"):
        cli_result(model="resnet9", cluster="dgx_h200", gpus=8, target=94)
