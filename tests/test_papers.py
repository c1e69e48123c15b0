"""docs/papers.md: every recipe has its table, every row one of three words, and what it names is in the code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bigstep import recipes
from bigstep.config.schema import config_to_mapping
from bigstep.config.text import parse_yaml

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "papers.md").read_text()
MARKS = ("faithful", "different", "missing")


@dataclass(frozen=True)
class Row:
    technique: str
    mark: str
    where: str
    note: str

    @property
    def names(self) -> list[str]:
        """Fields and files in the third column."""
        return re.findall(r"`([^`]+)`", self.where)


def tables() -> dict[str, list[Row]]:
    """The rows of every table of techniques, by recipe."""
    found: dict[str, list[Row]] = {}
    section = ""
    for line in PAGE.splitlines():
        if line.startswith("#"):
            heading = re.match(r"### `(\w+)`: ", line)
            section = heading[1] if heading else ("others" if "without a recipe" in line else "")
        elif section and line.startswith("|") and not line.startswith(("|---", "| technique")):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            found.setdefault(section, []).append(Row(*cells))
    return found


TABLES = tables()
ROWS = [(name, row) for name, rows in TABLES.items() for row in rows]


def test_every_recipe_has_its_table_and_no_table_is_of_another() -> None:
    assert set(TABLES) == {*recipes.NAMES, "others"}
    assert all(len(rows) >= 4 for rows in TABLES.values())


@pytest.mark.parametrize("name", recipes.NAMES)
def test_every_technique_that_a_recipe_is_known_for_has_a_row(name: str) -> None:
    told = " · ".join(row.technique for row in TABLES[name]).casefold()
    assert not [technique for technique in recipes.describe(name).techniques if technique.casefold() not in told]


def test_a_row_has_one_of_three_words_and_says_why_it_is_not_faithful() -> None:
    for name, row in ROWS:
        assert row.mark in MARKS, (name, row)
        assert row.note or row.mark == "faithful", (name, row)
        assert (row.where == "–") == (row.mark == "missing"), (name, row)


@pytest.mark.parametrize("name", TABLES)
def test_the_files_fields_and_values_of_a_row_exist(name: str) -> None:
    presets = recipes.describe(name).presets if name != "others" else ("mini",)
    configs = [config_to_mapping(recipes.load("plain" if name == "others" else name, preset)) for preset in presets]
    wrong = [
        mention
        for row in TABLES[name]
        for mention in row.names
        if not (is_file(mention) if mention.endswith(".py") else any(holds(mention, config) for config in configs))
    ]
    assert not wrong


def is_file(mention: str) -> bool:
    return (ROOT / "src" / "bigstep" / mention).is_file()


def holds(mention: str, config: Mapping[str, Any]) -> bool:
    """Whether a configuration has the field, and the value where one is given; a list has it if one of its items does.

    A plan or a list of sizes that is mentioned must not be empty.
    """
    field, _, value = mention.partition("=")
    here: Any = config
    for part in field.split("."):
        if part not in here:
            return False
        here = here[part]
    if not value:
        return here != []
    wanted = parse_yaml(value, "docs/papers.md")
    return any(wanted in item.values() for item in here) if isinstance(here, list) else bool(here == wanted)


def test_a_wrong_field_value_or_file_is_found() -> None:
    config = config_to_mapping(recipes.load("sony", "paper"))
    assert holds("exchange.collective=torus", config)
    assert holds("lr.schedule=warmup", config)
    wrong = ("exchange.collective=ring", "exchange.colective", "lr.schedule=cosine", "plan")
    assert not any(holds(mention, config) for mention in wrong)
    assert not is_file("exchange/collectives/tree.py")
