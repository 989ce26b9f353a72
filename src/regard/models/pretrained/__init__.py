"""Pretrained models: folders of Hugging Face as models of ours, and back."""

from .folder import ARCHITECTURES, load, save

__all__ = ["ARCHITECTURES", "load", "save"]
