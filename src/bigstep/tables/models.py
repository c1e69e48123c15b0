"""Networks by name, and the forms that name networks from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bigstep.errors import ConfigError, nearest
from bigstep.tables.plugins import Table

__all__ = ["FORMS", "MODELS", "Model", "find_model", "model_names"]

Input = Literal["images", "tokens", "any"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """One network, or one library or module to take networks from."""

    about: str
    """One sentence, for help and documents."""
    home: str
    """Where the function is that builds it, from the shape of the data and, for a form, from the name too."""
    input: Input = "images"
    """What it takes; `any` leaves that to the network."""


MODELS: dict[str, Model] = {
    "small": Model(about="a small residual network for 28 x 28 images", home="bigstep.models.small:small"),
    "mlp": Model(about="fully connected layers: many weights, little arithmetic", home="bigstep.models.small:mlp"),
    "resnet9": Model(about="nine layers for CIFAR-10", home="bigstep.models.small:resnet9"),
    "conv8": Model(
        about="eight layers for CIFAR-10 in seconds, the first whitens patches", home="bigstep.models.conv8:conv8"
    ),
    "conv8-wide": Model(about="conv8 with wider blocks", home="bigstep.models.conv8:conv8_wide"),
    "resnet18": Model(about="ResNet-18", home="bigstep.models.resnet:resnet18"),
    "resnet34": Model(about="ResNet-34", home="bigstep.models.resnet:resnet34"),
    "resnet50": Model(about="ResNet-50, which the large-batch papers trained", home="bigstep.models.resnet:resnet50"),
    "alexnet": Model(about="AlexNet with batch norm", home="bigstep.models.alexnet:alexnet"),
    "vgg16": Model(about="VGG-16: many weights in its last layers", home="bigstep.models.vgg:vgg16"),
    **{
        f"gpt-{size}{ending}": Model(
            about=f"a transformer {words}{', with a matrix of its own for the output' if ending else ''}",
            home=f"bigstep.models.gpt:gpt_{size}{ending.replace('-', '_')}",
            input="tokens",
        )
        for ending in ("", "-untied")
        for size, words in {
            "mini": "for two CPU cores",
            "10m": "of 10 million weights",
            "25m": "of 25 million weights",
            "124m": "of GPT-2's size",
        }.items()
    },
    "lstm": Model(about="a recurrent network for text", home="bigstep.models.lstm:lstm", input="tokens"),
    "lstm-mini": Model(about="a smaller lstm for two CPU cores", home="bigstep.models.lstm:lstm_mini", input="tokens"),
}

MODELS = Table("models", Model, MODELS)

FORMS: dict[str, Model] = {
    "timm:NAME": Model(about="a network of the timm library", home="bigstep.models.imported:model_from_timm"),
    "hf:NAME": Model(
        about="a causal language model of the transformers library",
        home="bigstep.models.imported:model_from_transformers",
        input="tokens",
    ),
    "package.module:function": Model(about="your own", home="bigstep.models.imported:model_from_path", input="any"),
}
"""Names with a colon: the part before it says where the network comes from."""


def find_model(name: str) -> Model:
    """Return the entry of a name; for a name with a colon, that of its form.

    >>> find_model("resnet50").input, find_model("timm:vit_tiny").home
    ('images', 'bigstep.models.imported:model_from_timm')
    """
    if name in MODELS:
        return MODELS[name]
    library, colon, _ = name.partition(":")
    if colon:
        return FORMS.get(f"{library}:NAME", FORMS["package.module:function"])
    raise ConfigError(f"Unknown model {name!r:.60}: {nearest(name, MODELS)} ({', '.join(FORMS)} work too).")


def model_names() -> tuple[str, ...]:
    """Return all names and forms, in the order of the table."""
    return (*MODELS, *FORMS)
