"""Fast decoding: the blocks of a decoder as functions of one token per row, without the overhead of modules.

A decoding step multiplies few rows by each matrix. Such products are short, and what surrounds them (module calls,
terms, checks, reshapes) takes longer than they do. `FastSteps` decides once all that is the same at every step, and
gives functions with the signature and the result of the blocks. A model runs the same forward over either:

    for block, cache in zip(fast.steps() or blocks, caches):
        x = block(x, cache=cache)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from operator import attrgetter, contains, is_, itemgetter

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from .. import torch_internals
from ..ops.backends.torch_kernels import run_fused
from ..ops.operator import attend
from ..ops.terms.masks import Causal, Window
from ..ops.terms.masks.mask_algebra import Mask, conjuncts
from .attention import Attention
from .blocks import DecoderBlock, EncoderBlock
from .cache import KeyValues, KVCache
from .core import Core
from .feedforward import FeedForward, GatedFeedForward
from .linear import current_product
from .norms import PostNorm, PreNorm
from .prepacked import PrepackedWeights, is_plain_tensor
from .row_starts import RowStarts
from .static_cache import StaticCache, StaticKeyValues

HIDDEN_PER_CALL = 2**15  # numbers of hidden keys that take about as long as one more call of the kernel
Map = Callable[[Tensor], Tensor]
Step = Callable[..., Tensor]
TRAINING, VERSION = itemgetter("training"), attrgetter("_version")
GLOBAL_HOOKS = torch_internals.global_module_hooks()


class FastSteps:
    """The blocks of a decoder as functions of one token per row, with the results of the modules.

    >>> block = EncoderBlock(Attention(64, heads=8, mask=Causal()), FeedForward(64, 256)).eval()
    >>> x, caches = torch.randn(3, 1, 64), (KVCache(), KVCache())
    >>> with torch.no_grad():
    ...     (step,) = FastSteps([block]).steps()
    ...     torch.allclose(step(x, cache=caches[0]), block(x, cache=caches[1]), atol=1e-5)
    True

    Queries, keys and values are one product, for which their weights are copied once. Caches are those of
    `Attention.new_cache`. `prepacked` are the weights in the layout that is fastest for few rows.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.prepacked = PrepackedWeights()
        self._blocks = blocks
        self._compiled: CompiledSteps | None = None

    def steps(self) -> tuple[Step, ...] | None:
        """Return a function for each block, `step(x, cache=)` or `step(x, source, cache=)`; None if modules must run.

        Modules must run with gradients, dropout or autocast; if a hook or a replaced `forward` has to see the call; and
        if an attention is more than softmax over all that its cache holds.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        if self._compiled is None or not self._compiled.is_current():
            self._compiled = CompiledSteps(self._blocks)
        return None if self._compiled.needs_modules() else self._compiled.steps

    def refresh(self) -> None:
        """Copy weights again where steps have copies of them, for steps that serve several decodings."""
        if self._compiled is not None:
            self._compiled.refresh()


class CompiledSteps:
    """The steps of blocks as these were when it was built, and what has to be checked before each use."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = blocks
        modules = [module for block in blocks for module in block.modules()]
        self._attributes = list(map(vars, modules))
        self._members = [x.values() for module in modules for x in (module._parameters, module._modules) if x]
        self._parts = list(self._find_parts())
        self._device = next((x.device.type for block in blocks for x in block.parameters()), "cpu")
        self._copied: list[Tensor] = []
        self._refreshes: list[Callable[[], None]] = []
        try:
            self.steps: tuple[Step, ...] | None = tuple(self._compile_block(block) for block in blocks)
        except Unsupported:
            self.steps = None
        self._versions = list(map(VERSION, self._copied))
        self._hook_id = -1

    def refresh(self) -> None:
        """Copy the weights again to where they were copied: a change through `weight.data` has no version."""
        for refresh in self._refreshes:
            refresh()

    def is_current(self) -> bool:
        """Return whether modules and parameters are the same objects as before, and copied weights are unchanged."""
        return all(map(is_, self._find_parts(), self._parts)) and list(map(VERSION, self._copied)) == self._versions

    def needs_modules(self) -> bool:
        """Return whether modules must run: for hooks, a replaced `forward`, dropout or autocast."""
        if self._hook_id != torch_internals.next_hook_id():  # a hook was added to some module since the last check
            if any(map(has_hooks, self._blocks)) or any(GLOBAL_HOOKS):
                return True
            self._hook_id = torch_internals.next_hook_id()
        if any(map(TRAINING, self._attributes)) or any(map(contains, self._attributes, repeat("forward"))):
            return True
        return torch.is_autocast_enabled(self._device)

    def _find_parts(self) -> Iterator[object]:
        """Yield everything the steps are built from, as it is now; the mark at the end reveals a missing part."""
        return chain(self._blocks, chain.from_iterable(self._members), (...,))

    def _compile_block(self, block: nn.Module) -> Step:
        if type(block) is EncoderBlock:
            return self._compile_encoder_block(block)
        if type(block) is DecoderBlock:
            return self._compile_decoder_block(block)
        raise Unsupported

    def _compile_encoder_block(self, block: EncoderBlock) -> Step:
        around, again = residual(block.around_attention), residual(block.around_feedforward)
        attention, inside = self._compile_self_attention(block.attention), feedforward(block.feedforward)

        def step(
            x: Float[Tensor, "rows 1 dim"],
            *,
            positions: Int[Tensor, "*rows 1"] | None = None,
            cache: KVCache,
        ) -> Float[Tensor, "rows 1 dim"]:
            x = x[:, 0]  # rows dim
            x = again(around(x, lambda x: attention(x, cache, positions)), inside)
            return x[:, None]

        return step

    def _compile_decoder_block(self, block: DecoderBlock) -> Step:
        around, between = residual(block.around_attention), residual(block.around_cross)
        again, inside = residual(block.around_feedforward), feedforward(block.feedforward)
        attention, cross = self._compile_self_attention(block.attention), cross_attention(block.cross)

        def step(x: Float[Tensor, "rows 1 dim"], source: KeyValues, *, cache: KVCache) -> Float[Tensor, "rows 1 dim"]:
            x = x[:, 0]  # rows dim
            x = around(x, lambda x: attention(x, cache, None))
            return again(between(x, lambda x: cross(x, source)), inside)[:, None]

        return step

    def _compile_self_attention(self, layer: Attention) -> Step:
        """Return attention of one token per row to all that its cache holds, the token itself included."""
        check_supported(layer)
        if not isinstance(layer.mask, Mask) or not all(isinstance(x, (Causal, Window)) for x in conjuncts(layer.mask)):
            raise Unsupported  # another mask may hide keys that the cache keeps
        query, out, kernel = self._merge_projections(layer), linear(layer.out), kernel_for(layer)
        query_norm, key_norm, rotary = layer.query_norm, layer.key_norm, layer.rotary
        is_changed = query_norm is not None or rotary is not None
        heads, groups, d = layer.heads, layer.kv_heads, layer.head_dim
        widths = (heads * d, 2 * groups * d)

        def attention(x: Tensor, cache: KVCache | StaticCache, positions: Tensor | None) -> Tensor:
            b, starts = x.shape[0], cache.starts
            first = 0 if isinstance(cache, StaticCache) else cache.length - cache.kept
            q, both = query(x).split_with_sizes(widths, 1)  # b (h d), b (g 2 d)
            q, both = q.view(b, heads, 1, d), both.view(b, groups, 1, 2 * d)  # b h i d, b g j 2d
            if is_changed:
                k, v = both.split_with_sizes((d, d), 3)
                if query_norm is not None and key_norm is not None:
                    q, k = query_norm(q), key_norm(k)
                if rotary is not None:
                    if positions is None:
                        positions = cache.positions(1, x.device)
                    angles = rotary.angles(k, positions)
                    q, k = rotary.rotate(q, *angles), rotary.rotate(k, *angles)
                k, v = cache.append(k, v)
            else:
                k, v = cache.extend(both, d)
            if isinstance(cache, StaticCache):
                y = cache.attend(q, k, v)
            else:
                y = kernel(q, k, v) if starts is None else attend_from(starts, first, q, k, v)
            return out(y.reshape(b, heads * d))

        return attention

    def _merge_projections(self, layer: Attention) -> Map:
        """Return one product for the queries of all heads, then the keys and values of each head side by side."""
        projections, d = (layer.query, layer.key, layer.value), layer.head_dim
        self._copied += [x for projection in projections for x in projection.parameters()]

        def merge(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with torch.inference_mode(False):
                heads = zip(k.detach().split(d), v.detach().split(d), strict=True)
                return torch.cat([q.detach(), *(x for head in heads for x in head)])

        def merge_all() -> tuple[Tensor, Tensor | None]:
            weight = merge(*(projection.weight for projection in projections))
            if all(projection.bias is None for projection in projections):
                return weight, None
            zeros = (projection.weight.new_zeros(projection.out_features) for projection in projections)
            return weight, merge(*(x if y.bias is None else y.bias for y, x in zip(projections, zeros, strict=True)))

        def refresh() -> None:
            for old, new in zip((weight, bias), merge_all(), strict=True):
                if old is not None and new is not None:
                    old.copy_(new)

        weight, bias = merge_all()
        self._refreshes.append(refresh)
        return lambda x: current_product()(x, weight, bias)


class Unsupported(Exception):
    """A block has a part that a fast step does not implement."""


def has_hooks(layer: nn.Module) -> bool:
    """Return whether the module or a submodule has forward hooks or a replaced `forward`."""
    return any(part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part) for part in layer.modules())


