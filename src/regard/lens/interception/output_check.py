"""Check that weights inferred from a kernel's arguments reproduce its output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ...ops.weights import Weights
from ..recording.observed import ObservedAttention

MIN_RELATIVE_ERROR = 2**-9  # relative to the norm of an output row: kernels may multiply float32 in TF32
ROUNDING_UNITS = 4  # units in the last place of the output's dtype


def reproduces_output(
    observed: ObservedAttention,
    out: Tensor,
    *,
    rows: int | None = None,
    skip_blind_rows: bool = False,
    project: Callable[[Tensor], Tensor] | None = None,
) -> bool:
    """True if the weights times the values equal the output, `b h i e`, up to its precision.

    With `rows`, only that many rows of each matrix are compared, the first and the last among them. With
    `skip_blind_rows`, rows that see no key are not: a model that hides keys by finite numbers spreads evenly there.
    `project` maps the heads, `b h i e`, to what `out` holds, if that is not the heads themselves.
    """
    v = observed.v.detach()
    dtype = torch.promote_types(v.dtype, torch.float32)
    weights = observed._replace(q=observed.q.detach().to(dtype), k=observed.k.detach().to(dtype)).weights
    if rows is not None:
        compared = torch.linspace(0, (n := out.shape[2]) - 1, min(rows, n), dtype=torch.float64).round().long()
        compared = compared.to(out.device)
        # The tiled backend is plain PyTorch: no kernel is compiled for a few rows.
        weights = Weights(replace(weights.call.select(rows=compared), backend="tiled"))
        out = out[:, :, compared]
    expected = weights @ v.to(dtype)
    expected = expected if project is None else project(expected)
    if expected.shape != out.shape:
        return False
    tolerance = max(ROUNDING_UNITS * torch.finfo(out.dtype).eps, MIN_RELATIVE_ERROR)
    error, norm = (x.transpose(1, 2).flatten(2).norm(dim=-1) for x in (expected - out, out.to(dtype)))
    agrees = error <= tolerance * norm
    return bool((agrees | (expected == 0).all(3).all(1) if skip_blind_rows else agrees).all())
