"""Eager attention: recognize softmax(q @ k.mT) @ v where a model writes it out."""
