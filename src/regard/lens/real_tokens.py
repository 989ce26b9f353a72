"""Real tokens: which queries and keys of an attention are tokens of a text, and which are padding, read from its mask.

A key is padding if the mask hides it from every query of its batch row. Terms are read by their structure: `Padding`,
`Prefix` and `Documents` say it of each key, and masks of positions, such as `Causal`, say it of none. Other masks are
evaluated a few rows at a time. In self-attention queries and keys are the same tokens, so a query is padding if its key
is. The queries of a cross-attention are the tokens of another layer, which only a tape knows (`with_own_queries`).

Limits. Padding that the mask does not hide is not known to be padding: a causal model run on right-padded texts without
their mask, or padding tokens that see each other as a document of their own does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile

import torch
from jaxtyping import Bool
from torch import Tensor

from ..ops.blocks.prepared_call import PreparedCall
from ..ops.blocks.reduction import Reduction
from ..ops.call import Call
from ..ops.terms.coordinates import Block
from ..ops.terms.masks import (
    Causal,
    Chunked,
    Diagonal,
    Dilated,
    Documents,
    Global,
    Near,
    Neighborhood,
    Padding,
    Prefix,
    Window,
)
from ..ops.terms.masks.mask_algebra import And, Mask, Not, Or, conjuncts
from ..ops.weights import Weights
from .recording.generation import looks_back_only

ENTRIES = 2**22  # mask elements evaluated at a time
POSITIONS = (
    Causal,
    Window,
    Dilated,
    Chunked,
    Diagonal,
    Global,
    Near,
    Neighborhood,
)  # masks that hide no key from all queries
MAX_SHARED_MASKS = 64
CROSS_NAMES = ("cross", "encdec", "enc_dec", "encoder_attn", "src_attn", "memory_attn")  # parts of names of layers
Key = tuple[str, int]  # layer and call


@dataclass(frozen=True, eq=False)
class RealTokens:
    """The queries, `b i`, and the keys, `b j`, that are real tokens, and whether each query sees no later token.

    Queries that are the keys are one tensor. Layers share these objects, so each number is read from a GPU once.
    """

    queries: Tensor
    keys: Tensor
    is_causal: bool
    has_no_padding: bool = False  # True if that is known without reading the tensors

    @classmethod
    def all_of(cls, shape: torch.Size) -> RealTokens:
        """Return the tokens of a matrix without padding, of this shape."""
        *lead, _, i, j = shape
        queries, keys = (torch.ones(math.prod(lead), n, dtype=torch.bool) for n in (i, j))
        return cls(queries, keys, is_causal=False, has_no_padding=True)

    @cached_property
    def are_all(self) -> bool:
        """True if there is no padding."""
        return self.has_no_padding or bool(self.queries.all() & self.keys.all())

    @cached_property
    def are_all_queries(self) -> bool:
        """True if no query is padding."""
        return self.has_no_padding or bool(self.queries.all())

    @property
    def counted(self) -> Tensor | None:
        """The real queries; None if it is known that all are real."""
        return None if self.has_no_padding else self.queries

    @cached_property
    def shifts(self) -> tuple[int, ...]:
        """For each batch row: how far behind the last real query the last real key stands."""
        if self.queries is self.keys:
            return (0,) * len(self.keys)
        shifts: list[int] = (_ends(self.keys) - _ends(self.queries)).tolist()
        return tuple(shifts)

    def repeat(self, n: int) -> RealTokens:
        """Return the tokens of n batches one after the other."""
        keys = self.keys.repeat(n, 1)
        return replace(self, queries=keys if self.queries is self.keys else self.queries.repeat(n, 1), keys=keys)


def real_keys(A: Weights) -> Bool[Tensor, "*b j"]:
    """Return True for each key that is a real token, False for padding: a key that no query of its batch row may see.

    >>> from regard import Causal, Padding, weights
    >>> q, k = torch.randn(2, 2, 4, 3, 8)
    >>> real_keys(weights(q, k, mask=Causal() & Padding((3, 1))))
    tensor([[ True,  True,  True],
            [ True, False, False]])
    """
    return real_tokens(A).keys.view(*A.shape[:-3], A.shape[-1])


def real_queries(A: Weights) -> Bool[Tensor, "*b i"]:
    """Return True for each query that is a real token, False for padding.

    The queries of a self-attention are real if their keys are. An attention is taken for one if its mask is causal, or
    if its numbers of queries and keys are equal. All queries of other attentions count as real:
    `tape.real_queries(layer)` knows more.
    """
    return real_tokens(A).queries.view(*A.shape[:-3], A.shape[-2])


def real_tokens(A: Weights) -> RealTokens:
    """Return the real queries and keys of an attention as its mask shows them; leading dims flattened to one."""
    call = A.call
    b, _, i, j = call.shape
    keys, is_causal = find_real_keys(call), looks_back_only(call.mask)
    queries = torch.ones(b, i, dtype=torch.bool, device=A.device)
    if keys is None:
        return RealTokens(queries, torch.ones(b, j, dtype=torch.bool, device=A.device), is_causal, has_no_padding=True)
    if i == j and not isinstance(call.offset, Tensor) and call.offset == 0 and call.row_ids is None:
        return RealTokens(keys, keys, is_causal)
    if is_causal or i == j:
        position = call.whole().i.view(-1)
        is_key = (position >= 0) & (position < j)
        queries[:, is_key] = keys[:, position[is_key]]
    return RealTokens(queries, keys, is_causal)


class SharedRealTokens:
    """Real tokens by mask: layers that share a mask share the result, and so what was read of it from a GPU."""

    def __init__(self) -> None:
        # Each mask is held, so that its id stays its own.
        self._known: dict[int, tuple[Mask | None, dict[tuple[object, ...], RealTokens]]] = {}

    def of(self, A: Weights) -> RealTokens:
        """Return the real queries and keys of an attention as its mask shows them; leading dims flattened to one."""
        (b, _, i, j), mask = A.call.shape, A.call.mask
        if A.call.is_selection or isinstance(A.call.offset, Tensor):
            return real_tokens(A)
        if id(mask) not in self._known and len(self._known) == MAX_SHARED_MASKS:
            self._known.clear()
        _, known = self._known.setdefault(id(mask), (mask, {}))
        tensors = () if mask is None else mask.tensors()
        versions = tuple(x._version for x in tensors if not x.is_inference())  # they count writes in place
        sizes = b, i, j, A.call.offset, A.device, versions
        if sizes not in known:
            known[sizes] = real_tokens(A)
        return known[sizes]


def find_real_keys(call: Call) -> Tensor | None:
    """Return `b j`: the keys that some query may see; None if the mask hides no key from all queries."""
    b, _, i, j = call.shape
    if call.mask is None or not (b and i and j):
        return None
    seen = _seen_keys(call.mask, call)
    return None if seen is None else seen.expand(b, j)


def padding_queries(A: Weights) -> Tensor | None:
    """Return `*b i`: the real queries, or None if all are real: the queries that a measure counts by default."""
    if find_real_keys(A.call) is None:
        return None
    queries = real_queries(A)
    return None if bool(queries.all()) else queries


def without_queries(A: Weights, queries: Bool[Tensor, "*b i"]) -> Weights:
    """Return the weights with zeros in the rows of all queries but these, lazy as before."""
    call = A.call
    b, _, i, _ = call.shape
    queries = queries.to(A.device).expand(*A.shape[:-3], i).reshape(b, i)
    hidden = (~queries).long()
    # Terms count batch rows and queries as they were numbered before a selection.
    if call.row_ids is not None:
        hidden = hidden.new_zeros(b, int(call.row_ids.max()) + 1).index_copy_(1, call.row_ids, hidden)
    if call.batch_ids is not None:
        rows = hidden.new_zeros(int(call.batch_ids.max()) + 1, hidden.shape[1])
        hidden = rows.index_copy_(0, call.batch_ids, hidden)
    no_query = Documents(hidden, hidden.new_zeros(1, call.shape[3]))
    statistic = A.known_statistic
    if statistic is not None:  # a hidden row may have NaN there
        statistic = statistic.masked_fill(~queries[:, None, :, None], 0.0)
    return Weights(replace(call, mask=no_query if call.mask is None else call.mask & no_query), statistic)


def received_from(A: Weights, queries: Bool[Tensor, "*b i"] | None) -> Tensor:
    """Return the attention that each key receives from these queries, from all if None: `b h j`."""
    return (A if queries is None else without_queries(A, queries)).received()


def distance_between(A: Weights, real: RealTokens) -> Tensor | None:
    """Return the mean distance of each query to its keys, `b h i`, if padding changes it; else None.

    If the mask is padding alone, the last real query stands at the last real key, as it does without padding.
    """
    is_padding = all(isinstance(part, Padding) for part in conjuncts(A.call.mask))
    if real.has_no_padding or not is_padding or not (real.queries.shape[1] and real.keys.shape[1]):
        return None
    if set(real.shifts) == {A.call.first_position} or real.are_all:
        return None
    shift = torch.tensor(real.shifts, device=A.device)

    def value(prepared: PreparedCall, block: Block, part: Tensor, x: Tensor | None) -> Tensor:
        selected = replace(block, batch_ids=None)
        return (part * (block.row + shift[selected.b] - block.j).abs()).sum(-1)

    return A.reduce(Reduction(value, "rows"))


def _ends(real: Tensor) -> Tensor:
    """Return the position behind the last real token of each row of `b n`."""
    return torch.where(real, torch.arange(1, real.shape[1] + 1, device=real.device), 0).amax(1)


def with_own_queries(layer: Key, tokens: Mapping[Key, RealTokens]) -> RealTokens:
    """Return the real tokens of a layer; the queries of a cross-attention are those of its block's self-attention.

    `tokens` holds all layers of a tape in order, this one among them. Layers are in one block if they were called as
    often and their names begin alike up to a number, as `decoder.layers.0.self_attn` and `decoder.layers.0.cross` do.
    A layer whose numbers of queries and keys are equal is a cross-attention if its name says so, if it is in a decoder
    and not causal, or if its block has a causal or an earlier self-attention. Without a self-attention of that length
    in the block all queries count as real.
    """
    found = tokens[layer]
    if found.is_causal or says_self(layer[0], found):
        return found
    is_square, is_cross = found.queries.shape == found.keys.shape, says_cross(layer[0], found)
    order = {key: n for n, key in enumerate(tokens)}
    own = [key for key, other in tokens.items() if _is_own_attention(key, other, layer, found)]
    own.sort(key=lambda key: (not tokens[key].is_causal, order[key]))
    if is_square and not is_cross and own and not tokens[own[0]].is_causal and order[own[0]] > order[layer]:
        return found
    if own:
        queries = tokens[own[0]].queries.to(found.queries.device)
    elif is_square and is_cross:
        queries = torch.ones_like(found.queries)
    else:
        return found
    if queries is found.queries or torch.equal(queries, found.queries):
        return found
    return replace(found, queries=queries, has_no_padding=False)


def says_self(name: str, tokens: RealTokens) -> bool:
    """True if the name of a layer says that its queries are its keys, and their numbers agree."""
    return tokens.queries.shape == tokens.keys.shape and "self" in _tail(name) and not says_cross(name, tokens)


def _is_own_attention(key: Key, other: RealTokens, layer: Key, found: RealTokens) -> bool:
    """Whether another layer is a self-attention over the queries of a layer: same block, call and number of tokens."""
    if key == layer or key[1] != layer[1] or other.queries.shape != found.queries.shape or says_cross(key[0], other):
        return False
    if not other.is_causal and other.queries.shape != other.keys.shape:
        return False
    ours, theirs = layer[0].split("."), key[0].split(".")
    shared = list(takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
    # Names alike but for numbers are two blocks of one kind: `stages.0.blocks.0.attn` and `stages.0.blocks.1.attn`.
    same_kind = [x for x in ours if not x.isdecimal()] == [x for x in theirs if not x.isdecimal()]
    return any(part.isdecimal() for part, _ in shared) and not same_kind


def _tail(name: str) -> str:
    """Return the part of a layer's name behind its last number, in lower case."""
    parts = name.lower().split(".")
    numbers = [n for n, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[numbers[-1] + 1 :] if numbers else parts)


