"""Downpour SGD: a parameter server in shards, replicas that push and fetch, AdaGrad on the shard (Dean et al. 2012).

Evidence
    Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.1; read in full text.

    Time to 16 % accuracy on a speech network of 42 M parameters, from one warm start, slowest to fastest (the hours are
    only in a figure): SGD with one replica < Downpour with 20 replicas < 20 replicas and AdaGrad < Sandblaster L-BFGS
    with 2,000 < Downpour with 200 replicas and AdaGrad. ImageNet of 21,000 classes, 1.7 G parameters: over 15 %.

Launch
    bigstep train downpour
    bigstep train downpour --listen 10.0.0.1:29500 --replicas-elsewhere 1
    bigstep join 10.0.0.1:29500
    The last two on a machine each, which share BIGSTEP_SECRET. From Python: train_downpour(listen=...), join_downpour
    and serve_downpour of bigstep.asynchronous.

Batch
    mini: pushes of 32 samples; 375 shares an epoch of 12,000 images, drawn by three replicas.

Known
    n_push = n_fetch = 1 in the experiments; AdaGrad on the shard, rate_i = gamma / sqrt(sum of squares of all pushed
    gradients of weight i), gamma about ten times the best fixed rate; a warm start with one replica before the others
    begin; nothing is synchronised between replicas or between shards.

Chosen
    mini: two shards, three replicas, one epoch of warm start, gamma 0.02 that falls linearly to zero. There is no
    preset `paper`: neither the speech corpus nor the 21,000-class network of locally connected layers is at hand, and
    the paper gives no rates.

Differs
    Shares are drawn from one counter, so no data belongs to a replica and none is lost with it beyond its current step.
    Weight decay and eps are those of torch's AdaGrad. Batch norm, which the paper does not have, uses each share's own
    statistics; the moving averages live on the shards beside the weights.
"""

from __future__ import annotations

from dataclasses import replace

from bigstep.config import AsynchronousConfig, LrConfig, Piece, Published, RunConfig, WorkersConfig
from bigstep.recipes.presets import EMBEDDED
from bigstep.tables.optimizers import AdagradSettings

__all__ = ["PUBLISHED", "SUMMARY", "TECHNIQUES", "mini"]

SUMMARY = "Dean et al. 2012: a sharded parameter server, replicas that wait for nobody, AdaGrad"
TECHNIQUES = ("parameter server", "AdaGrad on the shard", "warm start", "asynchronous")
PUBLISHED = Published(
    system="DistBelief",
    source="Dean et al., Large Scale Distributed Deep Networks, NIPS 2012",
    hardware="CPU cluster, up to 200 replicas",
    batch="n_push = n_fetch = 1",
    accuracy=None,
    seconds=None,
    note="Speech and ImageNet of 21,000 classes (over 15 %); times are in a figure only.",
)


def mini() -> RunConfig:
    """The embedded data on two CPU cores."""
    return replace(
        EMBEDDED,
        workers=WorkersConfig(count=3, local_batch=32),
        epochs=10,
        optimizer=AdagradSettings(eps=1e-8, weight_decay=5e-4),
        lr=LrConfig(base=0.02, scaling="none", schedule=(Piece(shape="linear", until=10, end=0.0),)),
        asynchronous=AsynchronousConfig(method="downpour", replicas=3, shards=2, warm_start=1.0),
    )
