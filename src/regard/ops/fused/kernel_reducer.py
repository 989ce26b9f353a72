"""Answers about the weights by one kernel launch each, from q, k and the row statistic; on a GPU.

A kernel compiles for seconds when it is first launched. Another thread compiles it, and until that is done blocks of
rows give the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from .. import dispatch
from ..blocks.block_reducer import Answer, BlockReducer
from ..blocks.pool_bins import Mesh
from ..blocks.reduction import Reduction
from ..call import Call, no_autocast
from ..terms.normalizers import SinkSoftmax, Softmax
from . import kernel_reductions
from .topk_entries import saves_work, topk

MEASURES = frozenset(("entropy", "received", "max", "distance"))
MAX = frozenset(("max",))
PEAKS = frozenset(("peaks",))
SMALLEST_EXACT_WEIGHT = 2.0**-100  # a smaller one may have lost digits in float32, or be 0
MAX_BLOCK_ENTRIES = 2**32  # weights that blocks of rows reduce in less time than a kernel compiles

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class KernelReducer:
    """Reductions by kernels. A question that no kernel answers, or not with its gradient, goes to `blocks`."""

    call: Call
    statistic: Tensor | None
    blocks: BlockReducer

    def describe(self) -> str:
        """How `summary` runs."""
        return "one fused product for the row statistic, if it is not known, and one kernel"

    def summary(
        self, mesh: Mesh | None, peaks: bool = False, queries: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Entropy, received mass, maximum, distance, logit in one pass; with a mesh the map, with `peaks` its maxima.

        With `queries`, `b i`, the rows of all others count as rows that see no key.
        """
        statistic = self.row_statistic()
        found = self._unless_compiling(
            lambda: self._summary(statistic, mesh, peaks, queries),
            lambda blocks: blocks.summary(mesh, peaks, queries)[0],
            statistic,
        )
        return found, statistic

    def _summary(self, statistic: Tensor, mesh: Mesh | None, peaks: bool, queries: Tensor | None) -> dict[str, Tensor]:
        # The weights of a row are 0 if the logarithm of its sum is -inf.
        counted = statistic if queries is None else statistic.masked_fill(~queries[:, None, :, None], -math.inf)
        want = MEASURES if mesh is None else MEASURES | {"map"}
        has_peaks = mesh is not None and peaks
        at_once = mesh is not None and has_peaks and kernel_reductions.finds_peaks_at_once(mesh)
        found = kernel_reductions.reduce_by_kernel(self.call, counted, want | PEAKS if at_once else want, mesh)
        if mesh is not None and has_peaks and not at_once:
            found |= kernel_reductions.reduce_by_kernel(self.call, counted, PEAKS, replace(mesh, how="max"))
        return found | {"logit": self._logit(found["max"], counted)}

    def pool(self, mesh: Mesh) -> Answer:
        """The mean, sum or maximum of each pair of bins: `b h rows cols`."""
        return self._reduce("peaks" if mesh.how == "max" else "map", mesh, lambda blocks: blocks.pool(mesh)[0])

    def group_sums(self, query_groups: Tensor, key_groups: Tensor, rows: int, cols: int) -> Answer:
        """The sum of A over each pair of groups, ids `1 i` or `b i`: `b h rows cols`."""
        if not (rows and cols):
            return self.blocks.group_sums(query_groups, key_groups, rows, cols)
        statistic = self.row_statistic()
        sums = self._unless_compiling(
            lambda: kernel_reductions.group_sums(self.call, statistic, query_groups, key_groups, rows, cols),
            lambda blocks: blocks.group_sums(query_groups, key_groups, rows, cols)[0],
            statistic,
        )
        return sums, statistic

    def topk(self, k: int) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """The k largest weights of each row and their keys: `b h i k` twice."""
        if not saves_work(self.call, k):
            return self.blocks.topk(k)
        statistic = self.row_statistic()
        found = self._unless_compiling(
            lambda: topk(self.call, statistic, k), lambda blocks: blocks.topk(k)[0], statistic
        )
        return found, statistic

    def transposed_product(self, x: Tensor) -> Answer:
        """A.T @ x: `b h j e`; by blocks if it needs a gradient."""
        if self.call.records_gradients or (torch.is_grad_enabled() and x.requires_grad):
            return self.blocks.transposed_product(x)
        with torch.no_grad(), no_autocast(x.device):
            statistic = self.row_statistic()
            product = self._unless_compiling(
                lambda: kernel_reductions.transposed_product(self.call, statistic, x),
                lambda blocks: blocks.transposed_product(x)[0],
                statistic,
            )
            return product, statistic

    def measure(self, reduction: Reduction) -> Answer:
        """The result of a reduction, with its gradient."""
        name = reduction.measure
        if name is None or not self.can_measure(name):
            return self.blocks.measure(reduction)
        with no_autocast(self.call.q.device):
            if self.call.records_gradients:
                statistic = self.row_statistic()
                value = self._unless_compiling(
                    lambda: kernel_reductions.measure_with_gradient(self.call, statistic, name),
                    lambda blocks: replace(blocks, statistic=self.statistic).measure(reduction)[0],
                    statistic,
                )
                return value, statistic
            with torch.no_grad():
                return self._reduce(name, None, lambda blocks: blocks.measure(reduction)[0])

    def columns(self, ids: Tensor) -> Tensor:
        """Whole columns of A, `b h i ids`: blocks are as fast."""
        return self.blocks.columns(ids)

    def can_measure(self, name: str) -> bool:
        """True if there is a kernel for this measure, and for its gradient if one is needed."""
        return not self.call.records_gradients or kernel_reductions.has_gradient(self.call, name)

    @torch.no_grad()
    def row_statistic(self) -> Tensor:
        """The row statistic `b h i 1`, by a fused product with the keys if no earlier answer left it."""
        if self.statistic is not None:
            return self.statistic
        _, statistic = dispatch.choose(self.call.with_values(self.call.k)).run()
        assert statistic is not None
        return statistic

    def _logit(self, largest: Tensor, statistic: Tensor) -> Tensor:
        """The largest score of each row, log max_j A + lse: from the largest weight and the row statistic."""
        lse = statistic.squeeze(-1).to(largest.dtype)
        logit = largest.log() + lse
        if isinstance(self.call.normalize, SinkSoftmax):
            # All weights of a row may vanish beside its sink. Those of the softmax without it do not.
            lost = (largest < SMALLEST_EXACT_WEIGHT) & (lse > -math.inf)
            if bool(lost.any()):
                plain = replace(self.call, normalize=Softmax())
                of_plain = replace(self, call=plain, statistic=None)
                logit = torch.where(lost, of_plain._value_of("logit", of_plain.row_statistic()), logit)
        return logit

    def _reduce(self, name: str, mesh: Mesh | None, by_blocks: Callable[[BlockReducer], Tensor]) -> Answer:
        statistic = self.row_statistic()
        return self._unless_compiling(lambda: self._value_of(name, statistic, mesh), by_blocks, statistic), statistic

    def _value_of(self, name: str, statistic: Tensor, mesh: Mesh | None = None) -> Tensor:
        if name == "logit":
            largest = kernel_reductions.reduce_by_kernel(self.call, statistic, MAX)["max"]
            return self._logit(largest, statistic)
        return kernel_reductions.reduce_by_kernel(self.call, statistic, frozenset((name,)), mesh)[name]

    def _unless_compiling(
        self, by_kernel: Callable[[], T], by_blocks: Callable[[BlockReducer], T], statistic: Tensor
    ) -> T:
        """The answer of the kernel; that of blocks while another thread compiles the kernel, if that takes longer."""
        from ...kernels.launch_cache import StillCompiling, without_waiting

        # Blocks round differently, so an algorithm that must give the same bits each time waits.
        if math.prod(self.call.shape) > MAX_BLOCK_ENTRIES or torch.are_deterministic_algorithms_enabled():
            return by_kernel()
        try:
            with without_waiting():
                return by_kernel()
        except StillCompiling:
            return by_blocks(replace(self.blocks, statistic=statistic))
