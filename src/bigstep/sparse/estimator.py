"""scikit-learn's conventions without scikit-learn: parameters, tags, errors of an estimator not yet fitted."""

from __future__ import annotations

import contextlib
import inspect
import numbers
import sys
from collections.abc import Iterator
from typing import Any, Self

import numpy as np

from bigstep.errors import ConfigError, nearest

__all__ = ["Estimator", "MissingMethodError", "NotFittedError", "check_epochs", "is_number"]

MOST_EPOCHS = 1_000_000


class NotFittedError(ConfigError, AttributeError):
    """A result was requested from an estimator before `fit`."""


class MissingMethodError(ConfigError, AttributeError):
    """The estimator has no such method under its parameters."""


def check_epochs(epochs: Any) -> None:
    """Refuse anything but a whole number of epochs that a fit might finish."""
    if not (isinstance(epochs, int | np.integer) and 1 <= epochs <= MOST_EPOCHS):
        raise ConfigError(f"epochs={epochs!r} is not allowed; give a whole number from 1 to {MOST_EPOCHS:,}.")


def is_number(value: Any) -> bool:
    """Whether a parameter is a real number, of Python or of NumPy.

    >>> is_number(np.float32(0.5)), is_number("0.5")
    (True, False)
    """
    return isinstance(value, numbers.Real)


class Estimator:
    """Parameters are the arguments of `__init__`, stored under their own names and checked in `fit`."""

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters by name."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **params: Any) -> Self:
        """Change parameters by name and return the estimator."""
        known = inspect.signature(type(self)).parameters
        for name, value in params.items():
            if name not in known:
                raise ConfigError(f"{type(self).__name__} has no parameter {name!r}; {nearest(name, known)}")
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        defaults = {name: parameter.default for name, parameter in inspect.signature(type(self)).parameters.items()}
        changed = [f"{k}={v!r}" for k, v in self.get_params().items() if v is not defaults[k] and v != defaults[k]]
        return f"{type(self).__name__}({', '.join(changed)})"

    @contextlib.contextmanager
    def _unchanged_on_failure(self) -> Iterator[None]:
        """Restore the estimator if a fit fails: half of a new one would predict without an error."""
        before = dict(vars(self))
        try:
            yield
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            raise

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "n_features_in_")

    def _check_fitted(self) -> None:
        if self.__sklearn_is_fitted__():
            return
        message = f"This {type(self).__name__} instance is not fitted yet; call fit first."
        # A program that uses scikit-learn catches scikit-learn's class.
        exceptions = sys.modules.get("sklearn.exceptions")
        raise (exceptions.NotFittedError if exceptions else NotFittedError)(message)

    def _tags(self, kind: str, **inputs: Any) -> Any:
        from sklearn.utils import ClassifierTags, InputTags, RegressorTags, Tags, TargetTags

        return Tags(
            estimator_type=kind,
            target_tags=TargetTags(required=True),
            classifier_tags=ClassifierTags() if kind == "classifier" else None,
            regressor_tags=RegressorTags() if kind == "regressor" else None,
            input_tags=InputTags(**inputs),
            non_deterministic=True,  # threads race
        )
