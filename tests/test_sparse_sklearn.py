"""scikit-learn's own tools accept the estimators, and scikit-learn is not needed."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest

from bigstep.sparse import HogwildClassifier, HogwildFactorizer

sklearn = pytest.importorskip("sklearn")

REFUSED = {"check_supervised_y_2d": "labels that are not a flat list are refused, not flattened with a warning"}


@pytest.mark.parametrize("loss", ["hinge", "logistic"])
def test_scikit_learns_estimator_checks_pass(loss: str) -> None:
    from sklearn.utils.estimator_checks import check_estimator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the checks warn about themselves
        results = check_estimator(HogwildClassifier(loss=loss), expected_failed_checks=REFUSED, on_fail=None)  # type: ignore[arg-type]
    failed = {result["check_name"]: result["exception"] for result in results if result["status"] == "failed"}
    assert failed == {}
    assert sum(result["status"] == "passed" for result in results) > 40


def test_few_epochs_are_as_good_as_those_of_sgd_classifier() -> None:
    from sklearn.linear_model import SGDClassifier

    from test_sparse_classifier import problem

    X, y = problem(14_000, 1_000)
    train, test = slice(0, 10_000), slice(10_000, None)
    gaps = []
    for seed in range(4):
        settings = {"alpha": 1e-4, "random_state": seed}
        ours = HogwildClassifier(epochs=5, n_threads=1, **settings).fit(X[train], y[train])  # type: ignore[arg-type]
        theirs = SGDClassifier(max_iter=5, tol=None, **settings).fit(X[train], y[train])
        gaps.append(ours.score(X[test], y[test]) - theirs.score(X[test], y[test]))
    # with first steps that were kept as small as the last, ours was 0.8 points below; seeds differ by 0.2
    assert np.mean(gaps) > -0.003


def test_pipeline_grid_search_clone_and_cross_validation() -> None:
    from sklearn.base import clone, is_classifier
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.model_selection import GridSearchCV, cross_val_score
    from sklearn.pipeline import make_pipeline

    texts = ["the cat sat", "a cat ran", "the dog barked", "a dog slept", "cat and cat", "dog or dog"] * 10
    names = ["cat", "cat", "dog", "dog", "cat", "dog"] * 10
    model = HogwildClassifier(mode="serial")
    search = GridSearchCV(make_pipeline(TfidfVectorizer(), model), {"hogwildclassifier__alpha": [1e-4, 1.0]}, cv=3)
    search.fit(texts, names)
    assert search.best_score_ == 1.0
    assert search.best_params_ == {"hogwildclassifier__alpha": 1e-4}
    assert cross_val_score(model, np.eye(60), names, cv=3).shape == (3,)
    assert is_classifier(model)
    assert clone(model).set_params(alpha=0.5).get_params()["alpha"] == 0.5
    assert repr(clone(model)) == "HogwildClassifier(mode='serial')"


def test_factorizer_is_searched_by_rmse() -> None:
    from sklearn.base import is_regressor
    from sklearn.model_selection import GridSearchCV

    rng = np.random.default_rng(0)
    X = np.stack(np.divmod(rng.choice(1200, 900, replace=False), 30), axis=1)
    y = np.sin(X[:, 0]) * np.cos(X[:, 1])
    search = GridSearchCV(HogwildFactorizer(rank=1, gamma0=0.1, mode="serial"), {"alpha": [0.01, 5.0]}, cv=3)
    assert search.fit(X, y).best_params_ == {"alpha": 0.01}
    assert is_regressor(search.best_estimator_)


def test_a_pickled_model_predicts_the_same() -> None:
    X = np.random.default_rng(0).normal(size=(50, 4))
    model = HogwildClassifier().fit(X, X[:, 0] > 0)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict(X), model.predict(X))


def test_neither_scikit_learn_nor_scipy_nor_torch_is_needed() -> None:
    program = """
import sys
for name in ("sklearn", "scipy", "torch"):
    sys.modules[name] = None
import numpy as np
from bigstep.sparse import HogwildClassifier
try:
    HogwildClassifier().predict(np.eye(2))
except AttributeError as error:
    print(error)
print(HogwildClassifier(mode="serial").fit(np.eye(2), [0, 1]).predict(np.eye(2)).tolist())
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [
        "This HogwildClassifier instance is not fitted yet; call fit first.",
        "[0, 1]",
    ]
