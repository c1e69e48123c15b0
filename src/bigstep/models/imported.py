"""Models from elsewhere: timm and Hugging Face by name, a user's own by import path."""

from __future__ import annotations

import importlib
import inspect
import os

from torch import Tensor, nn

from bigstep.errors import ConfigError, nearest
from bigstep.tables import load_own

__all__ = ["Logits", "model_from_path", "model_from_timm", "model_from_transformers"]


def model_from_timm(name: str, *, classes: int, channels: int, **_: int) -> nn.Module:
    """Build a model of the timm library, without pretrained weights; it takes images of any size."""
    try:
        timm = importlib.import_module("timm")
    except ImportError:
        raise ConfigError(
            f"model: timm:{name} needs the timm library, which is not installed; "
            "run pip install 'bigstep[extras]' or pip install timm."
        ) from None
    if not timm.is_model(name):
        raise ConfigError(f"timm has no model {name!r:.80}: {nearest(name, timm.list_models())}")
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=classes, in_chans=channels)
    return model


class Logits(nn.Module):
    """A Hugging Face model that returns its logits, as every model here does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Return batch x length x vocabulary logits for batch x length ids."""
        return self.model(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]


def model_from_transformers(name: str, *, vocabulary: int, length: int) -> nn.Module:
    """Build a causal language model of the transformers library with fresh weights; nothing is downloaded.

    Args:
        name: a type of model that transformers knows (gpt2, llama, …), which gives its default sizes, or a folder with
            a config.json.
        vocabulary: different tokens, in place of the configuration's own.
        length: longest sequence, likewise.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise ConfigError(
            f"model: hf:{name} needs the transformers library, which is not installed; run pip install transformers."
        ) from None
    sizes = {"vocab_size": vocabulary, "max_position_embeddings": length}
    known = [kind.model_type for kind in transformers.MODEL_FOR_CAUSAL_LM_MAPPING]
    if os.path.isfile(os.path.join(name, "config.json")):
        config = transformers.AutoConfig.from_pretrained(name, local_files_only=True, **sizes)
    elif name in known:
        config = transformers.AutoConfig.for_model(name, **sizes)
    else:
        raise ConfigError(
            f"transformers has no causal language model of the type {name!r:.80}: {nearest(name, known)} "
            "(a folder with a config.json works too)."
        )
    return Logits(transformers.AutoModelForCausalLM.from_config(config))


def model_from_path(path: str, **facts: int) -> nn.Module:
    """Call the function at `package.module:function` with those of `facts` that it accepts, and return its model.

    The current folder is searched too, so `mynet:build` finds a file `mynet.py` there.

    Args:
        path: an import path with a colon before the function.
        facts: classes, channels and image_size of images, vocabulary and length of tokens; the function gets those that
            it names, or all of them if it accepts any keyword.

    >>> model_from_path("torch.nn:Identity", classes=10)  # accepts any keyword
    Identity()
    """
    function = load_own(path, "model")
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    model = function(**{name: value for name, value in facts.items() if takes_all or name in named})
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: {path} returned {type(model).__name__}, but a torch.nn.Module is needed.")
    return model
