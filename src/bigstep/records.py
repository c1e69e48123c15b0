"""The run folder: run.json (what was run, on what) and metrics.jsonl (what was measured); one writer, one reader.

A training row has at least step, epoch, samples, loss, lr, batch, images_per_s, and noise_scale where it is known; an
evaluation row epoch, samples, accuracy and eval_loss. Accuracies are fractions. Rows carry `kind`: train, eval or note.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import bigstep
from bigstep.described import describe_machine
from bigstep.errors import ConfigError, DataError, RunError

__all__ = [
    "FILES", "FORMAT", "Run", "RunWriter", "describe_machine", "in_use", "json_text", "locked",
    "median_of_last_epochs", "read_run", "replacing", "write_atomically",
]  # fmt: skip

FORMAT = 1
"""Version of the run folder's layout; a reader refuses newer ones and upgrades older ones."""

FILES = (
    "run.json", "metrics.jsonl", "checkpoints", "meetings", "model.safetensors", "report.html", "tensorboard",
    "wandb", "mlflow.db", "profile.json", "profile.md", "trace.json.gz", "vocabulary.json", ".lock",
)  # fmt: skip
"""What a run leaves in its folder, besides error-rank-N.txt; nothing else is removed when a folder is cleared."""


_ASKING_S = 0.5
"""Seconds that a run waits for its folder: a report that asks whether it is in use locks it for microseconds."""


