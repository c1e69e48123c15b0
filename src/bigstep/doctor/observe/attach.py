"""How the observers get into a process: before the program's first line, where they wait for it to import torch."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import importlib.abc
import importlib.machinery
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType

from bigstep.doctor.observe import guard
from bigstep.doctor.observe.recorder import Examined, Recorder
from bigstep.doctor.settings import Settings

__all__ = ["attach"]


def attach(site: str) -> None:
    """Wait for torch in this process, keep the user's files safe, and note how the process ends.

    Args:
        site: The `sitecustomize.py` that called this; if it hides one of the user's, that one is imported after all.
    """
    folder = os.path.dirname(os.path.abspath(site))
    sys.path[:] = [each for each in sys.path if os.path.abspath(each or ".") != folder]
    own = sys.modules.pop("sitecustomize")
    with contextlib.suppress(ImportError):
        importlib.import_module("sitecustomize")
    sys.modules.setdefault("sitecustomize", own)
    recorder = Recorder(Settings.from_environment())
    _die_with_parent()
    guard.install(recorder)
    _note_the_end(recorder)
    sys.meta_path.insert(0, _Waiting(recorder))


class _Waiting(importlib.abc.MetaPathFinder):
    """Finds nothing itself: the other finders locate a package, and it is observed once it has been loaded."""

    def __init__(self, recorder: Recorder) -> None:
        self.awaited: dict[str, Callable[[], None]] = {
            "torch": lambda: _observe_torch(recorder),
            "lightning.pytorch": lambda: _observe_lightning(recorder, "lightning.pytorch"),
            "pytorch_lightning": lambda: _observe_lightning(recorder, "pytorch_lightning"),
        }

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec that the other finders give, with a loader that calls the observer afterwards."""
        observe = self.awaited.pop(name, None)
        if observe is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                execute = spec.loader.exec_module

                def then_observe(module: ModuleType, execute: Callable[[ModuleType], None] = execute) -> None:
                    execute(module)
                    observe()

                spec.loader.exec_module = then_observe  # type: ignore[method-assign]
                return spec
        return None


def _observe_torch(recorder: Recorder) -> None:
    from bigstep.doctor.observe import collectives, data, models, probe, randomness, saving, schedules, syncs, updates

    for observer in (data, updates, collectives, syncs):
        observer.install(recorder)
    if not recorder.settings.only_time:
        for observer in (models, randomness, saving, schedules, probe):
            observer.install(recorder)


def _observe_lightning(recorder: Recorder, name: str) -> None:
    from bigstep.doctor.observe import frameworks

    frameworks.install(recorder, name)


def _note_the_end(recorder: Recorder) -> None:
    before = sys.excepthook

    def failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not recorder.enough and not isinstance(error, Examined):
            where = ""
            while trace is not None:
                if recorder._is_own(trace.tb_frame.f_code.co_filename):
                    name = recorder._original(trace.tb_frame.f_code.co_filename)
                    where = f" ({name}:{trace.tb_lineno})"
                trace = trace.tb_next
            first = (str(error).strip().splitlines() or [""])[0]
            recorder.close("failed", f"{kind.__name__}: {first}{where}"[:400])
            recorder.enough = True
        before(kind, error, error.__traceback__)

    sys.excepthook = failed
    atexit.register(lambda: None if recorder.enough else recorder.close("finished"))


def _die_with_parent() -> None:
    """Ask the kernel to end this process with the one that started it: nothing may outlive an examination."""
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
        if os.getppid() == 1 and os.environ.get("BIGSTEP_DOCTOR_PARENT", "1") != "1":
            os._exit(1)
