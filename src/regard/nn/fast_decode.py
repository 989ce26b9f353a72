"""Plain steps: blocks as functions of one token a row, without the modules around the arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from operator import attrgetter, contains, is_, itemgetter

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from ..ops.operator import attend
from ..ops.terms.masks import Causal, Window
from ..ops.terms.masks.mask_algebra import Mask, conjuncts
from .attention import Attention
from .blocks import DecoderBlock, EncoderBlock
from .cache import KeyValues, KVCache
from .core import Core
from .feedforward import FeedForward, GatedFeedForward
from .linear import Linear, is_ordinary, product
from .norms import PostNorm, PreNorm

Map = Callable[[Tensor], Tensor]
Step = Callable[..., Tensor]
TRAINING, VERSION = itemgetter("training"), attrgetter("_version")
GLOBAL_HOOKS = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks


class Plain:
    """The blocks of a decoder as functions of one token a row, which compute what the modules compute.

    >>> block = EncoderBlock(Attention(64, heads=8, mask=Causal()), FeedForward(64, 256)).eval()
    >>> x, caches = torch.randn(3, 64), (KVCache(), KVCache())
    >>> with torch.no_grad():
    ...     (step,) = Plain([block]).steps()
    ...     torch.allclose(step(x, caches[0]), block(x[:, None], cache=caches[1])[:, 0], atol=1e-5)
    True

    Products of a few rows are short, and what surrounds them, modules called, terms, checks, reshapes, takes longer
    than they do. Here all that is the same at every step is settled once, and queries, keys and values are one product,
    which takes the memory of their weights once more. Caches are those of `Attention.new_cache`.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = blocks
        self._settled: Settled | None = None

    def steps(self) -> tuple[Step, ...] | None:
        """`step(x, cache, mask=, positions=)` for an `EncoderBlock`, `step(x, cache, source)` for a `DecoderBlock`.

        None where modules have to be called: with gradients, dropout or autocast, where one has a hook or a `forward`
        of its own, so that whoever watches sees them all, and where an attention is more than softmax over all its
        cache holds.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        if self._settled is None or not self._settled.holds():
            self._settled = Settled(self._blocks)
        return None if self._settled.is_watched() else self._settled.steps


class Settled:
    """The steps of some blocks, as these were when it was made, and what is to be seen to at each."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = blocks
        modules = [module for block in blocks for module in block.modules()]
        self._attributes = list(map(vars, modules))
        self._held = [x.values() for module in modules for x in (module._parameters, module._modules) if x]
        self._parts = list(self._find_parts())
        self._device = next((x.device.type for block in blocks for x in block.parameters()), "cpu")
        self._copied: list[Tensor] = []
        try:
            self.steps: tuple[Step, ...] | None = tuple(self._block(block) for block in blocks)
        except NotPlain:
            self.steps = None
        self._versions = list(map(VERSION, self._copied))
        self._handles = -1

    def holds(self) -> bool:
        """Are modules and weights those that were there, and the weights that were copied as they were?"""
        return all(map(is_, self._find_parts(), self._parts)) and list(map(VERSION, self._copied)) == self._versions

    def is_watched(self) -> bool:
        """Do modules have to be called: for hooks, a `forward` put in place of theirs, dropout or autocast?"""
        if self._handles != RemovableHandle.next_id:  # a hook has been added somewhere since
            if any(map(has_hooks, self._blocks)) or any(GLOBAL_HOOKS):
                return True
            self._handles = RemovableHandle.next_id
        if any(map(TRAINING, self._attributes)) or any(map(contains, self._attributes, repeat("forward"))):
            return True
        return torch.is_autocast_enabled(self._device)

    def _find_parts(self) -> Iterator[object]:
        """All that the steps were built from, as it is now, and a mark behind the last, so that none is missed."""
        return chain(self._blocks, chain.from_iterable(self._held), (...,))

    def _block(self, block: nn.Module) -> Step:
        if type(block) is EncoderBlock:
            return self._encoder(block)
        if type(block) is DecoderBlock:
            return self._decoder(block)
        raise NotPlain

    def _encoder(self, block: EncoderBlock) -> Step:
        around, again = residual(block.around_attention), residual(block.around_feedforward)
        attention, inside = self._self_attention(block.attention), feedforward(block.feedforward)

        def step(
            x: Float[Tensor, "rows dim"],
            cache: KVCache,
            *,
            mask: Mask | None = None,
            positions: Int[Tensor, "*rows 1"] | None = None,
        ) -> Float[Tensor, "rows dim"]:
            return again(around(x, lambda x: attention(x, cache, mask, positions)), inside)

        return step

    def _decoder(self, block: DecoderBlock) -> Step:
        around, between = residual(block.around_attention), residual(block.around_cross)
        again, inside = residual(block.around_feedforward), feedforward(block.feedforward)
        attention, cross = self._self_attention(block.attention), cross_attention(block.cross)

        def step(x: Float[Tensor, "rows dim"], cache: KVCache, source: KeyValues) -> Float[Tensor, "rows dim"]:
            x = around(x, lambda x: attention(x, cache, None, None))
            return again(between(x, lambda x: cross(x, source)), inside)

        return step

    def _self_attention(self, layer: Attention) -> Step:
        """Attention of a token to all that its cache holds, itself included."""
        check_supported(layer)
        if not isinstance(layer.mask, Mask) or not all(isinstance(x, (Causal, Window)) for x in conjuncts(layer.mask)):
            raise NotPlain  # the last token need not see all that its cache keeps
        query, out, kernel = self._query_key_value(layer), linear(layer.out), kernel_of(layer)
        query_norm, key_norm, rotary = layer.query_norm, layer.key_norm, layer.rotary
        changed = query_norm is not None or rotary is not None
        heads, groups, d = layer.heads, layer.kv_heads, layer.head_dim
        widths = (heads * d, 2 * groups * d)

        def attention(x: Tensor, cache: KVCache, mask: Mask | None, positions: Tensor | None) -> Tensor:
            rows = x.shape[0]
            q, both = query(x).split_with_sizes(widths, 1)
            q, both = q.view(rows, heads, 1, d), both.view(rows, groups, 1, 2 * d)
            if changed:
                k, v = both.split_with_sizes((d, d), 3)
                if query_norm is not None and key_norm is not None:
                    q, k = query_norm(q), key_norm(k)
                if rotary is not None:
                    if positions is None:
                        positions = torch.arange(cache.length, cache.length + 1, device=x.device)
                    turns = rotary.turns(k, positions)
                    q, k = rotary.turned(q, *turns), rotary.turned(k, *turns)
                k, v = cache.append(k, v)
            else:
                k, v = cache.extend(both, d)
            return out((kernel(q, k, v) if mask is None else attend(q, k, v, mask=mask)).reshape(rows, heads * d))

        return attention

    def _query_key_value(self, layer: Attention) -> Map:
        """Queries, and behind them the keys and values of each head side by side, as one product."""
        parts, d = (layer.query, layer.key, layer.value), layer.head_dim
        self._copied += [x for part in parts for x in part.parameters()]

        def joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with torch.inference_mode(False):
                heads = zip(k.detach().split(d), v.detach().split(d), strict=True)
                return torch.cat([q.detach(), *(x for head in heads for x in head)])

        weight, bias = joined(*(part.weight for part in parts)), None
        if any(part.bias is not None for part in parts):
            none = (part.weight.new_zeros(part.out_features) for part in parts)
            bias = joined(*(x if part.bias is None else part.bias for part, x in zip(parts, none, strict=True)))
        return lambda x: product()(x, weight, bias)


