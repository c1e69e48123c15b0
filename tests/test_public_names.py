"""The public pieces are where the documentation says they are, and each explains itself."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import bigstep

PUBLIC = {
    "bigstep.optim": ["LAMB", "LARS", "Muon", "RMSpropWarmup", "parameter_groups"],
    "bigstep.schedules": [
        "scale_lr", "warmup", "step_decay", "polynomial", "linear", "cosine", "join", "elu_blend", "slow_start",
        "BatchPlan",
    ],
    "bigstep.norm": ["last_batch_statistics", "average_statistics", "zero_gamma", "GhostBatchNorm2d"],
    "bigstep.exchange": ["Exchange"],
    "bigstep.asynchronous": ["train_locked", "train_hogwild", "train_downpour"],
    "bigstep.sparse": ["HogwildClassifier", "HogwildFactorizer"],
    "bigstep.train": ["fit"],
    "bigstep.check": ["check"],
    "bigstep.testing": ["assert_same_on_ranks"],
    "bigstep.plan": ["Cluster", "Workload", "predict"],
}  # fmt: skip
NAMES = [(module, name) for module, names in PUBLIC.items() for name in names]
# what a paper defined has a reference; these are our own
OWN = {
    "assert_same_on_ranks", "scale_lr", "join", "check", "Cluster", "Workload", "predict", "parameter_groups",
    "constant", "table",
}  # fmt: skip


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[name for _, name in NAMES])
def test_a_public_piece_has_an_example_and_its_source(module: str, name: str) -> None:
    piece = getattr(importlib.import_module(module), name)
    text = piece.__doc__ or ""
    assert ">>>" in text, f"{name} has no example that runs"
    if name not in OWN:
        assert "Reference" in text, f"{name} does not say where it comes from"
        assert "Differs" in text, f"{name} does not say how it differs from its paper"


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[name for _, name in NAMES])
def test_a_public_piece_is_listed(module: str, name: str) -> None:
    assert name in importlib.import_module(module).__all__


def test_a_type_checker_sees_every_name_of_the_package() -> None:
    """What `__getattr__` brings is Any; so each name is imported once more, for type checkers."""
    tree = ast.parse(Path(bigstep.__file__).read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = {
        alias.asname: node.module
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {name: f"bigstep.{module}" for name, module in bigstep._PUBLIC.items()}


def test_importing_the_package_imports_no_torch() -> None:
    code = "import bigstep, sys; print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
