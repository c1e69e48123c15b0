"""`bigstep probe`: measure this machine and its links."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bigstep.cli.options import Json, print_json, require_device

__all__ = ["probe"]


def probe(
    out: Annotated[Path, typer.Option(help="Folder for machine.yaml and the model's file.")] = Path("probe"),
    model: Annotated[str, typer.Option(help="Also measure this model, layer by layer.")] = "",
    ranks: Annotated[int, typer.Option(min=2, max=64, help="Processes to time collectives with.")] = 2,
    batch: Annotated[int, typer.Option(min=1, help="Local batch at which the model is measured.")] = 32,
    image_size: Annotated[int, typer.Option(min=1, help="Side of the model's images.")] = 224,
    length: Annotated[int, typer.Option(min=1, help="Tokens in the model's sequences.")] = 128,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Measure this machine, its links and a model, and write files that `bigstep plan` reads.

    \b
    bigstep probe --model resnet18 --image-size 64
    bigstep plan --cluster probe/machine.yaml --model probe/resnet18.yaml
    """
    require_device(device, "cpu", "cuda")
    from bigstep.lab.probe import probe as measure

    def tell(line: str) -> None:
        typer.echo(f"probe  {line}", err=True)

    result = measure(
        out, model=model, ranks=ranks, batch=batch, image_size=image_size, length=length, device=device, tell=tell
    )
    if as_json:
        print_json(result)
        return
    found = result["cluster"]["device"]
    typer.echo(
        f"{found['name']}: {found['memory_bandwidth_gbyte_s']:,.1f} GB/s of memory, "
        f"{1e3 * found['sustained_tflop_s']:,.1f} GFLOP/s in a convolution."
    )
    for path in result["files"]:
        typer.echo(f"Written: {path}")
    machine, *measured = result["files"]
    typer.echo(f"Next: bigstep plan --cluster {machine}{f' --model {measured[0]}' if measured else ''}")
