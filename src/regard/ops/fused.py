"""Reductions of the weights by one kernel, from q, k and the row statistic, where there is one for the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .backends import triton
from .backends.kernels import cap, product
from .bins import even_area, even_bins
from .call import Call
from .measures import How
from .normalizers import SinkSoftmax, Softmax
from .pattern import Tiling, banded, expressible, kernel_bias, pattern
from .rows import Once
from .scores import Bilinear, Cosine, Dot, Location
from .tracing import followed

if TYPE_CHECKING:
    from ..kernels.bins import Bins
    from ..kernels.reduce import Config, Reduced
    from ..kernels.tiles import Pattern

    Binning = Callable[[Config], Bins]  # bins as a cut of the matrix takes them


EVERY = slice(None)
MAP = frozenset(("map",))


def objections(call: Call) -> list[str]:
    """What keeps the kernel from reducing the weights of a call."""
    found = triton.unavailable(call)
    if not isinstance(call.score, (Dot, Cosine, Bilinear, Location)):
        found.append(f"{type(call.score).__name__} is no product of queries and keys")
    if not isinstance(call.normalize, (Softmax, SinkSoftmax)):
        found.append(f"the kernel is softmax, not {type(call.normalize).__name__}")
    if call.bias is not None and not expressible(call.bias):
        found.append(f"the kernel has no {type(call.bias).__name__}")
    if call.k.shape[-1] > 256:
        found.append(f"the kernel takes widths up to 256, got {call.k.shape[-1]}")
    if any(ids is not None for ids in (call.batch_ids, call.head_ids, call.row_ids)):
        found.append("it takes whole problems, not selections of rows and heads")
    if followed():
        found.append("it is launched uncompiled")
    return found


def reduced(
    call: Call, statistic: Tensor, want: frozenset[str], bins: Binning | None = None, batch: slice = EVERY
) -> dict[str, Tensor]:
    """Any of "entropy", "received", "max", "distance", and of bins "map", "peaks", from the row statistic `b h i 1`.

    A map holds sums, or what an `EvenMap` asks for.
    """
    q, k, scale = product(call)
    problem = q[batch], k[batch], statistic[batch].squeeze(-1).to(torch.float32)
    asked = {"want": want, "scale": scale, "offset": call.offset}
    band = _band_for_hopper(call, q, want, bins)
    if band is None:
        found = _by_any_gpu(call, problem, asked, bins, batch)
    else:
        found = _by_hopper(problem, asked, band.of(batch), bins)
    return {name: value for name, value in found._asdict().items() if value is not None}


def _by_any_gpu(
    call: Call, problem: tuple[Tensor, Tensor, Tensor], asked: dict[str, Any], bins: Binning | None, batch: slice
) -> Reduced:
    from ..kernels import reduce

    q = problem[0]
    cut = reduce.config(q.shape[-1], q.dtype)
    binned = None if bins is None else bins(cut)
    dealt = binned.dealt if binned is not None and call.shape[2] else None
    found = reduce.reduce(
        *problem,
        **asked,
        cut=cut,
        cap=cap(call),
        pattern=pattern(call, Tiling(cut.rows, cut.cols, dealt)).of(batch),
        bias=kernel_bias(call).of(batch),
        bins=binned,
        sums_to_one=isinstance(call.normalize, Softmax),
    )
    if isinstance(bins, EvenMap) and bins.how == "mean" and found.map is not None:
        return found._replace(map=found.map / bins.area)
    return found


def _by_hopper(
    problem: tuple[Tensor, Tensor, Tensor], asked: dict[str, Any], band: Pattern, bins: Binning | None
) -> Reduced:
    from ..kernels.summary import summary

    if not isinstance(bins, EvenMap):
        return summary(*problem, **asked, pattern=band)
    area = bins.area if bins.how == "mean" else 1
    assert isinstance(area, int)  # the kernel takes bins of one size alone
    return summary(*problem, **asked, pattern=band, shape=bins.shape, share=1 / area)


def _band_for_hopper(call: Call, q: Tensor, want: frozenset[str], bins: Binning | None) -> Pattern | None:
    """The mask, if the call is one of the commonest, for which there is a kernel laid out for Hopper GPUs."""
    if not (
        is_hopper(q.device)
        and isinstance(call.normalize, Softmax)
        and call.bias is None
        and cap(call) is None
        and "peaks" not in want
        and (bins is None or isinstance(bins, EvenMap))
        and not torch.are_deterministic_algorithms_enabled()
    ):
        return None
    from ..kernels.summary import fits
    from ..kernels.tiles import FAR

    band = banded(call) if fits(q, call.shape[3], None if bins is None else bins.shape) else None
    return None if band is None or band.high < FAR else band


@cache
def is_hopper(device: torch.device) -> bool:
    """Is it a GPU of compute capability 9, and Triton's dialect for it one that has been tried?"""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    import triton

    return triton.__version__.startswith(("3.6.", "3.7."))


@dataclass(frozen=True)
class EvenMap:
    """`n` queries and keys in bins as even as can be, `shape` of them, and what is asked of each."""

    n: tuple[int, int]
    shape: tuple[int, int]
    device: torch.device
    how: How

    @property
    def area(self) -> Tensor | int:
        """How many entries each bin holds."""
        return even_area(*self.n, *self.shape, self.device)

    def __call__(self, cut: Config) -> Bins:
        """The bins, as this cut takes them."""
        return _even_map(*self.n, *self.shape, self.device, cut, self.how == "max")


