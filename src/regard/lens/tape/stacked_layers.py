"""Layers of one shape and one mask, measured as one: on a GPU short layers take longer to launch than to compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.terms.masks import Causal, Padding, Window
from ...ops.terms.masks.mask_algebra import Mask, conjuncts
from ...ops.terms.normalizers import Softmax
from ...ops.terms.scores import Dot
from ...ops.weights import Summary, Weights
from ..real_tokens import Key, RealTokens

DEVICES = ("cuda",)  # a launch takes longer there than a short layer
MAX_ENTRIES = 2**28  # a layer with larger matrices is worth a launch of its own
MAX_BYTES = 2**30  # a stack copies no more than these, of queries and keys


class Layer(NamedTuple):
    """A layer of a tape: its weights, and its real tokens."""

    key: Key
    A: Weights
    real: RealTokens


def stacks(layers: Iterable[Layer]) -> Iterator[list[Layer]]:
    """Yield the layers in stacks that can be measured as one; a layer that cannot comes alone, and at once."""
    waiting: dict[object, list[Layer]] = {}
    for layer in layers:
        if (form := _form(layer)) is None:
            yield [layer]
            continue
        found = waiting.setdefault(form, [])
        found.append(layer)
        if (len(found) + 1) * (layer.A.call.q.nbytes + layer.A.call.k.nbytes) > MAX_BYTES:
            yield waiting.pop(form)
    yield from waiting.values()


def _form(layer: Layer) -> object:
    """Return what the layers of one stack have in common; None for a layer that is measured alone."""
    A, call = layer.A, layer.A.call
    score, terms = call.score, conjuncts(call.mask)
    if (
        A.device.type not in DEVICES
        or call.is_selection
        or len(call.lead) != 1
        or isinstance(call.offset, Tensor)
        or not 0 < A.shape.numel() <= MAX_ENTRIES
        or type(score) is not Dot
        or isinstance(score.scale, Tensor)
        or type(call.normalize) is not Softmax
        or call.bias is not None
        or any(type(term) not in (Causal, Window, Padding) for term in terms)
    ):
        return None
    shapes = call.q.shape, call.k.shape, call.q.dtype, call.k.dtype, A.device, A.known_statistic is None
    return shapes, call.offset, call.backend, score.scale, score.cap, id(call.mask), id(layer.real)


def stack(layers: Sequence[Layer]) -> tuple[Weights, RealTokens]:
    """Return the layers of a stack as one, their batches one after the other."""
    (_, A, real), n = layers[0], len(layers)
    if n == 1:
        return A, real
    calls = [layer.A.call for layer in layers]
    q, k = (_join([getattr(call, name).detach() for call in calls]) for name in ("q", "k"))
    known = [layer.A.known_statistic for layer in layers]
    statistic = torch.cat([x for x in known if x is not None]) if known[0] is not None else None
    whole = replace(A.call, q=q, k=k, lead=(len(q),), mask=_repeat(A.call.mask, n, q.device))
    return Weights(whole, statistic), real.repeat(n)


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Return batches `b h n d` one after the other, in the memory order they have: a copy that is not transposed."""
    if all(x.stride(1) < x.stride(2) for x in parts):
        return torch.cat([x.transpose(1, 2) for x in parts]).transpose(1, 2)
    return torch.cat(list(parts))


def _repeat(mask: Mask | None, n: int, device: torch.device) -> Mask | None:
    """Return a mask for n batches one after the other."""
    if mask is None:
        return None
    terms = conjuncts(mask)
    return reduce(and_, (_repeat_padding(term, n, device) if isinstance(term, Padding) else term for term in terms))


def _repeat_padding(mask: Padding, n: int, device: torch.device) -> Padding:
    if len(mask.keys) == 1:
        return mask
    keys = mask.keys_on(device)
    return Padding(keys.repeat(n, *[1] * (keys.ndim - 1)))


def split_summary(summary: Summary, n: int) -> list[Summary]:
    """Return the summaries of the n layers of a stack."""
    parts: dict[str, Any] = {field.name: _split(getattr(summary, field.name), n) for field in fields(Summary)}
    return [Summary(**{name: values[layer] for name, values in parts.items()}) for layer in range(n)]


def _split(x: Tensor | None, n: int) -> Sequence[Tensor | None]:
    return [None] * n if x is None else x.chunk(n)
