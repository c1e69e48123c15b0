"""`bigstep check` passes on what is right, and fails on the right row, in useful words, on what is planted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import faults
import faults_of_methods
import faults_of_text
import textbook_loop
from bigstep import recipes
from bigstep.check import PROPERTIES, Pool, check
from bigstep.check.observe import journey
from bigstep.check.shrink import shrink
from bigstep.config import (
    ExchangeConfig,
    IslandsConfig,
    LrConfig,
    OptimizerConfig,
    OuterConfig,
    Piece,
    RunConfig,
    Stage,
    WorkersConfig,
)
from bigstep.errors import ConfigError
from bigstep.records import read_run
from bigstep.train import fit

NAMES = [each.name for each in PROPERTIES]


def config(**changes: Any) -> RunConfig:
    """Momentum, a scaled rate, a warm-up, a batch plan: something for every property to hold."""
    base = RunConfig(
        recipe="test",
        workers=WorkersConfig(count=6, local_batch=4),
        plan=(Stage(epoch=1.5, count=6, local_batch=8),),
        epochs=2.5,
        optimizer=OptimizerConfig(momentum=0.9, weight_decay=1e-4),
        lr=LrConfig(
            base=0.2,
            base_batch=64,
            schedule=(Piece(shape="warmup", until=0.7, start=0.1), Piece(shape="cosine", until=2.5, end=0.0)),
        ),
    )
    return dataclasses.replace(base, **changes)


ISLANDS = IslandsConfig(count=2, every=2, outer=OuterConfig(name="nesterov", lr=0.7, momentum=0.9))
OF_ISLANDS = {"averaging every step = synchronous", "one island = ordinary training", "islands = islands by hand"}
ONEBIT = ExchangeConfig(collective="gather", codec="onebit", warmup_steps=1)

# fault, what it replaces, the row that must fail first, words that must be in it
PLANTED: list[tuple[str, str, str, str]] = [
    ("different_seeds_per_rank", "start", "same start on every rank", "rank 1 of 2"),
    ("one_rank_with_another_order", "start", "same parameter order on every rank", "rank 1 of 2 has out.weight"),
    ("sampler_that_pads", "start", "each sample once an epoch", "come twice"),
    ("sampler_that_fails_late", "start", "each sample once an epoch", "in epoch 3"),
    ("sampler_with_one_order", "start", "each sample once an epoch", "in the same order"),
    ("sampler_that_drops_the_last_batch", "steps", "each sample once an epoch", "never"),
    ("steps_that_end_early_on_rank_1", "steps", "each sample once an epoch", "never in epoch 0"),
    ("worker_0_counted_twice_on_3_ranks", "start", "each sample once an epoch", "on 3 rank(s)"),
    ("augmentation_seeded_by_rank", "start", "augmentation follows the sample", "rank 1 of 2"),
    ("warmup_counted_in_calls", "start", "rate counted in samples", "on rank 0 of"),
    ("rate_without_numbers_on_several_ranks", "start", "rate counted in samples", "is nan instead of"),
    ("schedule_counted_in_steps", "start", "rate counted in samples", "batch that doubles"),
    ("rate_not_scaled", "start", "rate follows the batch", "factor of 2"),
    ("dropout_seeded_by_rank", "start", "random numbers follow the worker", "numbers"),
    ("accumulation_that_divides_by_microbatches", "start", "accumulation = big batch", "full microbatches agree"),
    ("gradient_summed", "start", "gradient of P ranks = of one", "times as large"),
    ("mean_of_the_ranks_means", "start", "gradient of P ranks = of one", "on 4 ranks"),
    ("clipping_before_the_exchange", "start", "accumulation = big batch", "disagree"),
    ("codec_that_drops_its_residual", "exchange", "exchange = no exchange", "carries no residual"),
    ("exchange_whose_last_rank_gets_another_mean", "exchange", "exchange = no exchange", "2 different gradients"),
    ("exchange_that_gives_no_numbers", "exchange", "exchange = no exchange", "something other than the mean"),
    ("rate_set_behind_the_step", "train", "loop = rate, gradient, update", "part"),
    ("loop_that_stays_in_evaluation_mode", "start", "loop = rate, gradient, update", "the losses part at step"),
    ("loop_that_forgets_the_last_step", "train", "loop = rate, gradient, update", "steps are taken instead of"),
    ("meeting_that_counts_islands_alike", "start", "averaging every step = synchronous", "the losses part at step 6"),
    ("outer_gradient_with_the_wrong_sign", "start", "one island = ordinary training", "the losses part at step 4"),
    ("outer_gradient_from_a_stale_start", "start", "one island = ordinary training", "the losses part at step 7"),
    ("meeting_that_averages_optimizer_state", "start", "islands = islands by hand", "different path from the runs"),
    ("islands_that_part_without_momentum", "start", "islands = islands by hand", "the losses part at step 5"),
    ("crew_that_keeps_its_optimizer_state", "start", "path with waiting ranks = of one", "the losses part at step"),
    ("crew_that_evaluates_what_it_has", "start", "path with waiting ranks = of one", "end with other weights"),
    ("graph_with_the_rate_of_its_capture", "start", "steps as graphs = steps in the open", "take a different path"),
    (
        "graph_that_adds_parts_to_the_step_before",
        "start",
        "steps as graphs = steps in the open",
        "graphs take a different path",
    ),
    ("graph_that_counts_every_batch_alike", "start", "steps as graphs = steps in the open", "part at step 6"),
    ("scale_that_is_not_taken_out", "start", "scaled loss = plain loss", "on 1 rank(s) scaling changes the path"),
    ("scale_that_skips_good_steps", "start", "scaled loss = plain loss", "scaling changes the path"),
    ("statistics_of_rank_0", "start", "batch-norm statistics at evaluation", "not on the mean over all workers"),
    ("statistics_of_each_rank", "start", "batch-norm statistics at evaluation", "different networks"),
    ("evaluation_with_duplicates", "start", "each sample once an evaluation", "instead of"),
    ("evaluation_without_numbers", "evaluate", "each sample once an evaluation", "the loss is nan instead of"),
    ("accuracy_of_each_rank", "evaluate", "each sample once an evaluation", "on 2 rank(s) the accuracy is"),
    ("load_that_finds_no_checkpoint", "load", "resume = no interruption", "steps are taken again"),
    ("checkpoint_without_optimizer", "start", "resume = no interruption", "after the checkpoint"),
    ("checkpoint_that_begins_the_epoch_again", "start", "resume = no interruption", "after the checkpoint"),
    ("checkpoint_without_residuals", "start", "resume = no interruption", "after the checkpoint"),
    ("rate_that_begins_again_after_a_resume", "start", "resume = no interruption", "the rate differs"),
    (
        "statistics_that_every_rank_takes_whole",
        "start",
        "resume = no interruption",
        "the statistics that an evaluation uses differ",
    ),
]


def case_of(fault: str) -> RunConfig:
    """The run in which a fault can show: a lossy codec for residuals, an update inside the graph for graphs."""
    if "residual" in fault or "last_rank" in fault:
        return config(exchange=ONEBIT)
    if "outer" in fault or "meeting" in fault:
        return config(islands=dataclasses.replace(ISLANDS, every=3))
    if "islands_that_part" in fault:
        return config(islands=dataclasses.replace(ISLANDS, begin=0.5))
    if "graph" in fault and "every_batch" not in fault:  # with LARS it is the rate that counts
        return config(optimizer=OptimizerConfig(name="lars", trust_coefficient=0.02))
    return config()


def ranks_of(fault: str) -> tuple[int, ...]:
    """The worlds in which a fault can show: two ranks, unless it takes unequal shares of the six workers."""
    if "on_3_ranks" in fault:
        return (1, 2, 3)
    return (1, 2, 4) if fault in ("mean_of_the_ranks_means", "checkpoint_without_residuals") else (1, 2)


@pytest.mark.parametrize(("fault", "piece", "row", "words"), PLANTED, ids=[each[0] for each in PLANTED])
def test_a_planted_fault_fails_on_its_own_row(check_pool: Pool, fault: str, piece: str, row: str, words: str) -> None:
    home = faults if hasattr(faults, fault) else faults_of_methods
    report = check(
        case_of(fault),
        model=faults.Net,
        data=faults.Pairs,
        subject=faults.planted(**{piece: getattr(home, fault)}),
        ranks=ranks_of(fault),
        only=NAMES[: NAMES.index(row) + 1],  # rows behind it may follow from it
        pool=check_pool,
    )
    assert report.cause is not None, f"{fault} went unnoticed"
    assert report.cause.name == row, f"{fault} was blamed on {report.cause}"
    assert words in report.cause.words
    assert len(report.cause.remedy) > 40, "a remedy is a sentence"
    assert not report.passed


# fault, the row that must fail first, words that must be in it, words of its remedy
PLANTED_IN_TEXT: list[tuple[str, str, str, str]] = [
    (
        "windows_that_overlap_between_workers",
        "each sample once an epoch",
        "overlap by 8 tokens",
        "begin where the last",
    ),
    ("windows_cut_by_each_rank", "augmentation follows the sample", "rank 1 of 2 sees", "not from a generator"),
    (
        "mean_of_means_over_unequal_tokens",
        "accumulation = big batch",
        "microbatches",
        "over tokens that are not padding",
    ),
    ("clipping_before_the_exchange", "gradient of P ranks = of one", "on 2 ranks differs", "clip after it"),
]


def on_text() -> RunConfig:
    """`adamw` as it ships, on windows of 16 bytes, which cost a quarter."""
    preset = recipes.load("adamw", "mini")
    return dataclasses.replace(preset, data=dataclasses.replace(preset.data, length=16))


@pytest.mark.parametrize(
    ("fault", "row", "words", "remedy"), PLANTED_IN_TEXT, ids=[each[0] for each in PLANTED_IN_TEXT]
)
def test_a_fault_planted_in_text_fails_on_its_own_row(
    check_pool: Pool, fault: str, row: str, words: str, remedy: str
) -> None:
    report = check(
        on_text(),
        model=faults_of_text.small_gpt,
        subject=faults.planted(start=getattr(faults_of_text, fault)),
        ranks=(1, 2),
        only=NAMES[: NAMES.index(row) + 1],
        pool=check_pool,
    )
    assert report.cause is not None, f"{fault} went unnoticed"
    assert report.cause.name == row, f"{fault} was blamed on {report.cause}"
    assert words in report.cause.words
    assert remedy in report.cause.remedy


def test_every_property_holds_on_text(check_pool: Pool) -> None:
    report = check(on_text(), model=faults_of_text.small_gpt, ranks=(1, 3), pool=check_pool)
    assert report.passed, report.cause


@pytest.mark.parametrize("exchange", [ExchangeConfig(), ONEBIT], ids=["dense", "onebit"])
def test_every_property_holds_without_a_fault(check_pool: Pool, exchange: ExchangeConfig) -> None:
    report = check(config(exchange=exchange), model=faults.Net, data=faults.Pairs, pool=check_pool)
    assert [row.name for row in report.rows] == NAMES
    expected = {name: "not applicable" if name in OF_ISLANDS else "pass" for name in NAMES}
    assert {row.name: row.status for row in report.rows} == expected, report.cause
    assert ("onebit quantises per rank" in report.row("path of P ranks = of one").words) == (exchange is ONEBIT)


@pytest.mark.parametrize("codec", ["none", "fp16"])
def test_every_property_holds_where_gradients_come_a_step_late(check_pool: Pool, codec: str) -> None:
    late = config(exchange=ExchangeConfig(codec=codec, double_buffer=True))
    report = check(late, model=faults.Net, data=faults.Pairs, ranks=(1, 2, 4), pool=check_pool)
    assert report.passed, report.cause
    assert "a step late" in report.row("exchange = no exchange").words


def test_every_property_holds_on_islands(check_pool: Pool) -> None:
    report = check(config(islands=ISLANDS), model=faults.Net, data=faults.Pairs, pool=check_pool)
    assert report.ranks == (1, 2, 4), "three ranks do not make two equal islands"
    not_of_islands = ("steps as graphs = steps in the open", "path with waiting ranks = of one")
    expected = {**dict.fromkeys(NAMES, "pass"), **dict.fromkeys(not_of_islands, "not applicable")}
    assert {row.name: row.status for row in report.rows} == expected, report.cause


def test_islands_that_begin_later_are_their_parts(check_pool: Pool) -> None:
    later = config(islands=dataclasses.replace(ISLANDS, begin=0.5))
    rows = ["islands = islands by hand", "path of P ranks = of one", "resume = no interruption"]
    report = check(later, model=faults.Net, data=faults.Pairs, ranks=(1, 2), only=rows, pool=check_pool)
    assert {row.name: row.status for row in report.rows} == dict.fromkeys(rows, "pass"), report.cause


def test_a_rate_that_saturates_and_a_warm_up_that_lengthens_still_follow_the_rule(check_pool: Pool) -> None:
    bounded = dataclasses.replace(config().lr, saturation=30, warmup_batch=20)  # a trial has 24 samples, then 48
    only = ["rate follows the batch"]
    report = check(config(lr=bounded), model=faults.Net, data=faults.Pairs, ranks=(1, 2), only=only, pool=check_pool)
    assert report.passed, report.cause


@pytest.mark.parametrize("recipe", ["sony", "onebit"])
def test_recipes_pass(check_pool: Pool, recipe: str) -> None:
    kept = [name for name in NAMES if name != "resume on other ranks"]
    report = check(recipes.load(recipe, "mini"), ranks=(1, 2), only=kept, pool=check_pool)
    assert report.passed, report.cause
    words = report.row("accumulation = big batch").words
    assert "each worker normalises by its own samples" in words


def test_a_network_that_draws_nothing_has_no_random_numbers_to_follow(check_pool: Pool) -> None:
    """Nor is it blamed for a loop that seeds every forward alike."""
    row = "random numbers follow the worker"
    subject = faults.planted(start=faults.dropout_seeded_by_rank)
    report = check(config(), model=without_dropout, data=faults.Pairs, subject=subject, ranks=[1], only=[row],
                   pool=check_pool)  # fmt: skip
    assert report.row(row).status == "not applicable", report.cause


def without_dropout() -> torch.nn.Module:
    network = faults.Net()
    network.drop.p = 0.0
    return network


def test_own_pieces_need_no_configuration(check_pool: Pool) -> None:
    report = check(model=faults.Net(), data=faults.Pairs(), optimizer=torch.optim.Adam, ranks=(1, 2), pool=check_pool)
    assert report.passed, report.cause
    assert report.title == "your own"
    assert "give the function that builds it" in report.row("same start on every rank").words


def test_the_path_that_is_checked_is_the_one_that_train_takes(tmp_path: Path) -> None:
    from bigstep.check import Own, bigstep_loop

    trial = shrink(config(), 4)
    data = faults.Pairs(trial.train_samples)
    torch.manual_seed(trial.config.seed)
    result = fit(trial.config, faults.Net(), (data, data), out=tmp_path / "run", device="cpu")
    seen = journey(bigstep_loop(), Own(faults.Net, None, data), trial, tmp_path / "check")
    assert [row["loss"] for row in read_run(tmp_path / "run").train] == list(seen.losses)
    assert seen.evaluation is not None
    assert result.facts["eval_loss"] == seen.evaluation.loss


def test_a_loop_that_is_not_bigsteps_can_be_checked(check_pool: Pool) -> None:
    report = check(config(), subject=textbook_loop.TEXTBOOK, ranks=(1, 2), pool=check_pool)
    assert report.cause is not None
    assert report.cause.name == "each sample once an epoch"
    assert "come twice" in report.cause.words, "DistributedSampler pads"
    assert report.row("rate follows the batch").status == "fail"
    assert report.row("same start on every rank").status == "pass"
    assert report.row("resume = no interruption").words == "the loop has no checkpoints"


def mean_over_tokens(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A mean over the samples of classes 1 and 2 only, as a mean over tokens that are not padding."""
    counted = target > 0
    losses = torch.nn.functional.cross_entropy(output, target, reduction="none") * counted
    return losses.sum() / counted.sum().clamp(min=1)


