"""Collectives and codecs: every list of their names elsewhere agrees with the tables."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

import bigstep
from bigstep.config import ExchangeConfig
from bigstep.errors import ConfigError
from bigstep.exchange import Exchange
from bigstep.plan import Cluster, Scheme, Workload, cli_result
from bigstep.plan.cost import exchange_phases
from bigstep.plan.page import PAGE_CODECS, page_facts
from bigstep.tables import load
from bigstep.tables.codecs import CODECS, SETTINGS, check_pair, collectives_for, encoded_bytes
from bigstep.tables.collectives import COLLECTIVES, RUNNABLE, collective_traffic

SOURCE = Path(bigstep.__file__).parent
DOCS = SOURCE.parents[1] / "docs"
TEMPLATES = SOURCE / "plan" / "templates"


def pairs() -> list[tuple[str, str]]:
    return [(collective, codec) for codec in CODECS for collective in COLLECTIVES]


@pytest.mark.parametrize(("collective", "codec"), pairs())
def test_configuration_exchange_and_planner_agree_on_what_goes_together(collective: str, codec: str) -> None:
    allowed = collective in collectives_for(codec)
    runs = allowed and collective in RUNNABLE
    for make, works in ((ExchangeConfig, runs), (Exchange, runs), (Scheme, allowed)):
        if works:
            make(collective=collective, codec=codec)
        else:
            with pytest.raises(ConfigError):
                make(collective=collective, codec=codec)


def test_every_codec_has_a_collective_and_every_collective_a_codec() -> None:
    assert all(set(collectives_for(codec)) & set(RUNNABLE) for codec in CODECS)
    carried = {collective for codec in CODECS for collective in collectives_for(codec)}
    assert carried == set(COLLECTIVES)


@pytest.mark.parametrize("codec", CODECS)
def test_an_exchange_chooses_the_collective_of_its_codec(codec: str) -> None:
    chosen = Exchange(codec=codec).collective
    assert chosen == collectives_for(codec)[0]
    assert chosen == ("ring" if CODECS[codec].summable else "gather")


@pytest.mark.parametrize("make", [ExchangeConfig, Exchange, Scheme])
@pytest.mark.parametrize("field", ["collective", "codec"])
def test_an_unknown_name_is_refused_everywhere(make: type, field: str) -> None:
    with pytest.raises(ConfigError, match=f"There is no {field} 'toruss'"):
        make(**{field: "toruss"})


def test_an_unknown_name_has_no_price() -> None:
    for ask in (
        lambda: collective_traffic("toruss", 1.0, 4),
        lambda: exchange_phases("toruss", 1.0, Cluster.load("abci"), 8),
        lambda: encoded_bytes("fp61", [(3,)]),
        lambda: cli_result(gpus=8, codec="fp61"),
        lambda: cli_result(gpus=8, collective="toruss"),
    ):
        with pytest.raises(ConfigError, match="did you mean"):
            ask()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_price_is_that_of_the_traffic(name: str) -> None:
    """Bytes and rounds do not depend on who asks: what the planner places on links is what the entry counts."""
    cluster = dataclasses.replace(Cluster.load("abci"), devices_per_node=1)
    found = exchange_phases(name, 1e6, cluster, 8)
    entry = collective_traffic(name, 1e6, 8, group=1)
    assert sum(phase.rounds for phase in found) == entry.messages
    assert sum(phase.bytes_sent for phase in found) == pytest.approx(entry.bytes_sent)


def test_settings_of_codecs_are_fields_of_the_configuration() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(ExchangeConfig)}
    assert {name: fields.get(name) for name in SETTINGS} == SETTINGS


def test_double_buffering_is_refused_in_one_place_for_codecs_with_rounds_of_their_own() -> None:
    for codec, entry in CODECS.items():
        if entry.own_rounds:
            with pytest.raises(ConfigError, match="double_buffer does not go with"):
                check_pair(collectives_for(codec)[0], codec, double_buffer=True)
        else:
            check_pair(collectives_for(codec)[0], codec, double_buffer=True)


def test_the_page_prices_every_collective_and_knows_its_codecs_from_the_table() -> None:
    model = (TEMPLATES / "plan_model.js").read_text()
    prices = model[model.index("const PRICES") : model.index("function exchange")]
    assert set(re.findall(r"^    (\w+)[:(]", prices, re.MULTILINE)) == set(COLLECTIVES)
    page = (TEMPLATES / "plan_page.js").read_text()
    lines = re.search(r"const LINES = \{(.*?)\}", page)
    assert lines is not None
    assert tuple(re.findall(r"(\w+):", lines[1])) == PAGE_CODECS
    assert set(PAGE_CODECS) <= set(CODECS)
    result = cli_result(gpus=8)
    facts = page_facts(Workload.load("resnet50"), Cluster.load("abci"), result)
    written = json.loads(json.dumps(facts["cluster"]["traffic"]))
    for codec in PAGE_CODECS:
        entry = CODECS[codec]
        assert written[codec] == {
            "encode": entry.encode_traffic, "decode": entry.decode_traffic, "summable": entry.summable,
        }  # fmt: skip


@pytest.mark.parametrize("price", sorted({entry.price for entry in COLLECTIVES.values()}))
def test_a_price_can_be_loaded(price: str) -> None:
    assert callable(load(price))


@pytest.mark.parametrize("home", sorted({entry.home for entry in (*RUNNABLE.values(), *CODECS.values())}))
def test_the_code_of_an_entry_is_where_it_says(home: str) -> None:
    assert isinstance(load(home), type)


def test_the_document_lists_what_there_is() -> None:
    text = (DOCS / "exchange.md").read_text()
    for heading, table in (("## Collectives", RUNNABLE), ("## Codecs", CODECS)):
        rows = text.split(heading)[1].split("\n\n**")[0].split("\n\n`")[0]
        named = [
            name for row in re.findall(r"^\| (`.*?) \|", rows, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
        ]
        assert sorted(named) == sorted(table)
