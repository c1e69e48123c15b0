"""Matrix completion by Hogwild!, with scikit-learn's conventions."""

from __future__ import annotations

import math
import time
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from bigstep.errors import ConfigError, DataError, RunError
from bigstep.sparse.estimator import Estimator, check_epochs, is_number
from bigstep.sparse.kernels.hogwild import CONTROL_SIZE
from bigstep.sparse.kernels.hogwild_factors import factor_worker
from bigstep.sparse.modes import ModeName, mode_of
from bigstep.sparse.report import FitReport, Part, Tally
from bigstep.sparse.sparsity import Sparsity
from bigstep.sparse.threads import Threads, epoch_order, seed_of, threads_of

__all__ = ["HogwildFactorizer"]

LINE = 16  # float32 in a cache line
FEW_LINES = 1 << 22  # rows and columns that are always allowed; more need an entry per hundred


class HogwildFactorizer(Estimator):
    """Complete a matrix from some of its entries by SGD on threads that share both factors without locks.

    The entry (u, v) is `mean + scale * (b_u + c_v + L_u . R_v)`, where mean and scale are the mean and standard
    deviation of the known entries, so that `gamma0` and `alpha` mean the same for any unit. Minimises the squared error
    plus `alpha` times the squares of the coordinates that each entry touches.

    Args:
        rank: Coordinates of L_u and R_v.
        alpha: L2 coefficient.
        gamma0: First step size.
        beta: Factor on the step size after each epoch.
        epochs: Passes over the entries in `fit`.
        mode: As in `HogwildClassifier`, except "cached".
        n_threads: Threads; -1 means every core, or fewer if each would have under 4,096 entries per epoch.
        random_state: Seed of the start and of the order.

    Attributes:
        row_factors_: L, rows x rank, and `row_bias_`; `column_factors_` and `column_bias_` likewise.
        mean_: Mean of the entries.
        scale_: Their standard deviation.
        fit_report_: Speed, conflicts, Omega, Delta, rho and the paper's prediction; `losses` are squared errors.

    Example:
        >>> import numpy as np
        >>> pairs = np.array([(u, v) for u in range(30) for v in range(20)])
        >>> values = np.sin(pairs[:, 0]) * np.cos(pairs[:, 1])
        >>> known = np.arange(600) % 7 != 0
        >>> model = HogwildFactorizer(rank=2, alpha=0.001, gamma0=0.1, epochs=100, beta=0.98, mode="serial")
        >>> model.fit(pairs[known], values[known]).rmse(pairs[~known], values[~known]) < 0.01
        True

    Reference:
        F. Niu, B. Recht, C. Re, S. Wright, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient
        Descent", 2011: section 2, matrix completion; experiments of section 7.

    Differs from the paper: biases and the mean are added; each entry decays what it touches by `alpha`, not by alpha
    over the degree of its row and column.
    """

    n_features_in_: int
    n_iter_: int
    mean_: float
    scale_: float
    row_factors_: NDArray[np.float32]
    column_factors_: NDArray[np.float32]
    row_bias_: NDArray[np.float32]
    column_bias_: NDArray[np.float32]
    fit_report_: FitReport
    _estimator_type = "regressor"
    _saved_arrays = ("row_factors_", "column_factors_", "row_bias_", "column_bias_")
    _saved_values = {"mean_": float, "scale_": float, "n_iter_": int, "n_features_in_": int, "_seed": int}

    def __init__(
        self,
        *,
        rank: int = 10,
        alpha: float = 0.05,
        gamma0: float = 0.05,
        beta: float = 0.9,
        epochs: int = 20,
        mode: ModeName = "hogwild",
        n_threads: int = -1,
        random_state: Any = 0,
    ) -> None:
        self.rank = rank
        self.alpha = alpha
        self.gamma0 = gamma0
        self.beta = beta
        self.epochs = epochs
        self.mode = mode
        self.n_threads = n_threads
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn from scratch, `epochs` passes.

        Args:
            X: Pairs (row, column), n x 2 whole numbers from 0; or a SciPy sparse matrix whose stored entries are known.
            y: The entries' values; not given with a SciPy matrix.

        Returns:
            The estimator.
        """
        self._check_params()
        pairs, values = _entries(X, y)
        with self._unchanged_on_failure():
            self._start(pairs, values)
            return self._learn(pairs, values, int(self.epochs))

    def _start(self, pairs: NDArray[np.int32], values: NDArray[np.float64]) -> None:
        shape = (int(pairs[:, 0].max()) + 1, int(pairs[:, 1].max()) + 1)
        if sum(shape) > max(FEW_LINES, 100 * len(pairs)):
            raise DataError(
                f"The {len(pairs):,} entries lie in a matrix of {shape[0]:,} x {shape[1]:,}, and factors would be kept "
                "for every row and column; renumber them without gaps."
            )
        with np.errstate(over="ignore", invalid="ignore"):
            self.mean_ = float(values.mean())
            self.scale_ = float(values.std()) or 1.0
        if not math.isfinite(self.scale_):
            raise DataError("The squares of the values are too large for float64; give them in a larger unit.")
        self._seed = seed_of(self.random_state)
        rng = np.random.default_rng(self._seed)
        start = 0.1 / math.sqrt(self.rank)
        self.row_factors_ = rng.normal(0, start, (shape[0], self.rank)).astype(np.float32)
        self.column_factors_ = rng.normal(0, start, (shape[1], self.rank)).astype(np.float32)
        self.row_bias_ = np.zeros(shape[0], np.float32)
        self.column_bias_ = np.zeros(shape[1], np.float32)
        for factors, seen in ((self.row_factors_, pairs[:, 0]), (self.column_factors_, pairs[:, 1])):
            factors[np.bincount(seen, minlength=len(factors)) == 0] = 0  # what is never seen stays average
        self.n_iter_ = 0

    def partial_fit(self, X: Any, y: Any = None) -> Self:
        """Make one more pass, at the step size of the next epoch; the first call is `fit` with one epoch.

        Rows and columns beyond those of the first call are refused: they have no place in the factors.
        """
        if not self.__sklearn_is_fitted__():
            epochs, self.epochs = self.epochs, 1
            try:
                return self.fit(X, y)
            finally:
                self.epochs = epochs
        self._check_params()
        pairs, values = _entries(X, y)
        shape = (len(self.row_bias_), len(self.column_bias_))
        if pairs[:, 0].max() >= shape[0] or pairs[:, 1].max() >= shape[1]:
            raise DataError(
                f"An entry lies outside the {shape[0]} x {shape[1]} matrix of the first call; call fit with them all."
            )
        return self._learn(pairs, values, 1)

    def _check_params(self) -> None:
        mode_of(self.mode, without="cached")  # rows of the factors are too many and too rare to keep copies of
        check_epochs(self.epochs)
        if isinstance(self.rank, bool) or not (isinstance(self.rank, int | np.integer) and self.rank >= 1):
            raise ConfigError(f"rank={self.rank!r} is not allowed; give a whole number from 1 up.")
        are_numbers = all(map(is_number, (self.alpha, self.gamma0, self.beta)))
        if not (are_numbers and 0 <= self.alpha < np.inf and 0 < self.gamma0 < np.inf and 0 < self.beta <= 1):
            raise ConfigError(
                f"alpha={self.alpha!r}, gamma0={self.gamma0!r}, beta={self.beta!r} are not allowed together; give "
                "alpha >= 0, gamma0 > 0 and 0 < beta <= 1."
            )

    def _check_shapes(self) -> None:
        """Check that what was loaded fits together: a row of a factor and a bias for each row and column."""
        for factors, bias in ((self.row_factors_, self.row_bias_), (self.column_factors_, self.column_bias_)):
            if factors.shape != (len(bias), self.rank) or bias.ndim != 1 or len(bias) == 0:
                raise DataError(
                    f"Factors of shape {factors.shape} do not fit biases of shape {bias.shape}; give an undamaged file."
                )

    def _learn(self, pairs: NDArray[np.int32], values: NDArray[np.float64], epochs: int) -> Self:
        n_threads = threads_of(self.n_threads, self.mode, len(values))
        began = time.perf_counter()
        stride = -(-(self.rank + 1) // LINE) * LINE
        left = _padded(self.row_bias_, self.row_factors_, stride)
        right = _padded(self.column_bias_, self.column_factors_, stride)
        rows, columns = np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])
        targets = ((values - self.mean_) / self.scale_).astype(np.float32)
        sparsity = _sparsity(rows, columns)
        prepare_s = time.perf_counter() - began
        tally = Tally()
        locks = np.zeros(len(left) + len(right), np.int64)
        with Threads(n_threads) as threads:
            for epoch in range(self.n_iter_, self.n_iter_ + epochs):
                began = time.perf_counter()
                rate = self.gamma0 * self.beta**epoch
                order = epoch_order(len(targets), self._seed, epoch)
                control = np.zeros(CONTROL_SIZE, np.int64)

                def work(
                    thread: int,
                    rate: float = rate,
                    order: NDArray[np.uint32] = order,
                    control: NDArray[np.int64] = control,
                ) -> Part:
                    arguments: tuple[Any, ...] = (
                        *(mode_of(self.mode).discipline, thread, n_threads, 0, len(targets), order),
                        *(rows, columns, targets, left.reshape(-1), right.reshape(-1), stride, int(self.rank)),
                        *(rate, float(self.alpha), control, locks),
                    )
                    part: Part = factor_worker(*arguments)
                    return part

                tally.add(threads.run(work), len(targets), time.perf_counter() - began)
                if not math.isfinite(tally.losses[-1]):
                    raise RunError(
                        f"The factors became infinite in epoch {epoch} with step {rate:.3g}; give a smaller gamma0."
                    )
        self.row_bias_, self.row_factors_ = left[:, 0].copy(), left[:, 1 : self.rank + 1].copy()
        self.column_bias_, self.column_factors_ = right[:, 0].copy(), right[:, 1 : self.rank + 1].copy()
        self.n_iter_ += epochs
        self.n_features_in_ = 2
        self.fit_report_ = FitReport.of(tally, self.mode, n_threads, prepare_s, sparsity)
        return self

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Return the values at pairs (row, column); a row or column never seen counts as average."""
        self._check_fitted()
        pairs = _pairs(X)
        u, v = pairs[:, 0], pairs[:, 1]
        known_u, known_v = u < len(self.row_bias_), v < len(self.column_bias_)
        u, v = np.where(known_u, u, 0), np.where(known_v, v, 0)
        inner = np.einsum("nk,nk->n", self.row_factors_[u], self.column_factors_[v], dtype=np.float64)
        standard: NDArray[np.float64] = (
            known_u * self.row_bias_[u] + known_v * self.column_bias_[v] + (known_u & known_v) * inner
        )
        return self.mean_ + self.scale_ * standard

    def rmse(self, X: Any, y: Any = None) -> float:
        """Return the root-mean-square error on known entries."""
        self._check_fitted()
        pairs, values = _entries(X, y)
        return float(np.sqrt(np.mean((self.predict(pairs) - values) ** 2)))

    def score(self, X: Any, y: Any = None) -> float:
        """Return minus the RMSE: larger is better, as scikit-learn's searches expect."""
        return -self.rmse(X, y)

    def __sklearn_tags__(self) -> Any:
        return self._tags("regressor", sparse=False)