def says_cross(name: str, real: RealTokens) -> bool:
    """Whether a name is that of a cross-attention; in a decoder, it is if neither name nor mask say otherwise."""
    tail = _tail(name)
    in_decoder = "decoder" in name.lower() and not real.is_causal and "self" not in tail
    return in_decoder or any(word in tail for word in CROSS_NAMES)


def _seen_keys(mask: Mask, call: Call) -> Tensor | None:
    """Return `b|1 j`: the keys that some query sees; None for all, or if that depends on positions alone."""
    row = replace(call.whole(), rows=slice(0, 1), row_ids=None)
    match mask:
        case And() | Or():
            left, right = _seen_keys(mask.left, call), _seen_keys(mask.right, call)
            if isinstance(mask, Or):
                return None if left is None or right is None else left | right
            return right if left is None else left if right is None else left & right
        case Not(mask=And(left=left, right=right)):
            return _seen_keys(Or(Not(left), Not(right)), call)
        case Not(mask=Or(left=left, right=right)):
            return _seen_keys(And(Not(left), Not(right)), call)
        case Not(mask=Not(mask=inner)):
            return _seen_keys(inner, call)
        case Padding() | Prefix() | Not(mask=Padding() | Prefix()):
            return _keys_of(mask.over(row), call)
        case Documents(key_ids=None):
            return None
        case Documents(query_ids=queries, key_ids=keys):
            assert keys is not None
            queries, keys = (x if x.ndim == 2 else x[None] for x in (queries, keys))
            n = max(len(queries), len(keys))
            pairs = zip(queries.expand(n, -1), keys.expand(n, -1), strict=True)
            known = torch.stack([torch.isin(theirs, ours) for ours, theirs in pairs])
            return None if bool(known.all()) else _keys_of(Padding(known).over(row), call)
        case Not(mask=inner) if isinstance(inner, (*POSITIONS, Documents)):
            return None
        case _ if isinstance(mask, POSITIONS):
            return None
        case _:
            return _evaluate(mask, call)


