"""attend and weights: the operator."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..argument_hints import OPERATOR, with_argument_hints
from . import dispatch
from .backends import sdpa
from .backends.masked_tile import attend_masked
from .backends.sdpa_varlen import attend_varlen
from .call import Call, Offset, no_autocast
from .explanation import explain_call
from .nested import attend_nested
from .terms.biases import Bias
from .terms.masks.mask_algebra import Mask
from .terms.normalizers import Normalizer
from .terms.scores import Score
from .weights import Weights


@with_argument_hints(OPERATOR)
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
    offset: Offset | None = None,
    backend: str | None = None,
) -> Float[Tensor, "*b h i e"]:
    """dropout(A) @ v with A = normalize(mask(score(q, k) + bias)).

    >>> import torch
    >>> from regard import Additive, Alibi, Causal, Padding, SinkSoftmax, Window, attend
    >>> q, k, v = torch.randn(3, 2, 8, 100, 64)

    >>> # scaled dot-product attention: softmax(q @ k.mT / sqrt(d)) @ v
    >>> attend(q, k, v).shape
    torch.Size([2, 8, 100, 64])

    >>> # each query sees itself and up to 15 positions before it; farther keys score lower
    >>> attend(q, k, v, mask=Causal() & Window(16), bias=Alibi(8)).shape
    torch.Size([2, 8, 100, 64])

    >>> # sequences of 100 and 60 tokens in one batch: the padding is hidden
    >>> attend(q, k, v, mask=Padding([100, 60])).shape
    torch.Size([2, 8, 100, 64])

    >>> # grouped queries: heads 0-3 of q read head 0 of k and v, heads 4-7 head 1
    >>> attend(q, k[:, :2], v[:, :2]).shape
    torch.Size([2, 8, 100, 64])

    >>> # decoding: one query at the last position sees all 100 keys
    >>> torch.allclose(attend(q[:, :, -1:], k, v, mask=Causal()), attend(q, k, v, mask=Causal())[:, :, -1:], atol=1e-5)
    True

    >>> # another score and another normalizer: u . tanh(q + k), and heads may attend to nothing
    >>> attend(q, k, v, score=Additive(torch.randn(64)), normalize=SinkSoftmax(0.0)).shape
    torch.Size([2, 8, 100, 64])

    Head n of q uses head n * g // h of k and v, so g < h is grouped-query attention and g = 1 multi-query. Batch dims
    broadcast. A query that may see no key gets zeros. It is differentiable once; for second derivatives pass
    backend="reference", which stores the matrix.

    Args:
        q: queries, b h i d.
        k: keys, b g j d.
        v: values, b g j e.
        score: Dot (the default), Cosine, Bilinear, Additive, Location, or Score.of(fn).
        mask: Causal, Window, Padding, Documents, Prefix, Global, Dilated, Chunked, Diagonal, Near, Neighborhood,
            Blocks, Dense or Rule, combined by &, | and ~.
        bias: Alibi, Relative, Added, Gaussian or Bias.of(fn), added by +.
        normalize: Softmax (the default), SinkSoftmax, Sigmoid, Sparsemax, Entmax, Hard or Tapered.
        dropout: probability of dropping a weight, here and nowhere else; pass 0 in evaluation.
        offset: query row r stands at position r + offset. By default it is j - i, so the last query meets the last
            key; for caches of different lengths it has one number for each batch row, a tuple or a tensor.
        backend: "sdpa", "flex", "triton", "tiled" or "reference"; by default the fastest that runs the call, which
            `explain` names.
    """
    if has_torch_function((q, k, v)):  # like PyTorch's functions, so that function modes see this one
        terms: Any = {"score": score, "mask": mask, "bias": bias, "normalize": normalize, "offset": offset}
        result: Tensor = handle_torch_function(attend, (q, k, v), q, k, v, **terms, dropout=dropout, backend=backend)
        return result
    if v is None:
        raise TypeError("v must be a tensor of dims b g j e, got None; for the weights alone write weights(q, k)")
    if score is None and bias is None and normalize is None and backend is None and dropout == 0:
        out = sdpa.attend_directly(q, k, v, mask, offset)
        if out is None and isinstance(mask, Mask):
            shortcut = attend_varlen if type(q) is Tensor and q.is_cuda else attend_masked
            out = shortcut(q, k, v, mask, offset)
        if out is not None:
            return out
    if any(isinstance(x, Tensor) and x.is_nested for x in (q, k, v)):
        options: Any = {"score": score, "bias": bias, "normalize": normalize, "dropout": dropout, "backend": backend}
        return attend_nested(q, k, v, mask=mask, offset=offset, attend=attend, **options)
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


@with_argument_hints(OPERATOR)
def weights(
    q: Float[Tensor, "*b h i d"],
    k: Float[Tensor, "*b g j d_k"],
    *,
    score: Score | None = None,
    mask: Mask | None = None,
    bias: Bias | None = None,
    normalize: Normalizer | None = None,
    offset: Offset | None = None,
    backend: str | None = None,
) -> Weights:
    """The matrix A = normalize(mask(score(q, k) + bias)), never stored: `attend(q, k, v)` is `weights(q, k) @ v`.

    >>> import torch
    >>> from regard import Causal, weights
    >>> q, k, v = torch.randn(3, 1, 8, 65536, 64)

    >>> # nothing is computed yet; dense, this matrix would take 137 GB
    >>> A = weights(q, k, mask=Causal())
    >>> A
    Weights(1 x 8 x 65536 x 65536, mask=Causal())

    >>> # any part, as PyTorch would index the dense matrix
    >>> A[0, 3, :2, :2].tolist()[0]
    [1.0, 0.0]

    >>> # a product: A @ v is attend(q, k, v, mask=Causal())
    >>> q, k, v = q[:, :, :300], k[:, :, :300], v[:, :, :300]
    >>> A = weights(q, k, mask=Causal())
    >>> (A @ v).shape, (A.T @ v).shape
    (torch.Size([1, 8, 300, 64]), torch.Size([1, 8, 300, 64]))

    >>> # measures: per query, and per key
    >>> A.entropy().shape, A.received().shape
    (torch.Size([1, 8, 300]), torch.Size([1, 8, 300]))

    >>> # the three largest weights of each query, and a map of 10 x 10 cells
    >>> A.topk(3).values.shape, A.pool(10, 10).shape
    (torch.Size([1, 8, 300, 3]), torch.Size([1, 8, 10, 10]))

    >>> # the dense matrix, if it is small: each row sums to 1
    >>> torch.allclose(A.dense().sum(-1), torch.ones(1, 8, 300), atol=1e-5)
    True
    """
    if backend is not None:
        dispatch.find_backend(backend)
    return Weights(
        Call.of(q, k, score=score, mask=mask, bias=bias, normalize=normalize, offset=offset, backend=backend)
    )


@with_argument_hints(OPERATOR)
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
    offset: Offset | None = None,
) -> str:
    """Say what a call costs, which backend `attend` would choose, why not the others, and how `summary()` would run."""
    call = Call.of(q, k, v, score=score, mask=mask, bias=bias, normalize=normalize, dropout=dropout, offset=offset)
    return explain_call(call)
