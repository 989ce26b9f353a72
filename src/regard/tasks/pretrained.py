"""Pretrained: the encoders of others that a task may begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from ..data import Tokenizer
from ..models import Bert, load
from .vocabulary import TOKENIZER


def encoder_of(folder: Path) -> tuple[Bert, nn.Module, Tokenizer]:
    """The encoder in a Hugging Face folder, the model it is in, with its head if it has one, and the tokenizer."""
    model: Any = load(folder)
    bert = getattr(model, "bert", model)
    if not isinstance(bert, Bert):
        raise ValueError(f"{folder} must hold a BERT, RoBERTa or DistilBERT, got a {type(model).__name__}")
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    if len(tokenizer) > bert.config.vocabulary:
        raise ValueError(
            f"{folder / TOKENIZER} has {len(tokenizer)} tokens, more than the {bert.config.vocabulary} of the model"
        )
    return bert, model, tokenizer


def places(bert: Bert) -> int:
    """The most tokens an encoder reads."""
    return bert.config.length - bert.config.first
