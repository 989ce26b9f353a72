"""Reductions of the attention matrix by Triton kernels."""
