"""Attribution through all layers: how much each input token contributes to a token at the top.

A stack is a sequence of `Weights` of self-attention, the bottom layer first, or a `Tape`. The functions cannot follow
what a layer without attention weights mixes: given a tape or its `values()`, they warn if `tape.unseen` lists one.

For one token, rollout and relevance carry a row vector down through products with the lazy matrices, so memory is
linear in the length.

Padding is read from the masks (`real_tokens.py`). A negative token counts from the end of the real tokens of each batch
row: -1, the default, is the last token of each text, on whichever side its padding is.

Attention is not explanation: high weights need not mean that a token mattered, and quite different weights can give the
same output (Jain & Wallace 2019; Wiegreffe & Pinter 2019). Test what these maps suggest by ablation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...checks import check_int, check_integer_tensor, check_number, check_tensor
from ...ops.weights import LIMIT, Weights
from ..real_tokens import find_real_keys, padding_queries, real_tokens, without_queries
from ..recording.sampled_weights import SparseWeights
from ..tape.tape import Tape, TapeValues
from .head_measures import check_queries, check_weights, row_chunks

CAPACITY_UNITS = 2**30  # integer capacity of an edge with weight 1


@torch.no_grad()
def rollout(
    stack: Tape | Iterable[Weights], *, token: int | Int[Tensor, " b"] | None = -1, residual: float = 0.5
) -> Float[Tensor, "b n"]:
    """Row `token` of W_L ... W_1, W = (1 - residual) mean_h A + residual I with rows normalized to sum to 1: the share
    of each input token in the token at the top (Abnar & Zuidema 2020, sec. 3, with residual 1/2). With None, the mean
    of the rows of all real tokens.

    >>> import torch
    >>> from regard import Causal, weights
    >>> q, k = torch.randn(2, 4, 1, 8, 500, 16)  # four layers
    >>> stack = [weights(q[n], k[n], mask=Causal()) for n in range(4)]
    >>> rollout(stack, token=100).shape, rollout(stack, token=100)[0, 101:].sum().item()
    (torch.Size([1, 500]), 0.0)

    It takes two passes over the matrix per layer and O(n) memory. Caveat: heads are averaged, values and feed-forward
    layers are ignored, and in deep stacks rollout becomes uniform over the tokens that can be reached.
    """
    *_, r = rollout_per_layer(stack, token=token, residual=residual)
    return r


@torch.no_grad()
def rollout_per_layer(
    stack: Tape | Iterable[Weights], *, token: int | Int[Tensor, " b"] | None = -1, residual: float = 0.5
) -> Iterator[Float[Tensor, "b n"]]:
    """Yield the rollout from the top: a row with 1 at the token, then its shares below each layer, the top layer first.

    With None it starts from the mean of all real tokens.
    """
    layers = _check_stack(stack)
    r = _start(layers, token)
    yield r
    for A in reversed(layers):
        r = torch.where(r == 0, 0.0, r / _row_sums(A, residual))
        r = residual * r + (1 - residual) * _mean_over_heads(A, r)
        yield r


@torch.no_grad()
def rollout_matrix(
    stack: Tape | Iterable[Weights], *, residual: float = 0.5, limit: str = LIMIT
) -> Float[Tensor, "b n n"]:
    """W_L ... W_1: the rollout of every token; raises if a dense layer takes more memory than `limit`.

    Rows of padding are 0.
    """
    layers = _check_stack(stack)
    result = None
    for A in layers:
        W = _mixing_matrix(A, residual, limit)
        result = W if result is None else reachable_product(W, result)
    assert result is not None
    return torch.where(_real_tokens(layers)[..., None], result, 0.0)


@torch.no_grad()
def relevance(
    stack: Tape | Iterable[Weights],
    values: Iterable[Float[Tensor, "b g n e"]],
    gradients: Iterable[Float[Tensor, "b h n e"]],
    *,
    token: int | Int[Tensor, " b"] = -1,
) -> Float[Tensor, "b n"]:
    """Row `token` of (I + E_L) ... (I + E_1), E = mean_h max(A * dL/dA, 0) (Chefer et al. 2021, eq. 5 and 6).

    `values` are the v of each layer, and `gradients` dL/dout of each layer's out = A @ v, where L is the number to
    explain, such as the logit of a class. (dL/dA)_ij = dL/dout_i . v_j is computed a few rows at a time, never stored.
    Caveat: only positive contributions count, and whatever bypasses attention is taken to stay with its token.
    """
    layers = _check_stack(stack)
    r = _start(layers, token)
    for A, v, grad in reversed(list(zip(layers, values, gradients, strict=True))):
        v, grad = _per_head("values", v, A), _check_is_output("gradients", grad, A)
        carried = r.clone()
        for rows in row_chunks(A):
            if bool(r[:, rows].any()):
                E = (A[..., rows, :] * (grad[:, :, rows] @ v.mT)).clamp(min=0).mean(1)
                carried += reachable_product(r[:, None, rows], E).squeeze(1)
        r = carried
    return r


@torch.no_grad()
def gradient_attention(
    A: Weights,
    v: Float[Tensor, "b g j e"],
    gradient: Float[Tensor, "b h i e"],
    *,
    queries: Bool[Tensor, "b i"] | None = None,
) -> Float[Tensor, "b h j"]:
    """sum_i (A * dL/dA)_ij = v_j . (A.T @ dL/dout)_j: the contribution of each key, by head, to L in first order.

    `gradient` is dL/dout of out = A @ v. Keys that lower L have negative values. The sum over keys is out . dL/dout,
    which `importance` uses. The sum over i leaves out padding queries, as the mask shows them, or takes the `queries`
    that are True; for a cross-attention pass `tape.real_queries(layer)`. Caveat: it is a first-order statement about
    this one layer.
    """
    v, gradient = _per_head("v", v, A), _check_is_output("gradient", gradient, A)
    counted = padding_queries(A) if queries is None else check_queries(queries, A.shape[-2]).to(A.device)
    if counted is not None:
        A, gradient = without_queries(A, counted), torch.where(counted[..., None, :, None], gradient, 0.0)
    return (v * (A.T @ gradient)).sum(-1)


@torch.no_grad()
def value_norms(v: Float[Tensor, "b g j e"], output: Float[Tensor, "dim he"]) -> Float[Tensor, "b h j"]:
    """abs(v_j W_h): the norm of the vector that each head adds to the residual stream for each key with weight 1.

    `output` is the weight of the output projection as `nn.Linear` stores it, dim x (heads * e): e columns per head.
    `A.received() * value_norms(v, output)` then scales the attention that each key receives, by head, and
    `A[..., t, :] * value_norms(v, output)` the attention of query t (Kobayashi et al. 2020).
    """
    values, W = _values_and_projection(v, output)
    squares = torch.einsum("c h e, c h a -> h e a", W, W)
    return ((values @ squares) * values).sum(-1).clamp(min=0).sqrt()


@torch.no_grad()
def norm_attention(
    A: Weights, v: Float[Tensor, "b g j e"], output: Float[Tensor, "dim he"], *, token: int | Int[Tensor, " b"] = -1
) -> Float[Tensor, "b j"]:
    """abs(sum_h A_tj v_j W_h): the norm of the contribution of each key to query t, over all heads (Kobayashi et al.
    2020).

    Contributions of heads in opposite directions cancel, and a key with a large weight but a small value, such as an
    attention sink, counts little. It takes O(j h^2) memory. Caveat: the residual and the norms around the layer are
    left out.
    """
    b, *_ = _four_dims(A)
    gram = _gram(v, output)  # b j h h
    if gram.shape[1] != A.shape[-1] or gram.shape[2] != A.shape[1]:
        raise ValueError(
            f"v and output must have the {A.shape[1]} heads and {A.shape[-1]} keys of A, "
            f"got {gram.shape[2]} heads and {gram.shape[1]} keys"
        )
    t = _positions(token, real_tokens(A).queries)
    row = torch.cat([A.select(batch=n)[..., int(t[n]), :] for n in range(b)])  # b h j
    row = row.mT.to(gram.dtype)
    return torch.einsum("b j h, b j h f, b j f -> b j", row, gram, row).clamp(min=0).sqrt()


@torch.no_grad()
def attention_flow(
    stack: Tape | Iterable[Weights], *, token: int | Int[Tensor, " b"] = -1, residual: float = 0.5, edges: int = 200_000
) -> Float[Tensor, "b n"]:
    """The maximum flow from `token` at the top to each input token, with the weights W of `rollout` as edge capacities
    (Abnar & Zuidema 2020, sec. 3).

    It solves one maximum-flow problem per input token, over at most `edges` weights above 0 in all layers; with more it
    raises. Weights are rounded to multiples of 2**-30, so the error of a flow is at most that times the number of edges
    in its minimum cut. Caveat: each flow may use all edges alone, so the flows do not add up to 1.
    """
    check_int("edges", edges, least=1)
    layers = _check_stack(stack)
    b, _, n, _ = layers[0].shape
    real = _real_tokens(layers)
    if (dense := len(layers) * n * n) > edges and (kept := _count_edges(layers, real, edges)) > edges:
        raise ValueError(
            f"attention_flow takes at most edges={edges} weights above 0, got {kept} or more of {dense}; "
            "use rollout(stack, token=...), which has no limit, or pass a larger edges="
        )
    tops = _positions(token, real).tolist()
    mixed = torch.stack([_mixing_matrix(A, residual, LIMIT) for A in layers], 1).double().cpu().numpy()  # b layers n n
    all_nan = [math.nan] * n
    reachable = [_reachable_layers(W, top) for W, top in zip(mixed, tops, strict=True)]
    flows = [_flows(W, top) if np.isfinite(W).all() else all_nan for W, top in zip(reachable, tops, strict=True)]
    return torch.tensor(flows, dtype=layers[0].dtype, device=layers[0].device).view(b, n)


def reachable_product(r: Tensor, X: Tensor) -> Tensor:
    """Return r @ X, where a row of X at which r is 0 contributes 0 even if it holds NaN.

    >>> reachable_product(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.25, 0.75], [torch.nan, torch.nan]]))
    tensor([[0.2500, 0.7500]])
    """
    missing = X.isnan()
    if not bool(missing.any()):
        return r @ X
    unknown = (r != 0).to(X.dtype) @ missing.to(X.dtype) > 0
    return (r @ X.masked_fill(missing, 0.0)).masked_fill(unknown, torch.nan)


def _mean_over_heads(A: Weights, r: Tensor) -> Tensor:
    """Return r @ mean_h A, `b n`. Rows of A at which r is 0 contribute 0 even if they hold NaN."""
    result = (r[:, None, None] @ A).mean(1).squeeze(1)
    if bool(result.isfinite().all()):
        return result
    parts = [reachable_product(r[:, None, rows], A[..., rows, :].mean(1)) for rows in row_chunks(A)]
    return torch.cat(parts, 1).sum(1)


def _reachable_layers(layers: npt.NDArray[np.float64], top: int) -> npt.NDArray[np.float64]:
    """Return the layers with zeros in the rows that cannot be reached from this token at the top."""
    reachable, rows = np.zeros_like(layers), np.array([top])
    for level in reversed(range(len(layers))):
        reachable[level, rows] = layers[level, rows]
        rows = reachable[level].any(0).nonzero()[0]
    return reachable


def _flows(layers: npt.NDArray[np.float64], top: int) -> list[float]:
    """Return the maximum flow from a token at the top to each token at the bottom; nodes are `level * n + token`."""
    from scipy.sparse import coo_array  # type: ignore[import-untyped]
    from scipy.sparse.csgraph import maximum_flow  # type: ignore[import-untyped]

    depth, n, _ = layers.shape
    level, i, j = layers.nonzero()
    capacity = np.rint(layers[level, i, j] * CAPACITY_UNITS).astype(np.int32)
    nodes = ((level + 1) * n + i, level * n + j)
    graph = coo_array((capacity, nodes), shape=((depth + 1) * n, (depth + 1) * n)).tocsr()
    return [maximum_flow(graph, depth * n + top, bottom).flow_value / CAPACITY_UNITS for bottom in range(n)]


def _count_edges(layers: Sequence[Weights], real: Tensor, limit: int) -> int:
    """Count the weights above 0 of real tokens in the mean over heads, plus the diagonal; stop above `limit`."""
    count = 0
    for A in layers:
        for rows in row_chunks(A):
            is_edge = (A[..., rows, :] > 0).any(1)
            is_edge[:, range(rows.stop - rows.start), range(rows.start, rows.stop)] = True
            is_edge &= real[:, rows, None]
            count += int(is_edge.sum((-2, -1)).max()) if is_edge.numel() else 0
            if count > limit:
                return count
    return count


def _check_stack(stack: Tape | Iterable[Weights]) -> list[Weights]:
    """Return the layers of a stack or tape; raise unless they are self-attention over the same tokens."""
    tape = stack if isinstance(stack, Tape) else stack.tape if isinstance(stack, TapeValues) else None
    if tape is not None:
        tape.warn_partial("the flow of attention", stacklevel=5)
    layers: list[Any] = list(stack if tape is None else tape.values())
    if not layers:
        raise ValueError("the stack holds no layers; pass a list of Weights, the bottom layer first")
    for A in layers:
        if not isinstance(A, Weights):
            hint = "pass tape.values(), captured without keep="
            if isinstance(A, SparseWeights):
                hint = "pass its other layers, [A for A in tape.values() if isinstance(A, regard.Weights)]"
            raise TypeError(
                f"a stack is a list of Weights, the bottom layer first, got {type(A).__name__}; for a tape {hint}"
            )
        b, _, i, j = _four_dims(A)
        if i != j or (b, i) != (layers[0].shape[0], layers[0].shape[2]):
            raise ValueError(
                "a stack must be self-attention over the same tokens, with n queries and n keys in each layer, "
                f"got shapes {[tuple(A.shape) for A in layers]}"
            )
    return layers


def _four_dims(A: Weights) -> tuple[int, int, int, int]:
    check_weights(A)
    if len(A.shape) != 4:
        raise ValueError(f"weights must have dims b h i j here, got {tuple(A.shape)}; write A.select(batch=...)")
    b, h, i, j = A.shape
    return b, h, i, j


def _start(layers: Sequence[Weights], token: int | Tensor | None) -> Tensor:
    """Return a row with 1 at the token and 0 elsewhere, `b n`; with None, the same number for every real token."""
    A, real = layers[-1], _real_tokens(layers)
    if token is None:
        return real.to(A.dtype) / real.sum(-1, keepdim=True).clamp(min=1)
    r = torch.zeros(real.shape, dtype=A.dtype, device=A.device)
    return r.scatter_(1, _positions(token, real)[:, None], 1.0)


def _real_tokens(layers: Sequence[Weights]) -> Tensor:
    """Return `b n`: True for the tokens that any layer of a stack shows to a query."""
    b, _, n, _ = layers[0].call.shape
    real = torch.zeros(b, n, dtype=torch.bool, device=layers[0].device)
    for A in layers:
        keys = find_real_keys(A.call)
        if keys is None:
            return torch.ones_like(real)
        real |= keys.to(real.device)
    return real


def _positions(token: int | Tensor, real: Tensor) -> Tensor:
    """Return the position of a token in each batch row; a negative number counts from the end of the real tokens."""
    b, n = real.shape
    if isinstance(token, Tensor):
        check_integer_tensor("token", token, 0, 1)
        if token.ndim and len(token) != b:
            raise ValueError(f"token must hold one position for each of the {b} batch rows, got {len(token)}")
    else:
        check_int("token", token, least=-n)
    ids = torch.as_tensor(token, device=real.device).long().expand(b)
    counts = torch.where(real.any(-1), real.sum(-1), n)  # a row of padding alone counts all its tokens
    if not bool(((ids >= -counts) & (ids < n)).all()):
        raise ValueError(
            f"token must be from 0 to {n - 1}, or negative from the end of the real tokens, {counts.tolist()}, "
            f"got {ids.tolist()}"
        )
    rank = (real | ~real.any(-1, keepdim=True)).flip(-1).cumsum(-1).flip(-1)  # 1 at the last real token
    from_end = n - 1 - (rank.flip(-1) == -ids[:, None]).to(torch.uint8).argmax(-1) if n else ids
    return torch.where(ids < 0, from_end, ids)


def _row_sums(A: Weights, residual: float) -> Tensor:
    """Return the row sums of (1 - residual) mean_h A + residual I, `b n`; 1 for an empty row."""
    check_number("residual", residual)
    if not 0 <= residual <= 1:
        raise ValueError(f"residual must be from 0 to 1, got {residual}")
    ones = torch.ones(1, 1, A.shape[-1], 1, dtype=A.dtype, device=A.device)
    sums = residual + (1 - residual) * (A @ ones).mean(1).squeeze(-1)
    return torch.where(sums > 0, sums, 1.0)


def _mixing_matrix(A: Weights, residual: float, limit: str) -> Tensor:
    """Return (1 - residual) mean_h A + residual I with rows normalized to sum to 1, dense: `b n n`."""
    W = (1 - residual) * A.dense(limit).mean(1)
    W.diagonal(dim1=-2, dim2=-1).add_(residual)
    return W / _row_sums(A, residual)[..., None]


def _gram(v: Tensor, output: Tensor) -> Tensor:
    """Return <v_j W_h, v_j W_f> for each key and pair of heads, `b j h f`."""
    values, W = _values_and_projection(v, output)
    b, h, j, _ = values.shape
    gram = values.new_empty(b, j, h, h)
    for n in range(h):
        transformed = torch.einsum("b j e, c e, c f a -> b f j a", values[:, n], W[:, n], W)
        gram[:, :, n] = (transformed * values).sum(-1).mT
    return gram


def _values_and_projection(v: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """Return values `b h j e` and the output projection by head, `dim h e`."""
    for name, x, dims in (("v", v, 4), ("output", output, 2)):
        check_tensor(name, x)
        if x.ndim != dims:
            raise ValueError(f"{name} must have {dims} dims, got shape {tuple(x.shape)}")
    g, e = v.shape[1], v.shape[3]
    if output.shape[1] % (g * e):
        raise ValueError(
            f"output must have a multiple of {g} heads x {e} columns, dim x (heads * e), got {tuple(output.shape)}; "
            "pass the weight of the output projection, nn.Linear(heads * e, dim).weight"
        )
    dtype = torch.promote_types(torch.promote_types(v.dtype, output.dtype), torch.float32)
    W = output.to(dtype).unflatten(1, (-1, e))
    return v.to(dtype).repeat_interleave(W.shape[1] // g, 1), W


def _per_head(name: str, v: Tensor, A: Weights) -> Tensor:
    """Return values with one head per head of A, in the dtype of A."""
    check_tensor(name, v)
    b, h, _, j = _four_dims(A)
    if v.ndim != 4 or v.shape[0] != b or v.shape[2] != j or not v.shape[1] or h % v.shape[1]:
        raise ValueError(f"{name} must have dims b={b}, heads that divide {h}, {j}, e; got shape {tuple(v.shape)}")
    return v.to(A.dtype).repeat_interleave(h // v.shape[1], 1)


def _check_is_output(name: str, grad: Tensor, A: Weights) -> Tensor:
    check_tensor(name, grad)
    if grad.ndim != 4 or grad.shape[:3] != A.shape[:3]:
        b, h, i, _ = A.shape
        raise ValueError(
            f"{name} must have dims b={b}, h={h}, i={i}, e, the dims of A @ v; got shape {tuple(grad.shape)}"
        )
    return grad.to(A.dtype)
