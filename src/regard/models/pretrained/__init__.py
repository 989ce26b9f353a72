"""Pretrained models: load Hugging Face folders into our models, and save ours as such folders."""

from .folder import ARCHITECTURES, load, save

__all__ = ["ARCHITECTURES", "load", "save"]
