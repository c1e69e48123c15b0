"""A sparse linear classifier by Hogwild! in a scikit-learn pipeline."""

from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline

from bigstep.sparse import HogwildClassifier

GOOD = ["a fine engine", "quick and quiet", "works as promised", "a pleasure to use", "fast enough for us"]
BAD = ["breaks every week", "slow and loud", "does not work", "a waste of money", "never again for us"]
texts = [f"{first}, {second}" for group in (GOOD, BAD) for first in group for second in group]
labels = ["good"] * 25 + ["bad"] * 25

model = make_pipeline(HashingVectorizer(n_features=2**14), HogwildClassifier(epochs=20, n_threads=2, random_state=0))
scores = cross_val_score(model, texts, labels, cv=5)
print(f"accuracy {100 * scores.mean():.0f} % over {len(scores)} folds")
