"""The README is short, its links lead somewhere, and the Chinese one says the same: commands, figures, links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")


def code(text: str) -> list[str]:
    return re.findall(r"^```.*?^```", text, flags=re.M | re.S)


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table."""
    found = re.findall(r"(?:^\|.*\|\n)+", text, flags=re.M)
    return [[[cell.strip() for cell in row.strip("|").split("|")] for row in each.splitlines()] for each in found]


def figures(row: list[str]) -> list[str]:
    """The figures of a row, sorted: word order differs between the languages, and small counts may be words."""
    words = {"a nineteenth": "1/19", "three": "3", "four": "4", "one": "", "two": ""}
    text = " ".join(row[:2])
    for word, number in words.items():
        text = re.sub(rf"\b{word}\b", number, text)
    return sorted(re.findall(r"\d[\d,./]*\d|\d", text))


def test_the_readme_is_read_in_a_minute() -> None:
    assert len(ENGLISH.splitlines()) <= 115
    assert ENGLISH.count("![") == 2, "the idea and what it led to; the rest belongs into docs/"


def test_the_chinese_readme_has_the_same_commands_and_programs() -> None:
    assert code(CHINESE) == code(ENGLISH)
    inline = re.compile(r"`([^`\n]+)`")
    outside = [re.sub(r"^```.*?^```", "", text, flags=re.M | re.S) for text in (CHINESE, ENGLISH)]
    assert set(inline.findall(outside[0])) == set(inline.findall(outside[1]))


def test_the_chinese_readme_has_the_same_figures() -> None:
    ours, theirs = tables(CHINESE), tables(ENGLISH)
    assert [len(table) for table in ours] == [len(table) for table in theirs]
    for mine, yours in zip(ours[-1], theirs[-1], strict=True):
        assert figures(mine) == figures(yours)
        assert mine[-1] == yours[-1] or mine == ours[-1][0], "the last column says where a figure is from"


def test_the_chinese_readme_has_the_same_links() -> None:
    between = {"README.md", "README.zh.md"}
    assert set(LINK.findall(CHINESE)) - between == set(LINK.findall(ENGLISH)) - between
    assert "README.zh.md" in LINK.findall(ENGLISH)
    assert "README.md" in LINK.findall(CHINESE)


@pytest.mark.parametrize("name", ["README.md", "README.zh.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_lead_somewhere(name: str) -> None:
    links = LINK.findall((ROOT / name).read_text(encoding="utf-8"))
    assert [link for link in links if not (ROOT / link).exists()] == []
