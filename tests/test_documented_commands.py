"""Every command of the README and the tour runs, long ones in fewer steps on fewer samples; every help fits its window.

A command that is new to a document fails here until it is said below how it is shortened.
"""

from __future__ import annotations

import re
import shlex
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from bigstep.cli.app import app

if TYPE_CHECKING:
    from bigstep.check import Pool

ROOT = Path(__file__).parents[1]
COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]  # it is a group
IMAGES = "--device cpu --steps 1 --model mlp --workers 2 --batch 16 --procs 1 --no-report"
TEXT = "--device cpu --steps 1 --data tiny.txt --set data.length=16 --procs 1 --no-report"
SUITE = "--recipes plain --set model=mlp --set workers.count=2 --epochs 0.002 --procs 1 --device cpu"

Bigstep = Callable[..., tuple[int, str, str]]

SHORTER = {
    "bigstep train": f"{IMAGES} --report",
    "bigstep train sony": IMAGES,
    "bigstep train sony --procs 2": f"{IMAGES} --procs 2",  # one of them with real ranks
    "bigstep train sony --exact --procs 3": IMAGES,
    "bigstep train lars --workers 128": IMAGES,
    "bigstep train adamw": TEXT,
    "bigstep train diloco": TEXT,
    "bigstep recipes sony --yaml > run.yaml": "",
    "bigstep train --config run.yaml --lr 4": IMAGES,
    "bigstep train sony --procs 2 --epochs 6": IMAGES,
    "bigstep train lars --lr 4 --batch 2048 --seed 1 --epochs 4 --procs 2 --name bigger --tag try": IMAGES,
    "bigstep train --resume --out runs/bigger": "--steps 2",
    "bigstep check sony --ranks 1,2": "",
    "bigstep bench --quick --recipes plain,lars,sony,onebit,hogwild": SUITE,
    "bigstep bench --quick": SUITE,
    "bigstep report bench/seeds-quick --html report.html": "",
    "bigstep report runs": "",
    "bigstep doctor --html doctor.html train.py": "",
    "bigstep data shakespeare": "",
    "bigstep train adamw --procs 2 --epochs 0.1": TEXT,
    "bigstep train diloco --procs 2 --epochs 0.1": TEXT,
    "bigstep plan --cluster abci --gpus 2048 --target 75 --html plan.html": "",
    "bigstep export runs/sony-mini sony.pt2": "",
}
"""What is added to a command so that it takes a moment; the last of an option given twice counts."""

FAILS = {
    "bigstep doctor --html doctor.html train.py": (1, "the model is called without its DDP wrapper"),
    "torchrun --nnodes 32 --nproc-per-node 8 -m bigstep train fair --preset paper --data /data/imagenet": (
        2,
        "/data/imagenet",  # all that is missing here
    ),
}
"""The status and words with which a command ends that is not to end well, or cannot here."""

ELSEWHERE = {
    "pip install -e .": "every test runs with the package installed",
    "pip install -e '.[test]' && pytest": "this is it: .ci/run takes the line from the README",
}
"""Commands that are not run here, and who runs them."""


def documented(document: str) -> list[str]:
    """The commands of all blocks of code that begin with one; a block of output begins with something else."""
    text = (ROOT / document).read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```", text, flags=re.M | re.S)
    lines = [line for block in blocks if re.match(r"bigstep \w|torchrun|pip", block) for line in block.splitlines()]
    return [re.sub(r"\s+#.*", "", line).strip() for line in lines]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, check_pool: Pool, bigstep: Bigstep) -> Bigstep:
    """`bigstep` with what takes long made short: few properties, runs of a suite in this process, recorded facts."""
    from bigstep.bench import runner
    from bigstep.check import check
    from bigstep.doctor.examination import diagnose, load_case

    rows = ["same start on every rank", "gradient of P ranks = of one"]
    monkeypatch.setattr("bigstep.check.check", partial(check, pool=check_pool, only=rows))

    def here(words: list[str], _log: Path, _watch: object) -> str | None:
        status, _, err = bigstep(*words)
        return err if status else None

    monkeypatch.setattr(runner, "_in_a_process", here)
    (tmp_path / "tiny.txt").write_text("To be, or not to be, that is the question. " * 40)
    with zipfile.ZipFile(Path(__file__).parent / "data" / "doctor.zip") as archive:
        archive.extractall(tmp_path / "facts", [name for name in archive.namelist() if name.startswith("past_ddp/")])
    case = load_case(tmp_path / "facts" / "past_ddp")
    monkeypatch.setattr("bigstep.doctor.examine", lambda command, **_: diagnose(case, command[0]))
    return bigstep


@pytest.mark.timeout(300)  # one document is some twenty seconds on two cores, and more where others compute
@pytest.mark.parametrize("document", ["README.md", "docs/tour.md"])
def test_every_command_of_a_document_runs(document: str, quick: Bigstep, tmp_path: Path) -> None:
    for line in documented(document):
        command = line.removeprefix("pip install -e . && ")
        if command in ELSEWHERE:
            continue
        assert command in SHORTER or command in FAILS, f"{document}: say here how {command!r} is shortened"
        typed, _, into = f"{command} {SHORTER.get(command, '')}".partition(" > ")
        words = shlex.split(typed)
        status, out, err = quick(*words[words.index("bigstep") + 1 :])
        expected, said = FAILS.get(command, (0, ""))
        assert status == expected, f"{command}: {err}"
        assert said in out + err
        if into:
            (tmp_path / into.strip()).write_text(out)


@pytest.mark.parametrize("document", ["README.md", "docs/tour.md", "docs/index.md", "docs/do-i-need-it.md"])
def test_options_that_a_sentence_names_are_there(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for name, rest in re.findall(r"`bigstep ([a-z]+)([^`]*)`", text):
        assert name in COMMANDS, f"{document}: bigstep {name}"
        known = {option for parameter in COMMANDS[name].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= known, f"{document}: bigstep {name}{rest}"


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_the_help_of_a_command_fits_eighty_columns(name: str) -> None:
    shown = CliRunner().invoke(app, [*([name] if name else []), "--help"], terminal_width=80).output
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    assert shown.startswith("Usage: ")
