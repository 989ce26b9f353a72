"""Attention maps of classifiers: the relevance of each token of a text or position of an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn

from ..lens import Tape, capture, rollout
from ..models import AttentionConvNet, BertClassifier, TextClassifier, ViTClassifier
from ..ops.weights import Weights

Batch = Mapping[str, Tensor]


def logits(model: nn.Module, batch: Batch) -> Tensor:
    """Compute the logits of a batch, `b classes`."""
    if isinstance(model, TextClassifier):
        return model(batch["ids"], batch.get("characters"), lengths=batch["ids_lengths"])
    if isinstance(model, BertClassifier):
        return model(batch["ids"], keep=batch["ids_lengths"])
    return model(batch["image"])


def input_maps(model: nn.Module, batch: Batch) -> list[Tensor]:
    """Return the relevance of each token of a text, `n`, or of each position of an image, `y x`; it sums to 1.

    For attention pooling these are its weights; for self-attention of a convnet, the attention that each position
    receives in the last layer; for a BERT or a ViT, the rollout over all layers (Abnar & Zuidema 2020) to the first
    token, or to the mean of all tokens if the model classifies that.
    """
    tape = capture_batch(model, batch)
    if isinstance(model, TextClassifier):
        maps = _weights(tape["pool"])[...].mean((1, 2))
    elif isinstance(model, AttentionConvNet):
        A = _weights(tape[-1])
        maps = A.received().mean(1) / A.shape[-2]
    else:
        maps = rollout(_all_weights(tape), token=_summary_token(model))
    if "ids_lengths" in batch:
        return [row[:n] for row, n in zip(maps.cpu(), batch["ids_lengths"].tolist(), strict=True)]
    if leading := _count_leading_tokens(model):
        maps = maps[:, leading:] / maps[:, leading:].sum(-1, keepdim=True)
    side = isqrt(maps.shape[-1])
    return list(maps.unflatten(-1, (side, side)).cpu())


def capture_batch(model: nn.Module, batch: Batch, tokens: Sequence[Sequence[str]] | None = None) -> Tape:
    """Capture all attention of the model over a batch, labelled with its tokens or images."""
    with capture(model, None if tokens is None else _token_labels(model, tokens)) as tape, torch.no_grad():
        logits(model, batch)
    if "image" in batch:
        special = _count_leading_tokens(model)
        for name in tape.layers:
            side = isqrt(_weights(tape[name]).shape[-1] - special)
            tape.picture(batch["image"].cpu(), patches=(side, side), special=special, layers=name)
    return tape


def check_attends(model: nn.Module) -> None:
    """Raise if the model has no attention over positions or tokens."""
    if isinstance(model, AttentionConvNet) and model.config.attention != "self":
        raise ValueError(
            f"this model has no attention between positions, only attention='{model.config.attention}'; train one with "
            "attention='self', or a ViT"
        )


def _summary_token(model: nn.Module) -> int | None:
    """Return the number of the token that is classified; None if it is the mean of all tokens."""
    return None if isinstance(model, ViTClassifier) and not _count_leading_tokens(model) else 0


def _count_leading_tokens(model: nn.Module) -> int:
    """Return the number of tokens before those of the image."""
    return int(isinstance(model, ViTClassifier) and model.vit.token is not None)


def _token_labels(model: nn.Module, tokens: Sequence[Sequence[str]]) -> Any:
    if isinstance(model, TextClassifier):
        queries = [f"query {n + 1}" for n in range(model.config.queries)]
        return {"pool": ([queries] * len(tokens), tokens)}
    return tokens


def _all_weights(tape: Tape) -> list[Weights]:
    return [_weights(A) for A in tape.values()]


def _weights(A: object) -> Weights:
    assert isinstance(A, Weights)
    return A
