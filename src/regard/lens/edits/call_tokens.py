"""Find the tokens of an attention call: the position in its text of each query and key, and the tokens themselves.

A call knows its queries and keys; a layer that generates with a cache is called once per token. `TokenFinder` follows
the calls of each layer in each thread, so a position means the same token in every call. Padding is read from the mask
of the call, as `regard.lens.real_tokens` does.

Queries of a self-attention are its last keys. Queries of a cross-attention are those of the self-attention of its
block; if that was not followed, they are counted from the first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..layer_names import matches, shown_name
from ..real_tokens import RealTokens, real_tokens, says_cross
from ..recording.observed import ObservedAttention
from ..tape.annotations import Tokens, TokensByLayer
from .token_selection import TokenAxis

KEPT_CALLS = 32  # latest kinds of calls whose tokens are kept, for all layers that receive the same mask

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class CallTokens:
    """The queries and the keys of an attention call, and values that were computed from them."""

    queries: TokenAxis
    keys: TokenAxis
    is_self: bool
    _known: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """Return `make()`, computed once per key for all layers with these tokens."""
        if key not in self._known:
            self._known[key] = make()
        found: T = self._known[key]
        return found


@dataclass(frozen=True, eq=False)
class _Progress:
    """The tokens that a self-attention has seen, those included that its cache has dropped."""

    real: Tensor  # b n: False for padding
    prompt: Tensor | None  # b 1
    query_texts: Sequence[Sequence[str]] | None
    key_texts: Sequence[Sequence[str]] | None


class _Followed(threading.local):
    """The layers that a thread runs."""

    def __init__(self) -> None:
        self.progress: dict[str, _Progress] = {}
        self.axes: dict[str, TokenAxis] = {}  # the latest queries of each self-attention
        self.calls: OrderedDict[Any, tuple[Any, CallTokens]] = OrderedDict()


class TokenFinder:
    """Finds the tokens of each call of a model."""

    def __init__(self, tokens: Tokens | TokensByLayer | None) -> None:
        self._tokens = tokens
        self._here = _Followed()

    def tokens_of(self, layer: str, seen: ObservedAttention) -> CallTokens:
        """Return the tokens of a call; calls of a layer come in the order in which the model makes them."""
        offset: Any = seen.offset
        if offset is not None and not isinstance(offset, int):
            seen = seen._replace(offset=torch.as_tensor(offset, device=seen.q.device).flatten())  # type: ignore[arg-type]
        if (progress := self._find_progress(layer, seen)) is not None:
            key: Any = "step", id(progress), *_identity(seen)
            tokens = self._find_once(key, (seen, progress), lambda: _tokens_of_step(seen, progress))
        else:
            real = self._find_once(("real", *_identity(seen)), seen, lambda: real_tokens(seen.weights))
            if not _is_self(layer, seen, real):
                self._here.progress.pop(layer, None)
                return self._of_cross_attention(layer, seen, real)
            key = "self", id(real), *_identity(seen), self._texts_key(layer)
            tokens = self._find_once(key, (seen, real), lambda: self._tokens_of_self(layer, seen, real))
        # Layers that are alike share the tokens of their first call, and so those of later calls.
        self._here.progress[layer] = tokens.once("progress", lambda: _progress_after(tokens, seen, progress))
        self._here.axes[layer] = tokens.queries
        return tokens

    def _find_progress(self, layer: str, seen: ObservedAttention) -> _Progress | None:
        """Return the tokens before this call, if it goes on with the cache of the layer's latest call."""
        progress, (b, _, i, _), j = self._here.progress.get(layer), seen.q.shape, seen.k.shape[2]
        if progress is None or (not isinstance(seen.first_position, Tensor) and seen.first_position <= 0):
            return None
        if seen.offset is None and j > progress.real.shape[1] + i:
            return None
        if b != len(progress.real):
            progress = self._here.progress[layer] = _for_batch(progress, b)
        return progress

    def _tokens_of_self(self, layer: str, seen: ObservedAttention, real: RealTokens) -> CallTokens:
        keys, i, first = real.keys, seen.q.shape[2], seen.first_position
        if seen.offset is not None:  # the last keys of a static cache are not in use
            stop = first[:, None] + i if isinstance(first, Tensor) else first + i
            keys = keys & (torch.arange(keys.shape[1], device=keys.device) < stop)
        count = keys.sum(1, keepdim=True)
        is_whole = isinstance(first, Tensor) or first <= 0 or i >= keys.shape[1]
        prompt = count if is_whole else None  # else the block was entered in the middle of a generation
        query_texts, key_texts = self._texts(layer, keys)
        row = torch.arange(i, device=keys.device)
        at = row + first[:, None] if isinstance(first, Tensor) else (row + first)[None]
        is_key = (at >= 0) & (at < keys.shape[1])
        at = at.clamp(0, keys.shape[1] - 1).expand(len(keys), i)
        queries = TokenAxis(_places(keys).gather(1, at), keys.gather(1, at) & is_key, count, prompt, query_texts)
        return CallTokens(queries, TokenAxis(_places(keys), keys, count, prompt, key_texts), is_self=True)

    def _of_cross_attention(self, layer: str, seen: ObservedAttention, real: RealTokens) -> CallTokens:
        own = self._own_queries(layer, real.queries.shape)
        key = "cross", *_identity(seen), id(real), id(own), self._texts_key(layer)
        return self._find_once(key, (seen, real, own), lambda: self._cross_tokens(layer, real, own))

    def _cross_tokens(self, layer: str, real: RealTokens, own: TokenAxis | None) -> CallTokens:
        query_texts, key_texts = self._texts(layer, real.keys)
        keys = TokenAxis(_places(real.keys), real.keys, real.keys.sum(1, keepdim=True), None, key_texts)
        if own is not None:
            return CallTokens(own, keys, is_self=False)
        count = real.queries.sum(1, keepdim=True)
        refusal = None
        if real.queries.shape[1] == 1 < real.keys.shape[1] and not says_cross(layer, real):
            refusal = (
                f"it cannot be seen whether the one query of {shown_name(layer)!r} is a token of a generation or of "
                "another text; run the prompt within the block of edit too, or leave queries out"
            )
        queries = TokenAxis(_places(real.queries), real.queries, count, None, query_texts, refusal)
        return CallTokens(queries, keys, is_self=False)

    def _own_queries(self, layer: str, shape: torch.Size) -> TokenAxis | None:
        """Return the queries of the self-attention in the block of a cross-attention."""
        found = (
            axis
            for name, axis in reversed(self._here.axes.items())
            if axis.real.shape == shape and _are_in_one_block(name, layer)
        )
        return next(found, None)

    def _texts_key(self, layer: str) -> Any:
        """Return a value that is the same for layers with the same texts."""
        if not isinstance(self._tokens, Mapping):
            return None
        return next((pattern for pattern in self._tokens if matches(layer, pattern)), None)

    def _texts(self, layer: str, keys: Tensor) -> tuple[Any, Any]:
        """Return the tokens of each batch row without padding, of the queries and of the keys."""
        given: Any = self._tokens
        if isinstance(given, Mapping):
            given = given.get(self._texts_key(layer))
        if given is None:
            return None, None
        queries = given
        if isinstance(given, tuple) and len(given) == 2 and not isinstance(given[0], str):
            queries, given = given
            return _rows(queries, len(keys)), _without_padding(layer, _rows(given, len(keys)), keys)
        texts = _without_padding(layer, _rows(given, len(keys)), keys)
        return texts, texts

    def _find_once(self, key: Any, alive: Any, make: Callable[[], Any]) -> Any:
        """Return `make()`, computed once per key; ids in the key belong to objects that `alive` holds."""
        calls = self._here.calls
        if key not in calls:
            calls[key] = alive, make()
            if len(calls) > KEPT_CALLS:
                calls.popitem(last=False)
        return calls[key][1]


