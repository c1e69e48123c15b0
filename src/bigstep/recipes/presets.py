"""What the presets of the recipes share, so that a recipe says only what it does differently.

`replace(IMAGENET, ...)` is how a preset `paper` begins, `EMBEDDED` a preset `mini`, `CIFAR10` a preset `cifar10`;
optimizer, rate and exchange are each recipe's own. Where a paper does not speak of batch norm, it is Goyal's.
"""

from __future__ import annotations

from bigstep.config import DataConfig, LrConfig, NormConfig, RunConfig, WorkersConfig

__all__ = ["CIFAR10", "EMBEDDED", "IMAGENET"]

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
"""CIFAR-10 on one GPU at any batch: `--set workers.count=N` adds workers, and rates follow the batch up to 2,048."""
