"""Attention block by block in plain PyTorch, in memory linear in the sequence."""
