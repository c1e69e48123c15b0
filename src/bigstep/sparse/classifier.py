"""Linear classification by Hogwild!, with scikit-learn's conventions."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from bigstep.errors import ConfigError, DataError, nearest
from bigstep.sparse.estimator import Estimator, MissingMethodError, check_epochs, is_number
from bigstep.sparse.linear import BIAS_SHARE, LOSSES, LinearProblem, run_epochs
from bigstep.sparse.modes import ModeName, mode_of
from bigstep.sparse.report import FitReport, Tally
from bigstep.sparse.rows import Rows, arrange, as_rows, survey
from bigstep.sparse.sparsity import measure_sparsity
from bigstep.sparse.threads import Threads, seed_of, threads_of

__all__ = ["HogwildClassifier", "classes_of"]

PAPERS_BETA = 0.9
LAST_STEP = 0.5  # of 1 / (alpha * examples seen), where the step of Pegasos, 1 / (alpha t), ends


class HogwildClassifier(Estimator):
    """Learn linear classifiers by SGD on threads that share one weight vector.

    Minimises `mean loss(y, w.x + b) + alpha/2 |w|^2`, one against the rest when there are more than two classes. In
    epoch k every example, in an order drawn without replacement, does

        w <- (w + gamma_0 beta^k pull x) / (1 + gamma_0 beta^k alpha),    pull = -dloss/dmargin

    Args:
        loss: "hinge" (a support vector machine) or "logistic".
        alpha: L2 coefficient.
        gamma0: First step size, or "auto": 1 / mean |x|^2, so that a step reaches a margin of one; less if a given
            `beta` would leave the last epoch a larger step than "auto" ends at.
        beta: Factor on the step size after each epoch, or "auto": the factor that makes the last epoch's step
            0.5 / (alpha * examples * epochs), but at most the paper's 0.9.
        epochs: Passes over the data in `fit`.
        fit_intercept: Learn b. Its step is 100 times smaller, because every example changes it.
        mode: How several threads share the weights; `bigstep.sparse.MODES` says what each does. "hogwild" is the
            paper's own: no locks, no copies, compare-exchange additions; "racing" is the same with plain additions;
            "cached", the fastest as measured, keeps a copy of the frequent weights for each thread; "aig", "locked" and
            "round_robin" are what the paper compares with; "serial": one thread.
        n_threads: Threads; -1 means every core, or fewer if each would have under 4,096 examples per epoch.
        random_state: Seed of the order, which is a function of (seed, epoch) alone.

    Attributes:
        classes_: Sorted labels.
        coef_: Weights, (1 or classes) x features; a positive margin speaks for `classes_[1]`, or for the class itself.
        intercept_: One per output.
        n_iter_: Epochs made so far.
        gamma0_: The step size that "auto" chose; `beta_` likewise.
        fit_report_: Speed, conflicts, Omega, Delta, rho and the paper's prediction; see `FitReport`.

    Example:
        >>> import numpy as np
        >>> X = np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.2, 0.8]] * 50)
        >>> model = HogwildClassifier(mode="serial").fit(X, ["cat", "cat", "dog", "dog"] * 50)
        >>> model.predict([[1.0, 0.2], [0.1, 1.0]]).tolist()
        ['cat', 'dog']
        >>> model.fit_report_.conflicts
        0

    Reference:
        F. Niu, B. Recht, C. Re, S. Wright, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient
        Descent", 2011: algorithm 1; experiments of section 7 (20 epochs, beta 0.9, RR after Vowpal Wabbit).

    Differs from the paper: the L2 term decays all weights at every example, by a scale that depends on the position in
    the order alone and so needs no shared state, whereas the paper divides each coordinate's decay by its degree and
    applies it when the coordinate is met; both have the same mean. In the mode "cached" each thread adds what it learns
    about the intercept and the more frequent features (at most half of them), for which threads would compete, to the
    shared weights once in 2,048 examples (beyond the first 1,024 weights once in 32,768); on small sets more often, 32
    times (twice) per epoch and thread. The paper does not do this.
    """

    classes_: NDArray[Any]
    coef_: NDArray[np.float32]
    intercept_: NDArray[np.float32]
    n_features_in_: int
    n_iter_: int
    gamma0_: float
    beta_: float
    fit_report_: FitReport
    _estimator_type = "classifier"
    _saved_arrays = ("coef_", "intercept_")
    _saved_values = {"gamma0_": float, "beta_": float, "n_iter_": int, "n_features_in_": int, "_seed": int}

    def __init__(
        self,
        *,
        loss: Literal["hinge", "logistic"] = "hinge",
        alpha: float = 1e-4,
        gamma0: float | Literal["auto"] = "auto",
        beta: float | Literal["auto"] = "auto",
        epochs: int = 20,
        fit_intercept: bool = True,
        mode: ModeName = "cached",
        n_threads: int = -1,
        random_state: Any = 0,
    ) -> None:
        self.loss = loss
        self.alpha = alpha
        self.gamma0 = gamma0
        self.beta = beta
        self.epochs = epochs
        self.fit_intercept = fit_intercept
        self.mode = mode
        self.n_threads = n_threads
        self.random_state = random_state

    def fit(self, X: Any, y: Any, *, progress: Callable[[dict[str, Any]], None] | None = None) -> Self:
        """Learn from scratch, `epochs` passes.

        Args:
            X: SciPy sparse matrix, `(data, indices, indptr, n_features)`, or rows x features.
            y: Labels.
            progress: Called after each epoch with epoch, epochs, loss, rate, examples_per_s and seconds.

        Returns:
            The estimator.
        """
        self._check_params()
        rows = as_rows(X)
        labels = _labels(y, rows)
        classes = classes_of(labels)
        with self._unchanged_on_failure():
            self._start(rows, classes)
            return self._learn(rows, labels, int(self.epochs), progress)

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> Self:
        """Make one more pass, at the step size of the next epoch; twenty calls on the same data equal `fit`.

        Give `beta=1` for a stream of new data, or steps shrink with each call.

        Args:
            X: As in `fit`.
            y: Labels.
            classes: All labels that will ever occur; needed at the first call.

        Returns:
            The estimator.
        """
        self._check_params()
        rows = as_rows(X)
        labels = _labels(y, rows)
        if not self.__sklearn_is_fitted__():
            if classes is None:
                raise ConfigError(
                    "The first call of partial_fit must name all classes: partial_fit(X, y, classes=[...])."
                )
            with self._unchanged_on_failure():
                self._start(rows, classes_of(np.asarray(classes)))
                return self._learn(rows, labels, 1, None)
        if classes is not None and not np.array_equal(given := classes_of(np.asarray(classes)), self.classes_):
            raise ConfigError(
                f"classes={given.tolist()} differ from the first call's {self.classes_.tolist()}; give the same ones "
                "or none."
            )
        self._check_width(rows)
        return self._learn(rows, labels, 1, None)

    def _check_params(self) -> None:
        if self.loss not in LOSSES:
            raise ConfigError(f"loss={self.loss!r:.60} is not known; {nearest(str(self.loss), LOSSES)}")
        mode_of(self.mode)
        check_epochs(self.epochs)
        if not (is_number(self.alpha) and 0 <= self.alpha < np.inf):
            raise ConfigError(f"alpha={self.alpha!r} is not allowed; give a finite number from 0 up.")
        if self.beta != "auto" and not (is_number(self.beta) and 0 < self.beta <= 1):
            raise ConfigError(f"beta={self.beta!r} is not allowed; give a number above 0 and up to 1, or 'auto'.")
        if self.gamma0 != "auto" and not (is_number(self.gamma0) and 0 < self.gamma0 < np.inf):
            raise ConfigError(f"gamma0={self.gamma0!r} is not allowed; give a finite number above 0, or 'auto'.")

    def _start(self, rows: Rows, classes: NDArray[Any]) -> None:
        outputs = 1 if len(classes) == 2 else len(classes)
        self.gamma0_, self.beta_ = self._choose_steps(rows)
        self.classes_ = classes
        self.coef_ = np.zeros((outputs, rows.n_features), np.float32)
        self.intercept_ = np.zeros(outputs, np.float32)
        self.n_iter_ = 0
        self._seed = seed_of(self.random_state)

    def _choose_steps(self, rows: Rows) -> tuple[float, float]:
        """Return gamma_0 and beta: a first step that reaches a margin of one, a last one whose noise is harmless.

        The L2 term averages the noise that a step leaves over 1 / (step * alpha) examples: for a step of 0.5 / (alpha *
        examples * epochs) over two fits of this length. A given beta near 1 makes the first step as small, too,
        and a few epochs then get nowhere: on RCV1's shape that costs 0.9 points with 5 epochs.
        """
        last = np.inf if self.alpha == 0 else LAST_STEP / (self.alpha * rows.n_rows * self.epochs)
        if self.gamma0 != "auto":
            first = float(self.gamma0)
        else:
            square = rows.mean_square()
            first = 1 / (square if 0 < square < np.inf else 1.0)  # what is not finite is refused later, with its row
        if first < float(np.finfo(np.float32).tiny):
            raise DataError(f"A first step of {first:.3g} is too small for float32; scale the features down.")
        if self.beta == "auto":
            steps = max(1, self.epochs - 1)
            return first, float(min(PAPERS_BETA, (last / first) ** (1 / steps)))
        shrunk = self.beta ** (self.epochs - 1)
        if self.gamma0 == "auto" and first * shrunk > last:
            first = last / shrunk
        return first, float(self.beta)

    def _learn(
        self, rows: Rows, labels: NDArray[Any], epochs: int, progress: Callable[[dict[str, Any]], None] | None
    ) -> Self:
        known = np.isin(labels, self.classes_)
        if not known.all():
            raise DataError(
                f"The label {labels[~known].tolist()[0]!r} is not among the classes {self.classes_.tolist()}; name it "
                "in classes."
            )
        targets = np.searchsorted(self.classes_, labels)

        def show(epoch: int, rate: float, tally: Tally) -> None:
            if progress is not None:
                row = {"epoch": epoch + 1, "epochs": self.n_iter_ + epochs, "loss": tally.losses[-1], "rate": rate}
                progress({**row, "examples_per_s": tally.examples_per_s, "seconds": tally.seconds})

        outputs = len(self.coef_)
        if outputs == 1:
            targets = 1 - targets  # the only output, 0, is positive for classes_[1]
        n_threads = threads_of(self.n_threads, self.mode, rows.n_rows)
        with Threads(n_threads) as threads:
            began = time.perf_counter()
            counts = survey(rows, threads)
            sparsity = measure_sparsity(rows, counts)
            arranged = arrange(rows, counts, outputs, threads, apart=self.mode == "cached" and n_threads > 1)
            weights = np.empty((rows.n_features + 1, outputs), np.float32)
            weights[0] = self.intercept_
            weights[arranged.place] = self.coef_.T
            prepare_s = time.perf_counter() - began
            problem = LinearProblem(
                rows=arranged,
                labels=targets.astype(np.int32),
                weights=weights.reshape(-1),
                outputs=outputs,
                loss=self.loss,
                mode=self.mode,
                alpha=float(self.alpha),
                bias_share=BIAS_SHARE if self.fit_intercept else 0.0,
                seed=self._seed,
            )
            rates = [self.gamma0_ * self.beta_ ** (self.n_iter_ + epoch) for epoch in range(epochs)]
            tally = run_epochs(problem, rates, threads, first_epoch=self.n_iter_, progress=show)
        self.coef_ = np.ascontiguousarray(weights[arranged.place].T)
        self.intercept_ = weights[0].copy()
        self.n_iter_ += epochs
        self.n_features_in_ = rows.n_features
        self.fit_report_ = FitReport.of(tally, self.mode, n_threads, prepare_s, sparsity)
        return self

    def _check_shapes(self) -> None:
        """Check that what was loaded fits together: one row of weights per output."""
        outputs = 1 if len(self.classes_) == 2 else len(self.classes_)
        if self.coef_.shape != (outputs, self.n_features_in_) or self.intercept_.shape != (outputs,) or outputs == 0:
            raise DataError(
                f"Weights of shape {self.coef_.shape} do not fit {len(self.classes_)} classes; give an undamaged file."
            )

    def _check_width(self, rows: Rows) -> None:
        if rows.n_features != self.n_features_in_:
            raise DataError(
                f"X has {rows.n_features} features, but {type(self).__name__} is expecting {self.n_features_in_} "
                "features as input."
            )

    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """Return the margins w.x + b: one per row for two classes, one per row and class for more."""
        self._check_fitted()
        rows = as_rows(X)
        self._check_width(rows)
        with Threads(1) as threads:
            survey(rows, threads)
        margins = rows.times(self.coef_.T) + self.intercept_
        return margins[:, 0] if len(self.classes_) == 2 else margins

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the label with the largest margin for each row."""
        margins = self.decision_function(X)
        best = (margins > 0).astype(np.int64) if margins.ndim == 1 else margins.argmax(axis=1)
        labels: NDArray[Any] = self.classes_[best]
        return labels

    @property
    def predict_proba(self) -> Callable[[Any], NDArray[np.float64]]:
        """Return probabilities, rows x classes: one against the rest, normalised; only the logistic loss has them."""
        if self.loss != "logistic":  # scikit-learn asks with `hasattr`, which must say no
            raise MissingMethodError(
                f"predict_proba needs loss='logistic' (got {self.loss!r}); use decision_function instead."
            )
        return self._predict_proba

    def _predict_proba(self, X: Any) -> NDArray[np.float64]:
        margins = self.decision_function(X)
        odds = 0.5 * (1 + np.tanh(0.5 * margins))  # the logistic function without overflow
        if odds.ndim == 1:
            return np.stack([1 - odds, odds], axis=1)
        sums = odds.sum(axis=1, keepdims=True)
        return np.where(sums > 0, odds / np.where(sums > 0, sums, 1), 1 / len(self.classes_))

    def mean_loss(self, X: Any, y: Any) -> float:
        """Return the mean loss, without the L2 term, summed over the outputs as in training."""
        rows = as_rows(X)
        margins = self.decision_function(rows).reshape(rows.n_rows, -1)
        outputs = self.classes_[1:] if len(self.classes_) == 2 else self.classes_
        short = margins * np.where(_labels(y, rows)[:, None] == outputs, 1, -1)
        losses = np.maximum(0, 1 - short) if self.loss == "hinge" else np.logaddexp(0, -short)
        return float(losses.sum(axis=1).mean())

    def score(self, X: Any, y: Any) -> float:
        """Return the share of correct predictions."""
        rows = as_rows(X)
        return float(np.mean(self.predict(rows) == _labels(y, rows)))

    def __sklearn_tags__(self) -> Any:
        return self._tags("classifier", sparse=True)


