"""Reductions of the weights by one kernel launch, from q, k and the row statistic."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..backends import triton
from ..backends.torch_kernels import scaled_product_inputs, score_cap
from ..blocks.pool_bins import Mesh
from ..blocks.reduction import DifferentiableOnce, clone_if_inference
from ..call import Call
from ..terms.normalizers import SinkSoftmax, Softmax
from ..terms.scores import Bilinear, Cosine, Dot, Location
from ..torch_state import check_single_gradient, in_forward_mode, is_traced
from .kernel_terms import Tiling, band_pattern, has_kernel_form, kernel_bias, mask_pattern

if TYPE_CHECKING:
    from ...kernels.summary.bins import Bins
    from ...kernels.summary.generic import SummaryTensors
    from ...kernels.tiles import Pattern, TileConfig

    Binning = Mesh | Callable[[TileConfig], Bins]  # evenly sized bins, or a function of the tile sizes


ALL_BATCH_ROWS = slice(None)
MAP = frozenset(("map",))


def objections(call: Call) -> list[str]:
    """Return the reasons why the kernel cannot reduce the weights of a call."""
    found = triton.kernel_objections(call)
    if not isinstance(call.score, (Dot, Cosine, Bilinear, Location)):
        found.append(f"{type(call.score).__name__} is no product of queries and keys")
    if not isinstance(call.normalize, (Softmax, SinkSoftmax)):
        found.append(f"the kernel is softmax, not {type(call.normalize).__name__}")
    if call.bias is not None and not has_kernel_form(call.bias):
        found.append(f"the kernel has no {type(call.bias).__name__}")
    if isinstance(call.offset, Tensor):
        found.append("the kernel takes one offset for all batch rows")
    if call.k.shape[-1] > 256:
        found.append(f"the kernel takes widths up to 256, got {call.k.shape[-1]}")
    if call.is_selection:
        found.append("it takes whole problems, not selections of rows and heads")
    if is_traced():
        found.append("it is launched uncompiled")
    if in_forward_mode():
        found.append("it has no derivative in forward mode")
    return found


def reduce_by_kernel(
    call: Call, statistic: Tensor, want: frozenset[str], bins: Binning | None = None, batch: slice = ALL_BATCH_ROWS
) -> dict[str, Tensor]:
    """Return the measures in `want` by name, from the row statistic `b h i 1`.

    `want` may hold "entropy", "received", "max", "distance", and with `bins` also "map" and "peaks", per pair of bins:
    "map" is the sum of the weights, or their mean if `bins` is a `Mesh` with how="mean"; "peaks" is the largest weight.
    """
    q, k, scale = scaled_product_inputs(call)
    lse = statistic.squeeze(-1).to(torch.float32)
    inputs = (q, k, lse) if batch is ALL_BATCH_ROWS else (q[batch], k[batch], lse[batch])
    asked = {"want": want, "scale": scale, "offset": call.offset}
    band = _band_for_hopper(call, q, want, bins)
    if band is None:
        found = _by_any_gpu(call, inputs, asked, bins, batch)
    else:
        found = _by_hopper(inputs, asked, band.for_batch(batch), bins)
    return {name: value for name, value in found._asdict().items() if value is not None}


def finds_peaks_at_once(mesh: Mesh) -> bool:
    """True if one pass finds the means and the maxima of these bins: if each has whole parts of a tile of rows."""
    from ...kernels.summary.bins import MIN_PART_ROWS

    return mesh.how != "max" and bool(mesh.cols.size) and (mesh.rows.size or 1) % MIN_PART_ROWS == 0


def _by_any_gpu(
    call: Call, inputs: tuple[Tensor, Tensor, Tensor], asked: dict[str, Any], bins: Binning | None, batch: slice
) -> SummaryTensors:
    from ...kernels.summary import generic as reduce

    q = inputs[0]
    config = reduce.tile_config(q.shape[-1], q.dtype)
    binned = _bins_for(bins, config) if isinstance(bins, Mesh) else None if bins is None else bins(config)
    row_order = binned.row_order if binned is not None and call.shape[2] else None
    found = reduce.summarize_generic(
        *inputs,
        **asked,
        config=config,
        cap=score_cap(call),
        pattern=mask_pattern(call, Tiling(config.rows, config.cols, row_order)).for_batch(batch),
        bias=kernel_bias(call).for_batch(batch),
        bins=binned,
        sums_to_one=isinstance(call.normalize, Softmax),
    )
    if isinstance(bins, Mesh) and bins.how == "mean" and found.map is not None:
        found.map.div_(bins.area)
    return found


def _by_hopper(
    inputs: tuple[Tensor, Tensor, Tensor], asked: dict[str, Any], band: Pattern, bins: Binning | None
) -> SummaryTensors:
    from ...kernels.summary.hopper_launcher import summarize_hopper

    if not isinstance(bins, Mesh):
        return summarize_hopper(*inputs, **asked, pattern=band)
    high, wide = bins.rows.size or 1, bins.cols.size or 1  # the kernel takes bins of one size alone
    share = 1 / (high * wide) if bins.how == "mean" else 1.0
    found = summarize_hopper(*inputs, **asked, pattern=band, shape=bins.shape, bin_sizes=(high, wide), share=share)
    if bins.how == "mean" and found.map is not None:  # the last bins may hold fewer entries
        if bins.rows.last < high:
            found.map[..., -1, :] *= high / max(1, bins.rows.last)
        if bins.cols.last < wide:
            found.map[..., -1] *= wide / max(1, bins.cols.last)
    return found


def _band_for_hopper(call: Call, q: Tensor, want: frozenset[str], bins: Binning | None) -> Pattern | None:
    """The mask as a band of diagonals if the kernel written for Hopper GPUs can take this call, else None."""
    if not (
        is_hopper(q.device)
        and isinstance(call.normalize, Softmax)
        and call.bias is None
        and score_cap(call) is None
        and "peaks" not in want
        and (bins is None or isinstance(bins, Mesh))
        and not torch.are_deterministic_algorithms_enabled()
    ):
        return None
    from ...kernels.summary.hopper_launcher import is_supported
    from ...kernels.tiles import UNBOUNDED

    sizes = None if bins is None else (bins.rows.size, bins.cols.size)
    band = band_pattern(call) if is_supported(q, sizes) else None
    return None if band is None or band.high < UNBOUNDED else band


@cache
def is_hopper(device: torch.device) -> bool:
    """True for a GPU of compute capability 9 and a version of Triton whose Gluon dialect our kernel was tested on."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    import triton

    return triton.__version__.startswith(("3.6.", "3.7."))


