"""HogwildFactorizer: held to its equations and to the serial run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.sparse import coo_matrix

from bigstep.described import usable_cores
from bigstep.errors import ConfigError, DataError, RunError
from bigstep.sparse import HogwildFactorizer, epoch_order


def ratings(n: int = 6000, rows: int = 150, columns: int = 90) -> tuple[NDArray[Any], NDArray[Any]]:
    """Noisy entries of a matrix of rank 3 with biases."""
    rng = np.random.default_rng(1)
    cells = rng.choice(rows * columns, n, replace=False)
    u, v = cells // columns, cells % columns
    left, right = rng.normal(size=(rows, 3)), rng.normal(size=(columns, 3))
    values = 3 + rng.normal(size=rows)[u] + (left[u] * right[v]).sum(axis=1) + 0.1 * rng.normal(size=n)
    return np.stack([u, v], axis=1), values


def state(model: HogwildFactorizer) -> NDArray[np.float32]:
    parts = (model.row_bias_, model.column_bias_, model.row_factors_.ravel(), model.column_factors_.ravel())
    return np.concatenate(parts)


def test_serial_run_follows_the_equations() -> None:
    X, y = ratings(500, 20, 30)
    settings: dict[str, Any] = {"rank": 2, "alpha": 0.1, "gamma0": 0.05, "mode": "serial", "random_state": 4}
    model = HogwildFactorizer(epochs=3, **settings).fit(X, y)
    rng = np.random.default_rng(4)
    L = rng.normal(0, 0.1 / np.sqrt(2), (20, 2))
    R = rng.normal(0, 0.1 / np.sqrt(2), (30, 2))
    b, c = np.zeros(20), np.zeros(30)
    z = (y - y.mean()) / y.std()
    for epoch in range(3):
        rate = 0.05 * 0.9**epoch
        for i in epoch_order(500, 4, epoch):
            u, v = X[i]
            e = z[i] - (b[u] + c[v] + L[u] @ R[v])
            b[u], c[v] = b[u] + rate * (e - 0.1 * b[u]), c[v] + rate * (e - 0.1 * c[v])
            L[u], R[v] = L[u] + rate * (e * R[v] - 0.1 * L[u]), R[v] + rate * (e * L[u] - 0.1 * R[v])
    # float32 rounding of 1500 small steps
    np.testing.assert_allclose(state(model), np.concatenate([b, c, L.ravel(), R.ravel()]), atol=3e-6)


@pytest.mark.parametrize("mode", ["hogwild", "locked", "round_robin"])
def test_one_thread_equals_serial_bit_for_bit(mode: Any) -> None:
    X, y = ratings()
    serial = HogwildFactorizer(mode="serial", epochs=2).fit(X, y)
    np.testing.assert_array_equal(state(HogwildFactorizer(mode=mode, n_threads=1, epochs=2).fit(X, y)), state(serial))


@pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")
def test_threads_reach_the_serial_rmse_within_one_percent_and_locked_ones_exactly() -> None:
    X, y = ratings()
    known = np.arange(len(y)) % 10 != 0
    settings: dict[str, Any] = {"rank": 3, "alpha": 0.01, "gamma0": 0.1, "epochs": 30}
    serial = HogwildFactorizer(mode="serial", **settings).fit(X[known], y[known])
    goal = serial.rmse(X[~known], y[~known])
    assert goal < 0.25 * y.std()
    locked = HogwildFactorizer(mode="locked", n_threads=2, **settings).fit(X[known], y[known])
    np.testing.assert_array_equal(state(locked), state(serial))
    racing = HogwildFactorizer(mode="hogwild", n_threads=2, **settings).fit(X[known], y[known])
    assert racing.rmse(X[~known], y[~known]) == pytest.approx(goal, rel=0.01)
    assert racing.score(X[~known], y[~known]) == -racing.rmse(X[~known], y[~known])


def test_sparsity_of_entries_is_exact() -> None:
    X = np.array([(0, 0), (0, 1), (0, 2), (1, 0), (2, 2)])
    sparsity = HogwildFactorizer(rank=1, epochs=1).fit(X, np.arange(5.0)).fit_report_.sparsity
    assert (sparsity.omega, sparsity.delta) == (2, 3 / 5)
    assert sparsity.rho == 4 / 5  # (0, 0) meets itself, its row's two others and (1, 0)


@pytest.mark.parametrize("size", [2, 4, 30])
def test_sparsity_counts_a_pair_that_repeats_as_often_as_it_is_there(size: int) -> None:
    for seed in range(20):
        X = np.random.default_rng(seed).integers(0, size, (40, 2))
        meetings = (X[:, None] == X[None]).any(2).sum(1)
        sparsity = HogwildFactorizer(rank=1, epochs=1).fit(X, np.arange(40.0)).fit_report_.sparsity
        assert sparsity.rho == meetings.max() / 40


def test_scipy_matrix_and_pairs_agree_and_parts_equal_the_whole() -> None:
    X, y = ratings(800)
    whole = HogwildFactorizer(mode="serial", epochs=2).fit(X, y)
    parts = HogwildFactorizer(mode="serial").partial_fit(X, y).partial_fit(X, y)
    np.testing.assert_array_equal(state(parts), state(whole))
    matrix = coo_matrix((y, (X[:, 0], X[:, 1])))
    np.testing.assert_array_equal(state(HogwildFactorizer(mode="serial", epochs=2).fit(matrix)), state(whole))
    assert matrix.nnz == len(y)


def test_what_a_scipy_matrix_holds_twice_means_the_sum() -> None:
    matrix = coo_matrix(([1.0, 2.0, 5.0], ([0, 0, 1], [1, 1, 0])))
    model = HogwildFactorizer(mode="serial", epochs=2).fit(matrix)
    summed = HogwildFactorizer(mode="serial", epochs=2).fit(coo_matrix(matrix.toarray()))
    np.testing.assert_array_equal(state(model), state(summed))
    assert (model.mean_, matrix.nnz) == (4.0, 3)  # and the matrix itself is left alone


def test_a_failed_fit_leaves_a_factorizer_as_it_was() -> None:
    X, y = ratings(800)
    model = HogwildFactorizer(mode="serial").fit(X, y)
    before, seen = state(model).copy(), model.n_iter_
    with pytest.raises(RunError, match="smaller gamma0"):
        model.set_params(gamma0=1e6).fit(X, y)
    np.testing.assert_array_equal(state(model), before)
    assert model.n_iter_ == seen


def test_a_row_never_seen_counts_as_average() -> None:
    X, y = ratings(800)
    model = HogwildFactorizer(mode="serial").fit(X, y)
    unseen = model.predict([[10_000, 3]])[0]
    assert unseen == pytest.approx(model.mean_ + model.scale_ * model.column_bias_[3])
    assert model.predict([[10_000, 10_000]])[0] == pytest.approx(model.mean_)
    gaps = HogwildFactorizer(mode="serial").fit(2 * X, y)  # every other row and column
    assert gaps.predict([[2, 7]])[0] == pytest.approx(gaps.mean_ + gaps.scale_ * gaps.row_bias_[2], abs=1e-6)
    assert gaps.predict([[1, 7]])[0] == gaps.mean_


@pytest.mark.parametrize(
    ("pairs", "values", "message"),
    [
        ([[0, 1]], [np.nan], "entry 0 .*NaN"),
        ([[0, -1]], [1.0], "number them from 0"),
        ([[0, 0.5]], [1.0], "whole numbers"),
        ([[0, 1, 2]], [1.0], "pairs"),
        ([[0, 1]], [1.0, 2.0], "1 pairs but"),
        ([[0, 1]], None, "missing"),
        ([[0, 1]], ["three"], "must be numbers"),
        ([[0, 1]], np.array([1 + 1j]), "complex"),
        (coo_matrix(np.eye(2) * 1j), None, "complex"),
        ([[0, 1], [1, 0]], [1e200, -1e200], "larger unit"),
        ([[0, 1], [2**30, 0]], [1.0, 2.0], "renumber them"),
    ],
)
def test_bad_entries_are_one_sentence(pairs: Any, values: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        HogwildFactorizer().fit(pairs, values)


def test_bad_parameters_are_one_sentence() -> None:
    with pytest.raises(ConfigError, match="alpha='small'"):
        HogwildFactorizer(alpha="small").fit([[0, 1]], [1.0])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rank=0"):
        HogwildFactorizer(rank=0).fit([[0, 1]], [1.0])
    with pytest.raises(ConfigError, match="more than the"):
        HogwildFactorizer(n_threads=10_000).fit([[0, 1]], [1.0])