def classes_of(labels: NDArray[Any]) -> NDArray[Any]:
    """Return the distinct labels, sorted; refuse labels that cannot be sorted, or only one."""
    try:
        classes = np.unique(labels)
    except TypeError as error:
        raise DataError(f"The labels are of several kinds ({error}); give numbers only, or names only.") from None
    if len(classes) < 2:
        raise DataError(
            f"The labels hold {len(classes)} class only, {classes.tolist()}; give examples of at least two."
        )
    return classes


def _labels(y: Any, rows: Rows) -> NDArray[Any]:
    if y is None:
        raise DataError("This estimator requires y to be passed, but the target y is None.")
    labels = np.asarray(y)
    if labels.ndim != 1:
        raise DataError(
            f"The labels must be a flat list, one per row (got an array of shape {labels.shape}); use y.ravel()."
        )
    if len(labels) != rows.n_rows:
        raise DataError(f"There are {rows.n_rows} rows but {len(labels)} labels; give one label per row.")
    if labels.dtype.kind == "f":
        if not np.isfinite(labels).all():
            raise DataError("The labels hold NaN or infinity; give whole numbers or names.")
        if np.any(labels != np.floor(labels)):
            wrong = labels[labels != np.floor(labels)][0]
            raise DataError(f"Unknown label type: the label {wrong} is not an integer; give whole numbers or names.")
    return labels