@lru_cache(maxsize=16)
def _bins_for(mesh: Mesh, config: TileConfig) -> Bins:
    from ...kernels.summary.bins import assign_bins

    with torch.inference_mode(False):
        rows, cols = (ids[0].to(torch.int32) for ids in mesh.ids)
        sizes = (mesh.rows.size, mesh.cols.size) if mesh.rows.size and mesh.cols.size else None
        return assign_bins(rows, cols, mesh.shape, config, sizes, parted=mesh.how == "max")


def group_sums(call: Call, statistic: Tensor, query_groups: Tensor, key_groups: Tensor, rows: int, cols: int) -> Tensor:
    """The sum of A over each pair of groups, given by their ids `1 i` or `b i`: `b h rows cols`."""
    from ...kernels.summary.bins import assign_bins

    def sums(queries: Tensor, keys: Tensor, batch: slice) -> Tensor:
        ids = queries.to(torch.int32), keys.to(torch.int32)
        return reduce_by_kernel(
            call, statistic, MAP, lambda config: assign_bins(*ids, (rows, cols), config, None), batch
        )["map"]

    if query_groups.shape[0] == key_groups.shape[0] == 1:
        return sums(query_groups[0], key_groups[0], ALL_BATCH_ROWS)
    # A kernel orders rows alike in every batch row: if groups differ, each batch row takes a launch.
    b = call.shape[0]
    each = zip(query_groups.expand(b, -1), key_groups.expand(b, -1), strict=True)
    return torch.cat([sums(queries, keys, slice(m, m + 1)) for m, (queries, keys) in enumerate(each)])


def transposed_product(call: Call, statistic: Tensor, x: Tensor) -> Tensor:
    """A.T @ x from the row statistic `b h i 1`: `b 1|g|h i e -> b h j e`, features split to the width of a tile."""
    from ...kernels.weighted_products import product_by_keys

    q, k, scale = scaled_product_inputs(call)
    lse = statistic.squeeze(-1).to(torch.float32)
    parts = [
        product_by_keys(q, k, lse, part, **_product_arguments(call, q, part, scale, keys=True))
        for part in x.split(MAX_PRODUCT_WIDTH, dim=-1)
    ]
    return torch.cat(parts, -1) if parts else x.new_zeros(*call.shape[:2], call.shape[3], 0, dtype=torch.float32)


def has_gradient(call: Call, measure: str) -> bool:
    """True if the kernel has the gradient of this measure for every tensor that needs one."""
    beside = [x for term in (call.bias, call.normalize) if term is not None for x in term.tensors()]
    return (
        measure in ("entropy", "received")
        and isinstance(call.normalize, Softmax)
        and score_cap(call) is None
        and not any(x.requires_grad for x in beside)
    )


