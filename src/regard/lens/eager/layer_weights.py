"""Tell keys and values from the weight matrices of a layer: relu(x @ W.T) @ V.T is a feed-forward layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

MIN_COSINE = 0.5  # between a parameter and what a layer makes of it, by a cast, a norm, quantization or an adapter


def is_layer_weight(x: Tensor, parts: Sequence[nn.Module]) -> bool:
    """Whether a tensor is made of one parameter or buffer of the running layer, or of the part around it.

    `parts` are the running modules, the innermost last.
    """
    x = x.detach().squeeze()
    for part in parts[:-3:-1]:
        for weight in chain(part.parameters(), part.buffers()):
            weight = weight.detach().squeeze()
            if weight.ndim < 2 or not weight.is_floating_point() or weight.device != x.device:
                continue
            for form in (weight, weight.mT):
                if form.shape == x.shape and _cosine(form, x) > MIN_COSINE:
                    return True
    return False


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.cosine_similarity(a.flatten().float(), b.flatten().float(), dim=0))