def _evaluate(mask: Mask, call: Call) -> Tensor | None:
    """Return the keys that some query sees, from the last query up until all are found; None if all are."""
    b, h, i, j = call.shape
    seen = torch.zeros(b, j, dtype=torch.bool, device=call.q.device)
    reaches = torch.zeros(b, 1, dtype=torch.bool, device=call.q.device)
    step = max(1, ENTRIES // (b * h * j))
    for stop in range(i, 0, -step):
        block = replace(call.whole(), rows=slice(max(0, stop - step), stop))
        part = mask.over(block)
        seen = seen | _keys_of(part, call)
        if bool(seen.all()):
            return None
        reaches = reaches | _keys_of(part & (block.j >= block.i), call).any(1, keepdim=True)
    # A mask that shows each query earlier keys only hides the last token from all queries, which is no padding.
    last = torch.where(seen, torch.arange(j, device=seen.device), -1).amax(1, keepdim=True)
    return seen | (~reaches & (torch.arange(j, device=seen.device) == last + 1))


def _keys_of(part: Tensor, call: Call) -> Tensor:
    """Return `b|1 j`: the keys that any head and any row of a block of a mask shows."""
    part = part[(None,) * (4 - part.ndim)]
    return part.flatten(1, 2).any(1).expand(-1, call.shape[3])