def _padded(bias: NDArray[np.float32], factors: NDArray[np.float32], stride: int) -> NDArray[np.float32]:
    """Put biases and factors into rows, each on cache lines of its own."""
    count, rank = factors.shape
    memory = np.zeros(count * stride + LINE, np.float32)
    offset = (-memory.ctypes.data // 4) % LINE
    table = memory[offset : offset + count * stride].reshape(count, stride)
    table[:, 0] = bias
    table[:, 1 : rank + 1] = factors
    return table


def _pairs(X: Any) -> NDArray[np.int32]:
    array = np.asarray(X)
    if array.ndim != 2 or array.shape[1] != 2 or len(array) == 0:
        raise DataError(
            f"The entries must be pairs (row, column), n x 2 with n >= 1 (got an array of shape {array.shape})."
        )
    if array.dtype.kind not in "iuf" or not np.isfinite(array).all() or np.any(array != np.floor(array)):
        raise DataError("The entries' rows and columns must be whole numbers counted from 0.")
    if array.min() < 0 or array.max() >= 2**31 - 1:
        raise DataError(
            f"Rows and columns must lie in 0..2^31-2 (got {array.min()}..{array.max()}); number them from 0."
        )
    return np.asarray(array, dtype=np.int32)


def _entries(X: Any, y: Any) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    if hasattr(X, "tocoo"):
        if y is not None:
            raise ConfigError(
                "A sparse matrix holds its own values, but y was given too; leave y out, or give pairs and y."
            )
        matrix, summed = X.tocoo(), X.tocoo(copy=True)
        summed.sum_duplicates()  # duplicates are legal in SciPy, and mean their sum
        matrix = summed if summed.nnz < matrix.nnz else matrix  # without duplicates, keep the order
        X, y = np.stack([matrix.row, matrix.col], axis=1), matrix.data
    if y is None:
        raise DataError("The values of the entries are missing (y is None); give one for each pair.")
    pairs = _pairs(X)
    try:
        given = np.asarray(y)
        values = given if np.iscomplexobj(given) else given.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"The values of the entries must be numbers ({error}).") from None
    if np.iscomplexobj(values):  # NumPy would drop the imaginary parts
        raise DataError("Complex data not supported: the entries have complex values; give real numbers.")
    if values.shape != (len(pairs),):
        raise DataError(f"There are {len(pairs)} pairs but values of shape {values.shape}; give one value per pair.")
    if not np.isfinite(values).all():
        wrong = int(np.flatnonzero(~np.isfinite(values))[0])
        raise DataError(f"The value of entry {wrong} (from 0) is NaN or infinite; leave unknown entries out.")
    return pairs, values


def _sparsity(rows: NDArray[np.int32], columns: NDArray[np.int32]) -> Sparsity:
    """An entry touches its row and its column, and meets what is in either; repeats of its pair are in both."""
    n = len(rows)
    by_row, by_column = np.bincount(rows), np.bincount(columns)
    touched = by_row[rows] + by_column[columns]
    first = touched.argmax()
    repeats = np.count_nonzero((rows == rows[first]) & (columns == columns[first]))
    near = np.flatnonzero(touched > touched[first] - repeats)  # no other entry can meet more than this one
    pairs = rows[near].astype(np.int64) * len(by_column) + columns[near]
    _, places, repeated = np.unique(pairs, return_index=True, return_counts=True)
    most = int((touched[near][places] - repeated).max())
    coordinates = np.count_nonzero(by_row) + np.count_nonzero(by_column)
    return Sparsity(
        omega=2,
        delta=max(int(by_row.max()), int(by_column.max())) / n,
        rho=most / n,
        density=2 / coordinates,
    )
