"""Looking: where a classifier's attention lay, on the tokens of texts or the places of images."""

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
    """What a classifier says of a batch, `b classes`."""
    if isinstance(model, TextClassifier):
        return model(batch["ids"], batch.get("characters"), lengths=batch["ids_lengths"])
    if isinstance(model, BertClassifier):
        return model(batch["ids"], padding=batch["ids_lengths"])
    return model(batch["image"])


def input_maps(model: nn.Module, batch: Batch) -> list[Tensor]:
    """What each token of a text, `n`, or each place of an image, `y x`, counted for; its sum is 1.

    A pool says so itself, and so do places that look at each other, by what they receive in the last layer. In a BERT
    and a ViT it is what came to the first token through all layers (rollout: Abnar & Zuidema 2020), or to the mean of
    all, where that is what speaks for the image.
    """
    tape = capture_batch(model, batch)
    if isinstance(model, TextClassifier):
        found = _weights(tape["pool"])[...].mean((1, 2))
    elif isinstance(model, AttentionConvNet):
        A = _weights(tape[-1])
        found = A.received().mean(1) / A.shape[-2]
    else:
        found = rollout(_all_weights(tape), token=_summary_token(model))
    if "ids_lengths" in batch:
        return [row[:n] for row, n in zip(found.cpu(), batch["ids_lengths"].tolist(), strict=True)]
    if leading := _count_leading_tokens(model):
        found = found[:, leading:] / found[:, leading:].sum(-1, keepdim=True)
    side = isqrt(found.shape[-1])
    return list(found.unflatten(-1, (side, side)).cpu())


def capture_batch(model: nn.Module, batch: Batch, tokens: Sequence[Sequence[str]] | None = None) -> Tape:
    """Every attention of the model over a batch, with the tokens or the images it looks at."""
    with capture(model, None if tokens is None else _token_labels(model, tokens)) as tape, torch.no_grad():
        logits(model, batch)
    if "image" in batch:
        special = _count_leading_tokens(model)
        for name in tape.layers:
            side = isqrt(_weights(tape[name]).shape[-1] - special)
            tape.picture(batch["image"].cpu(), patches=(side, side), special=special, layers=name)
    return tape


def check_attends(model: nn.Module) -> None:
    """Raise if there are no places or tokens that attention is spread over."""
    if isinstance(model, AttentionConvNet) and model.config.attention != "self":
        raise ValueError(
            f"the places of this model do not look at each other, its attention is {model.config.attention}; train "
            "one with attention='self', or a ViT"
        )


def _summary_token(model: nn.Module) -> int | None:
    """The token that speaks for all; None where their mean does."""
    return None if isinstance(model, ViTClassifier) and not _count_leading_tokens(model) else 0


def _count_leading_tokens(model: nn.Module) -> int:
    """Tokens before those of the image."""
    return int(isinstance(model, ViTClassifier) and model.vit.token is not None)


def _token_labels(model: nn.Module, tokens: Sequence[Sequence[str]]) -> Any:
    if isinstance(model, TextClassifier):
        asking = [f"look {n + 1}" for n in range(model.config.queries)]
        return {"pool": ([asking] * len(tokens), tokens)}
    return tokens


def _all_weights(tape: Tape) -> list[Weights]:
    return [_weights(A) for A in tape.values()]


def _weights(A: object) -> Weights:
    assert isinstance(A, Weights)
    return A
