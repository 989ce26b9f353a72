"""Interpreter: from the arguments of an attention kernel to an attention in terms.

Each mask tensor is interpreted once, and layers that receive the same tensor share the term. Keys that a model repeated
for grouped queries are kept once; unused slots of a static KV cache are left out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from operator import add, and_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.weak import WeakIdKeyDictionary

from ...ops.checksums import row_and_column_sums
from ...ops.terms.biases import Added, Bias, Sum
from ...ops.terms.masks import Causal, Padding, Window
from ...ops.terms.masks.mask_algebra import And, Mask
from ...ops.terms.scores import Dot
from ...ops.terms.term import Term
from ..capture_warning import CaptureWarning
from ..eager.head_layout import common_batch_dims
from ..interception.graph_masks import GraphMask
from ..interception.kernel_call import FlexArguments, KernelCall, NotUnderstood, OutputProof
from ..interception.sdpa import is_causal_bias
from ..recording.generation import equal_terms
from ..recording.observed import ObservedAttention
from ..recording.store import Store, version_of
from .block_mask import rows_of_blocks
from .flex_mods import UNSUPPORTED_MODS, readings_of_mods
from .infer_mask import Packed, Rows, recognize, recognize_bias

MAX_COMPARED_ENTRIES = 2**20  # masks with more elements are not compared with that of the layer before
MIN_REPORTED_BYTES = 2**20  # smaller masks without structure are stored without a warning


class Interpreter:
    """Turns kernel calls into terms.

    It remembers the masks it has interpreted, so that layers share one term.
    """

    def __init__(self, store: Store, *, holds_biases: bool = True) -> None:
        self._store, self._holds_biases = store, holds_biases
        self._pass: dict[Any, Any] = {}  # results for functions such as a mask_mod, valid for this forward pass
        self._read: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._terms: dict[str, list[Term]] = {}
        self._known: set[int] = set()  # the ids of the terms in _terms
        self._latest: dict[Any, tuple[Tensor, _Found]] = {}  # sizes -> copy of the latest mask tensor, and its terms
        self._copies: dict[tuple[int, int], int] = {}  # (heads, width) -> times that such layers repeat each key head
        self._shorter: dict[tuple[int, int], _Found | None] = {}  # (id of mask, keys in use) -> mask over these keys

    def interpret(self, call: KernelCall, proof: OutputProof | None = None) -> ObservedAttention | NotUnderstood:
        """Return the call in terms, or the reason why it has none.

        If it has several readings, or if the `proof` wants to see every call, the first that the proof accepts counts.
        """
        try:
            return self._reading(call, proof)
        except NotUnderstood as reason:
            return reason

    def read(self, call: KernelCall) -> ObservedAttention:
        """Return a call that has one reading in terms.

        A mask that shows where the first query stands is believed more than the `offset` of the call.
        """
        q, k, v, mask, bias, offset = call.q, call.k, call.v, call.mask, call.bias, call.offset
        if call.score is not None:
            terms: Any = {"mask": mask, "bias": bias, "normalize": call.normalize}
            return ObservedAttention(q, k, v, call.score, **terms, offset=offset, statistic=call.statistic)
        if is_causal_bias(mask):  # a mask class of PyTorch without numbers
            first = 0 if mask.variant.name == "UPPER_LEFT" else mask.seq_len_kv - mask.seq_len_q
            mask, offset = Causal(), first
        lead = common_batch_dims(*(x.shape[:-3] for x in (q, k, v)))
        if not (q.ndim == k.ndim == v.ndim == 4):
            q, k, v = _four(q, lead), _four(k, lead), _four(v, lead)
        if not (len(q) == len(k) == len(v) and q.shape[1] >= k.shape[1] == v.shape[1]):
            q, k, v = _alike(q, k, v)
        _, heads, _, width = q.shape
        if k.shape[1] == heads:
            k, v = self._once(k, v)
        scale, cap = call.scale, call.cap
        plain = scale is None or scale == width**-0.5
        score = None if plain and cap is None else Dot(scale=None if plain else scale, cap=cap)
        if mask is None or isinstance(mask, Mask):
            seen = ObservedAttention(q, k, v, score, self._one(mask), None, call.normalize, offset, call.statistic)
        else:
            seen = ObservedAttention(q, k, v, score, None, None, call.normalize, offset, call.statistic)
            found = self._find_terms(mask, seen, lead)
            seen = seen._replace(mask=found.mask, bias=found.bias, offset=found.offset)
        seen = self._without_room(seen)
        if bias is None:
            return seen
        if isinstance(bias, Bias):
            return seen._replace(bias=_join(add, seen.bias, self._one(bias)))
        whole = bias.shape[-1] == seen.k.shape[2]
        found = self._find_terms(bias if whole else bias[..., : seen.k.shape[2]], seen, lead)
        return seen._replace(bias=_join(add, seen.bias, found.bias))

    def _reading(self, call: KernelCall, proof: OutputProof | None) -> ObservedAttention:
        """Return the first reading of a call that the proof accepts, in terms."""
        readings = [call] if call.flex is None else self._flex_readings(call, call.flex)
        while call.alternative is not None:
            readings.append(call := call.alternative)
        trusted = proof is None or (proof.only_if_ambiguous and len(readings) == 1)
        for reading in readings:
            observed = self.read(reading)
            if reading.changed:
                observed = observed._replace(changed=reading.changed)
            if trusted or (proof is not None and proof.agrees(observed)):
                return observed
        raise NotUnderstood("" if proof is None else proof.mismatch)

    def _flex_readings(self, call: KernelCall, flex: FlexArguments) -> list[KernelCall]:
        """Return each reading of a call of flex_attention; raise `NotUnderstood` if there is none."""
        blocks, score_mod, q = flex.block_mask, flex.score_mod, call.q
        about = (*q.shape[:3], call.k.shape[2]), q.dtype, q.device, flex.is_compiled
        key = blocks, blocks and blocks.mask_mod, score_mod, *about
        readings = self.in_this_pass(key, lambda: readings_of_mods(blocks, score_mod, *about))
        if not readings:
            raise NotUnderstood(UNSUPPORTED_MODS)
        return [replace(call, flex=None, mask=reading.mask, cap=reading.cap) for reading in readings]

    def begin_pass(self) -> None:
        """Forget the results for mask functions: from now on they may look up other numbers."""
        self._pass = {}

    def in_this_pass(self, key: tuple[Any, ...], find: Callable[[], Any]) -> Any:
        """Return `find()`, computed once per key in this forward pass; objects in the key count by identity."""
        asked = tuple(x if isinstance(x, (str, int, tuple, torch.dtype, torch.device)) else id(x) for x in key)
        if asked not in self._pass:
            self._pass[asked] = key, find()  # the key keeps its objects alive, so that their ids stay unique
        return self._pass[asked][1]

    def _once(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values without the copies that the model made for grouped queries.

        Layers of a model are alike, and a comparison makes the host wait for the device. So if a layer has no copies,
        layers of the same size are not compared; if it has n, the others are compared once, for n copies.
        """
        kind = k.shape[1], k.shape[3]
        times = self._copies.get(kind)
        if times != 1 and (times is None or not _repeats(k, v, times)):
            times = self._copies[kind] = _copies(k, v)
        return (k, v) if times == 1 else (k[:, ::times], v[:, ::times])

    def _without_room(self, seen: ObservedAttention) -> ObservedAttention:
        """Return the call without the keys behind the last query if its mask hides them from all queries."""
        if seen.offset is None or (used := seen.offset + seen.q.shape[2]) >= seen.k.shape[2] or seen.bias is not None:
            return seen
        asked = id(seen.mask), used
        if asked not in self._shorter:
            found = _mask_over_used_keys(seen, used)
            self._shorter[asked] = None if found is None else self._shared(found)
        shorter = self._shorter[asked]
        if shorter is None:
            return seen
        return seen._replace(k=seen.k[:, :, :used], v=seen.v[:, :, :used], mask=shorter.mask)

    def _find_terms(
        self, tensor: Tensor | BlockMask | Rows | GraphMask, seen: ObservedAttention, lead: torch.Size
    ) -> _Found:
        """Return the terms of a tensor, interpreted once for all layers that receive it."""
        if isinstance(tensor, GraphMask):
            sizes = seen.q.shape[2], seen.k.shape[2], seen.offset, len(lead)
            if sizes not in tensor.terms:
                tensor.terms[sizes] = _terms_of(tensor.values(), seen, lead)
            return self._shared(tensor.terms[sizes])
        if not isinstance(tensor, Tensor):
            mod = tensor.mask_mod if isinstance(tensor, BlockMask) else None
            key = tensor, mod, seen.q.shape[:3], seen.k.shape[2], seen.offset, len(lead)
            return self.in_this_pass(key, lambda: self._shared(_terms_of(tensor, seen, lead)))
        asked = version_of(tensor), seen.q.shape[2], seen.k.shape[2], seen.offset, len(lead)
        prints = row_and_column_sums(tensor) if tensor.is_inference() else None
        known = self._read.get(tensor)
        if known is None or known[0] != asked or (prints is not None and not torch.equal(known[1], prints)):
            known = asked, prints, self._terms_by_value(tensor, seen, lead, asked[1:])
            self._read[tensor] = known
        return known[2]

    def _terms_by_value(self, tensor: Tensor, seen: ObservedAttention, lead: torch.Size, sizes: Any) -> _Found:
        """Return the terms of a tensor: those of the latest one if both are equal, as if each layer makes the mask."""
        latest = self._latest.get(sizes)
        if latest is not None and _are_equal(latest[0], tensor):
            return latest[1]
        found = self._shared(_terms_of(tensor, seen, lead))
        if tensor.numel() <= MAX_COMPARED_ENTRIES:
            self._latest[sizes] = tensor.detach().clone(), found
        return found

    def _shared(self, found: _Found) -> _Found:
        return found._replace(mask=self._one(found.mask), bias=self._one(found.bias))

    def _one(self, term: Any) -> Any:
        """Return the term, or an equal one that is known already."""
        if term is None or id(term) in self._known:
            return term
        alike = self._terms.setdefault(repr(term), [])
        for other in alike:
            if equal_terms(other, term):
                return other
        if self._holds_biases or not isinstance(term, Bias):
            self._store.charge(sum(x.nbytes for x in term.tensors()), repr(term))
            alike.append(term)
            self._known.add(id(term))
        for part in _parts(term):
            if (
                isinstance(part, (Packed, Added))
                and (size := sum(x.nbytes for x in part.tensors())) > MIN_REPORTED_BYTES
            ):
                kind = "mask" if isinstance(part, Packed) else "bias"
                warnings.warn(
                    f"no structure (causal, window, padding, ...) found in this {kind}, {part!r}: storing it densely, "
                    f"queries x keys, takes {size / 1e6:.3g} MB",
                    CaptureWarning,
                    stacklevel=2,
                )
        return term


