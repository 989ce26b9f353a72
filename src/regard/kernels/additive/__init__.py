"""Triton kernels for additive (Bahdanau) scores and their gradients."""
