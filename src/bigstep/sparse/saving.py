"""Fitted estimators as files: arrays in a safetensors file, everything else as JSON in its header, and no code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as parse_arrays
from safetensors.numpy import save as write_arrays

from bigstep.errors import BigstepError, ConfigError, DataError
from bigstep.records import write_atomically
from bigstep.sparse.classifier import HogwildClassifier
from bigstep.sparse.factorizer import HogwildFactorizer
from bigstep.sparse.report import FitReport
from bigstep.sparse.threads import seed_of

__all__ = ["load", "save"]

_KEY = "bigstep.sparse"
_FORMAT = 1
_KINDS: dict[str, type[HogwildClassifier] | type[HogwildFactorizer]] = {
    "HogwildClassifier": HogwildClassifier,
    "HogwildFactorizer": HogwildFactorizer,
}


def save(model: HogwildClassifier | HogwildFactorizer, path: str | Path) -> None:
    """Write a fitted estimator to a file that `load` reads; after a crash either the old file is there or the new.

    >>> import tempfile
    >>> model = HogwildClassifier(mode="serial").fit([[1.0, 0.0], [0.0, 1.0]], ["cat", "dog"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(model, Path(folder) / "model.safetensors")
    ...     load(Path(folder) / "model.safetensors").predict([[0.1, 2.0]]).tolist()
    ['dog']
    """
    model._check_fitted()
    header = {
        "format": _FORMAT,
        "estimator": type(model).__name__,
        "params": {**model.get_params(), "random_state": seed_of(model._seed)},
        "values": {name: getattr(model, name) for name in model._saved_values},
        "report": model.fit_report_.as_dict(),
    }
    if isinstance(model, HogwildClassifier):
        header["classes"] = {"dtype": model.classes_.dtype.str, "labels": model.classes_.tolist()}
    try:
        metadata = {_KEY: json.dumps(header, default=_plain)}
    except TypeError as error:
        raise ConfigError(f"The estimator cannot be written as a file ({error}); pickle it instead.") from None
    arrays = {name: np.ascontiguousarray(getattr(model, name)) for name in model._saved_arrays}
    try:
        write_atomically(Path(path), write_arrays(arrays, metadata))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); choose another place.") from None


def load(path: str | Path) -> HogwildClassifier | HogwildFactorizer:
    """Read an estimator that `save` or `bigstep train hogwild --data FILE.svm` wrote; nothing in the file is executed.

    Args:
        path: The file, or the run folder that holds it as `model.safetensors`.
    """
    path = Path(path)
    path = path / "model.safetensors" if path.is_dir() else path
    try:
        content = path.read_bytes()
        arrays = parse_arrays(content)
        length = int.from_bytes(content[:8], "little")
        header = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][_KEY])
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); give the file of an estimator.") from None
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError):
        raise DataError(
            f"{path} is not the file of a sparse estimator, or is damaged; give one that `save` wrote."
        ) from None
    try:
        return _restore(header, arrays)
    except BigstepError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise DataError(
            f"{path} lacks something that a sparse estimator of this bigstep needs; save the estimator again."
        ) from None


def _restore(header: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> HogwildClassifier | HogwildFactorizer:
    if header["format"] > _FORMAT:
        raise DataError(f"The estimator has format {header['format']}, newer than {_FORMAT}; use a newer bigstep.")
    model = _KINDS[header["estimator"]](**header["params"])
    model._check_params()
    for name in model._saved_arrays:
        setattr(model, name, arrays[name].astype(np.float32, copy=False))
    for name, kind in model._saved_values.items():
        setattr(model, name, kind(header["values"][name]))
    if isinstance(model, HogwildClassifier):
        model.classes_ = np.array(header["classes"]["labels"], dtype=header["classes"]["dtype"])
    model.fit_report_ = FitReport.from_dict(header["report"])
    model._check_shapes()
    return model


def _plain(value: Any) -> Any:
    """Turn NumPy's numbers into Python's, which JSON can hold."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a plain value")
