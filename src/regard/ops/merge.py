"""Merge partial attention over disjoint keys, by their log-sum-exps, into attention over all of the keys."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def merge(outs: Sequence[Tensor], statistics: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of softmax attention over all keys, from those over parts of the keys.

    `outs` are `b h i e`, one for each part, and `statistics` their log-sum-exps, `b h i`: `A.lse` of the weights, or
    what another kernel returns.

    >>> import torch
    >>> from regard import merge, weights
    >>> q, k, v = torch.randn(3, 1, 2, 10, 8)
    >>> parts = [(weights(q, k[:, :, keys]), v[:, :, keys]) for keys in (slice(0, 4), slice(4, 10))]
    >>> out, lse = merge([A @ x for A, x in parts], [A.lse for A, x in parts])
    >>> whole = weights(q, k)
    >>> torch.allclose(out, whole @ v, atol=1e-6), torch.allclose(lse, whole.lse, atol=1e-6)
    (True, True)

    Exact, so parts may be merged in any order, and merged again. Differentiable in outs and statistics any number of
    times. A row that sees no key in a part has the statistic -inf there, and its out is not read; a row that sees none
    in any part gives zeros. The sink of `SinkSoftmax` counts once: pass it with one part, `Softmax()` with the others.
    Statistics are float32 for half precision, and so is the arithmetic; the output has the dtype of the outs.
    """
    _check(outs, statistics)
    lse = torch.stack([x.to(torch.promote_types(x.dtype, torch.float32)) for x in statistics])  # parts b h i
    top = lse.detach().amax(0)
    shares = (lse - torch.where(top == -math.inf, 0.0, top)).exp()
    total = shares.sum(0)
    is_empty = total == 0
    total = torch.where(is_empty, 1.0, total)
    shares = (shares / total)[..., None]
    merged = sum(torch.where(share == 0, 0.0, out * share) for out, share in zip(outs, shares, strict=True))
    assert isinstance(merged, Tensor)
    return merged.to(outs[0].dtype), torch.where(is_empty, -math.inf, top + total.log())


def _check(outs: Sequence[Tensor], statistics: Sequence[Tensor]) -> None:
    if not isinstance(outs, (list, tuple)) or not isinstance(statistics, (list, tuple)):
        raise TypeError("merge takes a list of outputs and a list of log-sum-exps; write merge([out], [lse])")
    if not outs or len(outs) != len(statistics):
        raise ValueError(f"merge takes a log-sum-exp for each output, got {len(outs)} and {len(statistics)}")
    for n, (out, lse) in enumerate(zip(outs, statistics, strict=True)):
        if out.shape != outs[0].shape or out.dtype != outs[0].dtype:
            raise ValueError(
                f"outs must have one shape and dtype, got {tuple(outs[0].shape)} {outs[0].dtype} and "
                f"{tuple(out.shape)} {out.dtype}; each part has all queries and some of the keys"
            )
        if lse.shape != out.shape[:-1]:
            hint = "; write lse.squeeze(-1)" if lse.shape == (*out.shape[:-1], 1) else ""
            raise ValueError(
                f"statistics must have dims b h i, {tuple(out.shape[:-1])}, got {tuple(lse.shape)} for part {n}{hint}"
            )
