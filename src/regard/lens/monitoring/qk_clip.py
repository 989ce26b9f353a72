"""qk_clip_: scale down the query and key projections of heads whose logits grew too large (Kimi Team 2025, MuonClip).

With gamma_h = bound / logit_h for heads whose largest logit is above the bound, 1 for others:

    W_q,h <- W_q,h gamma_h / kappa_g      W_k,g <- W_k,g kappa_g      kappa_g = sqrt(min gamma_h of its heads)

so every score of head h is multiplied by gamma_h, and those of heads below the bound stay as they are although their
group shares a key. Without groups both factors are sqrt(gamma_h). Biases are scaled like their rows. A rotation of
queries and keys commutes with a factor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...checks import check_number
from ...nn.attention import Attention
from ...nn.latent import LatentAttention
from ...ops.terms.scores import Cosine, Dot
from ..layer_names import matches, own_name
from .head_history import HeadHistory

NORMS = ("q_norm", "k_norm", "query_norm", "key_norm", "q_layernorm", "k_layernorm", "qk_norm", "query_layernorm")
LATENT = ("kv_a_proj_with_mqa", "kv_b_proj", "q_b_proj", "kv_b")


class HasHistory(Protocol):
    """A monitor."""

    @property
    def history(self) -> HeadHistory: ...


@dataclass(frozen=True, eq=False)
class ProjectionRows:
    """The outputs `first` to `first + count` of a linear map, which are the queries, or the keys, of all heads.

    `axis` is the dim of outputs in `weight`: 0 in `nn.Linear`, 1 in the `Conv1D` of GPT-2.
    """

    weight: Tensor
    bias: Tensor | None
    first: int
    count: int
    axis: int = 0


QueryAndKey = Callable[[nn.Module], tuple[nn.Module | ProjectionRows, nn.Module | ProjectionRows]]


@torch.no_grad()
def qk_clip_(
    model: nn.Module,
    monitor: HasHistory,
    bound: float = 100.0,
    *,
    projections: Mapping[str, QueryAndKey] | None = None,
) -> dict[str, dict[int, float]]:
    """Scale queries and keys of heads whose logit was above `bound` at the last watched step; return those heads.

    >>> from regard.lens import Monitor, qk_clip_
    >>> layer, x = Attention(16, heads=2), torch.randn(1, 9, 16)
    >>> _ = layer.query.weight.data[:8].mul_(400)  # head 0 has large logits
    >>> monitor = Monitor(layer, every=1)
    >>> for _ in range(2):
    ...     with monitor:
    ...         _ = layer(x)
    ...     clipped = qk_clip_(layer, monitor, bound=20.0)
    ...     print({name: list(heads) for name, heads in clipped.items()})
    {'(model)': [0]}
    {}

    Call it after the optimizer step, in every process. The result has the logit of each clipped head by layer. It knows
    the layers of regard, `nn.MultiheadAttention`, and those of transformers with `q_proj` and `k_proj` (Llama, Qwen2,
    Mistral, OPT), `c_attn` (GPT-2) or `query` and `key` (BERT). For another layer pass `projections`, a map from
    patterns of layer names to a function from the layer to its query and key map, two `nn.Linear` or `ProjectionRows`:
    `projections={"blocks.*": lambda layer: (layer.wq, layer.wk)}`.

    A layer that normalizes queries or keys (QK-norm) or compares them by cosine raises: there the size of the
    projections does not change the logits. Latent attention (MLA) raises too: its heads share parts of their keys. A
    bias of the scores is not scaled. The moments of the optimizer stay as they are.
    """
    check_number("bound", bound, above=0)
    history, found = monitor.history, {}
    for layer in history.last_layers:
        logits = history.latest("logit", layer)
        over = (logits > bound).nonzero().flatten().tolist()
        if not over:
            continue
        if not bool(logits.isfinite().all()):
            raise ValueError(
                f"the logits of {layer!r} are not finite at step {history.steps[-1]}; go back to an earlier checkpoint "
                "and clip from there"
            )
        query, key = _query_and_key(model, layer, projections or {})
        _scale_heads(layer, query, key, torch.where(logits > bound, bound / logits, 1.0))
        found[layer] = {head: logits[head].item() for head in over}
    return found


def _query_and_key(
    model: nn.Module, layer: str, projections: Mapping[str, QueryAndKey]
) -> tuple[ProjectionRows, ProjectionRows]:
    """Return the rows of the query map and of the key map of a layer."""
    module = model.get_submodule(own_name(layer))
    for pattern, choose in projections.items():
        if matches(own_name(layer), pattern):
            query, key = choose(module)
            return _rows_of(query), _rows_of(key)
    _check_scales(module, layer)
    if isinstance(module, nn.MultiheadAttention):
        return _rows_of_multihead(module)
    for names in (("query", "key"), ("q_proj", "k_proj")):
        maps: list[Any] = [getattr(module, name, None) for name in names]
        if all(isinstance(each, nn.Module) and isinstance(getattr(each, "weight", None), Tensor) for each in maps):
            return _rows_of(maps[0]), _rows_of(maps[1])
    if type(module).__name__ == "GPT2Attention":
        return _rows_of_gpt2(module)
    raise ValueError(
        f"the query and key projections of {layer!r}, a {type(module).__name__}, are not known; pass "
        f"qk_clip_(..., projections={{{layer!r}: lambda layer: (layer.wq, layer.wk)}})"
    )


def _check_scales(module: nn.Module, layer: str) -> None:
    """Raise if a factor of the projections does not change the logits by itself."""
    kind = type(module).__name__
    normed = any(getattr(module, name, None) is not None for name in NORMS)
    if normed or isinstance(getattr(module, "score", None), Cosine):
        raise ValueError(
            f"{layer!r}, a {kind}, normalizes its queries or keys, so the size of its projections does not change its "
            "logits and a clip is meaningless; bound the weights of the norms, or lower the learning rate"
        )
    if isinstance(module, LatentAttention) or any(hasattr(module, name) for name in LATENT):
        raise ValueError(
            f"{layer!r}, a {kind}, is latent attention (MLA): its heads share a part of their keys, which qk_clip_ "
            "does not support; lower the learning rate, or watch it without a clip"
        )
    if isinstance(module, Attention):
        score = module.score
        if module.slots is not None or not (score is None or (isinstance(score, Dot) and score.cap is None)):
            raise ValueError(
                f"{layer!r} has learned keys or a score other than q . k, which a factor of its projections does not "
                "scale; leave it out by Monitor(model, layers=...)"
            )


def _rows_of(linear: nn.Module | ProjectionRows) -> ProjectionRows:
    if isinstance(linear, ProjectionRows):
        return linear
    weight, bias = linear.weight, getattr(linear, "bias", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise TypeError(f"a projection must be a linear map with a weight of two dims, got {type(linear).__name__}")
    return ProjectionRows(weight, bias if isinstance(bias, Tensor) else None, 0, weight.shape[0])


def _rows_of_multihead(module: nn.MultiheadAttention) -> tuple[ProjectionRows, ProjectionRows]:
    n, bias = module.embed_dim, module.in_proj_bias
    if module.in_proj_weight is not None:
        weight = module.in_proj_weight
        return ProjectionRows(weight, bias, 0, n), ProjectionRows(weight, bias, n, n)
    if bias is not None:
        raise ValueError("nn.MultiheadAttention with kdim or vdim and a bias is not supported; pass projections=")
    return ProjectionRows(module.q_proj_weight, None, 0, n), ProjectionRows(module.k_proj_weight, None, 0, n)


def _rows_of_gpt2(module: Any) -> tuple[ProjectionRows, ProjectionRows]:
    fused = module.c_attn
    if (alone := getattr(module, "q_attn", None)) is not None:  # cross-attention: keys and values are in c_attn
        n = alone.weight.shape[1]
        query = ProjectionRows(alone.weight, alone.bias, 0, n, 1)
        return query, ProjectionRows(fused.weight, fused.bias, 0, n, 1)
    n = fused.weight.shape[1] // 3
    return ProjectionRows(fused.weight, fused.bias, 0, n, 1), ProjectionRows(fused.weight, fused.bias, n, n, 1)


def _scale_heads(layer: str, query: ProjectionRows, key: ProjectionRows, gamma: Tensor) -> None:
    """Multiply the scores of each head by gamma, a factor per head."""
    heads = len(gamma)
    width = query.count // heads
    groups = key.count // max(1, width)
    if query.count != heads * width or key.count != groups * width or not groups or heads % groups:
        raise ValueError(
            f"{layer!r} has {heads} heads, but its queries have {query.count} and its keys {key.count} features; pass "
            "projections= for this layer"
        )
    shared = gamma.view(groups, -1).amin(1).sqrt()
    _scale_rows(query, (gamma.view(groups, -1) / shared[:, None]).flatten().repeat_interleave(width))
    _scale_rows(key, shared.repeat_interleave(width))


def _scale_rows(rows: ProjectionRows, factors: Tensor) -> None:
    """Multiply the outputs of a linear map by a factor each."""
    whole = torch.ones(rows.weight.shape[rows.axis], dtype=torch.float32)
    whole[rows.first : rows.first + rows.count] = factors
    for parameter, axis in ((rows.weight, rows.axis), (rows.bias, 0)):
        if parameter is not None:
            shape = [-1 if dim == axis else 1 for dim in range(parameter.ndim)]
            parameter.copy_(parameter * _placed_as(whole.view(shape), parameter))


def _placed_as(factors: Tensor, parameter: Tensor) -> Tensor:
    """Return the factors on the device of a parameter, sharded as it is."""
    factors = factors.to(parameter.device)
    return _sharded_as(factors, parameter) if hasattr(parameter, "placements") else factors


def _sharded_as(factors: Tensor, parameter: Tensor) -> Tensor:
    """Return the factors as a distributed tensor; along dims of one factor they are replicated."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    assert isinstance(parameter, DTensor)
    placements = [
        place if isinstance(place, Shard) and factors.shape[place.dim] > 1 else Replicate()
        for place in parameter.placements
    ]
    return distribute_tensor(factors, parameter.device_mesh, placements)
