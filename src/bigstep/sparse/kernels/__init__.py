"""Numba kernels of the sparse estimators: lock-free threads, rows, LIBSVM text."""
