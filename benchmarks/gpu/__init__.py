"""Attention and its weights on a GPU, beside PyTorch's kernels: `python -m benchmarks.gpu`."""
