"""HogwildClassifier: held to its equations, to the serial run in every mode, and to its conventions."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from bigstep.described import usable_cores
from bigstep.errors import ConfigError, DataError, RunError
from bigstep.sparse import HogwildClassifier, Rows, epoch_order
from bigstep.sparse.linear import LinearProblem, run_epochs
from bigstep.sparse.rows import arrange, as_rows, survey
from bigstep.sparse.threads import Threads

two_cores = pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")


def problem(n: int = 1500, features: int = 300, classes: int = 2, seed: int = 0) -> tuple[csr_matrix, NDArray[Any]]:
    """Rows of about 12 features with power-law frequencies and unit length; noisy linear labels."""
    rng = np.random.default_rng(seed)
    shares = 1 / (np.arange(features) + 5.0)
    dense = np.zeros((n, features), np.float32)
    for row in dense:
        chosen = rng.choice(features, 12, replace=False, p=shares / shares.sum())
        row[chosen] = rng.exponential(size=12)
    dense /= np.linalg.norm(dense, axis=1, keepdims=True)
    scores = dense @ rng.normal(size=(features, classes)) + 0.05 * rng.normal(size=(n, classes))
    return csr_matrix(dense), scores.argmax(axis=1)


def weights_of(model: HogwildClassifier) -> NDArray[np.float32]:
    return np.concatenate([model.coef_.ravel(), model.intercept_])


def run(
    mode: str, count: int, X: Any, y: NDArray[Any], classes: int, alpha: float = 1e-3, bias_share: float = 0.01
) -> NDArray[np.float32]:
    """Two epochs with any number of threads, also more than there are cores."""
    rows = as_rows(X)
    outputs = 1 if classes == 2 else classes
    with Threads(count) as threads:
        problem = LinearProblem(
            rows=arrange(rows, survey(rows, threads), outputs, threads, apart=mode == "cached" and count > 1),
            labels=(1 - y if classes == 2 else y).astype(np.int32),
            weights=np.zeros((rows.n_features + 1) * outputs, np.float32),
            outputs=outputs,
            loss="hinge",
            mode=mode,
            alpha=alpha,
            bias_share=bias_share,
            seed=3,
        )
        run_epochs(problem, [1.0, 0.9], threads)
    return problem.weights


@pytest.mark.parametrize("loss", ["hinge", "logistic"])
@pytest.mark.parametrize("classes", [2, 3])
def test_serial_run_follows_the_equations(loss: str, classes: int) -> None:
    X, y = problem(400, classes=classes)
    settings: dict[str, Any] = {"loss": loss, "alpha": 0.02, "gamma0": 0.8, "beta": 0.9, "epochs": 3}
    model = HogwildClassifier(mode="serial", random_state=7, **settings).fit(X, y)
    dense = X.toarray().astype(np.float64)
    outputs = 1 if classes == 2 else classes
    w, b = np.zeros((outputs, dense.shape[1])), np.zeros(outputs)
    for epoch in range(3):
        rate = 0.8 * 0.9**epoch
        for i in epoch_order(400, 7, epoch):
            for k in range(outputs):
                target = 1.0 if (y[i] == 1 if classes == 2 else y[i] == k) else -1.0
                z = target * (w[k] @ dense[i] + b[k])
                pull = target * (z < 1) if loss == "hinge" else target / (1 + math.exp(z))
                w[k] = (w[k] + rate * pull * dense[i]) / (1 + rate * 0.02)
                b[k] += 0.01 * rate * pull
    # float32 rounding of 1200 steps; a hinge decision that rounding flips would show as a difference near 0.1
    np.testing.assert_allclose(model.coef_, w, atol=2e-5)
    np.testing.assert_allclose(model.intercept_, b, atol=2e-6)


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_locked_equals_serial_bit_for_bit(classes: int, threads: int) -> None:
    X, y = problem(600, classes=classes)
    np.testing.assert_array_equal(run("locked", threads, X, y, classes), run("serial", 1, X, y, classes))


@pytest.mark.parametrize("mode", ["hogwild", "racing", "cached", "aig", "round_robin"])
@pytest.mark.parametrize("alpha", [0.0, 1e-3, 0.5])
def test_one_thread_equals_serial_bit_for_bit(mode: str, alpha: float) -> None:
    # alpha 0.5 folds the scale every 20 examples, alpha 0 never
    X, y = problem(600)
    np.testing.assert_array_equal(run(mode, 1, X, y, 2, alpha), run("serial", 1, X, y, 2, alpha))


@two_cores
@pytest.mark.parametrize("mode", ["hogwild", "racing", "cached", "aig", "round_robin"])
def test_threads_that_race_reach_the_accuracy_of_a_serial_run(mode: Any) -> None:
    X, y = problem(6000)
    gaps = []
    for seed in range(3):
        settings: dict[str, Any] = {"epochs": 5, "random_state": seed}
        serial = HogwildClassifier(mode="serial", **settings).fit(X[:4000], y[:4000]).score(X[4000:], y[4000:])
        racing = HogwildClassifier(mode=mode, n_threads=2, **settings).fit(X[:4000], y[:4000]).score(X[4000:], y[4000:])
        assert serial > 0.85
        gaps.append(racing - serial)
    # two standard errors of a share of 0.9 of 2000 examples, as if the two runs were independent: 1.9 points
    assert np.abs(gaps).max() < 0.019


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize(
    ("mode", "count"), [("hogwild", 5000), ("racing", 5000), ("cached", 5000), ("aig", 5000), ("round_robin", 700)]
)
def test_no_example_is_skipped_or_taken_twice(mode: str, count: int, threads: int) -> None:
    # disjoint examples with alpha 0 and no intercept do not interact: each weight is touched by its own example alone.
    # Of 5,000 columns each cached thread copies 2,500: 1,024 weights are merged with each claim, the others in turns
    X = csr_matrix((np.ones(count, np.float32), np.arange(count), np.arange(count + 1)), shape=(count, count))
    y = np.arange(count) % 2
    np.testing.assert_array_equal(run(mode, threads, X, y, 2, 0.0, 0.0), run("serial", 1, X, y, 2, 0.0, 0.0))


@pytest.mark.parametrize("mode", ["hogwild", "aig"])
def test_no_addition_is_lost(mode: str) -> None:
    # each of 200,000 examples adds the same amount to the same two weights: any order of whole additions gives the same
    # bits, and of plain ones thousands are lost when two threads run at once
    count = 200_000
    indices = np.tile(np.arange(2), count)
    X = csr_matrix((np.full(2 * count, 1e-4, np.float32), indices, 2 * np.arange(count + 1)), shape=(count, 2))
    y = np.ones(count, np.int64)
    np.testing.assert_array_equal(run(mode, 4, X, y, 2, 0.0, 0.0), run("serial", 1, X, y, 2, 0.0, 0.0))


@pytest.mark.parametrize(("alpha", "epochs"), [(1e-5, 5), (1e-4, 5), (1e-4, 20), (1e-3, 1)])
def test_auto_steps_go_from_a_margin_of_one_to_a_last_step_that_noise_forgives(alpha: float, epochs: int) -> None:
    X, y = problem(4000)
    model = HogwildClassifier(alpha=alpha, epochs=epochs, mode="serial").fit(X, y)
    assert model.gamma0_ == pytest.approx(1.0)  # rows have unit length
    last = model.gamma0_ * model.beta_ ** max(1, epochs - 1)
    assert last == pytest.approx(min(0.9 ** max(1, epochs - 1), 0.5 / (alpha * 4000 * epochs)))


def test_a_given_beta_lowers_the_first_step_where_the_last_would_be_too_large() -> None:
    X, y = problem(4000)
    model = HogwildClassifier(alpha=1e-2, epochs=5, beta=0.9, mode="serial").fit(X, y)
    assert model.gamma0_ * 0.9**4 == pytest.approx(0.5 / (1e-2 * 4000 * 5))
    assert HogwildClassifier(beta=0.5, epochs=10_000, mode="serial").fit(np.eye(2), [0, 1]).gamma0_ == 1.0


def test_long_indices_change_no_bit() -> None:
    X, y = problem(600)
    wide = csr_matrix((X.data, X.indices, X.indptr), shape=(600, 70_000))  # beyond 16 bits
    np.testing.assert_array_equal(run("serial", 1, wide, y, 2)[:301], run("serial", 1, X, y, 2))


@two_cores
def test_threads_are_started_where_they_pay() -> None:
    def threads(count: int, **settings: Any) -> int:
        X, y = problem(count)
        return HogwildClassifier(epochs=1, **settings).fit(X, y).fit_report_.n_threads

    assert threads(8191) == 1
    assert threads(8192) == 2
    assert threads(100, n_threads=2) == 2  # who asks for two gets two


@pytest.mark.parametrize("apart", [False, True])
def test_threads_share_the_rows_of_a_preparation_and_change_none_of_it(
    apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = as_rows(problem(n=999)[0])
    taken: list[tuple[int, int]] = []
    share = Threads.share

    def noted(self: Threads, thread: int, count: int) -> tuple[int, int]:
        taken.append(share(self, thread, count))
        return taken[-1]

    def prepare(count: int) -> Any:
        with Threads(count) as threads:
            counts = survey(rows, threads)
            return counts, arrange(rows, counts, 1, threads, apart=apart)

    counts, alone = prepare(1)
    monkeypatch.setattr(Threads, "share", noted)
    again, together = prepare(3)
    # once to look at the rows and once to arrange them, each by all three
    assert sorted(taken) == sorted([(0, 333), (333, 666), (666, 999)] * 2)
    assert np.array_equal(counts, again)
    for field in ("starts", "split", "indices", "values", "place"):
        assert np.array_equal(getattr(alone, field), getattr(together, field)), field


def test_twenty_partial_fits_equal_one_fit() -> None:
    X, y = problem(500, classes=3)
    whole = HogwildClassifier(mode="serial", epochs=4).fit(X, y)
    parts = HogwildClassifier(mode="serial")
    for _ in range(4):
        parts.partial_fit(X, y, classes=[0, 1, 2])
    np.testing.assert_array_equal(weights_of(parts), weights_of(whole))


def test_every_kind_of_input_gives_the_same_model() -> None:
    X, y = problem(300)
    expected = weights_of(HogwildClassifier(mode="serial").fit(X, y))
    for same in (X.tocsc(), X.toarray(), X.astype(np.float64), (X.data, X.indices, X.indptr, X.shape[1])):
        np.testing.assert_array_equal(weights_of(HogwildClassifier(mode="serial").fit(same, y)), expected)


def test_classes_are_sorted_and_of_the_users_kind() -> None:
    X, y = problem(600, classes=3)
    names = np.array(["pear", "apple", "fig"])[y]
    model = HogwildClassifier(loss="logistic", mode="serial").fit(X, names)
    assert model.classes_.tolist() == ["apple", "fig", "pear"]
    assert model.score(X, names) > 0.8
    np.testing.assert_allclose(model.predict_proba(X).sum(axis=1), 1)
    np.testing.assert_array_equal(model.decision_function(X).argmax(axis=1), model.predict_proba(X).argmax(axis=1))


def test_report_says_how_fast_how_sparse_and_what_to_expect() -> None:
    X, y = problem()
    seen: list[dict[str, Any]] = []
    report = HogwildClassifier(mode="serial", epochs=3).fit(X, y, progress=seen.append).fit_report_
    assert report.examples_per_s > 0
    assert (report.conflicts, report.n_threads, report.sparsity.omega) == (0, 1, 12)
    assert 0 < report.watched <= report.updates <= 3 * 1500
    assert [row["epoch"] for row in seen] == [1, 2, 3]
    assert report.losses[2] < report.losses[0]
    assert report.as_dict()["sparsity"]["delta"] == pytest.approx((X != 0).sum(axis=0).max() / 1500)


def test_order_is_a_permutation_that_seed_and_epoch_choose() -> None:
    for n in (1, 2, 3, 1000, 4097):
        assert sorted(epoch_order(n, 5, 2)) == list(range(n))
    orders = np.array([epoch_order(64, seed, epoch) for seed in range(50) for epoch in range(80)])
    # 4000 draws of 64 equally likely places: a cell has mean 62.5, standard deviation 7.8; six of them are never seen
    table = np.array([np.bincount(orders[:, place], minlength=64) for place in range(64)])
    assert np.abs(table - 62.5).max() < 47
    for lag in (1, 2, 8, 32):  # 4000 draws of 63 differences: mean 63.5, standard deviation 7.9
        steps = np.bincount((orders[:, lag].astype(np.int64) - orders[:, 0]) % 64, minlength=64)
        assert np.abs(steps[1:] - 4000 / 63).max() < 48


BAD_ROWS = {
    "NaN": (([1.0, np.nan], [0, 1], [0, 1, 2], 2), "Row 1 .*NaN"),
    "unsorted": (([1.0, 1.0], [1, 0], [0, 2, 2], 2), "Row 0 .*unsorted or duplicate"),
    "duplicate": (([1.0, 1.0], [1, 1], [0, 2, 2], 2), "Row 0 .*unsorted or duplicate"),
    "outside": (([1.0, 1.0], [0, 2], [0, 1, 2], 2), "index is 2, but there are 2 features"),
    "outside, 32 bits": (([1.0, 1.0], np.array([0, 2], np.int32), [0, 1, 2], 2), "Row 1 .*outside 0..1"),
    "too wide": (([1.0, 1.0], np.array([0, 2], np.int32), [0, 1, 2], 2**31), "at most 2147483646 are allowed"),
    "negative": (([1.0, 1.0], [-1, 0], [0, 1, 2], 2), "index is -1, but there are 2 features"),
    "lengths": (([1.0], [0, 1], [0, 1, 2], 2), "do not fit together"),
    "indptr": (([1.0, 1.0], [0, 1], [0, 2, 1], 2), "never fall"),
    "unsigned indptr": (([1.0, 1.0], [0, 1], np.array([0, 2, 1, 2], np.uint64), 2), "never fall"),
    "indptr that is a number": (([1.0, 1.0], [0, 1], 2, 2), "flat"),
    "empty": (([], [], [0], 2), "0 sample"),
    "beyond 32 bits": (([1.0, 1.0], np.array([-(2**32), 1]), [0, 1, 2], 2), "index is -4294967296"),
    "indices with fractions": (([1.0, 1.0], [0.5, 1.7], [0, 1, 2], 2), "whole numbers"),
    "values that are not flat": (([[1.0], [1.0]], [0, 1], [0, 1, 2], 2), "flat"),
    "rows of several lengths": ([[1.0, 2.0], [1.0]], "must be numbers"),
    "values that leave no step": (np.eye(2) * 1e26, "scale the features"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows_are_one_sentence(name: str) -> None:
    rows, message = BAD_ROWS[name]
    with pytest.raises(DataError, match=message):
        HogwildClassifier().fit(rows, [0, 1])


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0.5, 1.0], "0.5 is not an integer"),
        ([1, 1], "1 class only"),
        ([1], "2 rows but 1 labels"),
        ([np.nan, 1.0], "NaN"),
        ([[0], [1]], "flat list"),
        (np.array([1, "a"], object), "several kinds"),
        (np.array([None, "a"]), "several kinds"),
    ],
)
def test_bad_labels_are_one_sentence(labels: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        HogwildClassifier().fit(np.eye(2), labels)


@pytest.mark.parametrize("labels", [[[0], [1]], [0], [0, 1, 0]])
def test_scores_of_labels_of_another_shape_are_refused_not_broadcast(labels: Any) -> None:
    model = HogwildClassifier().fit(np.eye(2), [0, 1])
    for measure in (model.score, model.mean_loss):
        with pytest.raises(DataError, match="label"):
            measure(np.eye(2), labels)


def test_four_rows_in_a_tuple_are_rows() -> None:
    rows, labels = ((0, 1), (1, 0), (0, 1), (1, 0)), [0, 1, 0, 1]
    expected = HogwildClassifier().fit(list(rows), labels).coef_
    np.testing.assert_array_equal(HogwildClassifier().fit(rows, labels).coef_, expected)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n_threads": 10_000}, "more than the .* cores"),
        ({"n_threads": 0}, "n_threads=0"),
        ({"n_threads": None}, "n_threads=None"),
        ({"n_threads": 1.5}, "n_threads=1.5"),
        ({"alpha": "small"}, "alpha='small'"),
        ({"gamma0": None}, "gamma0=None"),
        ({"mode": "hogwlid"}, "did you mean 'hogwild'"),
        ({"loss": "hing"}, "did you mean 'hinge'"),
        ({"epochs": 0}, "epochs=0"),
        ({"alpha": -1.0}, "alpha=-1.0"),
        ({"gamma0": 0.0}, "gamma0=0.0"),
        ({"random_state": "x"}, "random_state"),
    ],
)
def test_bad_parameters_are_one_sentence(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HogwildClassifier(**params).fit(np.eye(2), [0, 1])


@pytest.mark.parametrize(
    ("rows", "params"),
    [
        (np.full((4, 3), np.nan), {}),  # as wide
        (np.full((4, 2), np.nan), {}),
        (np.eye(4)[:, :3] * 1e30, {"gamma0": 1e30, "alpha": 0.0}),  # diverges
    ],
)
def test_a_failed_fit_leaves_an_estimator_as_it_was(rows: Any, params: dict[str, Any]) -> None:
    X, y = np.eye(4)[:, :3], [0, 1, 0, 1]
    model = HogwildClassifier(mode="serial").fit(X, y)
    before = model.coef_.copy()
    with pytest.raises((DataError, RunError)):
        model.set_params(**params).fit(rows, y)
    np.testing.assert_array_equal(model.coef_, before)
    assert model.n_iter_ == 20
    model = HogwildClassifier(mode="serial", **params)
    with pytest.raises((DataError, RunError)):
        model.partial_fit(rows, y, classes=[0, 1])
    assert not hasattr(model, "coef_")


def test_numbers_of_numpy_are_numbers() -> None:
    X, y = problem(100, 20)
    settings = {"alpha": np.float32(0.25), "gamma0": np.float32(0.5), "beta": np.float32(0.5), "epochs": np.int64(2)}
    own = HogwildClassifier(**settings).fit(X, y).coef_  # type: ignore[arg-type]
    np.testing.assert_array_equal(own, HogwildClassifier(alpha=0.25, gamma0=0.5, beta=0.5, epochs=2).fit(X, y).coef_)


@two_cores
def test_ctrl_c_ends_threads_that_wait_for_their_turn() -> None:
    program = """
