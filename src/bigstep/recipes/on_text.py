"""A recipe for images as it runs on text: what stays, what does not apply, and a sentence that says so."""

from __future__ import annotations

from dataclasses import replace

from bigstep.config import RunConfig
from bigstep.config.edit import scale_workers, stretch
from bigstep.recipes.presets import SHAKESPEARE
from bigstep.tables.datasets import DATASETS
from bigstep.tables.models import find_model

__all__ = ["on_text", "said_of_text", "wants_text"]

IMAGES_OF_A_SEQUENCE = 8
"""A sequence of 64 bytes replaces so many images of a batch, so that a run takes as long as the recipes for text."""


def wants_text(config: RunConfig, model: str) -> bool:
    """Whether a synchronous run on images is asked for a model of tokens.

    >>> from bigstep.recipes import load
    >>> [wants_text(load(name), "gpt-mini") for name in ("sony", "adamw", "hogwild")]
    [True, False, False]
    """
    data = DATASETS.get(config.data.name)
    on_images = data is not None and data.input == "images"
    return config.asynchronous.method == "none" and on_images and find_model(model).input == "tokens"


def on_text(config: RunConfig, model: str) -> RunConfig:
    """Return a run on images as one on the text that ships.

    Rule, shape of the schedule, batch plan, smoothing, precision, exchange and islands stay, and so does the rate of a
    full batch: nothing was searched for text. Batches shrink to sequences, epochs to those of the presets for text.

    >>> from bigstep.recipes import load
    >>> config = on_text(load("sony"), "gpt-mini")
    >>> config.data.name, config.workers.local_batch
    ('shakespeare', 4)
    """
    share, rate, text = 1 / IMAGES_OF_A_SEQUENCE, config.lr, SHAKESPEARE
    shrunk = scale_workers(stretch(config, text.epochs), local_batch=share)
    ratio = shrunk.batch / config.batch  # local batches are rounded
    kept = config.data
    return replace(
        shrunk,
        model=model,
        data=replace(text.data, drop_last=kept.drop_last, holdout=kept.holdout, loaders=kept.loaders),
        lr=replace(
            shrunk.lr,
            base_batch=max(1, round(rate.base_batch * ratio)),
            saturation=max(1, round(rate.saturation * ratio)) if rate.saturation else 0,
            warmup_batch=round(rate.warmup_batch * ratio),
        ),
        evaluate_every=text.evaluate_every,
    )


def said_of_text(images: RunConfig, config: RunConfig) -> str:
    """Say what `config` does on text; it was made from the recipe `images` and the other options.

    >>> from bigstep.recipes import load
    >>> said_of_text(load("sony"), on_text(load("sony"), "gpt-mini"))[:37]
    'sony on text: gpt-mini on shakespeare'
    """
    lost = [
        *(["augmentation"] if images.data.augment != "none" else []),
        *(["progressive image sizes"] if images.data.sizes else []),
    ]
    return (
        f"{config.recipe} on text: {config.model} on {config.data.name}, {config.workers.count} workers x "
        f"{config.workers.local_batch} sequences of {config.data.length} tokens, {config.epochs:g} passes. Rule "
        f"({config.optimizer.name}), schedule, plan and exchange are the recipe's for images, and so is the rate where "
        f"none was set; {' and '.join([*lost, 'batch norm'])} do not apply. Nothing was tuned for text: the "
        "tuned baseline is adamw."
    )