class _Found(NamedTuple):
    """The terms of a mask tensor, and the position of the first query if the mask shows it."""

    mask: Mask | None
    bias: Bias | None = None
    offset: int | None = None


@torch.no_grad()
def _terms_of(tensor: Tensor | BlockMask | Rows, seen: ObservedAttention, lead: torch.Size) -> _Found:
    if isinstance(tensor, Tensor):
        rows = _rows(tensor, lead, seen.k.shape[2])
    elif isinstance(tensor, BlockMask):
        rows = rows_of_blocks(tensor, (*seen.q.shape[:3], seen.k.shape[2]), seen.q.device)
    else:
        rows = tensor
    dtype = rows.block(0, min(1, rows.shape[2])).dtype
    # A single row for all queries does not show their positions.
    given = seen.offset if rows.shape[2] == seen.q.shape[2] else seen.first_position
    if dtype == torch.bool:
        mask, offset = recognize(rows, offset=given)
        return _Found(mask, offset=seen.offset if offset == seen.first_position else offset)
    # Models hide keys by -inf or by the least number of the dtype: both become a mask. NaN hides nothing.
    least = torch.finfo(dtype).min / 2
    shown = replace(rows, block=lambda start, stop: ~(rows.block(start, stop) <= least))
    mask, offset = recognize(shown, offset=given)
    _warn_fully_masked(rows, shown, offset)
    numbers = replace(rows, block=lambda start, stop: _zero_hidden(rows.block(start, stop), least))
    bias = recognize_bias(numbers, seen=shown, offset=offset)
    return _Found(mask, bias, seen.offset if offset == seen.first_position else offset)


