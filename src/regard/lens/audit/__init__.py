"""Audit: run a copy of the model again after a capture, and find layers that mix positions and left no entry."""
