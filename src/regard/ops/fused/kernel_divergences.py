"""Divergences of two attention matrices by kernels, from queries, keys and row statistics; on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..backends.torch_kernels import scaled_product_inputs, score_cap
from ..blocks.divergences import Kind
from ..blocks.reduction import DifferentiableOnce, clone_if_inference
from ..call import Call
from ..torch_state import check_single_gradient
from . import kernel_reductions
from .kernel_terms import Tiling, band_pattern, kernel_bias, mask_pattern

if TYPE_CHECKING:
    from ...kernels.row_divergences import Matrix
    from ...kernels.tiles import KernelBias, Pattern


def objections(A: Call, B: Call) -> list[str]:
    """Return the reasons why no kernel compares the weights of two calls."""
    found = [*kernel_reductions.objections(A), *kernel_reductions.objections(B)]
    if not {A.backend, B.backend} <= {None, "triton"}:
        found.append("the backend of a side is not the kernel")
    if A.q.dtype != B.q.dtype:
        found.append(f"the kernel takes one dtype, got {A.q.dtype} and {B.q.dtype}")
    if not found and not has_one_pattern(A, B) and None in (band_pattern(A), band_pattern(B)):
        found.append("the kernel takes one mask for both sides, or two that are bands of diagonals and lengths")
    found += [reason for call in (A, B) if call.records_gradients for reason in _gradient_objections(call)]
    return found


def _gradient_objections(call: Call) -> list[str]:
    beside = [x for term in (call.bias, call.normalize) if term is not None for x in term.tensors()]
    found = []
    if any(x.requires_grad for x in beside):
        found.append("the kernel has no gradient for a bias or a normalizer")
    if score_cap(call) is not None:
        found.append("the kernel has no gradient of capped scores")
    return found


def has_one_pattern(A: Call, B: Call) -> bool:
    """True if one pattern says what both sides see: the same mask, offset and heads."""
    if isinstance(A.offset, Tensor) or isinstance(B.offset, Tensor):
        return False
    return A.mask == B.mask and A.offset == B.offset and A.shape == B.shape


def divergence_by_kernel(kind: Kind, A: Call, B: Call, statistic_a: Tensor, statistic_b: Tensor) -> Tensor:
    """The divergence of each row, `b h i`, with its gradient, from the row statistics `b h i 1`."""
    (q, k, scale_a), (q2, k2, scale_b) = (scaled_product_inputs(call) for call in (A, B))
    setting = DivergenceSettings(kind, A, B, (scale_a, scale_b))
    statistics = statistic_a.detach(), statistic_b.detach()
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, q2, k2)):
        value: Tensor = KernelDivergence.apply(setting, *statistics, q, k, q2, k2)
        return value
    with torch.no_grad():
        return _row_divergences(setting, (*statistics, q, k, q2, k2), with_sums=False).value


class DivergenceSettings(NamedTuple):
    """The inputs of a divergence that are no tensors."""

    kind: Kind
    A: Call
    B: Call
    scales: tuple[float, float]


class KernelDivergence(torch.autograd.Function):
    """A divergence by one kernel; its gradients by one more for the queries and one for the keys of both sides."""

    @staticmethod
    def forward(ctx: Any, setting: DivergenceSettings, *tensors: Tensor) -> Tensor:
        found = _row_divergences(setting, tensors, with_sums=True)
        ctx.setting = setting
        # Terms are kept, since tiles are cached per term; saving their tensors makes autograd detect in-place changes.
        terms = (term for call in (setting.A, setting.B) for term in (call.mask, call.bias) if term is not None)
        held = [clone_if_inference(x.detach()) for term in terms for x in term.tensors()]
        ctx.save_for_backward(*map(clone_if_inference, tensors), found.row_a, found.row_b, *held)
        return found.value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from ...kernels.row_divergences import RowSums

        check_single_gradient(grad)
        saved = ctx.saved_tensors
        tensors, (row_a, row_b) = saved[:6], saved[6:8]
        with torch.no_grad():
            # A row of infinite divergence passes no gradient.
            is_infinite = row_a == torch.inf
            grad = grad.to(torch.float32).masked_fill(is_infinite, 0.0)
            sums = RowSums(row_a.masked_fill(is_infinite, 0.0), row_b, grad)
            grads = _gradients(ctx.setting, tensors, sums, ctx.needs_input_grad[3:7])
        if torch.is_grad_enabled():
            grads = [None if x is None else DifferentiableOnce.apply(x, grad, *tensors[2:]) for x in grads]
        return None, None, None, *grads


def _row_divergences(setting: DivergenceSettings, tensors: tuple[Tensor, ...], *, with_sums: bool) -> Any:
    from ...kernels.row_divergences import divergence_config, row_divergences

    config = divergence_config(max(tensors[2].shape[-1], tensors[4].shape[-1]), tensors[2].dtype, gradient=False)
    one_pattern, A, B = _matrices(setting, tensors, Tiling(config.rows, config.cols))
    return row_divergences(setting.kind, A, B, one_pattern=one_pattern, with_sums=with_sums)


def _gradients(
    setting: DivergenceSettings, tensors: tuple[Tensor, ...], sums: Any, needs: tuple[bool, ...]
) -> list[Tensor | None]:
    """The gradients of q and k of A, and of q and k of B; None for those that are not needed."""
    from ...kernels.row_divergences import divergence_config, divergence_gradients

    inputs = tensors[2:]
    config = divergence_config(max(inputs[0].shape[-1], inputs[2].shape[-1]), inputs[0].dtype, gradient=True)
    grads: list[Tensor | None] = [None] * 4
    for by_keys in (False, True):
        places = (1, 3) if by_keys else (0, 2)
        if not any(needs[n] for n in places):
            continue
        one_pattern, A, B = _matrices(setting, tensors, Tiling(config.rows, config.cols, by_keys=by_keys))
        # Gradients that are summed over heads are kept in float32.
        own = [inputs[n].dtype if inputs[n].shape[1] == A.shape[1] else torch.float32 for n in places]
        dtypes = [dtype if needs[n] else None for n, dtype in zip(places, own, strict=True)]
        found = divergence_gradients(
            setting.kind, A, B, sums, one_pattern=one_pattern, by_keys=by_keys, out_dtypes=(dtypes[0], dtypes[1])
        )
        for n, x in zip(places, found, strict=True):
            if x is not None:
                shared = inputs[n].shape[1]
                x = x if x.shape[1] == shared else x.unflatten(1, (shared, -1)).sum(2)
                grads[n] = x.to(inputs[n].dtype)
    return grads


def _matrices(setting: DivergenceSettings, tensors: tuple[Tensor, ...], tiling: Tiling) -> tuple[bool, Matrix, Matrix]:
    """True if one pattern serves both sides, and both sides as the kernel takes them, with the same number of heads."""
    from ...kernels.row_divergences import Matrix

    _, A, B, scales = setting
    statistic_a, statistic_b, q, k, q2, k2 = tensors
    one_pattern = has_one_pattern(A, B)
    patterns: list[Pattern | None] = (
        [mask_pattern(A, tiling)] * 2 if one_pattern else [band_pattern(A), band_pattern(B)]
    )
    h = max(A.shape[1], B.shape[1])
    sides = []
    for call, statistic, queries, keys, scale, pattern in zip(
        (A, B), (statistic_a, statistic_b), (q, q2), (k, k2), scales, patterns, strict=True
    ):
        assert pattern is not None
        assert not isinstance(call.offset, Tensor)
        lse = statistic.squeeze(-1).to(torch.float32).expand(-1, h, -1)
        bias = _for_heads(kernel_bias(call), call.shape[1], h)
        sides.append(
            Matrix(queries.expand(-1, h, -1, -1), keys, lse, scale, call.offset, score_cap(call), pattern, bias)
        )
    return one_pattern, sides[0], sides[1]


def _for_heads(bias: KernelBias, own: int, heads: int) -> KernelBias:
    """The bias of a side with one head, for each of `heads` heads."""
    if own == heads:
        return bias
    slopes = None if bias.slopes is None else bias.slopes.expand(heads).contiguous()
    steps = None if bias.steps is None else (bias.steps[0], 0, *bias.steps[2:])
    return bias._replace(slopes=slopes, steps=steps)
