"""`bigstep export`: write a trained model in the format that another tool needs."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigstep.cli.imports import collector_off
from bigstep.cli.options import Json, Trust, print_json, refuse_existing
from bigstep.errors import ConfigError
from bigstep.records import replacing, write_atomically

if TYPE_CHECKING:
    from torch import Tensor
    from torch.export import ExportedProgram
    from torch.onnx import ONNXProgram

__all__ = ["export"]

FORMATS = {".safetensors": "weights", ".pt": "weights", ".pt2": "program", ".onnx": "program"}
"""What a file holds, by its suffix: the weights alone, or the whole computation."""


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    to: Annotated[Path, typer.Argument(help="The file: .safetensors, .pt (state_dict), .pt2 (torch.export), .onnx.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Write the trained model of a run for other tools, in the format that the file's suffix names.

    \b
    bigstep export runs/sony-mini sony.safetensors  # weights by name
    bigstep export runs/sony-mini sony.pt           # for load_state_dict
    bigstep export runs/sony-mini sony.pt2          # torch.export
    bigstep export runs/sony-mini sony.onnx
    """
    if to.suffix not in FORMATS:
        raise ConfigError(f"{to} ends in {to.suffix or 'nothing'!r}, but it must end in one of {', '.join(FORMATS)}.")
    refuse_existing(to, force=force)
    with collector_off():
        import torch

        from bigstep.engine.weights import FILE, load, weights_of

    tensors, about = weights_of(run)
    content = io.BytesIO()  # in memory first: torch's writer may kill the process if the disk is full
    if to.suffix == ".safetensors":
        content.write((run / FILE).read_bytes())
    elif to.suffix == ".pt":
        torch.save(tensors, content)
    else:
        model, example = load(run, trust=trust).model.float(), _example(about)
        batch = {0: torch.export.Dim("batch")}
        try:
            with _torch_quiet():
                program = torch.export.export(model, (example,), dynamic_shapes=(batch,))
        except Exception as error:  # which error torch raises depends on the network
            raise ConfigError(
                f"torch cannot export the model of {run} as a program ({_reason(error)}); export its weights alone, as "
                ".safetensors or .pt."
            ) from error
        if to.suffix == ".pt2":
            torch.export.save(program, content)
        else:
            converted = _onnx_of(program, run)
    files = [to]
    try:
        if to.suffix == ".onnx":
            files = _write_onnx(converted, to, force=force)
        else:
            write_atomically(to, content.getvalue())
    except OSError as error:
        raise ConfigError(f"{to} cannot be written ({error.strerror}); name another file.") from None
    size = sum(file.stat().st_size for file in files)
    if as_json:
        print_json({"file": str(to), "tensors": len(tensors), "bytes": size})
    else:
        typer.echo(f"Written: {' and '.join(map(str, files))} ({len(tensors)} tensors, {size:,} bytes)")


def _example(about: dict[str, str]) -> Tensor:
    """Two samples of the shape that the model was trained on."""
    import torch

    dtype = torch.int64 if "length" in json.loads(about["shape"]) else torch.float32
    return torch.zeros(2, *json.loads(about["input"]), dtype=dtype)


@contextlib.contextmanager
def _torch_quiet() -> Iterator[None]:
    """Silence the warnings and log messages of torch's exporters."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)


def _reason(error: BaseException) -> str:
    """The first line of the root cause: torch wraps it in advice for its own developers."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _onnx_of(program: ExportedProgram, run: Path) -> ONNXProgram:
    """Convert a program to ONNX."""
    import torch

    try:
        with _torch_quiet():
            converted = torch.onnx.export(
                program, dynamo=True, verbose=False, dynamic_shapes=({0: "batch"},), output_names=["output"]
            )
    except ImportError as error:
        raise ConfigError(
            f"ONNX needs packages that are missing here ({error}): pip install onnx onnxscript."
        ) from None
    except Exception as error:  # depends on the network: ONNX may lack one of its operations
        raise ConfigError(
            f"torch cannot convert the model of {run} to ONNX ({_reason(error)}); export it as .pt2, or its "
            "weights alone, as .safetensors or .pt."
        ) from error
    assert converted is not None
    return converted


def _write_onnx(converted: ONNXProgram, to: Path, *, force: bool) -> list[Path]:
    """Write the model; large weights go to a second file, which the first refers to by a name made from its own."""
    with tempfile.TemporaryDirectory(prefix=f".{to.name}.", dir=to.parent) as folder:
        converted.save(Path(folder) / to.name)
        parts = sorted(Path(folder).iterdir())
        files = [to.with_name(part.name) for part in parts]
        refuse_existing(*files, force=force)
        # the weights first, so that a model never refers to a missing file
        for part, file in zip(reversed(parts), reversed(files), strict=True):
            with part.open("rb") as source, replacing(file) as target:
                shutil.copyfileobj(source, target)
    return files
