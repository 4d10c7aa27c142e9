"""Sparse kernels and the networks that run on them."""

from driveprune.sparse.explain import Explanation, explain
from driveprune.sparse.made import SparseNetwork
from driveprune.sparse.network import densify, sparsify, write_back
from driveprune.sparse.reasons import SparseWarning

__all__ = ["Explanation", "SparseNetwork", "SparseWarning", "densify", "explain", "sparsify", "write_back"]
