"""Recognize averages that are no attention of queries over keys, though a softmax made their weights.

Linear attention softmaxes keys over the tokens, so its "queries" are feature channels; a router averages experts; soft
experts share the tokens among slots, by two softmaxes of the same scores; a soft-argmax averages coordinates; capsules
route by agreement. The origins of the dims distinguish them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..recording.unseen import EXPERT_GATE
from .dim_origins import FEATURES, LEARNED, PRESUMED, ROWS, STACKED, Dim, Piece, kinds_of


class NotAttention(NamedTuple):
    """An average that is not put on the tape: its kind, and the reason in words."""

    kind: str
    reason: str
    is_final: bool = True  # the same softmax may not average anything else later
    withdrawn: Any = None  # an entry of the tape that it shows to be no attention


FIXED_VALUES = NotAttention("soft-argmax", "it averages constants, such as coordinates, by its softmax")
FIXED_WEIGHTS = NotAttention("fixed weights", "its weights are the softmax of constants, and not of queries and keys")
ROUTING = NotAttention("routing", "it averages the same values again and again, by weights that begin as constants")
GATE = NotAttention(EXPERT_GATE, "its softmax weighs experts or branches, and not positions")
SLOTS = NotAttention(
    "soft mixture of experts", "its softmaxes share positions among slots of experts, and are none of queries over keys"
)
CHANNELS = NotAttention(
    "linear attention", "its softmax is over features, or gives weights of feature channels, and not of queries"
)
FACTORS = NotAttention(
    "factored attention", "it multiplies softmaxes with each other, so that none of them has the weights of the values"
)


class AverageOrigin(NamedTuple):
    """The origin of the dims of an average, and facts about its softmax."""

    weights: Sequence[Dim] | None  # *lead i j
    values: Sequence[Dim] | None  # *lead j e
    piece: Piece | None  # the position at which the logits were cut from a tensor, if they were
    from_product: bool  # the logits descend from a product of queries and keys
    is_summed: bool  # the weights have no dim of queries
    is_shared: bool  # another softmax, over the other dim of the same logits, waits for its product
    has_feature_softmax: bool  # another softmax, over features equal in number to the rows, waits


def kind_of_average(average: AverageOrigin) -> NotAttention | None:
    """Return the kind of an average that is no attention; None for attention, and where nothing is known."""
    lead, rows, keys = _parts_of(average.weights)
    value_keys, values = average.values[-2:] if average.values is not None else ((), ())
    if _is(value_keys, ROWS) and _is(values, ROWS):
        return FACTORS
    has_slots = _is(rows, FEATURES) or (not rows and LEARNED in kinds_of(lead))
    if average.is_shared and has_slots and not _is(keys, FEATURES, LEARNED):
        return SLOTS
    if average.from_product:
        return None
    if _is(keys, FEATURES, LEARNED, PRESUMED) and _is(value_keys, STACKED, LEARNED):
        return GATE
    if _is(keys, FEATURES, LEARNED):
        if _is(value_keys, FEATURES):
            return CHANNELS
        if not rows and not _is(value_keys, ROWS) and (len(lead) > 1 or average.is_summed):
            return GATE
    if _is(rows, FEATURES) and not _is(keys, FEATURES):
        was_cut = average.piece is not None and average.piece.kind == FEATURES
        if FEATURES in kinds_of(lead) or was_cut or average.has_feature_softmax:
            return CHANNELS
    return None


def _parts_of(dims: Sequence[Dim] | None) -> tuple[Sequence[Dim], Dim, Dim]:
    return (dims[:-2], dims[-2], dims[-1]) if dims is not None and len(dims) > 1 else ((), (), ())


def _is(dim: Dim, *kinds: str) -> bool:
    """Whether a dim has more than one entry, and only factors of the given kinds."""
    return bool(dim) and {factor.kind for factor in dim} <= set(kinds)
