"""Convert between `nn.MultiheadAttention` and `Attention`, with the same weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.terms.normalizers import SinkSoftmax
from .attention import Attention


def attention_from_torch(module: nn.MultiheadAttention, cls: type[Attention] = Attention) -> Attention:
    """Return the `Attention`, of class `cls`, with the weights of an `nn.MultiheadAttention`, batch first."""
    if not isinstance(module, nn.MultiheadAttention):
        raise TypeError(f"module must be an nn.MultiheadAttention, got {type(module).__name__}")
    layer = cls(
        module.embed_dim,
        module.num_heads,
        key_width=module.kdim,
        value_width=module.vdim,
        biased="" if module.in_proj_bias is None else "qkvo",
        normalize=SinkSoftmax(0.0) if module.add_zero_attn else None,
        slots=0 if module.bias_k is None else 1,
        dropout=module.dropout,
    )
    layer = layer.to(module.out_proj.weight).train(module.training)
    with torch.enable_grad():  # without gradients a slice of a parameter says requires_grad=False
        pairs = parameter_pairs(layer, module)
    with torch.no_grad():
        for ours, theirs in pairs:
            ours.copy_(theirs).requires_grad_(theirs.requires_grad)
    return layer


def attention_to_torch(layer: Attention, *, batch_first: bool) -> nn.MultiheadAttention:
    """Return the `nn.MultiheadAttention` with the weights of an `Attention`; raise if it cannot express the layer."""
    if missing := objections(layer):
        raise ValueError(f"nn.MultiheadAttention has no {', '.join(missing)}; keep this layer as it is")
    module = nn.MultiheadAttention(
        layer.dim,
        layer.heads,
        dropout=layer.core.dropout,
        bias=layer.out.bias is not None,
        add_bias_kv=layer.slots is not None,
        add_zero_attn=layer.normalize == SinkSoftmax(0.0),
        kdim=layer.key.in_features,
        vdim=layer.value.in_features,
        batch_first=batch_first,
        device=layer.out.weight.device,
        dtype=layer.out.weight.dtype,
    ).train(layer.training)
    with torch.no_grad():
        for ours, theirs in parameter_pairs(layer, module):
            theirs.copy_(ours)
    return module.requires_grad_(any(x.requires_grad for x in layer.parameters()))


def parameter_pairs(layer: Attention, module: nn.MultiheadAttention) -> list[tuple[Tensor, Tensor]]:
    """Return (parameter of ours, parameter of theirs), as views of the same shape."""
    projections = (layer.query, layer.key, layer.value)
    if module.in_proj_weight is None:
        weights: tuple[Tensor, ...] = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    else:
        weights = module.in_proj_weight.chunk(3)
    pairs: list[tuple[Tensor, Tensor]] = [(linear.weight, x) for linear, x in zip(projections, weights, strict=True)]
    pairs.append((layer.out.weight, module.out_proj.weight))
    if module.in_proj_bias is not None:
        pairs += [(linear.bias, x) for linear, x in zip(projections, module.in_proj_bias.chunk(3), strict=True)]
        pairs.append((layer.out.bias, module.out_proj.bias))
    if layer.slots is not None and module.bias_k is not None and module.bias_v is not None:
        shape = layer.slots.keys.shape
        pairs += [(layer.slots.keys, module.bias_k.view(shape)), (layer.slots.values, module.bias_v.view(shape))]
    return pairs


def objections(layer: Attention) -> list[str]:
    """Return the features of this layer that `nn.MultiheadAttention` lacks."""
    biased = [linear.bias is not None for linear in (layer.query, layer.key, layer.value, layer.out)]
    features = {
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
    return [name for name, is_present in features.items() if is_present]
