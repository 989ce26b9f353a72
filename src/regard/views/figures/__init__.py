"""Figures: attention drawn with matplotlib."""
