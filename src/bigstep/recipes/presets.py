"""What the presets of the recipes share, so that a recipe states only what it does differently.

`replace(IMAGENET, ...)` is how a preset `paper` begins, `EMBEDDED` a preset `mini`, `CIFAR10` a preset `cifar10`;
optimizer, rate and exchange are each recipe's own. If a paper does not speak of batch norm, Goyal's is taken.
"""

from __future__ import annotations

from bigstep.config import DataConfig, LrConfig, NormConfig, Piece, RunConfig, WorkersConfig

__all__ = ["BOOKS", "CIFAR10", "EMBEDDED", "IMAGENET", "SHAKESPEARE"]

GOYAL = NormConfig(statistics="moving", momentum=0.9, zero_gamma=True)

IMAGENET = RunConfig(
    model="resnet50",
    data=DataConfig(name="imagenet", image_size=224, augment="resized_crop", loaders=8),
    workers=WorkersConfig(count=8, local_batch=32),
    epochs=90,
    lr=LrConfig(base=0.1),
    norm=GOYAL,
)
"""ResNet-50 on ImageNet, 90 epochs."""

EMBEDDED = RunConfig(
    model="small",
    data=DataConfig(augment="flip"),
    workers=WorkersConfig(count=32, local_batch=32),
    epochs=20,
    lr=LrConfig(base=0.1),
    norm=GOYAL,
)
"""A small network on the embedded data: a minute on two CPU cores."""

CIFAR10 = RunConfig(
    model="resnet9",
    data=DataConfig(name="cifar10", augment="crop_flip", drop_last=True),
    workers=WorkersConfig(count=16, local_batch=32),
    epochs=30,
    lr=LrConfig(base=1.6, base_batch=2048, scaling="sqrt", saturation=2048),
    norm=GOYAL,
    precision="fp16",
)
"""CIFAR-10 on one GPU at any batch: `--set workers.count=N` adds workers; rates follow the batch up to 2,048."""


SHAKESPEARE = RunConfig(
    model="gpt-mini",
    data=DataConfig(name="shakespeare", length=64),
    workers=WorkersConfig(count=4, local_batch=4),
    epochs=1.25,
    lr=LrConfig(
        base=1e-2,
        base_batch=16,
        scaling="sqrt",
        schedule=(Piece(shape="warmup", until=0.125, start=0.0), Piece(shape="cosine", until=1.25, end=0.0)),
    ),
    evaluate_every=0.5,
)
"""A small GPT on the text that ships, as bytes: under two minutes on two CPU cores."""

BOOKS = RunConfig(
    model="gpt-10m",
    data=DataConfig(name="text", length=256),
    workers=WorkersConfig(count=8, local_batch=8),
    epochs=1,
    lr=LrConfig(
        base=1e-3,
        base_batch=64,
        scaling="sqrt",
        saturation=512,
        schedule=(Piece(shape="warmup", until=0.05, start=0.0), Piece(shape="cosine", until=1, end=0.0)),
    ),
    precision="bf16",
)
"""A GPT of 10 million weights on your own text, as bytes, on one GPU: one pass over it."""
