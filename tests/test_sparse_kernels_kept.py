"""Machine code that Numba keeps on disk is never older than the sources of the sparse kernels."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import pytest

from bigstep.sparse.kernels import atomics

KERNEL = """
from kernels.atomics import compiled
from kernels.other import FACTOR


@compiled
def times(x):
    return FACTOR * x
"""


def test_machine_code_is_out_of_date_when_what_a_kernel_uses_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an upgrade that leaves the kernel's own file as it was, and Numba's cache beside it."""
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "kernels"
    folder.mkdir()
    shutil.copy(atomics.__file__, folder)
    (folder / "kernel.py").write_text(KERNEL)
    for factor in (3, 50):
        (folder / "other.py").write_text(f"FACTOR = {factor}\n")
        importlib.invalidate_caches()
        for name in [name for name in sys.modules if name.partition(".")[0] == "kernels"]:
            monkeypatch.delitem(sys.modules, name)
        assert importlib.import_module("kernels.kernel").times(2) == 2 * factor
