"""Every line of the documentation that begins with `bigstep` is one that the program takes, up to where it would train.

Lines are read from the README, the pages, the recipes' evidence and the helps. Each goes through the real parser; what
it asks for is resolved into configurations, plans and suites, and nothing is trained, measured or written beside them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from bigstep import recipes
from bigstep.cli.app import app
from bigstep.cli.resolve import job_of
from bigstep.cli.sparse import _settings, is_sparse_file
from bigstep.cli.train import Train
from bigstep.config.text import config_to_mapping, config_to_yaml
from bigstep.records import RunWriter

ROOT = Path(__file__).parents[1]
COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]  # it is a group
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

STANDS_FOR = {
    "RECIPE": "sony", "NAME": "sony", "SUITE": "seeds", "SCRIPT": "train.py", "RUN": "runs/bigger", "DIR": "photos",
    "FOLDER": "photos", "OUT": "packed", "FILE": "model.pt2", "FILE.svm": "rows.svm", "PERCENT": "85", "N": "2",
    "/data/imagenet": "photos", "DATA": "photos", "PIXELS": "224",
}  # fmt: skip
"""What a reader puts for a word in capitals, and for what lies on other machines."""

FRAGMENTS = {"train --epochs", "join --shard", "data pack"}
"""What a sentence names without its value; that the option is there is held all the same."""


class Resolved(Exception):  # noqa: N818 - no error, but as far as a line is followed here
    """All that was typed has been understood."""


def lines_of(text: str) -> list[str]:
    """The commands in blocks and in sentences, a line that goes on behind a backslash as one."""
    text = text.replace("\\\n", " ")
    blocks = "\n".join(re.findall(r"^```(?!python|toml)\w*\n(.*?)^```", text, flags=re.M | re.S))
    sentences = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", sentences)]
    found = [part for line in [*blocks.splitlines(), *inline] for part in re.split(r" && ", line)]
    return [line for line in found if re.match(r"(# )?(bigstep|torchrun .*-m bigstep|mpirun .*-m bigstep) [a-z]", line)]


def documented() -> dict[str, list[str]]:
    """Where a line stands, and what it is."""
    lines = {str(page.relative_to(ROOT)): lines_of(page.read_text(encoding="utf-8")) for page in PAGES}
    for name in recipes.NAMES:
        lines[f"recipes {name}"] = re.findall(r"^ +((?:bigstep|torchrun) .*)$", recipes.describe(name).docstring, re.M)
    for name, command in COMMANDS.items():
        lines[f"{name} --help"] = re.findall(r"^ *((?:bigstep|torchrun) .*)$", command.help or "", re.M)
    return {where: found for where, found in lines.items() if found}


LINES = documented()


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Follow one line in a folder that has what the documentation speaks of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for module, names in {"my_package": "models", "mine": "recipes"}.items():
        (tmp_path / module).mkdir()
        (tmp_path / module / f"{names}.py").write_text("from bigstep.recipes.sony import mini as small\nnetwork = None")
    (tmp_path / "photos" / "train" / "ant").mkdir(parents=True)
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "index.json").write_text("{}")
    for name in ("book.txt", "books.txt", "my_book.txt", "my_text.txt"):
        (tmp_path / name).write_text("To be, or not to be")
    (tmp_path / "run.yaml").write_text(config_to_yaml(recipes.load("sony")))
    (tmp_path / "mine.yaml").write_text("- {recipe: plain, epochs: 4, seeds: 3}")
    for name, recipe in {"sony-mini": "sony", "bigger": "lars"}.items():
        RunWriter(tmp_path / "runs" / name, config_to_mapping(recipes.load(recipe))).close()

    def planned(runs: Any, *_: Any, **__: Any) -> None:
        for run in runs:
            assert run.config().batch > 0
        raise Resolved

    def proved(config: Any, **_: Any) -> None:
        assert config.batch > 0
        raise Resolved

    monkeypatch.setattr("bigstep.bench.command.run_all", planned)
    monkeypatch.setattr("bigstep.check.check", proved)
    return lambda line: follow(line, tmp_path)


def follow(line: str, folder: Path) -> None:
    typed = re.sub(r"\s+#.*|\[[A-Z]+\]|…", "", line.removeprefix("# ")).partition(" > ")[0]
    launched = not typed.startswith("bigstep")
    name, *words = shlex.split(typed.partition("bigstep ")[2])
    words = [STANDS_FOR.get(word, word) for word in words]
    assert name in COMMANDS, f"there is no bigstep {name}"
    command = COMMANDS[name]
    options = {option for parameter in command.params for option in parameter.opts + parameter.secondary_opts}
    if not words or " ".join([name, *words]) in FRAGMENTS:
        assert {word for word in words if word.startswith("-")} <= options
        return  # the bare name of a command, or of one of its options
    context = command.make_context(name, list(words))
    if name == "train":
        asked = Train(**context.params)
        if is_sparse_file(asked.data, asked.recipe):
            _settings(asked)
        elif asked.resume and not launched:
            return  # which run it goes on with is read from its folder
        else:
            assert job_of(asked, launched=launched).config.batch > 0
    elif name in ("bench", "check", "recipes") or (name == "plan" and _is_at_hand(words)):
        try:
            context.invoke(command.callback, **context.params)
        except Resolved:
            return
        assert name in ("recipes", "plan"), "the others end before anything runs"


def _is_at_hand(words: list[str]) -> bool:
    """Whether a plan needs neither measurements nor runs that are not here."""
    return "--validate-local" not in words and "--runs" not in words and not any(w.endswith(".yaml") for w in words)


@pytest.mark.parametrize("where", list(LINES))
def test_every_line_is_one_that_the_program_takes(where: str, resolve: Callable[[str], None]) -> None:
    for line in LINES[where]:
        try:
            resolve(line)
        except (Exception, SystemExit) as error:
            pytest.fail(f"{where}: {line}\n{type(error).__name__}: {error}")


@pytest.mark.parametrize(
    "line",
    [
        "bigstep trane", "bigstep train sonny", "bigstep train --learning-rate 2", "bigstep train --set lr.bass=2",
        "bigstep train sony --preset papr", "bigstep bench ablatoin", "bigstep bench --recipes plane",
        "bigstep check --set workers.count=none", "bigstep plan --cluster abcd", "bigstep recipes sonny",
        "bigstep export RUN", "bigstep train --data nowhere.txt",
    ],
)  # fmt: skip
def test_a_line_that_is_wrong_is_not_taken(line: str, resolve: Callable[[str], None]) -> None:
    with pytest.raises((Exception, SystemExit)) as raised:
        resolve(line)
    assert str(raised.value)


def test_lines_are_found() -> None:
    assert lines_of("```\nbigstep train \\\n  sony\n$ ls\n```\nand `bigstep check\n--exact`, `pip`") == [
        "bigstep train    sony",
        "bigstep check --exact",
    ]
    assert sum(map(len, LINES.values())) > 200
