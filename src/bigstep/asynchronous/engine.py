"""One asynchronous run with its folder: what `train_locked`, `train_hogwild`, `train_downpour` and the CLI share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from bigstep.asynchronous.ledger import Ledger
from bigstep.asynchronous.limits import require_runnable
from bigstep.asynchronous.resume import saved_progress
from bigstep.config.text import config_to_mapping
from bigstep.engine.build import Own, build
from bigstep.engine.interruption import listening
from bigstep.engine.observers.base import Audience, Observer
from bigstep.engine.observers.records import Records
from bigstep.engine.ranks import Ranks
from bigstep.engine.run import Order
from bigstep.engine.weights import save_weights
from bigstep.records import RunWriter
from bigstep.records import locked as keep_folder

__all__ = ["run_asynchronously"]


def run_asynchronously(
    order: Order,
    ranks: Ranks,
    observers: Iterable[Observer] = (),
    own: Own = Own(),  # noqa: B008 - frozen
    *,
    listen: str = "127.0.0.1:0",
    elsewhere: tuple[int, int] = (0, 0),
) -> dict[str, Any]:
    """Carry out an order as `bigstep.engine.run.run` does, but asynchronously.

    Args:
        order: What to run.
        ranks: This process.
        observers: Further observers of the run.
        own: A user's model, data and loss.
        listen: HOST:PORT at which other machines reach a Downpour run.
        elsewhere: How many shards and replicas run on other machines.
    """
    require_runnable(order.config, ranks, resume=order.resume)
    with keep_folder(order.folder, fresh=not order.resume):
        return _run(order, ranks, observers, own, listen, elsewhere)


def _run(
    order: Order, ranks: Ranks, observers: Iterable[Observer], own: Own, listen: str, elsewhere: tuple[int, int]
) -> dict[str, Any]:
    config = order.config
    run = build(config, ranks, own)
    asynchronous = config.asynchronous
    saved = saved_progress(order.folder, config) if order.resume else None
    writer = RunWriter(
        order.folder,
        config_to_mapping(config),
        keep_until_step=saved.updates if saved else None,
        ranks=asynchronous.replicas,
        device=torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu",
        **order.facts,
    )
    watching = tuple(observers)
    audience = Audience([Records(writer), *watching])
    Audience(watching).noted(
        f"{config.recipe} · {config.model} on {config.data.name} · updates of {config.workers.local_batch} samples · "
        f"{config.epochs:g} epoch{'' if config.epochs == 1 else 's'} · "
        f"{asynchronous.method} with {asynchronous.replicas} replicas · {order.folder}"
    )
    ledger = Ledger(run, writer, audience, saved)
    if order.resume:
        ledger.note(f"Resumed at update {saved.updates}." if saved else "Nothing to resume: started anew.")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the cores are for the replicas: threads that spin beside them would slow all down
    try:
        with listening() as request:
            if asynchronous.method == "downpour":
                from bigstep.asynchronous.downpour import train_sharded

                result = train_sharded(order, run, ledger, own, saved, request, listen=listen, elsewhere=elsewhere)
            else:
                from bigstep.asynchronous.shared import train_shared

                result = train_shared(order, run, ledger, own, request)
        name = "" if own.model is not None else config.model
        result["model"] = str(save_weights(run.learner.model, order.folder, name, run.train_feed))
        writer.update(result=result)
        return result
    finally:
        torch.set_num_threads(threads)
        run.close()
        audience.close()
        writer.close()