def measure_with_gradient(call: Call, statistic: Tensor, measure: str) -> Tensor:
    """Entropy or received mass, with its gradient for q and k."""
    q, k, scale = scaled_product_inputs(call)
    setting = MeasureSettings(call, scale, measure)
    _await_kernels_of_gradient(setting, statistic, q, k)
    value: Tensor = KernelMeasure.apply(setting, statistic.detach(), q, k)
    return value


def _await_kernels_of_gradient(setting: MeasureSettings, statistic: Tensor, q: Tensor, k: Tensor) -> None:
    """Raise `StillCompiling` if the caller does not wait and kernels of the backward are not compiled yet."""
    from ...kernels import launch_cache

    kind = setting.measure, q.dtype, q.shape[-1], q.shape[1] == k.shape[1], type(setting.call.bias), q.device
    if launch_cache.waits_for_kernels() or kind in _compiled_gradients:
        return
    value = statistic.squeeze(-1).to(torch.float32)
    grad = value if setting.measure == "entropy" else value.new_empty(*q.shape[:2], k.shape[2])
    with torch.no_grad(), launch_cache.compiling_only():
        _gradients(setting, statistic, q, k, value, grad)
    _compiled_gradients.add(kind)


_compiled_gradients: set[tuple[object, ...]] = set()
MAX_PRODUCT_WIDTH = 256


class MeasureSettings(NamedTuple):
    """The inputs of a measure that are no tensors."""

    call: Call
    scale: float
    measure: str


class KernelMeasure(torch.autograd.Function):
    """Entropy or received mass by one kernel; their gradients by two products with W = dL/ds."""

    @staticmethod
    def forward(ctx: Any, setting: MeasureSettings, statistic: Tensor, q: Tensor, k: Tensor) -> Tensor:
        value = reduce_by_kernel(setting.call, statistic, frozenset((setting.measure,)))[setting.measure]
        ctx.setting = setting
        needed = (value.clone(),) if setting.measure == "entropy" else ()  # the user may write to the value itself
        # Terms are kept, since tiles are cached per term; saving their tensors makes autograd detect in-place changes.
        terms = (term for term in (setting.call.mask, setting.call.bias) if term is not None)
        held = [clone_if_inference(x.detach()) for term in terms for x in term.tensors()]
        ctx.save_for_backward(statistic, q, k, *needed, *held)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_single_gradient(grad)
        statistic, q, k, *needed = ctx.saved_tensors
        with torch.no_grad():
            grads = _gradients(ctx.setting, statistic, q, k, needed[0] if needed else None, grad)
        if torch.is_grad_enabled():
            return None, None, *(DifferentiableOnce.apply(x, grad, q, k) for x in grads)
        return None, None, *grads


def _gradients(
    setting: MeasureSettings, statistic: Tensor, q: Tensor, k: Tensor, entropy: Tensor | None, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of q and k, from that of the measure; `entropy` is its value."""
    from ...kernels.weighted_products import GradientTerms, product_by_keys, product_by_rows

    call, scale, measure = setting
    lse, grad = statistic.squeeze(-1).to(torch.float32), grad.to(torch.float32).contiguous()
    if measure == "entropy":
        terms = GradientTerms(None, entropy, grad)
    else:
        x = grad[..., None]
        mean = product_by_rows(q, k, lse, x, **_product_arguments(call, q, x, scale))
        terms = GradientTerms(grad, mean.squeeze(-1), None)
    grouped = q.shape[1] != k.shape[1]
    asked: dict[str, Any] = {"gradient": terms, "times": scale}
    given = _product_arguments(call, q, k, scale)
    dq = product_by_rows(q, k, lse, k, **given, **asked, dtype=q.dtype)
    if given["pattern"].lists is not None:  # tiles are listed by rows or by keys; a band is the same for both
        given = _product_arguments(call, q, q, scale, keys=True)
    dk = product_by_keys(q, k, lse, q, **given, **asked, dtype=torch.float32 if grouped else k.dtype)
    return dq, dk.unflatten(1, (k.shape[1], -1)).sum(2).to(k.dtype) if grouped else dk


def _product_arguments(call: Call, q: Tensor, x: Tensor, scale: float, keys: bool = False) -> dict[str, Any]:
    from ...kernels.weighted_products import product_config

    config = product_config(q.shape[-1], x.shape[-1], torch.promote_types(q.dtype, x.dtype))
    return {
        "scale": scale,
        "offset": call.offset,
        "cap": score_cap(call),
        "pattern": mask_pattern(call, Tiling(config.rows, config.cols, by_keys=keys)),
        "bias": kernel_bias(call),
    }
