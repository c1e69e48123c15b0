"""docs/architecture.md names files that are there, layers that are enforced, and a loop that stays what it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import bigstep
from bigstep.tables.codecs import CODECS
from bigstep.tables.collectives import COLLECTIVES
from bigstep.tables.methods import METHODS
from bigstep.tables.optimizers import OPTIMIZERS
from test_layers import ALLOWED

SOURCE = Path(bigstep.__file__).parent
PAGE = (SOURCE.parents[1] / "docs" / "architecture.md").read_text()
LOOP = SOURCE / "engine" / "loop.py"


def test_every_file_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]*(?:\.py)?)`", PAGE))
    assert len(named) > 25
    missing = [name for name in named if not (SOURCE / name).exists() and not (SOURCE.parents[1] / name).exists()]
    assert not missing


def test_the_page_has_every_group_of_the_layers() -> None:
    for group in ALLOWED:
        assert f"`{group}" in PAGE or f"`{group}.py`" in PAGE or group == "__init__", group


def test_the_loop_is_short_and_knows_nobody_by_name() -> None:
    text = LOOP.read_text()
    assert len(text.splitlines()) <= 120
    imported = {node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.module}
    special = {name for name in imported if ".methods" in name or ".optim" in name or ".exchange" in name}
    assert not special
    assert not {name for name in imported if ".observers." in name} - {"bigstep.engine.observers.base"}
    words = set(re.findall(r"[a-z_]+", text))
    common = {"none", "exact", "gather", "ring"}  # words of English, too
    assert not words & ({*CODECS, *COLLECTIVES, *METHODS, *OPTIMIZERS} - common)


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_function_is_longer_than_a_screen(path: Path) -> None:
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if text.splitlines()[first - 2].strip().startswith("# long: "):
                continue  # with its reason beside it
            body = node.body[1:] if ast.get_docstring(node) else node.body
            length = body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]
            assert length <= 60, f"{path.name}: {node.name} has {length} lines; say why beside it, or divide it"
