"""Trained weights as a file that every tool reads (safetensors, names as in the module), and back into a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import bigstep
from bigstep.config import RunConfig
from bigstep.config.text import config_from_mapping
from bigstep.config.trust import require_own, require_trust
from bigstep.data.feed import Feed
from bigstep.engine.checkpoint import tensors_of
from bigstep.errors import ConfigError, DataError, RunError
from bigstep.models import build_model
from bigstep.records import read_run, write_atomically

__all__ = ["FILE", "Loaded", "load", "save_weights", "weights_of"]

FILE = "model.safetensors"
"""The file in a run folder."""


class Loaded(NamedTuple):
    """A trained model, and the configuration that it was trained with."""

    model: nn.Module
    config: RunConfig


def save_weights(model: nn.Module, folder: Path, name: str = "", feed: Feed | None = None) -> Path:
    """Write a model's weights and buffers into a run folder.

    Args:
        model: As it is evaluated: batch-norm statistics averaged over all workers.
        folder: The run folder.
        name: What `build_model` makes it from; empty for a user's own model.
        feed: What the model was trained on; `build_model` needs its shape.
    """
    from safetensors.torch import save

    seen: set[int] = set()
    tensors = {}
    for key, value in tensors_of(model).items():
        plain = value.detach().cpu().contiguous()
        plain = plain.to(torch.complex64) if plain.is_complex() else plain  # the format's only complex type
        place = plain.untyped_storage().data_ptr()
        tensors[key] = plain.clone() if place in seen else plain  # tied weights are written under each name
        seen.add(place)
    about = {"format": "pt", "bigstep": bigstep.__version__, "model": name}
    if name and feed is not None:
        about |= {"shape": json.dumps(feed.shape), "input": json.dumps(feed.input_shape)}
    try:
        write_atomically(folder / FILE, save(tensors, about))
    except OSError as error:
        raise RunError(
            f"The run has reached its end, but {folder / FILE} cannot be written ({error.strerror}): make room for it; "
            "the last checkpoint may hold the weights."
        ) from None
    return folder / FILE


def load(run: Path | str, *, trust: bool = False) -> Loaded:
    """Return the trained model of a run, ready to be evaluated, and its configuration.

    Args:
        run: The folder that `bigstep train` wrote, or `fit` with `out`.
        trust: Run the `package.module:function` that builds the model, if the run names one.

    >>> import tempfile
    >>> from bigstep.train import fit
    >>> from bigstep.recipes import load as recipe
    >>> from bigstep.config.text import apply_settings
    >>> quick = apply_settings(recipe("plain"), ["model=mlp", "data.holdout=0.98", "workers.count=2"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     trained = fit(quick, out=folder, max_steps=1, device="cpu")
    ...     model, config = load(folder)
    >>> config.model, model.training
    ('mlp', False)
    """
    tensors, about = weights_of(Path(run))
    config = config_from_mapping(read_run(Path(run)).config)
    if not about["model"]:
        raise ConfigError(
            f"{run} was trained with a model of your own: build it, and call its load_state_dict with what "
            f"safetensors.torch.load_file('{FILE}') returns."
        )
    require_own(about["model"], "model")
    require_trust([about["model"]], run, trusted=trust)
    model = build_model(about["model"], **json.loads(about["shape"]))
    types = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
    model.to(types[0] if types else torch.float32)
    extra = {name: value for name, value in model.state_dict().items() if not isinstance(value, Tensor)}
    model.load_state_dict({**extra, **tensors})
    return Loaded(model.eval(), config)


def weights_of(run: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a run by name, and what the file says about them."""
    from safetensors import SafetensorError, safe_open

    path = run / FILE
    if not path.is_file():
        begun = (run / "run.json").is_file()
        cure = f"finish it with `bigstep train --resume --out {run}`" if begun else "give the folder of a run"
        if not run.exists():
            raise DataError(f"{run} does not exist: give the folder of a run.")
        raise DataError(f"{run} has no {FILE}, which a run writes when it ends: {cure}.")
    try:
        with safe_open(path, "pt") as file:
            tensors, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise DataError(f"{path} cannot be read ({error}).") from None
    return tensors, {"model": "", "shape": "{}", **about}
