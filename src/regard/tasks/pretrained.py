"""Pretrained encoders that a task can fine-tune."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..data import Tokenizer
from ..models import Bert, load
from .vocabulary import TOKENIZER


def encoder_of(folder: Path) -> tuple[Bert, nn.Module, Tokenizer]:
    """Return the encoder in a Hugging Face folder, the whole model with its head if it has one, and the tokenizer."""
    model: Any = load(folder)
    bert = getattr(model, "bert", model)
    if not isinstance(bert, Bert):
        raise ValueError(f"{folder} must contain a BERT, RoBERTa or DistilBERT, got a {type(model).__name__}")
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    if len(tokenizer) > bert.config.vocabulary:
        raise ValueError(
            f"{folder / TOKENIZER} has {len(tokenizer)} tokens, but the model has {bert.config.vocabulary} embeddings"
        )
    return bert, model, tokenizer


def max_positions(bert: Bert) -> int:
    """Return the maximum number of tokens of an encoder."""
    return bert.config.length - bert.config.first


def class_names(folder: Path, count: int) -> list[str]:
    """Return the names of the classes in a Hugging Face folder, `LABEL_0` and so on if it does not name them."""
    path, unnamed = folder / "config.json", {f"{n}": f"LABEL_{n}" for n in range(count)}
    labels = json.loads(path.read_bytes()).get("id2label") or unnamed
    if labels.keys() != unnamed.keys():
        raise ValueError(f"{path}: id2label must name the classes 0 to {count - 1}, got {', '.join(sorted(labels))}")
    return [str(labels[number]) for number in unnamed]


def class_numbers(classes: Sequence[str], names: Sequence[str]) -> list[int] | None:
    """Return the number of each of `classes` among pretrained classes with these names; None if the classes differ.

    >>> class_numbers(["neutral", "negative"], ["NEGATIVE", "NEUTRAL"])
    [1, 0]

    A class may also be given by its number. Pretrained classes without names are matched in order.
    """
    numbers = [str(n) for n in range(len(classes))]
    for theirs, spelled in ((names, str), (names, str.casefold), (numbers, str)):
        by_name = {spelled(name): n for n, name in enumerate(theirs)}
        if by_name.keys() == {spelled(name) for name in classes} and len(by_name) == len(classes):
            return [by_name[spelled(name)] for name in classes]
    unnamed = all(name == f"LABEL_{n}" for n, name in enumerate(names))
    return list(range(len(classes))) if unnamed else None
