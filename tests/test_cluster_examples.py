"""The files under examples/clusters are what their checkers accept, and call bigstep with options that exist."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from bigstep.cli import app
from bigstep.engine.launch import program

EXAMPLES = Path(__file__).parent.parent / "examples" / "clusters"


def known_options() -> set[str]:
    train = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    return {spelling for parameter in train.params for spelling in parameter.opts}


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.sh")), ids=lambda path: path.name)
def test_shell_scripts_pass_shellcheck(script: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    command = script.read_text().partition("-m bigstep train")[2].splitlines()[0]
    given = {word for word in command.split() if word.startswith("--")}
    assert given
    assert given <= known_options()


@pytest.mark.parametrize(
    ("status", "restarts", "requeued"),
    [(0, 0, False), (2, 0, False), (1, 3, False), (143, 0, True), (143, 19, True), (143, 20, False)],
)
def test_a_slurm_job_goes_back_into_the_queue_only_after_a_signal_and_not_forever(
    status: int, restarts: int, requeued: bool, tmp_path: Path
) -> None:
    for name, ending in (("srun", status), ("scontrol", 0)):
        body = f'echo "$@" >"{tmp_path}/{name}"; exit {ending}'
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "17",
        "SLURM_RESTART_COUNT": str(restarts),
    }  # fmt: skip
    done = subprocess.run(["bash", str(EXAMPLES / "slurm.sh"), "sony"], env=variables, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert (tmp_path / "srun").read_text().endswith(f"train sony --out {tmp_path}/runs/17 --resume --timeout 120\n")
    assert (tmp_path / "scontrol").exists() == requeued


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
def test_processes_of_mpirun_are_the_ranks_of_one_run(tmp_path: Path) -> None:
    command = [
        "mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", *program("train", "--device", "cpu", "--model"),
        "mlp", "--workers", "4", "--batch", "32", "--steps", "2", "--out", "run",
        "--json", "--no-report",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 2


def require_fields(value: Any, fields: dict[str, Any], where: str) -> None:
    """Compare with a table of required fields and their types, taken from the resource definition of Trainer v2."""
    for name, kind in fields.items():
        assert name in value, f"{where} lacks {name}"
        if isinstance(kind, dict):
            require_fields(value[name], kind, f"{where}.{name}")
        else:
            assert isinstance(value[name], kind), f"{where}.{name} is {value[name]!r}"


TRAIN_JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "runtimeRef": {"apiGroup": str, "kind": str, "name": str},
        "trainer": {
            "image": str, "numNodes": int, "numProcPerNode": int, "command": list, "args": list,
            "resourcesPerNode": {"limits": dict},
        },
        "podTemplateOverrides": list,
    },
}  # fmt: skip


def test_the_train_job_has_what_its_resource_definition_requires() -> None:
    job = yaml.safe_load((EXAMPLES / "trainjob.yaml").read_text())
    require_fields(job, TRAIN_JOB, "TrainJob")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    allowed = {"image", "command", "args", "env", "numNodes", "numProcPerNode", "resourcesPerNode"}
    assert set(job["spec"]["trainer"]) <= allowed
    arguments = job["spec"]["trainer"]["args"]
    assert all(isinstance(argument, str) for argument in arguments)
    ours = arguments[arguments.index("train") + 1 :]
    assert {argument.partition("=")[0] for argument in ours if argument.startswith("--")} <= known_options()
    for override in job["spec"]["podTemplateOverrides"]:
        names = {volume["name"] for volume in override["spec"]["volumes"]}
        for container in override["spec"]["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= names
        assert [target["name"] for target in override["targetJobs"]] == ["node"]
