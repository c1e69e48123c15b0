"""`bigstep export`: a trained model in the format that another tool wants."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigstep.cli.imports import collector_off
from bigstep.cli.options import Json, Trust, print_json, refuse_existing
from bigstep.errors import ConfigError
from bigstep.records import write_atomically

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["export"]

FORMATS = {".safetensors": "weights", ".pt": "weights", ".pt2": "program", ".onnx": "program"}
"""By the end of the file's name: weights alone, or the whole computation."""


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
    content = io.BytesIO()  # torch's writer may end the process where a disk is full
    if to.suffix == ".safetensors":
        content.write((run / FILE).read_bytes())
    elif to.suffix == ".pt":
        torch.save(tensors, content)
    else:
        model, example = load(run, trust=trust).model.float(), _example(about)
        batch = {0: torch.export.Dim("batch")}
        try:
            program = torch.export.export(model, (example,), dynamic_shapes=(batch,))
        except Exception as error:  # what the network is made of decides what torch finds wrong with it
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"torch cannot make a program of the model of {run} ({reason:.200}); export its weights alone, as "
                ".safetensors or .pt."
            ) from error
        if to.suffix == ".pt2":
            torch.export.save(program, content)
    try:
        if to.suffix == ".onnx":
            _write_onnx(program, to)  # weights beyond 2 GB go to a second file, named after this one
        else:
            write_atomically(to, content.getvalue())
    except OSError as error:
        raise ConfigError(f"{to} cannot be written ({error.strerror}); name another file.") from None
    if as_json:
        print_json({"file": str(to), "tensors": len(tensors), "bytes": to.stat().st_size})
    else:
        typer.echo(f"Written: {to} ({len(tensors)} tensors, {to.stat().st_size:,} bytes)")


def _example(about: dict[str, str]) -> Tensor:
    """Two samples of the shape that the model was trained on."""
    import torch

    dtype = torch.int64 if "length" in json.loads(about["shape"]) else torch.float32
    return torch.zeros(2, *json.loads(about["input"]), dtype=dtype)


def _write_onnx(program: object, to: Path) -> None:
    import torch

    try:
        written = torch.onnx.export(program, dynamo=True, verbose=False)  # type: ignore[arg-type]  # a program will do
    except ImportError as error:
        raise ConfigError(
            f"ONNX needs packages that are missing here ({error}): pip install onnx onnxscript."
        ) from None
    assert written is not None
    written.save(str(to))
