"""Kernels behind plain functions; each has a plain-torch twin that is its specification.

Importing this package imports neither triton nor numba.
"""
