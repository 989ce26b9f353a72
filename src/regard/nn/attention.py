"""Attention: the layer around the operator; it projects tokens to queries, keys and values, and the output back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..argument_hints import CALLS, KEEP, LAYERS, with_argument_hints
from ..checks import check_int, check_letters, check_tensor
from ..ops.call import SLOTS
from ..ops.operator import weights
from ..ops.terms.biases import Bias
from ..ops.terms.masks import Causal, Chunked, Diagonal, Dilated, Padding, Prefix, Window
from ..ops.terms.masks.mask_algebra import Mask, conjuncts
from ..ops.terms.normalizers import Normalizer
from ..ops.terms.reach import depends_on_distance_only, look_back, reads_key_positions
from ..ops.terms.scores import Score
from ..ops.terms.term import Term
from ..ops.weights import Weights
from .cache import KeyValues, KVCache, PackedPrompts
from .core import Core
from .head_pruning import keep_input_heads, keep_key_heads, keep_output_heads
from .learned_terms import fill, slot
from .linear import project
from .memory_slots import MemorySlots, extend_bias, extend_taper
from .norms import Norm
from .positions import Rotary

SHARED_MASKS = (Causal, Chunked, Diagonal, Dilated, Padding, Prefix, Window)  # the same for all heads


class Attention(nn.Module):
    """concat over heads of attend(x W_q, c W_k, c W_v), times W_o (Vaswani et al. 2017, sec. 3.2.2).

    >>> from regard import Causal
    >>> x, source = torch.randn(2, 7, 64), torch.randn(2, 9, 64)
    >>> layer = Attention(64, heads=8, kv_heads=2, mask=Causal())
    >>> layer(x).shape
    torch.Size([2, 7, 64])
    >>> layer.weights(x)
    Weights(2 x 8 x 7 x 7, mask=Causal())
    >>> Attention(64, heads=8)(x, source, keep=torch.tensor([9, 4])).shape
    torch.Size([2, 7, 64])

    `kv_heads` below `heads` is grouped-query attention, `kv_heads=1` multi-query. Queries and keys of a head are
    `head_dim` wide (default: dim / heads), its values `value_dim` (default: head_dim). Keys are projected from inputs
    of `key_width` (default: dim), values from inputs of `value_width` (default: key_width). `biased` names the
    projections that have a bias: "qkvo" all, "" none.

    `score`, `mask`, `bias` and `normalize` each take a term made of numbers, `mask=Causal() & Window(256)`, or a module
    whose `forward()` returns the term and which owns its tensors, `bias=T5Bias(8)`, `score=LearnedDot(8, scale=0.1)`.
    `rotary` rotates queries and keys, `qk_norm` (such as `RMSNorm`) makes one norm for queries and one for keys, and
    `slots` is the number of learned keys and values that every query sees besides.
    """

    @with_argument_hints(LAYERS)
    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        key_width: int | None = None,
        value_width: int | None = None,
        biased: str = "qkvo",
        score: Score | nn.Module | None = None,
        mask: Mask | nn.Module | None = None,
        bias: Bias | nn.Module | None = None,
        normalize: Normalizer | nn.Module | None = None,
        rotary: Rotary | None = None,
        qk_norm: Norm | None = None,
        slots: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_int("dim", dim, least=1)
        check_int("heads", heads, least=1)
        self.dim, self.heads, self.kv_heads = dim, heads, heads if kv_heads is None else kv_heads
        self.head_dim = _even_split(dim, heads) if head_dim is None else head_dim
        self.value_dim = self.head_dim if value_dim is None else value_dim
        for name, width in (("head_dim", self.head_dim), ("value_dim", self.value_dim)):
            check_int(name, width, least=1)
        _check_kv_heads(self.heads, self.kv_heads)
        check_letters("biased", biased, "qkvo")
        self.query = nn.Linear(dim, heads * self.head_dim, bias="q" in biased)
        self.key = nn.Linear(key_width or dim, self.kv_heads * self.head_dim, bias="k" in biased)
        self.value = nn.Linear(value_width or key_width or dim, self.kv_heads * self.value_dim, bias="v" in biased)
        self.out = nn.Linear(heads * self.value_dim, dim, bias="o" in biased)
        self.query_norm = None if qk_norm is None else qk_norm(self.head_dim)
        self.key_norm = None if qk_norm is None else qk_norm(self.head_dim)
        self.rotary = rotary
        self.slots = MemorySlots(slots, self.kv_heads, self.head_dim, value_dim=self.value_dim) if slots else None
        self.score = slot("score", score, Score)
        self.mask = slot("mask", mask, Mask)
        self.bias = slot("bias", bias, Bias)
        self.normalize = slot("normalize", normalize, Normalizer)
        self.core = Core(dropout=dropout)
        self.kept_heads: Tensor | None  # the first numbers of the heads that `keep_heads` left
        self.register_buffer("kept_heads", None)
        for linear in (self.query, self.key, self.value, self.out):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    @with_argument_hints(CALLS, renamed=KEEP)
    def forward(
        self,
        x: Float[Tensor, "b i dim"],
        context: Float[Tensor, "b j key_width"] | KeyValues | None = None,
        values: Float[Tensor, "b j value_width"] | None = None,
        *,
        mask: Mask | None = None,
        keep: Bool[Tensor, "b j"] | Int[Tensor, " b"] | None = None,
        positions: Int[Tensor, "*b new"] | None = None,
        cache: KVCache | PackedPrompts | None = None,
    ) -> Float[Tensor, "b i dim"]:
        """Queries from x, keys from `context` (x if absent), values from `values` (`context` if absent).

        A query sees a key if the layer's mask, the mask of the call and `keep` (lengths, or True = a real key)
        all allow it. `positions`, for rotary layers, are the positions of the keys; those of x are the last of them.
        By default they count from 0, or from the length of the cache. With a cache, the keys of earlier calls come
        first, x follows them, and `keep` covers both. A cache whose rows have different lengths hides what lies
        before each row; `cache.prompts` reads texts that follow each other in one row.
        """
        q, k = self._queries_and_keys(x, context, positions, cache)
        v = self._values(x, context, values)
        terms = self._terms(mask, _padding_of(keep, context), x.shape[1], k.shape[2], cache)
        grown = None if cache is None else cache.fork()
        if grown is not None:
            k, v = grown.append(k, v)
        if self.slots is not None:
            k, v = self.slots(k, v)
        x = project(self.out, self.core(q, k, v, **terms).transpose(1, 2).flatten(2))  # b h i e -> b i (h e) -> b i dim
        if cache is not None and grown is not None:
            cache.become(grown)  # type: ignore[arg-type]
        return x

    @with_argument_hints(CALLS, renamed=KEEP)
    def weights(
        self,
        x: Float[Tensor, "b i dim"],
        context: Float[Tensor, "b j key_width"] | KeyValues | None = None,
        *,
        mask: Mask | None = None,
        keep: Bool[Tensor, "b j"] | Int[Tensor, " b"] | None = None,
        positions: Int[Tensor, "*b new"] | None = None,
        cache: KVCache | PackedPrompts | None = None,
    ) -> Weights:
        """Return the lazy weights of the same call; the cache is read and not changed."""
        q, k = self._queries_and_keys(x, context, positions, cache)
        terms = self._terms(mask, _padding_of(keep, context), x.shape[1], k.shape[2], cache)
        if cache is not None:
            k = cache.join(k)
        if self.slots is not None:
            k = self.slots.after_keys(k)
        return weights(q, k, **terms)

    @with_argument_hints(CALLS, renamed=KEEP)
    def remember(
        self,
        context: Float[Tensor, "b j key_width"],
        values: Float[Tensor, "b j value_width"] | None = None,
        *,
        keep: Bool[Tensor, "b j"] | Int[Tensor, " b"] | None = None,
    ) -> KeyValues:
        """Project the keys and values of another sequence once: `layer(x, layer.remember(context))`."""
        if self.rotary is not None:
            raise ValueError(
                "remember() does not support rotary=: a call rotates its queries and keys by the same positions; "
                "call layer(x, context)"
            )
        return KeyValues(self._keys(context), self._values(context, context, values), keep)

    def keep_heads(self, heads: Sequence[int]) -> None:
        """Remove all other heads for good, in place, with their weights.

        The parameters are new ones, so make the optimizer afterwards. `state_dict` holds the numbers of the heads that
        stay in `kept_heads`, and loading it into a layer with all heads removes the others first. Terms with numbers of
        their own for each head, and memory slots, raise.
        """
        check_prunable(self)
        kept, before = sorted(set(heads)), self.heads
        if not kept or not 0 <= kept[0] <= kept[-1] < before:
            raise ValueError(f"heads must be one or more from 0 to {before - 1}, got {list(heads)}")
        keep_output_heads(self.query, kept, self.head_dim)
        self.key, self.kv_heads = keep_key_heads(self.key, before, kept, self.head_dim)
        self.value, _ = keep_key_heads(self.value, before, kept, self.value_dim)
        keep_input_heads(self.out, kept, self.value_dim)
        self.heads = len(kept)
        known = torch.arange(before, device=self.query.weight.device) if self.kept_heads is None else self.kept_heads
        self.register_buffer("kept_heads", known[kept])

    def fit_heads(self, values: Mapping[str, Tensor], prefix: str) -> None:
        """Keep the heads that saved weights have, if this layer has all heads."""
        kept = values.get(f"{prefix}kept_heads")
        if kept is not None and self.kept_heads is None:
            self.keep_heads(kept.tolist())

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        self.fit_heads(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def new_cache(self) -> KVCache:
        """Return an empty cache; under a windowed mask it forgets the keys that no later query can see."""
        reach = look_back(fill(self.mask))
        if reach is None or any(reads_key_positions(fill(term)) for term in (self.score, self.bias, self.normalize)):
            return KVCache()
        return KVCache(window=reach + 1)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> Attention:
        """Return the same attention with the same weights, batch first whatever `module.batch_first` is.

        `add_bias_kv` becomes a slot and `add_zero_attn` a `SinkSoftmax(0.0)`, which are the same mechanisms.
        """
        from .torch_interop import attention_from_torch

        return attention_from_torch(module, cls)

    def to_torch(self, *, batch_first: bool = True) -> nn.MultiheadAttention:
        """Return the `nn.MultiheadAttention` of the same weights; raise if it cannot express this layer.

        Pass arguments that PyTorch takes per call, such as a causal mask, to its calls again.
        """
        from .torch_interop import attention_to_torch

        return attention_to_torch(self, batch_first=batch_first)

    def extra_repr(self) -> str:
        shown = [f"{self.dim}, heads={self.heads}"]
        shown += [f"kv_heads={self.kv_heads}"] if self.kv_heads != self.heads else []
        terms = {name: getattr(self, name) for name in SLOTS}
        return ", ".join(shown + [f"{name}={term!r}" for name, term in terms.items() if isinstance(term, Term)])

    def _queries_and_keys(
        self,
        x: Tensor,
        context: Tensor | KeyValues | None,
        positions: Tensor | None,
        cache: KVCache | PackedPrompts | None,
    ) -> tuple[Tensor, Tensor]:
        """Return queries (b h i d) and the new keys (b g j d): projected, normalized, rotated."""
        _check_tokens("x", x, self.query.in_features)
        if x.is_nested and (self.rotary is not None or self.slots is not None or cache is not None):
            raise ValueError(
                "nested tensors go through layers without rotary=, slots= and caches; write x.to_padded_tensor(0.0) "
                "and keep=lengths"
            )
        if cache is not None and context is not None:
            raise ValueError(
                "a cache is for self-attention; for another sequence write layer(x, layer.remember(context))"
            )
        q = _split(project(self.query, x), self.heads)
        q = q if self.query_norm is None else self.query_norm(q)
        if isinstance(context, KeyValues):
            return q, context.k
        k = self._keys(x if context is None else context)
        if self.rotary is None:
            return q, k
        if positions is None and cache is not None:
            positions = cache.positions(k.shape[2], k.device)
        positions = _key_positions(positions, x.shape[1], k)
        angles = self.rotary.angles(k, positions)
        q = self.rotary.rotate(q, *(part[..., k.shape[2] - x.shape[1] :, :] for part in angles))
        return q, self.rotary.rotate(k, *angles)

    def _keys(self, context: Tensor) -> Tensor:
        _check_tokens("context", context, self.key.in_features)
        k = _split(project(self.key, context), self.kv_heads)
        return k if self.key_norm is None else self.key_norm(k)

    def _values(self, x: Tensor, context: Tensor | KeyValues | None, values: Tensor | None) -> Tensor:
        if isinstance(context, KeyValues):
            if values is not None:
                raise ValueError(
                    "values come with the remembered context; pass them to layer.remember(context, values)"
                )
            return context.v
        values = values if values is not None else context if context is not None else x
        _check_tokens("values", values, self.value.in_features)
        return _split(project(self.value, values), self.kv_heads)

    def _terms(
        self,
        mask: Mask | None,
        keep: Tensor | None,
        i: int,
        new: int,
        cache: KVCache | PackedPrompts | None,
    ) -> dict[str, Any]:
        """Return the terms for i queries and `new` keys behind those of the cache, and the offset of the queries."""
        past, before = (0, 0) if cache is None else (cache.kept, cache.length)
        mask, bias, j = _both(fill(self.mask), mask), fill(self.bias), past + new if past else new
        score, normalize = fill(self.score), fill(self.normalize)
        hidden = None
        if cache is not None and cache.is_relative:
            _check_cache(cache, mask, score, bias, normalize)
            hidden = cache.padding(new)
        if keep is not None:
            if hidden is not None:
                raise ValueError(f"{cache!r} knows the length of each row; pass no keep with it")
            hidden = padding_of_last_keys(keep, j, before + new)
        mask = mask if hidden is None else _both(mask, hidden)
        terms = {"score": score, "mask": mask, "bias": bias, "normalize": normalize}
        if self.slots is None:
            return terms
        # Memory slots come after the tokens: the last query is aligned with the last token, not with the last key.
        mask, bias = self.slots.extend_mask(mask, j), extend_bias(bias, j, self.slots.slots)
        normalize = extend_taper(normalize, j, self.slots.slots)
        return {**terms, "mask": mask, "bias": bias, "normalize": normalize, "offset": j - i}


def check_prunable(layer: Attention) -> None:
    """Raise unless all heads of a layer share its terms, so that heads may be removed."""
    for name in ("score", "bias", "normalize", "slots"):
        if (term := getattr(layer, name)) is not None:
            raise ValueError(
                f"heads cannot be removed from a layer with {name}={term!r}, which may have numbers for each head; "
                "switch them off with regard.lens.edit(model, {layer: Scale(heads, 0)})"
            )
    for mask in (*conjuncts(layer.mask),) if isinstance(layer.mask, Mask) else (layer.mask,):
        is_per_head = isinstance(mask, Window) and any(
            isinstance(x, (tuple, Tensor)) for x in (mask.width, mask.before, mask.after)
        )
        if mask is not None and (is_per_head or not isinstance(mask, SHARED_MASKS)):
            raise ValueError(
                f"heads cannot be removed from a layer with mask={layer.mask!r}, which may differ between heads; "
                "switch them off with regard.lens.edit(model, {layer: Scale(heads, 0)})"
            )


def _both(layer: Mask | None, call: Mask | None) -> Mask | None:
    """Return the mask of what both the layer and the call allow."""
    if call is not None and not isinstance(call, Mask):
        raise TypeError(f"mask must be a Mask term, got {type(call).__name__}; write mask=Dense(x), True = may attend")
    return layer if call is None else call if layer is None else layer & call


def _check_cache(cache: KVCache | PackedPrompts, mask: Mask | None, *others: Term | None) -> None:
    """Raise unless the terms depend on distances alone: the cache no longer knows the positions of its entries."""
    if cache.window is not None:
        reach = look_back(mask)
        if reach is None or reach >= cache.window:
            raise ValueError(
                f"{cache!r} forgets keys that mask={mask!r} may still see; pass cache=KVCache(), which forgets none"
            )
        why, step = "forgets keys, so positions of the others are lost", "pass cache=KVCache(), which forgets none"
    else:
        why, step = "has rows of different lengths, which begin at different entries", "decode rows one at a time"
    reading = [term for term in others if reads_key_positions(term)]
    if mask is not None and not depends_on_distance_only(mask):
        reading.append(mask)
    if reading:
        raise ValueError(f"{cache!r} {why}, but {reading[0]!r} depends on them; {step}")


def _padding_of(keep: Tensor | None, context: Tensor | KeyValues | None) -> Tensor | None:
    return context.keep if keep is None and isinstance(context, KeyValues) else keep


def padding_of_last_keys(keep: Tensor, j: int, seen: int) -> Padding:
    """Return the padding of the last j of the `seen` keys so far, from lengths or keep of all of them."""
    check_tensor("keep", keep, hint="torch.tensor([3, 5])")
    if keep.dtype != torch.bool:
        if seen == j or keep.is_floating_point():  # `Padding` raises for floating-point lengths
            return Padding(keep)
        return Padding((keep.long() - (seen - j)).clamp(min=0))
    if keep.ndim != 2 or keep.shape[1] != seen:
        raise ValueError(
            f"keep must be lengths (b,) or keep (b, {seen}) over all keys, with those of the cache, "
            f"got shape {tuple(keep.shape)}"
        )
    return Padding(keep[:, seen - j :])


def _key_positions(positions: Tensor | None, i: int, k: Tensor) -> Tensor:
    j = k.shape[2]
    if j < i:
        raise ValueError(
            f"with rotary= queries take the last key positions, got {i} queries and {j} keys; pass more keys"
        )
    if positions is None:
        return torch.arange(j, device=k.device)
    if positions.shape[-1] != j:
        raise ValueError(
            f"positions must hold one position for each of the {j} new keys, got shape {tuple(positions.shape)}"
        )
    return positions


def _split(x: Tensor, heads: int) -> Tensor:
    """b n (h d) -> b h n d"""
    b, n, width = x.shape
    return x.view(b, n, heads, width // heads).transpose(1, 2)


def _check_tokens(name: str, x: Tensor, width: int) -> None:
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[-1] != width:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must have dims b n {width}, batch first, got {got}")


def _even_split(dim: int, heads: int) -> int:
    if dim % heads:
        raise ValueError(
            f"dim must be a multiple of heads, got dim={dim} and heads={heads}; pass heads={_divisors(dim)}"
        )
    return dim // heads


def _check_kv_heads(heads: int, kv_heads: int) -> None:
    check_int("kv_heads", kv_heads, least=1)
    if heads % kv_heads:
        raise ValueError(
            f"heads must be a multiple of kv_heads, got heads={heads} and kv_heads={kv_heads}; "
            f"pass kv_heads={_divisors(heads)}"
        )


def _divisors(n: int) -> str:
    *smaller, last = (str(m) for m in range(1, n + 1) if n % m == 0)
    return f"{', '.join(smaller)} or {last}" if smaller else last