def _identity(seen: ObservedAttention) -> tuple[Any, ...]:
    """Return a key that calls with the same mask and sizes share."""
    offset: Any = seen.offset
    return id(seen.mask), seen.q.shape[:3], seen.k.shape[2], id(offset) if isinstance(offset, Tensor) else offset


def _is_self(layer: str, seen: ObservedAttention, real: RealTokens) -> bool:
    """Whether the queries of a call are among its keys."""
    if real.is_causal or says_cross(layer, real):
        return real.is_causal
    return seen.q.shape[2] == seen.k.shape[2] or seen.offset is not None or "self" in layer.lower()


def _tokens_of_step(seen: ObservedAttention, progress: _Progress) -> CallTokens:
    """Return the tokens of a call whose queries follow those of earlier calls."""
    i, j = seen.q.shape[2], seen.k.shape[2]
    real = torch.nn.functional.pad(progress.real, (0, i), value=True)
    place, count = _places(real), real.sum(1, keepdim=True)
    queries = TokenAxis(place[:, -i:], real[:, -i:], count, progress.prompt, progress.query_texts)
    if j < real.shape[1]:  # the cache has dropped the first tokens
        place, real = place[:, -j:], real[:, -j:]
    else:  # the last keys of a static cache are not in use
        place, real = (torch.nn.functional.pad(x, (0, j - x.shape[1])) for x in (place, real))
    return CallTokens(queries, TokenAxis(place, real, count, progress.prompt, progress.key_texts), is_self=True)


