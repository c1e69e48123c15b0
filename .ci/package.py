"""Builds sdist and wheel, installs the wheel where no source lies, and uses it as somebody else would.

python .ci/package.py; takes the packages that bigstep needs from the environment that runs it, so torch is not
installed again. Needs `build` and `mypy`.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
USER_PROGRAM = """\
import torch
from bigstep import LARS, fit
from bigstep.testing import assert_same_on_ranks

optimizer = LARS(torch.nn.Linear(2, 1).parameters(), lr=1.0)
reveal_type(LARS)
reveal_type(fit)
optimizer.no_such_method()
"""


def run(*command: str | Path, cwd: Path, fails: bool = False) -> str:
    """Run a command that must succeed (or fail) and return what it said."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=300)
    if (done.returncode != 0) != fails:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def build(folder: Path) -> Path:
    """Build the sdist, and the wheel from it; nothing of the package is missing in either."""
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    source = ROOT / "src"
    files = {
        path.relative_to(source).as_posix()
        for path in (source / "bigstep").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as archive:
        unpacked = {name.partition("/src/")[2] for name in archive.getnames()}
    for kind, names in (("wheel", packed), ("sdist", unpacked)):
        if files - names:
            raise SystemExit(f"the {kind} lacks {sorted(files - names)[:5]}: see tool.setuptools in pyproject.toml")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {sdist.name}: {sdist.stat().st_size / 1e6:.1f} MB")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel alone into a fresh environment that finds everything else where this program finds it."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet")
    run(*pip, "--ignore-installed", wheel, cwd=folder)
    return python


def use(python: Path, folder: Path) -> None:
    """Run commands that need what lies in the package beside its modules, and check a user's file against its types."""
    program = python.parent / "bigstep"
    where = run(python, "-c", "import bigstep; print(bigstep.__file__)", cwd=folder).strip()
    assert where.startswith(str(python.parents[1])), f"the source was imported, not the wheel: {where}"
    print(run(program, "--version", cwd=folder).strip())
    assert "sony" in run(program, "recipes", cwd=folder)
    run(program, "plan", "--html", "plan.html", cwd=folder)
    train = ("train", "--steps", "1", "--model", "mlp", "--device", "cpu", "--out", "run")
    run(program, *train, cwd=folder)
    assert (folder / "run" / "report.html").is_file()
    (folder / "program.py").write_text(USER_PROGRAM)
    mypy = (sys.executable, "-m", "mypy", "--python-executable", python, "--cache-dir", ROOT / ".mypy_cache")
    said = run(*mypy, "--strict", "program.py", cwd=folder, fails=True)
    assert 'Revealed type is "def (params:' in said, f"LARS is Any to a type checker:\n{said}"
    assert 'has no attribute "no_such_method"' in said, f"mistakes pass the type checker:\n{said}"
    assert "Found 1 error" in said, said


def main() -> None:
    """Build, install, use."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("dist", "clean", "work"):
            (folder / part).mkdir()
        wheel = build(folder / "dist")
        use(install(wheel, folder / "clean"), folder / "work")


if __name__ == "__main__":
    main()