def has_hooks(layer: nn.Module) -> bool:
    """Is somebody told, or called instead, when this layer or one within it is called?"""
    return any(one._forward_hooks or one._forward_pre_hooks or "forward" in vars(one) for one in layer.modules())


class NotPlain(Exception):
    """A block has something in it that a plain step knows nothing of."""


def check_supported(layer: nn.Module) -> None:
    """Raise unless it is scaled dot products and softmax, over tokens alone."""
    if not (
        type(layer) is Attention
        and type(layer.core) is Core
        and layer.head_dim == layer.value_dim
        and layer.slots is layer.score is layer.bias is layer.normalize is None
        and all(type(x) in (Linear, nn.Linear) for x in (layer.query, layer.key, layer.value))
        and all(map(is_ordinary, layer.parameters()))
    ):
        raise NotPlain


def cross_attention(layer: Attention) -> Step:
    """Attention of a token to a source, several rows side by side to each."""
    check_supported(layer)
    if layer.mask is not None or layer.rotary is not None:
        raise NotPlain
    query, out, kernel = linear(layer.query), linear(layer.out), kernel_of(layer)
    heads, d, norm = layer.heads, layer.head_dim, layer.query_norm

    def attention(x: Tensor, source: KeyValues) -> Tensor:
        k, v, mask, rows = source.k, source.v, source.mask, x.shape[0]
        q = query(x)
        alone = k.shape[0] == rows
        q = q.view(rows, heads, 1, d) if alone else q.view(k.shape[0], -1, heads, d).transpose(1, 2)
        q = q if norm is None else norm(q)
        fetched = kernel(q, k, v) if mask is None else attend(q, k, v, mask=mask)
        return out((fetched if alone else fetched.transpose(1, 2)).reshape(rows, heads * d))

    return attention


def kernel_of(layer: Attention) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """What `attend` comes to without terms, nearer at hand where it is known."""
    known = layer.query.weight.device.type == "cpu" and layer.heads == layer.kv_heads
    return F.scaled_dot_product_attention if known else attend


def residual(module: nn.Module) -> Callable[[Tensor, Map], Tensor]:
    """`PreNorm` or `PostNorm` in evaluation."""
    if type(module) is PreNorm:
        before = norm(module.norm)
        return lambda x, f: x + f(before(x))
    if type(module) is PostNorm:
        after = norm(module.norm)
        return lambda x, f: after(x + f(x))
    raise NotPlain


def norm(module: nn.Module) -> Map:
    """A norm, bare if it is a `LayerNorm`."""
    if type(module) is not nn.LayerNorm:
        return module
    shape, weight, bias, eps = module.normalized_shape, module.weight, module.bias, module.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)


def feedforward(module: nn.Module) -> Map:
    """A feed-forward, bare if it is one of ours."""
    if type(module) is FeedForward:
        up, activation, down = linear(module.up), module.activation, linear(module.down)
        return lambda x: down(activation(up(x)))
    if type(module) is GatedFeedForward:
        gate, up, activation, down = linear(module.gate), linear(module.up), module.activation, linear(module.down)
        return lambda x: down(activation(gate(x)) * up(x))
    return lambda x: module(x[:, None])[:, 0]


def linear(module: nn.Module) -> Map:
    """A product, bare if there is nothing else to it."""
    if not isinstance(module, nn.Linear) or type(module) not in (Linear, nn.Linear):
        return module
    weight, bias = module.weight, module.bias
    return lambda x: product()(x, weight, bias)
