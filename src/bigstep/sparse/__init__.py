"""Hogwild! for sparse problems: linear classification and matrix completion, with scikit-learn's conventions."""

from __future__ import annotations

from bigstep.sparse.classifier import HogwildClassifier
from bigstep.sparse.factorizer import HogwildFactorizer
from bigstep.sparse.libsvm import read_libsvm, read_libsvm_files
from bigstep.sparse.modes import MODES
from bigstep.sparse.report import FitReport
from bigstep.sparse.rows import Rows
from bigstep.sparse.saving import load, save
from bigstep.sparse.sparsity import Sparsity, measure_sparsity
from bigstep.sparse.threads import epoch_order
from bigstep.sparse.training import train_sparse

__all__ = [
    "MODES",
    "FitReport",
    "HogwildClassifier",
    "HogwildFactorizer",
    "Rows",
    "Sparsity",
    "epoch_order",
    "load",
    "measure_sparsity",
    "read_libsvm",
    "read_libsvm_files",
    "save",
    "train_sparse",
]
