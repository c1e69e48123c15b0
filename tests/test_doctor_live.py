"""`bigstep doctor` on real scripts: started as ranks, watched, stopped, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples" / "doctor"


def examine(script: Path | str, *arguments: str, options: tuple[str, ...] = (), cwd: Path = EXAMPLES) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "bigstep", "doctor", "--json", *options, str(script), *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "src")},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("script, name", [("past_ddp.py", "unexchanged-gradients"), ("no_sampler.py", "same-samples")])
def test_the_cause_is_named_with_its_line(script: str, name: str) -> None:
    first = examine(script)["findings"][0]
    assert first["name"] == name
    assert first["line"].startswith(f"{script}:")


def test_a_right_script_is_told_to_be_right() -> None:
    assert examine("past_ddp.py", "--right")["healthy"]