def even_map(call: Call, rows: int, cols: int, how: How = "mean") -> EvenMap:
    """The matrix in `rows` x `cols` bins as even as can be."""
    return EvenMap(call.shape[2:], (rows, cols), call.q.device, how)


@lru_cache(maxsize=16)
def _even_map(n_i: int, n_j: int, rows: int, cols: int, device: torch.device, cut: Config, parted: bool) -> Bins:
    from ..kernels.bins import binned

    with torch.inference_mode(False):
        by_row, by_col = (even_bins(n, count, device)[0].to(torch.int32) for n, count in ((n_i, rows), (n_j, cols)))
        even = (n_i // rows, n_j // cols) if n_i % rows == 0 and n_j % cols == 0 else None
        return binned(by_row, by_col, (rows, cols), cut, even, parted)


def group_sums(call: Call, statistic: Tensor, query_groups: Tensor, key_groups: Tensor, rows: int, cols: int) -> Tensor:
    """The sum of A over each pair of groups, given by their ids `1 i` or `b i`: `b h rows cols`."""
    from ..kernels.bins import binned

    def sums(queries: Tensor, keys: Tensor, batch: slice) -> Tensor:
        ids = queries.to(torch.int32), keys.to(torch.int32)
        return reduced(call, statistic, MAP, lambda cut: binned(*ids, (rows, cols), cut, None), batch)["map"]

    if query_groups.shape[0] == key_groups.shape[0] == 1:
        return sums(query_groups[0], key_groups[0], EVERY)
    # A kernel deals out the same rows for every batch row: groups of their own take a launch each.
    b = call.shape[0]
    each = zip(query_groups.expand(b, -1), key_groups.expand(b, -1), strict=True)
    return torch.cat([sums(queries, keys, slice(m, m + 1)) for m, (queries, keys) in enumerate(each)])


def transposed_product(call: Call, statistic: Tensor, x: Tensor) -> Tensor:
    """A.T @ x from the row statistic `b h i 1`: `b 1|g|h i e -> b h j e`, features in parts as wide as a tile."""
    from ..kernels.gather import by_keys

    q, k, scale = product(call)
    lse = statistic.squeeze(-1).to(torch.float32)
    parts = [by_keys(q, k, lse, part, **_setting(call, q, part, scale, keys=True)) for part in x.split(WIDEST, dim=-1)]
    return torch.cat(parts, -1) if parts else x.new_zeros(*call.shape[:2], call.shape[3], 0, dtype=torch.float32)


def differentiable(call: Call, measure: str) -> bool:
    """Does the kernel know the gradient of this measure for all that needs one?"""
    beside = [x for term in (call.bias, call.normalize) if term is not None for x in term.tensors()]
    return (
        measure in ("entropy", "received")
        and isinstance(call.normalize, Softmax)
        and cap(call) is None
        and not any(x.requires_grad for x in beside)
    )


def differentiated(call: Call, statistic: Tensor, measure: str) -> Tensor:
    """Entropy or received mass, with its gradient for q and k."""
    q, k, scale = product(call)
    value: Tensor = Measured.apply(Setting(call, scale, measure), statistic.detach(), q, k)
    return value


WIDEST = 256


class Setting(NamedTuple):
    """What a measure is taken of, beside the tensors."""

    call: Call
    scale: float
    measure: str


class Measured(torch.autograd.Function):
    """Entropy or received mass by one kernel; their gradients by two products with W = dL/ds."""

    @staticmethod
    def forward(ctx: Any, setting: Setting, statistic: Tensor, q: Tensor, k: Tensor) -> Tensor:
        value = reduced(setting.call, statistic, frozenset((setting.measure,)))[setting.measure]
        ctx.setting = setting
        needed = (value.clone(),) if setting.measure == "entropy" else ()  # the value itself may be written to
        ctx.save_for_backward(statistic, q, k, *needed)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from ..kernels.gather import Tilt, by_keys, by_rows

        (call, scale, measure), (statistic, q, k, *needed) = ctx.setting, ctx.saved_tensors
        with torch.no_grad():
            lse, grad = statistic.squeeze(-1).to(torch.float32), grad.to(torch.float32)
            nothing_row, nothing_key = lse.new_zeros(lse.shape), lse.new_zeros(*lse.shape[:2], k.shape[2])
            if measure == "entropy":
                tilt = Tilt(nothing_key, grad * needed[0], grad)
            else:
                mean = by_rows(q, k, lse, grad[..., None], **_setting(call, q, grad[..., None], scale))
                tilt = Tilt(grad, mean.squeeze(-1), nothing_row)
            dq = scale * by_rows(q, k, lse, k, **_setting(call, q, k, scale), tilt=tilt)
            dk = scale * by_keys(q, k, lse, q, **_setting(call, q, q, scale, keys=True), tilt=tilt)
            dk = dk.unflatten(1, (k.shape[1], -1)).sum(2)
            grads = dq.to(q.dtype), dk.to(k.dtype)
        if torch.is_grad_enabled():
            return None, None, *(Once.apply(x, grad, q, k) for x in grads)
        return None, None, *grads


def _setting(call: Call, q: Tensor, x: Tensor, scale: float, keys: bool = False) -> dict[str, Any]:
    from ..kernels.gather import config

    cut = config(q.shape[-1], x.shape[-1], torch.promote_types(q.dtype, x.dtype))
    return {
        "scale": scale,
        "offset": call.offset,
        "cap": cap(call),
        "pattern": pattern(call, Tiling(cut.rows, cut.cols, by_keys=keys)),
        "bias": kernel_bias(call),
    }
