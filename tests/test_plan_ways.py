"""Islands, prices and machines that are lost: closed forms, limits, and what is recommended."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bigstep.config import LrConfig, RunConfig, WorkersConfig
from bigstep.config.text import apply_settings
from bigstep.errors import ConfigError
from bigstep.plan import Cluster, Scheme, Workload, cli_result, predict, render
from bigstep.plan.cost import exchange_seconds
from bigstep.plan.crossover import find_crossover
from bigstep.plan.islands import FEW_MEETINGS, IslandPlan, fewest_steps_between, predict_islands, propose_outer
from bigstep.plan.search import prefer, rank
from bigstep.plan.simulate import expected_maximum
from bigstep.plan.terminal import crossover_sentence
from bigstep.plan.ways import (
    RESTART_S,
    SAVE_S,
    WORTH,
    Way,
    cheapest,
    compare_ways,
    islands_pay_below,
    lost_share,
    recommend,
)
from bigstep.plan.workload import workload_names
from bigstep.tables.codecs import encoded_bytes

GPT = Workload.load("gpt-124m")
STEADY = replace(Cluster.load("dgx_h200"), jitter=0.0)
SLOW = STEADY.with_bandwidth(125e6)  # 1 Gbit/s an adapter
COMMON = {"devices": 64, "local_batch": 8, "scheme": Scheme(optimizer="adamw")}


@pytest.mark.parametrize("every, fragments, overlap", [(1, 1, 0), (30, 1, 0), (30, 4, 0), (30, 4, 2), (30, 1, 29)])
def test_a_step_on_islands_is_its_closed_form(every: int, fragments: int, overlap: int) -> None:
    plan = IslandPlan(count=8, every=every, fragments=fragments, overlap=overlap)
    found = predict_islands(GPT, SLOW, plan=plan, **COMMON)
    own = predict(GPT, SLOW, devices=8, local_batch=8, scheme=COMMON["scheme"]).step_s
    part = exchange_seconds("torus", 4 * GPT.parameters / fragments, SLOW, 64, (8, 8))
    assert found.inner.step_s == own
    assert found.step_s == pytest.approx(own + max(0.0, part - overlap * own) * fragments / every)
    assert found.meeting_s == pytest.approx(part * fragments)


def test_one_island_is_the_synchronous_step() -> None:
    synchronous = predict(GPT, SLOW, **COMMON)
    found = predict_islands(GPT, SLOW, plan=IslandPlan(count=1, every=30, two_levels=False), **COMMON)
    assert found.inner == synchronous
    assert found.waiting_s == 0.0


def test_more_steps_between_meetings_more_fragments_in_flight_and_smaller_codes_never_cost_time() -> None:
    def step(**changes: object) -> float:
        return predict_islands(GPT, SLOW, plan=replace(IslandPlan(count=8, every=20), **changes), **COMMON).step_s

    assert step(every=40) < step() < step(every=10)
    assert step(fragments=4, overlap=2) < step(overlap=2) < step()
    assert step(codec="int4") < step(codec="int8") < step(codec="fp16")
    # half a value to each of seven others is more than 7/8 of a whole value sent twice, and to one other it is less
    assert step(codec="fp16") > step()
    assert step(codec="fp16", count=2) < step(count=2)


def test_what_cannot_be_added_on_the_way_is_sent_to_every_other_island() -> None:
    apart = replace(SLOW, nodes=4, devices_per_node=1)
    common = {"devices": 4, "local_batch": 8}

    def sent(codec: str) -> float:
        return predict_islands(GPT, apart, plan=IslandPlan(count=4, codec=codec), **common).meeting_bytes

    assert sent("none") == pytest.approx(2 * 3 / 4 * 4 * GPT.parameters)
    assert sent("int4") == 3 * encoded_bytes("int4", GPT.shapes)
    one = predict_islands(GPT, apart, devices=1, local_batch=8, plan=IslandPlan(count=1, codec="int4"))
    assert one.meeting_s == 0.0


def test_waiting_for_the_slowest_island_averages_out() -> None:
    noisy = replace(STEADY, jitter=0.05)
    waits = [predict_islands(GPT, noisy, plan=IslandPlan(count=8, every=h), **COMMON) for h in (1, 100)]
    compute = sum(waits[0].inner.split[part] for part in ("forward", "backward"))
    assert waits[0].waiting_s == pytest.approx(0.05 * expected_maximum(8) * compute)
    assert waits[1].waiting_s == pytest.approx(waits[0].waiting_s / 10)


def test_the_proposed_number_of_steps_is_the_smallest_that_keeps_meetings_to_their_share() -> None:
    found = fewest_steps_between(GPT, SLOW, plan=IslandPlan(count=8), share=0.1, **COMMON)
    assert found.exposed_s <= 0.1 * (found.inner.step_s + found.exposed_s)
    fewer = predict_islands(GPT, SLOW, plan=replace(found.plan, every=found.plan.every - 1), **COMMON)
    assert fewer.exposed_s > 0.1 * (fewer.inner.step_s + fewer.exposed_s)


def test_islands_must_be_equal() -> None:
    with pytest.raises(ConfigError, match="64 devices do not make 7 equal islands"):
        predict_islands(GPT, SLOW, plan=IslandPlan(count=7), **COMMON)


def test_a_loss_costs_a_restart_and_what_was_done_since_a_checkpoint_or_a_meeting() -> None:
    lifetime, devices = 20.0, 128
    losses = devices / lifetime / 3600
    apart = math.sqrt(2 * SAVE_S / losses)
    extra = SAVE_S / apart + losses * (RESTART_S + apart / 2)
    assert lost_share("synchronous", devices, lifetime) == pytest.approx(extra / (1 + extra))
    since = losses * (RESTART_S + 30 / 2)
    assert lost_share("islands", devices, lifetime, between_s=30) == pytest.approx(since / (1 + since))
    assert lost_share("islands", devices, lifetime, between_s=apart) < lost_share("synchronous", devices, lifetime)
    assert lost_share("downpour", devices, lifetime) < lost_share("islands", devices, lifetime) / 100
    for method in ("synchronous", "islands", "downpour"):
        assert lost_share(method, devices, math.inf) == 0.0
        assert lost_share(method, devices, 1.0) > lost_share(method, devices, 10.0)


def test_a_slow_network_and_dying_machines_ask_for_islands_and_a_fast_one_does_not() -> None:
    cluster = Cluster.load("dgx_h200")
    ways = compare_ways(GPT, cluster, rank(GPT, cluster, 64)[0], price=2.5)
    assert recommend(ways)[0].method == "synchronous"
    very_slow = cluster.with_bandwidth(12.5e6)
    dense = rank(GPT, very_slow, 64, codec="none")[0]
    way, why = recommend(compare_ways(GPT, very_slow, dense, price=2.5, lifetime_h=20))
    assert way.method == "islands"
    assert "epochs" in why


def test_islands_are_preferred_to_stale_gradients() -> None:
    speeds = {"synchronous": 100.0, "islands": 160.0, "downpour": 200.0}
    ways = [Way(method, method, 64, speed, None, None) for method, speed in speeds.items()]
    assert recommend(ways)[0].method == "islands"
    assert recommend([ways[0], replace(ways[1], samples_s=140.0), ways[2]])[0].method == "downpour"
    assert recommend([ways[0], replace(ways[1], samples_s=140.0)])[0].method == "synchronous"


def test_the_cheapest_number_of_devices_is_that_of_the_lowest_price() -> None:
    resnet, cluster = Workload.load("resnet50"), Cluster.load("dgx_h100")
    counts = [1, 8, 64, 512]
    from bigstep.plan.accuracy import LAWS

    found = cheapest(resnet, cluster, counts, price=2.5, law=LAWS["resnet50"])
    prices = {}
    for devices in counts:
        best = rank(resnet, cluster, devices, law=LAWS["resnet50"])[0]
        prices[devices] = best.minutes / 60 * devices * 2.5
    assert found.price == pytest.approx(min(prices.values()))
    assert found.devices == min(prices, key=lambda devices: prices[devices])


def test_codes_that_change_the_path_are_chosen_only_where_they_pay() -> None:
    fast = Cluster.load("dgx_h200")
    assert prefer(rank(GPT, fast, 64)).prediction.scheme.codec in ("none", "fp16")
    slow = fast.with_bandwidth(125e6)
    assert prefer(rank(GPT, slow, 64)).prediction.scheme.codec in ("onebit", "powersgd")


def test_the_predicted_table_of_the_manual_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[1]
    monkeypatch.syspath_prepend(str(root / "benchmarks" / "planner"))
    which_way = importlib.import_module("which_way")
    monkeypatch.setattr(which_way, "MODELS", {"lstm": 64})
    rows = [line for line in which_way.predicted_table().splitlines() if line.startswith("| lstm")]
    text = (root / "docs" / "which-way.md").read_text(encoding="utf-8")
    assert len(rows) == 3
    assert all(row in text for row in rows), "run benchmarks/planner/which_way.py"


def test_the_page_says_below_which_rate_codes_pay_for_vgg(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parent.parent
    monkeypatch.syspath_prepend(str(root / "benchmarks" / "planner"))
    which_way = importlib.import_module("which_way")
    monkeypatch.setattr(which_way, "CLUSTERS", ("big_basin",))
    row = which_way.crossing_table().splitlines()[-1]
    assert row in (root / "docs" / "which-way.md").read_text(encoding="utf-8"), "run benchmarks/planner/which_way.py"
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    own = float(cells[1].removesuffix(" Gbit/s"))
    assert all(float(cell) < own for cell in cells[2:]), "the page says that no code pays at its own rate"


@pytest.mark.parametrize("name", workload_names())
def test_every_model_that_ships_can_be_planned(name: str) -> None:
    answer = cli_result(model=name, cluster="dgx_h200", gpus=16, price=2.5, lifetime_hours=50)
    assert {way["method"] for way in answer["ways"]} == {"synchronous", "islands", "downpour"}
    assert answer["cheapest"]["price"] > 0
    assert (answer["best"]["tokens_per_s"] is not None) == bool(Workload.load(name).tokens)
    assert answer["best"]["recipe"] in ("adamw", "lamb") or not Workload.load(name).tokens


def test_the_command_takes_a_price_and_refuses_a_negative_one() -> None:
    from bigstep.cli.app import app

    runner = CliRunner()
    shown = runner.invoke(
        app, ["plan", "--model", "gpt-124m", "--cluster", "dgx_h200", "--gpus", "64", "--price", "2.5"]
    )
    assert shown.exit_code == 0
    for words in (
        "tokens/s",
        "Recommended: synchronous",
        "Islands meet every H = ",
        "outer rate",
        "Cheapest: ",
    ):
        assert words in shown.output
    with pytest.raises(ConfigError, match="price is -1"):
        cli_result(price=-1)


def test_a_curve_over_devices_has_its_prices(capsys: pytest.CaptureFixture[str]) -> None:
    answer = cli_result(cluster="dgx_h100", sweep="gpus=1..8", price=2.0)
    for row in answer["sweep"]:
        assert row["price"] == pytest.approx(row["gpus"] * row["minutes"] / 60 * 2.0)
    assert answer["sweep"][0]["price"] == pytest.approx(answer["cheapest"]["price"])
    render(answer)
    assert f"{answer['sweep'][0]['price']:,.2f}\n" in capsys.readouterr().out.replace(" \n", "\n")
    assert all(row["price"] is None for row in cli_result(cluster="dgx_h100", sweep="gpus=1..8")["sweep"])


def test_a_price_without_an_end_is_that_of_a_million_samples(capsys: pytest.CaptureFixture[str]) -> None:
    render(cli_result(model="gpt-124m", cluster="dgx_h200", gpus=1, price=2.5))
    printed = capsys.readouterr().out
    assert "price/M\n" in printed.replace(" \n", "\n")
    assert "on 1 device of" in printed


def test_a_torus_over_all_devices_can_be_set_beside_islands() -> None:
    answer = cli_result(model="gpt-124m", cluster="dgx_h200", gpus=64, collective="torus")
    assert answer["best"]["collective"] == "torus"
    assert {way["method"] for way in answer["ways"]} == {"synchronous", "islands", "downpour"}


def test_a_price_is_told_where_a_single_device_does_not_hold_the_batch() -> None:
    answer = cli_result(cluster="dgx_h200", gpus=96, batch=65_536, price=2.0)
    assert answer["cheapest"]["devices"] >= 32, "fewer do not hold 65,536 images"
    only = cli_result(cluster="dgx_h200", gpus=64, price=2.0, collective="ring", codec="none")
    assert only["cheapest"]["label"].startswith("ring, none")


def test_what_pays_at_every_rate_is_not_said_to_pay_at_none() -> None:
    quick = replace(Cluster.load("dgx_h200"), inside=replace(STEADY.inside, bandwidth_byte_s=1e6))
    crossing = find_crossover(
        GPT, quick, devices=16, local_batch=8,
        compressed=[Scheme(collective="gather", codec="onebit")], plain=[Scheme(collective="ring")],
    )  # fmt: skip
    assert crossing.pays_here
    assert crossing.gbit_s == math.inf, "the links inside a node are the slow ones, whatever joins the nodes"
    told = crossover_sentence({"crossover": {**vars(crossing), "gbit_s": crossing.gbit_s, "here_gbit_s": 400}})
    assert told.endswith("it takes less at every rate.")


def test_the_outer_rate_follows_from_the_islands_and_their_meetings() -> None:
    assert [propose_outer(count, 30, 1e6).lr for count in (1, 2, 4, 8, 64)] == [0.4, 0.6, 0.6, 0.8, 0.8]
    few, enough = (propose_outer(8, 30, 30.0 * meetings) for meetings in (FEW_MEETINGS - 1, FEW_MEETINGS))
    assert (few.name, few.lr, few.momentum) == ("average", 1.0, 0.0)
    assert (enough.name, enough.momentum) == ("nesterov", 0.9)
    assert f"{FEW_MEETINGS - 1} meetings are too few" in few.why
    assert "fewer than 1,200 steps" in propose_outer(8, 30, None).why


@pytest.mark.parametrize("model", ["resnet50", "gpt-124m"])
def test_what_is_proposed_for_islands_can_be_trained(model: str) -> None:
    answer = cli_result(model=model, cluster="dgx_h200", gpus=64)
    (way,) = (way for way in answer["ways"] if way["method"] == "islands")
    plain = RunConfig(workers=WorkersConfig(count=64, local_batch=4), epochs=3, lr=LrConfig(base=0.05))
    islands = apply_settings(plain, list(way["settings"])).islands
    assert f"{islands.count} islands, H = {islands.every}," in way["label"]
    assert f"H = {islands.every}" in way["advice"]
    assert f"outer rate {islands.outer.lr:g} with" in way["advice"]


def test_islands_pay_up_to_the_rate_that_is_told() -> None:
    best, plan = rank(GPT, SLOW, 64)[0], IslandPlan(count=8, overlap=1)
    below = islands_pay_below(GPT, SLOW, best, plan)
    assert below is not None
    assert below["1-bit"] < below["the torus"] < below["a plain ring"], "the better the rival, the slower the link"
    for factor, pays in ((0.98, True), (1.02, False)):
        there = SLOW.with_bandwidth(factor * below["the torus"] * 1e9 / 8)
        rival = min(
            predict(
                GPT, there, devices=64, local_batch=best.prediction.local_batch, scheme=choice.prediction.scheme
            ).step_s
            for choice in rank(GPT, there, 64, collective="torus")
            if choice.prediction.scheme.codec in ("none", "fp16")
        )
        found = fewest_steps_between(
            GPT, there, devices=64, local_batch=best.prediction.local_batch, plan=plan, scheme=best.prediction.scheme
        )
        assert (found.step_s * WORTH <= rival * 1.01) == pays
    assert islands_pay_below(GPT, SLOW, rank(GPT, SLOW, 8)[0], plan) is None, "nothing leaves the node"


@pytest.mark.parametrize("more", [(), ("--sweep", "gpus=1..4096")])
def test_a_narrow_terminal_loses_columns_and_no_digits(
    bigstep: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    status, out, told = bigstep("plan", "--gpus", "2048", "--target", "75", *more)
    assert status == 0, told
    assert "…" not in out
    assert "16,384" in out
    assert "45.3 s" in out