def check_supported(layer: nn.Module) -> None:
    """Raise `Unsupported` unless the layer is scaled dot products and softmax over tokens alone."""
    if not (
        type(layer) is Attention
        and type(layer.core) is Core
        and layer.head_dim == layer.value_dim
        and layer.slots is layer.score is layer.bias is layer.normalize is None
        and all(type(x) is nn.Linear for x in (layer.query, layer.key, layer.value))
        and all(map(is_plain_tensor, layer.parameters()))
    ):
        raise Unsupported


def cross_attention(layer: Attention) -> Step:
    """Return attention of one token per row to a source; consecutive rows may share a batch row of the source."""
    check_supported(layer)
    if layer.mask is not None or layer.rotary is not None:
        raise Unsupported
    query, out, kernel = linear(layer.query), linear(layer.out), kernel_for(layer)
    heads, d, norm = layer.heads, layer.head_dim, layer.query_norm

    def attention(x: Tensor, source: KeyValues) -> Tensor:
        k, v, mask, rows = source.k, source.v, source.mask, x.shape[0]
        q = query(x)
        is_shared = k.shape[0] != rows
        q = q.view(k.shape[0], -1, heads, d).transpose(1, 2) if is_shared else q.view(rows, heads, 1, d)  # b h i d
        q = q if norm is None else norm(q)
        if isinstance(source, StaticKeyValues):
            y = source.attend(q)
        else:
            y = kernel(q, k, v) if mask is None else attend(q, k, v, mask=mask)
        return out((y.transpose(1, 2) if is_shared else y).reshape(rows, heads * d))

    return attention


