"""Interception: see the attention calls of a running model, whichever function computes them."""