def _are_equal(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and x.device == y.device and torch.equal(x, y)


def _warn_fully_masked(rows: Rows, shown: Rows, place: int) -> None:
    """Warn of rows that hide every key by finite numbers: a softmax spreads evenly over them, while terms give zeros.

    Rows at padded positions, whose own key is hidden from all queries, are ignored.
    """
    b, _, i, j = shown.shape
    blind = torch.zeros(b, i, dtype=torch.bool, device=shown.device)
    keep = torch.zeros(b, j, dtype=torch.bool, device=shown.device)
    for start, seen in shown.blocks():
        keep |= seen.flatten(1, 2).any(1)
        nothing = ~seen.any(-1)
        if bool(nothing.any()):
            stop = start + seen.shape[2]
            blind[:, start:stop] = (nothing & (rows.block(start, stop) > -torch.inf).any(-1)).any(1)
    if j and bool(blind.any()):
        own = (torch.arange(i, device=shown.device) + place).clamp(0, j - 1)
        masked_rows = (blind & keep[:, own]).any(0).nonzero().flatten().tolist()
        if masked_rows:
            several = len(masked_rows) > 1
            warnings.warn(
                f"{len(masked_rows)} query row{'s are' if several else ' is'} fully masked with finite values (first: "
                f"row {masked_rows[0]}, all {j} keys). The model attends uniformly there; regard shows zeros. Use a "
                "boolean mask, or leave at least one key visible",
                CaptureWarning,
                stacklevel=2,
            )


def _rows(tensor: Tensor, lead: torch.Size, keys: int) -> Rows:
    x = _four(tensor, lead) if tensor.ndim > 2 else tensor[None, None]
    x = x.expand(-1, -1, -1, keys) if x.shape[3] == 1 else x
    # A row that is broadcast over queries stays one row.
    return Rows.of(x[:, :, :1] if x.shape[2] > 1 and x.stride(2) == 0 else x)


def _zero_hidden(x: Tensor, least: float) -> Tensor:
    return torch.where(x <= least, 0.0, x)


def _alike(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v with batch rows and heads of size 1 expanded, as kernels broadcast them."""
    b, g = max(map(len, (q, k, v))), max(k.shape[1], v.shape[1])
    q = q.expand(b, g if q.shape[1] == 1 else -1, -1, -1)
    k, v = (x.expand(b, g if x.shape[1] == 1 else -1, -1, -1) for x in (k, v))
    return q, k, v


def _four(x: Tensor, lead: torch.Size) -> Tensor:
    """Return a tensor of a call with batch dims `lead` as `b h i d`: batch dims merged, and no heads as one head."""
    if len(lead) == 1:
        return x if x.ndim == 4 else x[(None,) * (4 - x.ndim)]
    if not lead:  # b i d: a batch without heads
        return x[:, None] if x.ndim == 3 else x[(None,) * (4 - x.ndim)]
    x = x[(None,) * (len(lead) + 3 - x.ndim)]
    return x.expand(*lead, *x.shape[-3:]).flatten(0, -4)


def _copies(k: Tensor, v: Tensor) -> int:
    """Return how many adjacent copies there are of each key head and its values."""
    heads = k.shape[1]
    # For most models one comparison, of the first two heads, rules copies out.
    if heads == 1 or not torch.equal(k[:, 0, :1], k[:, 1, :1]):
        return 1
    return next((n for n in range(heads, 1, -1) if heads % n == 0 and _repeats(k, v, n)), 1)


def _repeats(k: Tensor, v: Tensor, times: int) -> bool:
    """True if every key head and its values have `times` adjacent copies."""
    if v.shape[1] != k.shape[1]:
        return False
    same = [(x.unflatten(1, (-1, times)) == x[:, ::times, None]).all() for x in (k, v)]
    return bool(same[0] & same[1])


def _mask_over_used_keys(seen: ObservedAttention, used: int) -> _Found | None:
    """Return the mask over the keys in use if it hides all others from every query; else None."""
    parts: list[Any] = list(_parts(seen.mask))
    hidden = any(isinstance(x, Causal) or (isinstance(x, Padding) and _ends(x, seen, used)) for x in parts)
    if not hidden or not all(isinstance(x, (Causal, Window, Padding)) for x in parts):
        return None
    return _Found(_join(and_, *(_narrow(x, seen, used) for x in parts)))


def _ends(padding: Padding, seen: ObservedAttention, used: int) -> bool:
    return not bool(_keep(padding, seen)[:, used:].any())


def _keep(padding: Padding, seen: ObservedAttention) -> Tensor:
    keys = padding.keys if isinstance(padding.keys, Tensor) else torch.tensor(padding.keys, device=seen.k.device)
    return keys if keys.dtype == torch.bool else torch.arange(seen.k.shape[2], device=keys.device) < keys[:, None]


def _narrow(part: Mask, seen: ObservedAttention, used: int) -> Mask | None:
    if not isinstance(part, Padding):
        return part
    keep = _keep(part, seen)[:, :used]
    return None if bool(keep.all()) else Padding(keep)


def _parts(term: Term | None) -> Iterator[Term]:
    """Yield the terms that are joined by `&` or `+`."""
    if term is None:
        return
    if isinstance(term, (And, Sum)):
        yield from _parts(term.left)
        yield from _parts(term.right)
    else:
        yield term


def _join(operator: Any, *terms: Any) -> Any:
    given = [term for term in terms if term is not None]
    return reduce(operator, given) if given else None