def attend_from(
    starts: RowStarts, first: int, q: Float[Tensor, "b h 1 d"], k: Float[Tensor, "b g j d"], v: Float[Tensor, "b g j d"]
) -> Float[Tensor, "b h 1 d"]:
    """Return attention of one token per row to the keys of a cache whose rows begin at `starts`, from `first` on.

    What lies before a row is 0 and cannot leak, so on the CPU the kernel gets the mask without further checks; or, if
    much lies there, it runs once for each row, without a mask.
    """
    (b, g, j, d), scale = k.shape, q.shape[-1] ** -0.5
    if not q.is_cpu:
        return attend(q, k, v, mask=starts.padding(first, j))
    begun = [max(0, n - first) for n in starts.numbers]
    if sum(begun) * g * d > HIDDEN_PER_CALL * b:
        rows = [
            run_fused(
                q[n : n + 1],
                k[n : n + 1, :, m:],
                v[n : n + 1, :, m:],
                scale=scale,
                added=None,
                causal=False,
                dropout=0.0,
            )[0]
            for n, m in enumerate(begun)
        ]
        return torch.cat(rows)
    added = starts.additive_mask(first, j, q.dtype)
    if q.shape[1] == k.shape[1]:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=added)
    return run_fused(q, k, v, scale=scale, added=added, causal=False, dropout=0.0)[0]


def kernel_for(layer: Attention) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the kernel that `attend` without terms would choose, if that is known, else `attend`."""
    is_known = layer.query.weight.device.type == "cpu" and layer.heads == layer.kv_heads
    return F.scaled_dot_product_attention if is_known else attend


def residual(module: nn.Module) -> Callable[[Tensor, Map], Tensor]:
    """Return `PreNorm` or `PostNorm` in evaluation as a function of (x, sublayer)."""
    if type(module) is PreNorm:
        before = norm(module.norm)
        return lambda x, f: x + f(before(x))
    if type(module) is PostNorm:
        after = norm(module.norm)
        return lambda x, f: after(x + f(x))
    raise Unsupported


def norm(module: nn.Module) -> Map:
    """Return a norm as a function: the bare kernel for a `LayerNorm`, the module otherwise."""
    if type(module) is not nn.LayerNorm:
        return module
    shape, weight, bias, eps = module.normalized_shape, module.weight, module.bias, module.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)


def feedforward(module: nn.Module) -> Map:
    """Return a feed-forward as a function: bare products for the classes of `regard.nn`, the module otherwise."""
    if type(module) is FeedForward:
        up, activation, down = linear(module.up), module.activation, linear(module.down)
        return lambda x: down(activation(up(x)))
    if type(module) is GatedFeedForward:
        gate, up, activation, down = linear(module.gate), linear(module.up), module.activation, linear(module.down)
        return lambda x: down(activation(gate(x)) * up(x))
    return lambda x: module(x[:, None])[:, 0]


def linear(module: nn.Module) -> Map:
    """Return a linear layer as a function: the bare product, or the module if it is of a subclass."""
    if not isinstance(module, nn.Linear) or type(module) is not nn.Linear:
        return module
    weight, bias = module.weight, module.bias
    return lambda x: current_product()(x, weight, bias)
