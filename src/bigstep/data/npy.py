"""NumPy's own file format, read without trusting it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from bigstep.errors import DataError

__all__ = ["map_npy"]


def map_npy(path: Path) -> NDArray[Any]:
    """Memory-map an array; whatever is wrong with the file becomes a `DataError` that names it."""
    try:
        return cast(NDArray[Any], np.load(path, mmap_mode="r", allow_pickle=False))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or 'it is cut off'}.") from None
    except Exception as error:  # the header is a Python expression: a damaged one can raise nearly anything
        raise DataError(f"{path} is not a .npy file of numbers ({type(error).__name__}).") from None
