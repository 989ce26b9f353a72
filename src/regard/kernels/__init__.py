"""Triton kernels: what PyTorch's fused kernels do not give. Nothing here is imported before a GPU asks for it."""
