"""attend and weights: the operator."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from . import dispatch
from .backends import sdpa
from .call import Call, no_autocast
from .explanation import explain_call
from .terms.biases import Bias
from .terms.masks.mask_algebra import Mask
from .terms.normalizers import Normalizer
from .terms.scores import Score
from .weights import Weights


def attend(
    q: Float[Tensor, "*b h i d"],
    k: Float[Tensor, "*b g j d_k"],
    v: Float[Tensor, "*b g j e"],
    *,
    score: Score | None = None,
    mask: Mask | None = None,
    bias: Bias | None = None,
    normalize: Normalizer | None = None,
    dropout: float = 0.0,
    offset: int | None = None,
    backend: str | None = None,
) -> Float[Tensor, "*b h i e"]:
    """dropout(A) @ v with A = normalize(mask(score(q, k) + bias)).

    Scaled dot-product attention unless the terms say otherwise:

    >>> import torch
    >>> from regard import Alibi, Causal, Window, attend
    >>> q, k, v = torch.randn(3, 2, 8, 100, 64)
    >>> attend(q, k, v).shape
    torch.Size([2, 8, 100, 64])
    >>> attend(q, k, v, mask=Causal() & Window(16), bias=Alibi(8)).shape
    torch.Size([2, 8, 100, 64])

    Head n of q uses head n * g // h of k and v, so g < h is grouped-query attention and g = 1 multi-query. Query
    row r stands at position r + offset; offset is j - i unless given, so the last query meets the last key. Dropout
    acts on the weights, here and nowhere else: pass 0 in evaluation. A query that may see no key gets zeros. It is
    differentiable once; for second derivatives pass backend="reference", which stores the matrix.
    """
    if has_torch_function((q, k, v)):  # like PyTorch's functions, so that function modes see this one
        terms: Any = {"score": score, "mask": mask, "bias": bias, "normalize": normalize, "offset": offset}
        result: Tensor = handle_torch_function(attend, (q, k, v), q, k, v, **terms, dropout=dropout, backend=backend)
        return result
    if v is None:
        raise TypeError("v must be a tensor of dims b g j e, got None; for the weights alone write weights(q, k)")
    if score is None and bias is None and normalize is None and backend is None and dropout == 0:
        out = sdpa.attend_directly(q, k, v, mask, offset)
        if out is not None:
            return out
    call = Call.of(
        q,
        k,
        v,
        score=score,
        mask=mask,
        bias=bias,
        normalize=normalize,
        dropout=dropout,
        offset=offset,
        backend=backend,
    )
    with no_autocast(q.device):
        out, _ = dispatch.choose(call).run()
    return out.unflatten(0, call.lead) if len(call.lead) != 1 else out


def weights(
    q: Float[Tensor, "*b h i d"],
    k: Float[Tensor, "*b g j d_k"],
    *,
    score: Score | None = None,
    mask: Mask | None = None,
    bias: Bias | None = None,
    normalize: Normalizer | None = None,
    offset: int | None = None,
    backend: str | None = None,
) -> Weights:
    """The matrix A = normalize(mask(score(q, k) + bias)), never stored: `attend(q, k, v)` is `weights(q, k) @ v`.

    >>> import torch
    >>> from regard import Causal, weights
    >>> q, k = torch.randn(2, 1, 8, 65536, 64)
    >>> A = weights(q, k, mask=Causal())
    >>> A
    Weights(1 x 8 x 65536 x 65536, mask=Causal())
    >>> A[0, 3, :2, :2].tolist()[0]
    [1.0, 0.0]
    """
    if backend is not None:
        dispatch.named(backend)
    return Weights(
        Call.of(q, k, score=score, mask=mask, bias=bias, normalize=normalize, offset=offset, backend=backend)
    )


def explain(
    q: Float[Tensor, "*b h i d"],
    k: Float[Tensor, "*b g j d_k"],
    v: Float[Tensor, "*b g j e"],
    *,
    score: Score | None = None,
    mask: Mask | None = None,
    bias: Bias | None = None,
    normalize: Normalizer | None = None,
    dropout: float = 0.0,
    offset: int | None = None,
) -> str:
    """Say what a call costs, which backend `attend` would choose, why not the others, and how `summary()` would run."""
    call = Call.of(q, k, v, score=score, mask=mask, bias=bias, normalize=normalize, dropout=dropout, offset=offset)
    return explain_call(call)