def write_atomically(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write a file so that a crash leaves either the old content or the new, never a torn one.

    Args:
        path: The file.
        content: All of it.
        sync: Wait for the disk, so that the promise holds for a crash of the machine and not only of the process.
    """
    with replacing(path, sync=sync) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file to write; it replaces `path` if the block succeeds, and is removed if it fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as file:  # never through a link that somebody has put there
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if not sync:
            return
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename itself must survive a power cut
        finally:
            os.close(folder)
    except OSError as error:
        if error.filename in (None, str(temporary)):  # None: the disk is full
            error.filename = str(path)  # the name that the user knows
        raise
    finally:
        with contextlib.suppress(OSError):  # the folder cannot be entered: the error above says so
            temporary.unlink(missing_ok=True)


def json_text(value: Any, indent: int | None = None) -> str:
    """Write a value as JSON, which knows neither NaN nor infinity: they become null, and readers show a gap.

    >>> json_text({"loss": float("nan"), "rows": [1, float("inf")]})
    '{"loss": null, "rows": [1, null]}'
    """
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def locked(folder: Path, *, fresh: bool = False, option: str = "--out") -> Iterator[None]:
    """Lock a run folder for this process; the system releases the lock when the process ends, however it ends.

    A folder in which nothing was written is removed again; one whose parts are links to other folders is refused.

    Args:
        folder: Created if it is missing.
        fresh: Refuse a folder that holds a run. Checked under the lock: another process may just have begun one.
        option: The option that names the folder on the command line.
    """
    from filelock import FileLock, Timeout  # its locks exclude threads too, and follow no link

    lock = FileLock(folder / ".lock", timeout=_ASKING_S)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise ConfigError(
            f"Another run is writing into {folder}; wait until it ends, or choose another folder with {option}."
        ) from None
    except OSError as error:
        lockless = error.errno == errno.ENOLCK
        what = f"file system of {folder} keeps no locks" if lockless else f"run folder {folder} cannot be written"
        raise ConfigError(f"The {what} ({error.strerror}); choose another with {option}.") from None
    try:
        if fresh and (folder / "run.json").exists():
            raise ConfigError(
                f"{folder} holds a run; add --resume (in Python resume=True) to continue it, or name a new folder with "
                f"{option}."
            )
        linked = [name for name in FILES if (folder / name).is_symlink() and (folder / name).is_dir()]
        if linked:  # it is unclear whose files would be overwritten and which removed
            raise ConfigError(
                f"{folder / linked[0]} is a link to another folder, but a run writes through none: link "
                f"{folder} itself, or choose another with {option}."
            )
        for left in (*folder.glob(".*.part"), *folder.glob("checkpoints/.*.part"), *folder.glob("meetings/*/.*.part")):
            left.unlink(missing_ok=True)  # left by a writer that was killed
        yield
    finally:
        with contextlib.suppress(OSError):
            if all(path.name == ".lock" for path in folder.iterdir()):
                (folder / ".lock").unlink(missing_ok=True)
                folder.rmdir()
        lock.release()


def in_use(folder: Path) -> bool:
    """Whether a process has locked a run folder, so that its run is in progress; False if the disk keeps no locks."""
    try:
        lock = (folder / ".lock").open("rb")
    except OSError:
        return False
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two processes that ask do not exclude each other
        except OSError as error:
            return isinstance(error, BlockingIOError)
    return False


def median_of_last_epochs(evaluations: Iterable[Mapping[str, Any]], epochs: float = 5) -> float | None:
    """The median accuracy of the evaluations in the last `epochs` of a run, which one lucky epoch does not change.

    >>> rows = [{"epoch": float(epoch), "accuracy": epoch / 10} for epoch in range(1, 8)]
    >>> median_of_last_epochs(rows), median_of_last_epochs(rows[:3]), median_of_last_epochs([])
    (0.5, 0.2, None)

    Reference: Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 5.1: the error of a run is this median.
    """
    told = [
        (row["epoch"], row["accuracy"])
        for row in evaluations
        if all(isinstance(row.get(name), int | float) for name in ("epoch", "accuracy"))
    ]
    end = max((epoch for epoch, _ in told), default=0.0)
    last = [accuracy for epoch, accuracy in told if epoch > end - epochs + 1e-6]
    return statistics.median(last) if last else None


class RunWriter:
    """Writes one run folder; rows are appended as whole lines and flushed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     writer = RunWriter(Path(folder) / "run", {"recipe": "plain"})
    ...     writer.add([{"kind": "eval", "epoch": 1.0, "samples": 10, "accuracy": 0.5, "eval_loss": 1.0}])
    ...     writer.finish({"accuracy": 0.5})
    ...     read_run(writer.folder).result["accuracy"]
    0.5
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], *, keep_until_step: int | None = None, **facts: Any):
        """Start a run folder, or resume one: rows after `keep_until_step` are dropped, as they will be written again.

        A resumed run keeps the time of its first start; `sessions` has an entry for each time that it was run.
        """
        self.folder = folder
        machine, now = describe_machine(), _now()
        session = {"started": now, "from_step": keep_until_step or 0, **machine, **_pick(facts, "ranks", "device")}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            before = read_run(folder).facts if keep_until_step and (folder / "run.json").exists() else {}
            kept = [] if keep_until_step is None else _rows_until(folder / "metrics.jsonl", keep_until_step)
            write_atomically(folder / "metrics.jsonl", "".join(map(_line, kept)).encode())
            self.evaluations = [row for row in kept if row.get("kind") == "eval"]
            """Every evaluation of the run, including those before it was resumed."""
            losses = [row["loss"] for row in kept if row.get("kind") == "train" and row.get("loss") is not None]
            self.last_loss: float = losses[-1] if losses else math.nan
            """The last finite loss before the run was resumed; NaN if there is none."""
            sessions = before.get("sessions", [_pick(before, *session)] if before else [])
            self._facts: dict[str, Any] = {
                "format": FORMAT,
                "config": dict(config),
                **machine,
                **_pick(before, "name", "tags", "bench"),
                **facts,
                "started": before.get("started", now),
                "sessions": [*sessions, session],
            }
            self._write_facts()
            self._metrics = open(folder / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115 - open for the run
        except OSError as error:
            raise ConfigError(
                f"The run folder {folder} cannot be written ({error.strerror}); choose another with --out."
            ) from None

    @property
    def sessions(self) -> list[Any]:
        """An entry for each time that the run was run, the current one last."""
        return list(self._facts["sessions"])

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows to metrics.jsonl."""
        rows = list(rows)
        self.evaluations += [dict(row) for row in rows if row.get("kind") == "eval"]
        try:
            self._metrics.write("".join(map(_line, rows)))
            self._metrics.flush()
        except OSError as error:
            raise _unwritable(self.folder / "metrics.jsonl", error) from None

    def note(self, text: str, **facts: Any) -> None:
        """Append a remark that a reader of the run should see."""
        self.add([{"kind": "note", "text": text, **facts}])

    def update(self, **facts: Any) -> None:
        """Add facts to run.json."""
        self._facts.update(facts)
        try:
            self._write_facts()
        except OSError as error:
            raise _unwritable(self.folder / "run.json", error) from None

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the result and close the folder."""
        self.update(result=dict(result), finished=_now())
        self.close()

    def close(self) -> None:
        """Close the metrics file; the run counts as unfinished unless `finish` was called."""
        with contextlib.suppress(OSError):  # of rows that a full disk has refused already
            self._metrics.close()

    def _write_facts(self) -> None:
        write_atomically(self.folder / "run.json", (json_text(self._facts, indent=1) + "\n").encode())


def _unwritable(path: Path, error: OSError) -> RunError:
    return RunError(f"{path} cannot be written ({error.strerror}); make room for it, then continue with --resume.")


def _line(row: Mapping[str, Any]) -> str:
    return json_text(row) + "\n"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _pick(facts: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: facts[name] for name in names if name in facts}


def _rows_until(path: Path, step: int) -> list[dict[str, Any]]:
    return [row for row in _read_rows(path) if _figure(row, "step") <= step] if path.exists() else []


def _figure(row: Mapping[str, Any], name: str) -> float:
    """A number of a row; 0 if the row has none, as a note, or if the value is not a number."""
    value = row.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _read_rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                if not line.endswith(b"\n"):  # the writer was killed while it wrote this row
                    continue
                raise DataError(f"{path}, line {number} is not a JSON object; remove that line.") from None
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number} is not a JSON object; remove that line.")
            # rows share the strings of their keys: with copies, a million rows would take twice the memory
            rows.append(dict(zip(map(sys.intern, row), row.values(), strict=True)))
    return rows


