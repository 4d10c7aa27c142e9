"""Sparse kernels and the networks that run on them."""

from driveprune.sparse.network import SparseNetwork, densify, sparsify, write_back

__all__ = ["SparseNetwork", "densify", "sparsify", "write_back"]
