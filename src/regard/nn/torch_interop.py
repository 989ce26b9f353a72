"""nn.MultiheadAttention and our Attention: which parameter is which, and what the first cannot express."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..ops.terms.normalizers import SinkSoftmax

if TYPE_CHECKING:
    from .attention import Attention


def pairs(layer: Attention, module: nn.MultiheadAttention) -> list[tuple[Tensor, Tensor]]:
    """Our parameters and theirs, as views of the same shape."""
    ours = (layer.query, layer.key, layer.value)
    if module.in_proj_weight is None:
        theirs: tuple[Tensor, ...] = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    else:
        theirs = module.in_proj_weight.chunk(3)
    found: list[tuple[Tensor, Tensor]] = [(linear.weight, x) for linear, x in zip(ours, theirs, strict=True)]
    found.append((layer.out.weight, module.out_proj.weight))
    if module.in_proj_bias is not None:
        found += [(linear.bias, x) for linear, x in zip(ours, module.in_proj_bias.chunk(3), strict=True)]
        found.append((layer.out.bias, module.out_proj.bias))
    if layer.slots is not None and module.bias_k is not None and module.bias_v is not None:
        shape = layer.slots.keys.shape
        found += [(layer.slots.keys, module.bias_k.view(shape)), (layer.slots.values, module.bias_v.view(shape))]
    return found


def objections(layer: Attention) -> list[str]:
    """What this layer has and nn.MultiheadAttention has not."""
    biased = [linear.bias is not None for linear in (layer.query, layer.key, layer.value, layer.out)]
    facts = {
        "kv_heads below heads": layer.kv_heads != layer.heads,
        "head_dim other than dim / heads": layer.heads * layer.head_dim != layer.dim,
        "value_dim other than head_dim": layer.value_dim != layer.head_dim,
        "bias on some projections only": any(biased) != all(biased),
        "rotary positions": layer.rotary is not None,
        "norms of queries and keys": layer.query_norm is not None,
        "more than one slot": layer.slots is not None and layer.slots.slots > 1,
        f"score={layer.score!r}": layer.score is not None,
        f"mask={layer.mask!r}": layer.mask is not None,
        f"bias={layer.bias!r}": layer.bias is not None,
        f"normalize={layer.normalize!r}": layer.normalize not in (None, SinkSoftmax(0.0)),
    }
    return [name for name, true in facts.items() if true]
