"""Pretrained: the encoders of others that a task may begin with."""

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


def names_of(folder: Path, count: int) -> list[str]:
    """What the classes of a Hugging Face folder are called, `LABEL_0` and so on where nobody named them."""
    path, unnamed = folder / "config.json", {f"{n}": f"LABEL_{n}" for n in range(count)}
    labels = json.loads(path.read_bytes()).get("id2label") or unnamed
    if labels.keys() != unnamed.keys():
        raise ValueError(f"{path}: id2label must name the classes 0 to {count - 1}, got {', '.join(sorted(labels))}")
    return [str(labels[number]) for number in unnamed]


def numbers_of(classes: Sequence[str], names: Sequence[str]) -> list[int] | None:
    """Which of as many classes with these names each of ours is; None where they are others.

    >>> numbers_of(["neutral", "negative"], ["NEGATIVE", "NEUTRAL"])
    [1, 0]

    A class may also be called by its number. Those that nobody named are ours in order.
    """
    numbers = [str(n) for n in range(len(classes))]
    for theirs, spelled in ((names, str), (names, str.casefold), (numbers, str)):
        found = {spelled(name): n for n, name in enumerate(theirs)}
        if found.keys() == {spelled(name) for name in classes} and len(found) == len(classes):
            return [found[spelled(name)] for name in classes]
    unnamed = all(name == f"LABEL_{n}" for n, name in enumerate(names))
    return list(range(len(classes))) if unnamed else None
