"""Answers about the weights, computed block by block in PyTorch: every term, any device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ..backends import reference
from ..backends.triton import prepare_with_kernel
from ..call import Call, no_autocast
from ..torch_state import in_functorch, is_traced, run_uncompiled
from . import measures
from .pool_bins import Mesh
from .prepared_call import PreparedCall, is_safe
from .products import transposed_product
from .reduction import Reduction, evaluate

Answer = tuple[Tensor, Tensor | None]  # the result, and the row statistic `b h i 1` if it is known by then


@dataclass(frozen=True, eq=False)
class BlockReducer:
    """Reductions over blocks of rows, from the row statistic `b h i 1` if it is known."""

    call: Call
    statistic: Tensor | None = None

    def describe(self) -> str:
        """How `summary` runs."""
        return "block by block, in PyTorch"

    def summary(
        self, mesh: Mesh | None, peaks: bool = False, queries: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Entropy, received mass, maximum, distance, logit in one pass; with a mesh the map, with `peaks` its maxima.

        With `queries`, `b i`, the rows of all others count as rows that see no key.
        """
        values, statistic = measures.summarize(self._prepare_gathering(), mesh, peaks, queries)
        return values if mesh is None else values | {"map": values["map"] / mesh.area}, statistic

    def pool(self, mesh: Mesh) -> Answer:
        """The mean, sum or maximum of each pair of bins: `b h rows cols`."""
        reduction = measures.bin_maxima if mesh.how == "max" else measures.bin_sums
        pooled = reduction(self._prepare_gathering(), *mesh.ids, *mesh.shape)
        return pooled / mesh.area if mesh.how == "mean" else pooled, self.statistic

    def group_sums(self, query_groups: Tensor, key_groups: Tensor, rows: int, cols: int) -> Answer:
        """The sum of A over each pair of groups, ids `1 i` or `b i`: `b h rows cols`."""
        return measures.bin_sums(self._prepare_gathering(), query_groups, key_groups, rows, cols), self.statistic

    def topk(self, k: int) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """The k largest weights of each row and their keys: `b h i k` twice."""
        return measures.topk(self._prepare_gathering(), k), self.statistic

    def transposed_product(self, x: Tensor) -> Answer:
        """A.T @ x: `b h j e`, differentiable."""
        return self.measure(transposed_product(x))

    def measure(self, reduction: Reduction) -> Answer:
        """The result of a reduction, differentiable once; any number of times with the reference backend."""
        if self.call.backend == "reference":
            with no_autocast(self.call.q.device):
                prepared = self._prepare()
                if reduction.reads_scores:
                    s = reference.masked_scores(prepared)
                    return reduction.of(prepared, prepared.whole, s, None), self.statistic
                A, statistic = reference.weigh(prepared)
                return reduction.of(prepared, prepared.whole, A, statistic), statistic
        if in_functorch():
            raise ValueError(
                "measures are computed block by block, in place, which torch.func cannot follow; "
                "pass weights(..., backend='reference') to store the matrix"
            )
        return _evaluate(self, reduction)

    def columns(self, ids: Tensor) -> Tensor:
        """Whole columns of A, `b h i ids`, differentiable; from the row statistic only those keys are scored."""
        if self.statistic is not None and self.call.backend != "reference" and not self.call.records_gradients:
            with no_autocast(self.call.q.device):
                prepared = self._prepare()
                if prepared.nonfinite_keys is None and self._are_safe(ids):
                    return measures.known_columns(prepared, ids)
        part, _ = replace(self, statistic=None).measure(measures.columns(ids, self.call.shape[3]))
        return part

    def _are_safe(self, ids: Tensor) -> bool:
        """True if these keys may be scored where a mask hides them; `prepare` looks at visible keys only."""
        return self.call.mask is None or is_traced() or is_safe(self.call.k[:, :, ids])

    def _prepare(self) -> PreparedCall:
        return prepare_with_kernel(self.call, self.statistic)

    def _prepare_gathering(self) -> PreparedCall:
        """The prepared call, for answers that are written in place and have no gradient."""
        if in_functorch():
            raise ValueError(
                "topk, pool, mass and summary work block by block, in place, which torch.func cannot follow; compute "
                "them from weights(..., backend='reference').dense(), or outside of vmap, grad and the like"
            )
        return self._prepare()


@run_uncompiled
def _evaluate(reducer: BlockReducer, reduction: Reduction) -> Answer:
    with no_autocast(reducer.call.q.device):
        return evaluate(reducer._prepare(), reduction)