def _progress_after(tokens: CallTokens, seen: ObservedAttention, before: _Progress | None) -> _Progress:
    """Return the tokens that a self-attention has seen after a call."""
    queries, keys, first = tokens.queries, tokens.keys, seen.first_position
    if before is not None:
        real = torch.nn.functional.pad(before.real, (0, queries.real.shape[1]), value=True)
    else:  # the last keys of a static cache are not in use
        real = keys.real if isinstance(first, Tensor) else keys.real[:, : max(first, 0) + queries.real.shape[1]]
    return _Progress(real, queries.prompt, queries.texts, keys.texts)


def _for_batch(progress: _Progress, b: int) -> _Progress:
    """Return the progress of a batch whose rows were repeated for a search; raise if rows were removed."""
    times, rest = divmod(b, len(progress.real))
    if rest or not times:
        raise ValueError(
            f"the batch changed from {len(progress.real)} to {b} rows within a generation, so the tokens of an edit "
            "cannot be found; generate one text at a time"
        )
    prompt = None if progress.prompt is None else progress.prompt.repeat_interleave(times, 0)
    query_texts, key_texts = (
        None if texts is None else [text for text in texts for _ in range(times)]
        for texts in (progress.query_texts, progress.key_texts)
    )
    return _Progress(progress.real.repeat_interleave(times, 0), prompt, query_texts, key_texts)


def _places(real: Tensor) -> Tensor:
    return real.long().cumsum(1) - 1


def _rows(texts: Any, b: int) -> list[Sequence[str]]:
    """Return one text for each batch row."""
    rows = [texts] if texts and isinstance(texts[0], str) else list(texts)
    if len(rows) == 0 or b % len(rows):
        raise ValueError(f"tokens must be one list, or one for each of the {b} batch rows, got {len(rows)}")
    return [text for text in rows for _ in range(b // len(rows))]


def _without_padding(layer: str, texts: Sequence[Sequence[str]], real: Tensor) -> list[list[str]]:
    """Return the tokens of each batch row, given with its padding or without."""
    found = []
    for n, (text, row) in enumerate(zip(texts, real.tolist(), strict=True)):
        count = sum(row)
        if len(text) not in (len(row), count):
            raise ValueError(
                f"tokens of batch row {n} must be {count}, or {len(row)} with padding, as {shown_name(layer)!r} has "
                f"keys, got {len(text)}"
            )
        is_padded = len(text) == len(row)
        found.append([x for x, is_real in zip(text, row, strict=True) if is_real] if is_padded else list(text))
    return found


def _are_in_one_block(name: str, other: str) -> bool:
    """Whether two names begin alike up to a number, as `decoder.layers.0.self_attn` and `decoder.layers.0.cross` do."""
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(name.split("."), other.split("."), strict=False))
    return any(part.isdecimal() for part, _ in shared)
