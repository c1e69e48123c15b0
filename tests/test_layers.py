"""The layers of docs/architecture.md, enforced: a file imports only from groups above its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import bigstep

SOURCE = Path(bigstep.__file__).parent

# group -> (its layer, what it may import of bigstep besides layer 0)
ALLOWED: dict[str, set[str]] = {
    # 0 facts
    "__init__": {"comm", "norm", "optim", "sparse", "train"},  # for type checkers alone; a test holds it to that
    "errors": set(),
    "validate": set(),
    "published": set(),
    "pages": set(),
    "tables": set(),
    "config": set(),
    "described": set(),
    "records": set(),
    # 1 mathematics: no process groups, no config
    "schedules": set(),
    "nested": set(),
    "losses": {"gpu"},
    "gpu": {"nested"},
    "optim": {"gpu", "schedules"},
    "norm": {"gpu"},
    "models": {"norm", "gpu"},
    "data": {"gpu", "nested", "schedules"},
    # 2 communication
    "exchange": {"gpu"},
    # 3 engines
    "engine": {"schedules", "losses", "optim", "norm", "models", "data", "gpu", "exchange"},
    "asynchronous": {"schedules", "optim", "norm", "models", "data", "exchange", "engine"},
    "sparse": set(),
    # 4 studies
    "report": set(),
    "plan": set(),
    "lab": {"exchange", "engine", "plan", "data", "models", "recipes"},
    "check": {"schedules", "nested", "optim", "norm", "models", "data", "gpu", "exchange", "engine", "asynchronous"},
    "doctor": {"report"},
    "bench": {"engine", "asynchronous", "sparse", "lab", "plan", "report", "data", "recipes"},
    "testing": {"check", "engine", "recipes"},
    # names of 0.1 that stay importable wherever the code lives
    "train": {"engine", "recipes"},
    "comm": {"exchange"},
    "kernels": {"gpu"},
    # 5 choices
    "recipes": set(),
}
FACTS = {"errors", "validate", "pages", "published", "tables", "described", "records", "config"}
NO_CONFIG = {"schedules", "nested", "losses", "optim", "norm", "models", "data", "gpu", "exchange", "doctor"}
NO_TORCH = {
    "__init__", "errors", "validate", "pages", "published", "tables", "config", "described", "records", "plan",
    "report", "recipes",
}  # fmt: skip
DOOR = {"cli", "__main__"}


def group_of(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, at the top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import; write it out"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    group = group_of(path)
    if group in DOOR:
        return
    assert group in ALLOWED, f"{path}: the group {group!r} has no layer; give it one here and in docs/architecture.md"
    facts = FACTS - {"config"} if group in NO_CONFIG else FACTS
    allowed = ALLOWED[group] | facts | {group, "__version__"}
    modules = imports_of(path)
    used = {name.split(".")[1] for name in modules if name.startswith("bigstep.")}
    assert used <= allowed, f"{path.name} may not import {sorted(used - allowed)}"
    if group in NO_TORCH:
        torch_names = {name for name in modules if name.split(".")[0] == "torch"}
        assert not torch_names, f"{path.name} may not import torch"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_file_escapes(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= 400, f"{path.name} has {lines} lines; split it by idea"
    assert path.stem not in {"utils", "helpers", "common"}, f"{path.name} says nothing about what it holds"
