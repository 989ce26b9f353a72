"""Edits that hold the weights of another run: `From` a tape, and `Freeze`, from the same input without the edits.

The weights are computed tile by tile from the queries, keys and terms of the other run; the values are those of this
one. Both patterns are constants: gradients pass through the values alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...ops.call import Call
from ...ops.terms.biases import Bias, ScaledBias
from ...ops.terms.masks import Dense
from ...ops.terms.masks.mask_algebra import Mask
from ...ops.terms.normalizers import Softmax
from ...ops.terms.scores import Dot
from ...ops.weights import Weights
from ..interception.kernel_call import NotUnderstood
from ..layer_names import list_names
from ..recording.generation import equal_terms
from ..recording.observed import ObservedAttention
from ..tape.tape import Tape
from .edit_values import Edit, EditedCall, Heads, are_chosen, normalize_fields


@dataclass(frozen=True, repr=False)
class From(Edit):
    """The weights of another run, patched in; the values are those of this run.

    >>> import torch
    >>> from regard.lens import From, capture, edit
    >>> from regard.nn import Attention
    >>> model, clean, corrupt = Attention(16, heads=4), torch.randn(1, 5, 16), torch.randn(1, 5, 16)
    >>> with capture(model) as tape, torch.no_grad():
    ...     plain = model(clean)
    >>> with edit(model, {"*": From(tape, heads=[0, 2])}), torch.no_grad():
    ...     patched = model(corrupt)

    The tape is of the same model and the same numbers of queries and keys. A layer that is on the tape several times
    gives the weights of its first call to the first call in the block, and so on.
    """

    tape: Tape
    heads: Heads | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tape, Tape):
            raise TypeError(
                f"From takes a tape, got {type(self.tape).__name__}; write with capture(model) as tape: model(x)"
            )
        normalize_fields(self)

    def change(self, seen: ObservedAttention, at: EditedCall) -> ObservedAttention:
        return with_pattern(seen, find_pattern(self.tape, at), self.head_numbers())

    def __repr__(self) -> str:
        return "From(tape)" if self.heads is None else f"From(tape, heads={self.heads!r})"


@dataclass(frozen=True, repr=False)
class Freeze(Edit):
    """The weights that this input gives without the edits of this block: constants, for path analysis.

    >>> from regard.lens import Freeze
    >>> Freeze([0, 1])
    Freeze(heads=(0, 1))

    Gradients pass through the values alone. If the block has other edits too, the model first runs once without them,
    so it must be called as a whole, and without a filled cache.
    """

    heads: Heads | None = None

    is_frozen: ClassVar[bool] = True

    def __post_init__(self) -> None:
        normalize_fields(self)

    def change(self, seen: ObservedAttention, at: EditedCall) -> ObservedAttention:
        if at.clean is not None:
            return with_pattern(seen, find_pattern(at.clean, at), self.head_numbers())
        own = Call.of(seen.q, seen.k, **_slots(seen), offset=seen.first_position)
        return with_pattern(seen, own.map_tensors(Tensor.detach), self.head_numbers())


def find_pattern(tape: Tape, at: EditedCall) -> Call:
    """Return the attention of a layer's call on a tape; raise `NotUnderstood` if the tape does not have it."""
    calls = [key for key in tape if key[0] == at.layer]
    if not calls:
        raise NotUnderstood(f"the tape does not have this layer; it has {list_names(tape.layers)}")
    if len(calls) > 1 and at.number >= len(calls):
        raise NotUnderstood(f"the tape has {len(calls)} calls of it, and this is call {at.number} of the block")
    A = tape[calls[0] if len(calls) == 1 else calls[at.number]]
    if not isinstance(A, Weights):
        raise NotUnderstood("the tape holds no queries and keys of it; capture without keep=")
    if A.call.is_selection:
        raise NotUnderstood("the tape holds some of its heads or texts; capture all, without heads=")
    return A.call


def with_pattern(seen: ObservedAttention, theirs: Call, heads: tuple[int, ...] | None) -> ObservedAttention:
    """Return the values of one attention under the weights of another, in some heads or all."""
    q, k, v = seen.q, seen.k, seen.v
    b, h, i, j = len(q), q.shape[1], q.shape[2], k.shape[2]
    if theirs.shape not in ((b, h, i, j), (1, h, i, j)):
        raise NotUnderstood(
            f"its weights are {' x '.join(map(str, theirs.shape))} in the other run and {b} x {h} x {i} x {j} here"
        )
    if theirs.q.device != q.device:
        theirs = theirs.to(q.device)
    their_q, their_k = (x.to(q.dtype).expand(b, -1, -1, -1) for x in (theirs.q, theirs.k))
    if heads is None:
        their_k, v = _with_equal_heads(their_k, v)
        return seen._replace(q=their_q, k=their_k, v=v, **theirs.slots, offset=theirs.first_position, statistic=None)
    chosen = are_chosen(heads, h, q.device)
    if not _fit(seen, theirs):
        raise NotUnderstood(
            "its score or its normalizer is another one in the other run, so some heads cannot be taken"
        )
    k, their_k, v = (x.repeat_interleave(h // x.shape[1], 1) for x in (k, their_k, v))
    return seen._replace(
        q=torch.where(chosen[:, None, None], their_q, q),
        k=torch.where(chosen[:, None, None], their_k, k),
        v=v,
        mask=_join_masks(theirs.mask, seen.mask, chosen),
        bias=_join_biases(theirs.bias, seen.bias, chosen),
        statistic=None,
    )


def _slots(seen: ObservedAttention) -> Any:
    return {"score": seen.score, "mask": seen.mask, "bias": seen.bias, "normalize": seen.normalize}


def _fit(seen: ObservedAttention, theirs: Call) -> bool:
    """Whether heads of two attentions can be in one: all but their mask and their bias is equal."""
    same = equal_terms(seen.score or Dot(), theirs.score) and equal_terms(seen.normalize or Softmax(), theirs.normalize)
    return same and seen.first_position == theirs.first_position and seen.q.shape[-1] == theirs.q.shape[-1]


def _with_equal_heads(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    n = max(k.shape[1], v.shape[1])
    return k.repeat_interleave(n // k.shape[1], 1), v.repeat_interleave(n // v.shape[1], 1)


def _join_masks(theirs: Mask | None, ours: Mask | None, chosen: Tensor) -> Mask | None:
    """Return one mask in the chosen heads and another in the others."""
    if equal_terms(theirs, ours):
        return ours
    of_theirs, of_ours = Dense(chosen[:, None, None]), Dense(~chosen[:, None, None])
    return (of_theirs if theirs is None else theirs & of_theirs) | (of_ours if ours is None else ours & of_ours)


def _join_biases(theirs: Bias | None, ours: Bias | None, chosen: Tensor) -> Bias | None:
    """Return one bias in the chosen heads and another in the others."""
    if equal_terms(theirs, ours):
        return ours
    factor = chosen.float()
    parts = [ScaledBias(bias, x) for bias, x in ((theirs, factor), (ours, 1 - factor)) if bias is not None]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]