@dataclasses.dataclass(frozen=True)
class Run:
    """One run as it was recorded."""

    folder: Path
    facts: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, as plain dicts."""
        return _mapping(self.facts, "config", self.folder)

    @property
    def used(self) -> dict[str, Any]:
        """What a program supplied that the configuration does not name, such as its model, by part."""
        return _mapping(self.facts, "used", self.folder)

    @property
    def result(self) -> dict[str, Any]:
        """The result, empty while the run is unfinished."""
        return _mapping(self.facts, "result", self.folder)

    @property
    def complete(self) -> bool:
        """Whether it completed all of its epochs; a run that `--steps` ended has not."""
        reached = max((_figure(row, "epoch") for row in self.rows), default=0.0)
        return bool(self.result) and reached >= float(self.config.get("epochs", 0.0)) * (1 - 1e-9)

    @property
    def train(self) -> list[dict[str, Any]]:
        """The training rows, in order."""
        return [row for row in self.rows if row.get("kind") == "train"]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The evaluation rows, in order."""
        return [row for row in self.rows if row.get("kind") == "eval"]

    @property
    def notes(self) -> list[str]:
        """Remarks written during the run."""
        return [str(row["text"]) for row in self.rows if row.get("kind") == "note"]


def _mapping(facts: Mapping[str, Any], name: str, folder: Path) -> dict[str, Any]:
    value = facts.get(name, {})
    if not isinstance(value, dict):
        raise DataError(f"{folder / 'run.json'}: {name} is {value!r:.40}, but it must be an object of fields.")
    return dict(value)


def read_run(folder: Path) -> Run:
    """Read a run folder, or say in one sentence why that is impossible."""
    try:
        facts = json.loads((folder / "run.json").read_bytes())
    except OSError as error:
        raise DataError(f"{folder} is not a run folder: run.json cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError):
        raise DataError(f"{folder / 'run.json'} is not valid JSON.") from None
    version = facts.get("format") if isinstance(facts, dict) else None
    if not isinstance(version, int) or version > FORMAT:
        raise DataError(
            f"{folder / 'run.json'} has format {version!r}, and this bigstep {bigstep.__version__} reads up to "
            f"{FORMAT}; use the version that wrote it or a newer one."
        )
    metrics = folder / "metrics.jsonl"
    return Run(folder, facts, _read_rows(metrics) if metrics.exists() else [])