def test_a_loss_that_is_no_mean_over_samples_is_found_by_accumulation(check_pool: Pool) -> None:
    report = check(
        config(), model=faults.Net, data=faults.Pairs, loss=mean_over_tokens, pool=check_pool, ranks=[1],
        only=["accumulation = big batch"],
    )  # fmt: skip
    assert report.cause is not None
    assert "mean over samples" in report.cause.remedy


def test_a_model_whose_constructor_draws_without_the_seed_is_named(check_pool: Pool) -> None:
    report = check(config(), model=unseeded, data=faults.Pairs, ranks=(1, 2), pool=check_pool, only=NAMES[:2])
    assert report.cause is not None
    assert report.cause.name == "same start on every rank"
    assert report.rows[1].status == "not run"


def unseeded() -> torch.nn.Module:
    torch.seed()
    return faults.Net()


def test_mistakes_are_told_in_one_sentence(check_pool: Pool) -> None:
    with pytest.raises(ConfigError, match="cannot be pickled"):
        check(config(), model=lambda: faults.Net(), pool=check_pool)
    with pytest.raises(ConfigError, match="did you mean 'same start on every rank'"):
        check(config(), only=["same start on every rnk"], pool=check_pool)
    with pytest.raises(ConfigError, match="between 1 and 16"):
        check(config(), ranks=[0], pool=check_pool)


def test_one_check_after_another_in_a_pool_has_a_place_of_its_own(check_pool: Pool) -> None:
    from bigstep.check import Own, bigstep_loop
    from bigstep.check.laboratory import Laboratory

    trial = shrink(config(), 4)
    places = set()
    for _ in range(5):  # each is gone before the next is made, and its address in memory free
        places.add(Laboratory(check_pool, bigstep_loop(), Own(faults.Net), trial, (1,), "float32").folder(trial, 1))
    assert len(places) == 5
