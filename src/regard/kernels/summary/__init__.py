"""Triton kernels that reduce the attention matrix: entropy, received mass, maximum, distance and map in one pass."""