import os, signal, threading
import numpy as np
from bigstep.sparse import HogwildClassifier
X, y = (np.ones(10**6), np.zeros(10**6, np.int32), np.arange(10**6 + 1), 1), np.arange(10**6) % 2
small = (np.ones(2), np.zeros(2, np.int32), np.arange(3), 1)
HogwildClassifier(mode="round_robin", n_threads=2, epochs=2).fit(small, [0, 1])  # compiles
def stop_while_the_next_order_is_drawn(row):
    threading.Timer(0.001, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    model = HogwildClassifier(mode="round_robin", n_threads=2, epochs=4)
    model.fit(X, y, progress=stop_while_the_next_order_is_drawn)
except KeyboardInterrupt:
    print("stopped", vars(model).keys() == model.get_params().keys())
"""
    # an epoch of turns takes a second or two; threads that wait for one that was never started wait for ever
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.stdout == "stopped True\n", result.stderr


def test_a_step_that_diverges_is_named_with_its_epoch() -> None:
    with pytest.raises(RunError, match="epoch 0 .*smaller gamma0"):
        HogwildClassifier(gamma0=1e30, alpha=0.0, mode="serial").fit(np.eye(2) * 1e30, [0, 1])


def test_a_failed_fit_leaves_the_data_alone() -> None:
    rows = Rows(np.ones(2, np.float32), np.array([1, 0], np.int32), np.array([0, 2]), 2)
    with pytest.raises(DataError):
        HogwildClassifier().fit(rows, [0])
    assert rows.indices.tolist() == [1, 0]
