"""Recipes: the published arithmetic, schedules that give the papers' numbers, and text in both directions."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from bigstep import recipes
from bigstep.config import LrConfig, Piece, RunConfig, Stage
from bigstep.config.edit import stretch
from bigstep.config.text import apply_settings, config_from_yaml, config_to_yaml
from bigstep.data.sampler import Sampler
from bigstep.engine.rates import batch_plan, learning_rate
from bigstep.errors import ConfigError, RunError
from bigstep.models import build_model
from bigstep.tables.models import find_model
from bigstep.train import fit

PRESETS = [(name, preset) for name in recipes.NAMES for preset in recipes.describe(name).presets]
IMAGENET = 1_281_167

# (recipe, preset) -> (workers, local batch, global batch) of every stage, as the papers print them
PUBLISHED_BATCHES = {
    ("plain", "paper"): [(8, 32, 256)],
    ("fair", "paper"): [(256, 32, 8_192)],
    ("lars", "paper"): [(2048, 16, 32_768)],
    ("pfn", "paper"): [(1024, 32, 32_768)],
    ("sony", "paper"): [(3456, 16, 55_296)],
    ("sony", "paper_v1"): [(2176, 16, 34_816), (2176, 32, 69_632)],
    ("fujitsu", "paper"): [(2048, 40, 81_920)],
    ("tencent", "paper"): [(2048, 32, 65_536)],
    ("tencent", "paper_alexnet"): [(1024, 64, 65_536)],
    ("google", "paper"): [(256, 32, 8_192), (256, 64, 16_384)],
    ("google", "paper_pod"): [(1024, 32, 32_768)],
    ("fastai", "paper"): [
        (128, 64, 8_192), (128, 128, 16_384), (128, 64, 8_192), (128, 224, 28_672), (128, 128, 16_384),
    ],
    ("onebit", "paper"): [(8, 180, 1_440)],  # half of a minibatch of 2,880: double buffering exchanges halves
}  # fmt: skip


def stages_of(config: RunConfig) -> list[tuple[int, int, int]]:
    stages = [config.workers, *config.plan]
    return [(stage.count, stage.local_batch, stage.count * stage.local_batch) for stage in stages]


def rates(name: str, preset: str, epochs: list[float]) -> list[float]:
    config = recipes.load(name, preset)
    rate = learning_rate(config.lr, config.batch)
    return [rate(epoch, config.batch) for epoch in epochs]


@pytest.mark.parametrize("name, preset", [pair for pair in PRESETS if pair[1].startswith("paper")])
def test_workers_and_local_batch_give_the_published_batch(name: str, preset: str) -> None:
    config = recipes.load(name, preset)
    assert stages_of(config) == PUBLISHED_BATCHES[name, preset]
    assert config.data.name == "imagenet"
    assert config.recipe == name
    assert config.preset == preset


@pytest.mark.parametrize("name", recipes.SYNCHRONOUS)
def test_mini_takes_a_large_batch_of_the_embedded_data(name: str) -> None:
    config = recipes.load(name)
    assert all(1_024 <= batch <= 4_096 for _, _, batch in stages_of(config))
    assert (config.data.name, config.model, config.precision) == ("embedded", "small", "float32")
    assert (config.recipe, config.preset) == (name, "mini")


@pytest.mark.parametrize("name", recipes.SYNCHRONOUS)
def test_mini_keeps_the_signature_of_the_paper(name: str) -> None:
    mini, paper = recipes.load(name), recipes.load(name, "paper")
    assert mini.optimizer.name == paper.optimizer.name
    assert (mini.exchange.collective, mini.exchange.codec) == (paper.exchange.collective, paper.exchange.codec)
    assert mini.norm == paper.norm
    assert mini.loss == paper.loss
    assert bool(mini.data.sizes) == bool(paper.data.sizes)


@pytest.mark.parametrize("name, preset", PRESETS)
def test_every_preset_survives_yaml(name: str, preset: str) -> None:
    config = recipes.load(name, preset)
    assert config_from_yaml(config_to_yaml(config), "run.yaml") == config


@pytest.mark.parametrize("name, preset", PRESETS)
def test_schedules_cover_the_run_and_never_turn_negative(name: str, preset: str) -> None:
    config = recipes.load(name, preset)
    assert config.lr.schedule[-1].until == config.epochs
    assert all(stage.epoch < config.epochs for stage in config.plan)
    epochs = [config.epochs * i / 1000 for i in range(1001)]
    values = rates(name, preset, epochs)
    assert min(values) >= 0
    assert values[-1] < 0.1 * max(values), "a run ends with a small rate"


def test_fair_warms_up_to_the_scaled_rate_and_drops_three_times() -> None:
    expected = [0.1, 1.65, 3.2, 3.2, 0.32, 0.032, 0.0032]
    assert rates("fair", "paper", [0, 2.5, 5, 29.99, 30, 60, 80]) == pytest.approx(expected, rel=1e-12)
    assert round(5 * IMAGENET / recipes.load("fair", "paper").batch) == 782  # steps of the warm-up


def test_pfn_starts_slowly_and_blends_around_epoch_ten() -> None:
    expected = [6.4, 6.4, 0.96, 0.128, 0.0128]
    assert rates("pfn", "paper", [0, 39.9, 40, 70, 85]) == pytest.approx(expected, rel=1e-12)
    for preset in ("mini", "cifar10"):  # the drops stand at the same fractions of a shorter run
        config = recipes.load("pfn", preset)
        rate = learning_rate(config.lr, config.batch)
        shares = [
            rate(config.epochs * at / 90, config.batch) / rate(0, config.batch) for at in (39.9, 40.1, 70.1, 85.1)
        ]
        assert shares == pytest.approx([1, 0.15, 0.02, 0.002])
    optimizer = recipes.load("pfn", "paper").optimizer
    assert (optimizer.blend_center, optimizer.blend_period, optimizer.rms_lr, optimizer.rms_decay) == (
        10,
        5,
        3e-4,
        0.99,
    )
    assert recipes.load("pfn", "paper").norm.statistics == "last_batch"


def test_google_lets_the_batch_carry_a_factor_of_two() -> None:
    config = recipes.load("google", "paper")
    rate = learning_rate(config.lr, config.batch)
    noise = [rate(epoch, batch) / batch for epoch, batch in [(29.9, 8_192), (30, 16_384), (60, 16_384), (80, 16_384)]]
    # the noise scale rate / batch falls by 10 where FAIR's rate alone does
    assert [noise[0] / value for value in noise] == pytest.approx([1, 10, 100, 1000], rel=1e-12)


@pytest.mark.parametrize(
    "name, preset, peak, warm_up",
    [
        ("lars", "paper", 34, 12),
        ("google", "paper_pod", 34, 12),
        ("fujitsu", "paper", 41, 16),
        ("tencent", "paper", 41, 16),
    ],
)
def test_lars_presets_follow_the_public_table_of_peaks(name: str, preset: str, peak: float, warm_up: float) -> None:
    halfway = (warm_up + 90) / 2
    values = rates(name, preset, [0, warm_up / 2, warm_up, halfway, 90])
    assert values == pytest.approx([0, peak / 2, peak, peak / 4, 0], rel=1e-12)


def test_fastai_follows_the_table_of_its_repository() -> None:
    base = 1.92
    table = {
        0: base, 6: 2 * base, 10.9: 2 * base, 11: 2 * base, 12.5: 1.5 * base, 14: base, 17: base, 20: 0.675 * base,
        23: 0.35 * base, 28.999999: 0.035 * base, 29: 0.01 * base, 37: 0.001 * base, 39.9: 0.001 * base,
    }  # fmt: skip
    # 28.999999 lies a millionth of an epoch before the jump: the line is 5e-8 above its end there
    assert rates("fastai", "paper", list(table)) == pytest.approx(list(table.values()), rel=1e-5)
    config = recipes.load("fastai", "paper")
    sizes = [(size.epoch, size.image_size, size.min_scale) for size in config.data.sizes]
    assert sizes == [(0, 128, 0.08), (14, 224, 0.087), (29, 288, 0.5)]
    assert [stage.epoch for stage in config.plan] == [6, 14, 17, 29]
    assert config.data.rectangular


def test_onebit_leaves_the_share_of_the_paper_unquantised() -> None:
    config = recipes.load("onebit", "paper")
    assert config.exchange.warmup_steps == round(24 / 309 * IMAGENET / config.batch)
    assert config.exchange.error_feedback
    assert (config.optimizer.name, config.optimizer.adagrad) == ("sgd", "after")
    assert config.optimizer.momentum > 0


@pytest.mark.parametrize("name, preset", [pair for pair in PRESETS if pair[1] != "paper"])
def test_the_model_of_a_preset_can_be_built(name: str, preset: str) -> None:
    config = recipes.load(name, preset)
    if find_model(config.model).input == "tokens":
        assert build_model(config.model, vocabulary=256, length=config.data.length) is not None
        return
    size, channels = (config.data.image_size, 3) if config.data.name == "imagenet" else (28, 1)
    assert build_model(config.model, classes=10, channels=channels, image_size=size) is not None


def short_text(name: str, folder: Path) -> list[str]:
    """Settings by which a recipe for text reads 20 kB: its own evaluation takes longer than a few steps."""
    if find_model(recipes.load(name).model).input != "tokens":
        return []
    (folder / "short.txt").write_text("To be, or not to be, that is the question. " * 470)
    return ["data.name=text", f"data.path={folder / 'short.txt'}"]


@pytest.mark.parametrize("name", recipes.SYNCHRONOUS + recipes.HUGE + recipes.SEQUENCE)
def test_mini_runs_two_steps_with_few_workers(name: str, tmp_path: Path) -> None:
    few = apply_settings(recipes.load(name), ["workers.count=3", "plan=[]", *short_text(name, tmp_path)])
    result = fit(few, max_steps=2, device="cpu")
    assert result.steps == 2
    assert math.isfinite(result.loss)


@pytest.mark.parametrize("name", recipes.ISLANDS)
def test_mini_with_islands_runs_until_they_have_met(name: str, tmp_path: Path) -> None:
    settings = ["workers.count=4", "islands.begin=0", "islands.every=3", *short_text(name, tmp_path)]
    few = apply_settings(recipes.load(name), settings)
    result = fit(few, max_steps=4, device="cpu")
    assert result.steps == 4
    assert math.isfinite(result.loss)


@pytest.mark.parametrize("name", recipes.SYNCHRONOUS + recipes.HUGE + recipes.SEQUENCE + recipes.ISLANDS)
def test_a_recipe_opens_with_its_evidence(name: str) -> None:
    recipe = recipes.describe(name)
    sections = ["Evidence", "Launch", "Batch", "Known", "Chosen", "Differs"]
    found = [line.split(" (")[0] for line in recipe.docstring.splitlines() if line.split(" (")[0] in sections]
    assert found == sections
    assert f"bigstep train {name}" in recipe.docstring or name == "plain"
    assert "\n" not in recipe.summary
    assert len(recipe.summary) <= 100
    assert recipe.techniques
    if name not in recipes.SYNCHRONOUS:
        text = find_model(recipes.load(name).model).input == "tokens"
        assert recipe.presets[:2] == ("mini", "books" if text else "cifar10")
        return
    assert recipe.presets[:2] == ("mini", "paper")
    first = recipes.load(name, "paper").batch
    assert recipe.published.batch.startswith(f"{first:,}")


def test_the_recipes_of_text_differ_in_the_rule_and_its_rate_alone() -> None:
    for preset in ("mini", "books"):
        adamw, lamb = (recipes.load(name, preset) for name in recipes.SEQUENCE)
        assert lamb.optimizer == dataclasses.replace(
            adamw.optimizer.switch("lamb"), betas=adamw.optimizer.betas, weight_decay=0.1, clip=1.0
        )
        assert adamw.lr.schedule == lamb.lr.schedule
        same = ("model", "data", "workers", "plan", "epochs", "loss", "exchange", "precision")
        assert all(getattr(adamw, field) == getattr(lamb, field) for field in same)


@pytest.mark.parametrize("name", recipes.ISLANDS)
def test_a_recipe_of_islands_is_its_synchronous_twin_but_for_the_islands(name: str) -> None:
    twin = "adamw" if name in ("diloco", "streaming") else "plain"
    for preset in recipes.describe(name).presets:
        ours, theirs = recipes.load(name, preset), recipes.load(twin, preset)
        assert ours.islands.count > 1
        assert ours.islands.begin < ours.epochs
        assert ours.workers.count % ours.islands.count == 0
        same = ("model", "data", "workers", "plan", "optimizer", "loss", "norm", "exchange", "precision")
        assert all(getattr(ours, field) == getattr(theirs, field) for field in same)
        assert ours.lr.base == theirs.lr.base


@pytest.mark.parametrize("name", recipes.HUGE)
def test_recipes_for_huge_batches_follow_the_number_of_workers_alone(name: str) -> None:
    small = recipes.load(name, "cifar10")
    largest = max(batch for _, _, batch in stages_of(small))
    assert largest == 512
    for batch, factor in ((2048, 2.0), (16384, 2.0 if name == "muon" else 4.0)):
        huge = apply_settings(small, [f"workers.count={small.workers.count * batch // largest}"])
        assert max(size for _, _, size in stages_of(huge)) == batch
        assert {local for _, local, _ in stages_of(huge)} == {32}, "batch norm sees the same groups in every stage"
        # by the square root of the first batch, up to 2,048: 512 -> 2,048 for muon, 128 -> 512 and 2,048 for leap
        grown = learning_rate(huge.lr, huge.batch)(2.0, huge.batch) / learning_rate(small.lr, small.batch)(2.0, 1)
        assert grown == pytest.approx(factor)


def test_post_local_islands_begin_when_the_rate_first_falls() -> None:
    for preset in ("mini", "cifar10"):
        config = recipes.load("postlocal", preset)
        rate, begin = learning_rate(config.lr, config.batch), config.islands.begin
        before, after = rate(begin - 0.01, config.batch), rate(begin, config.batch)
        assert before == rate(config.lr.schedule[0].until, config.batch), "the highest until then"
        assert after == pytest.approx(before / 10)


def test_an_unknown_recipe_or_preset_offers_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Unknown recipe 'sonny': did you mean 'sony'"):
        recipes.load("sonny")
    with pytest.raises(ConfigError, match="Unknown recipe '__init__'"):
        recipes.describe("__init__")
    with pytest.raises(ConfigError, match="fair has no preset 'papers': did you mean 'paper'"):
        recipes.load("fair", "papers")


def test_reading_every_recipe_imports_no_torch() -> None:
    code = (
        "import sys; from bigstep import recipes; "
        "loaded = [n for n in recipes.NAMES if f'bigstep.recipes.{n}' in sys.modules]; "
        "[recipes.describe(n) for n in recipes.NAMES]; print(loaded, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[] False"


def test_rates_on_cifar10_grow_with_the_batch_until_they_saturate() -> None:
    config = recipes.load("lars", "cifar10").lr
    peak = config.schedule[0].until  # the end of the warm-up
    rates = [learning_rate(config, batch)(peak, batch) for batch in (512, 2048, 16384)]
    assert rates == pytest.approx([3.0, 6.0, 6.0])
    later = recipes.load("fastai", "cifar10").lr
    assert [learning_rate(later, batch)(0, batch) for batch in (1024, 4096, 8192)] == pytest.approx([0.8, 1.6, 1.6])


def test_a_rate_may_change_by_another_power_beyond_the_batch_at_which_it_saturates() -> None:
    halved = LrConfig(base=1.6, base_batch=2048, scaling="sqrt", saturation=2048, beyond=-1 / 3)
    rates = [learning_rate(halved, batch)(0.0, batch) for batch in (512, 2048, 16384)]
    assert rates == pytest.approx([0.8, 1.6, 0.8])
    with pytest.raises(ConfigError, match="lr.beyond is 1, which begins at lr.saturation"):
        LrConfig(base=1.6, beyond=1.0)
    for power in (500.0, -500.0):  # of a batch eight times as large: no number of a computer's, or 0
        with pytest.raises(ConfigError, match=rf"lr.beyond is {power:g}.*, but it must be -4 to 4"):
            LrConfig(base=1.6, saturation=2048, beyond=power)


def test_the_presets_take_the_steps_of_the_runs_in_the_table_of_cifar10() -> None:
    book = Path(__file__).parent.parent / "benchmarks/cifar10/results/runs.jsonl"
    rows = [json.loads(line) for line in book.read_text().splitlines() if '"table ' in line]
    taken = {tuple(row["name"].split()[1:3]): row["steps"] for row in rows}
    assert len(taken) == 45
    for (recipe, batch), steps in taken.items():
        if batch != "512":  # thousands of steps, by the same rule
            config = apply_settings(recipes.load(recipe, "cifar10"), [f"workers.count={int(batch) // 32}"])
            sampler = Sampler(50_000, 0, batch_plan(config), config.data.drop_last)
            assert sampler.total_steps(config.epochs) == steps, (recipe, batch)


def test_the_warm_up_of_a_huge_batch_has_as_many_steps_as_that_of_a_large_one() -> None:
    config = recipes.load("plain", "cifar10").lr
    lengths = {512: 5, 8192: 5, 16384: 10, 24992: 15}  # epochs; half of the run at most
    for batch, epochs in lengths.items():
        rate = learning_rate(config, batch)
        highest = rate(epochs, batch)
        assert highest == pytest.approx(config.base * (batch / 2048) ** (1 / 2 if batch < 2048 else 1 / 3))
        assert rate(epochs / 2, batch) == pytest.approx(highest / 2)
        assert rate((epochs + 30) / 2, batch) == pytest.approx(highest / 2), "the decay takes what is left"


def test_a_longer_warm_up_keeps_its_share_of_a_longer_run_and_goes_by_the_first_batch() -> None:
    config = apply_settings(recipes.load("plain", "cifar10"), ["workers.count=512"])
    longer = stretch(config, 60)
    assert learning_rate(longer.lr, longer.batch)(10, longer.batch) == pytest.approx(1.6)  # half way to epoch 20
    grown = learning_rate(config.lr, config.batch, (Stage(epoch=2, count=1024, local_batch=32),))
    assert grown(5, 32768) == pytest.approx(1.6)


def test_a_longer_warm_up_takes_the_place_of_what_it_covers() -> None:
    schedule = (
        Piece(shape="warmup", until=2, start=0.0, end=1.0),
        Piece(shape="constant", until=4, start=1.0),
        Piece(shape="linear", until=20, start=1.0, end=0.0),
    )
    config = LrConfig(base=1.0, scaling="none", warmup_batch=100, schedule=schedule)
    assert learning_rate(config, 400)(4, 400) == pytest.approx(0.5)
    assert learning_rate(config, 400)(14, 400) == pytest.approx(0.5)
    assert learning_rate(config, 100)(3, 100) == learning_rate(config, 50)(3, 50) == 1.0
    late = LrConfig(base=1.0, scaling="none", warmup_batch=100, schedule=(Piece(shape="warmup", until=3, start=0.0),))
    assert learning_rate(late, 200)(1.5, 200) == pytest.approx(0.5), "a warm-up is never made shorter"


@pytest.mark.parametrize(
    "first", ["shape: warmup, until: 1, start: 0.0", "shape: table, until: 1, at: [], values: [0]"]
)
def test_an_optimizer_that_divides_by_the_rate_says_so_where_it_is_0(first: str, tmp_path: Path) -> None:
    schedule = f"lr.schedule=[{{{first}}}, {{shape: linear, until: 20, end: 0.0}}]"
    config = apply_settings(recipes.load("pfn", "mini"), [schedule])
    with pytest.raises(
        RunError, match="rate is 0 at epoch 0.00, and optimizer.name=rmsprop_warmup divides by it until"
    ):
        fit(config, out=tmp_path, device="cpu", max_steps=1)
