"""`bigstep join`: take part in a Downpour run that another machine started."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from bigstep.cli.options import require_device

__all__ = ["join"]


def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The address given to the run as --listen.")],
    shard: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Serve a shard, kept in this folder, instead of computing.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu or cuda.")] = "auto",
    wait: Annotated[float, typer.Option(min=0, max=86_400, help="Seconds to wait for the run to appear.")] = 60,
) -> None:
    """Join a Downpour run that another machine started.

    All machines share a secret, and the run's configuration comes from the one that started it:

    \b
    export BIGSTEP_SECRET=$(openssl rand -hex 32)      # the same on every machine
    bigstep train downpour --listen 10.0.0.1:29500 --replicas-elsewhere 1
    bigstep join 10.0.0.1:29500                        # on the other machine
    """
    require_device(device, "auto", "cpu", "cuda")
    from bigstep.asynchronous import join_downpour, serve_downpour
    from bigstep.engine.ranks import DeviceChoice

    if shard is not None:
        serve_downpour(address, shard, timeout_s=wait)
        typer.echo(f"The run has ended; what the shard held is in {shard}.", err=True)
        return
    pushes = join_downpour(address, device=cast("DeviceChoice", device), timeout_s=wait)
    typer.echo(f"The run has ended; this replica made {pushes:,} updates.", err=True)
