"""Weights: the attention matrix that is never stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checks import check_within
from . import dispatch
from .backends import reference
from .backends.triton import prepare_with_kernel
from .blocks import measures
from .blocks.measures import How
from .blocks.pool_bins import Axis, groups
from .blocks.prepared_call import PreparedCall
from .blocks.products import factor
from .blocks.reduction import Reduction, empty_row_statistic, evaluate
from .call import Call, no_autocast
from .fused import kernel_reductions as fused
from .fused.topk_entries import top, worthwhile
from .indexing import chosen_ids, split
from .memory_limit import LIMIT as LIMIT
from .memory_limit import check_fits
from .terms.coordinates import take_entries
from .terms.normalizers import Normalizer, SinkSoftmax, Softmax, Tapered
from .torch_state import in_forward_mode, in_functorch, run_uncompiled
from .transposed_weights import Transposed
from .weights_hints import no_tensor

MAP = 512  # cells a side, at most
SUMMARY = frozenset(("entropy", "received", "max", "distance", "map"))


def map_axes(n_i: int, n_j: int) -> tuple[Axis, Axis]:
    """The cells of the map of a summary."""
    return Axis.cells(n_i, MAP), Axis.cells(n_j, MAP)


@dataclass(frozen=True, eq=False)
class Summary:
    """The measures of one pass over the matrix."""

    entropy: Tensor  # b h i
    received: Tensor  # b h j
    max: Tensor  # b h i
    distance: Tensor  # b h i
    map: Tensor  # b h rows cols, at most 512 x 512: the mean of each cell, which is a power of two a side
    statistic: Tensor | None  # b h i


@no_tensor
class Weights:
    """A = normalize(mask(score(q, k) + bias)), dims b h i j, rebuilt wherever it is asked for.

    >>> import torch
    >>> from regard import Causal, weights
    >>> q, k, v = torch.randn(3, 1, 4, 300, 32)
    >>> A = weights(q, k, mask=Causal())
    >>> A.shape, (A @ v).shape, A.entropy().shape, A.topk(3).values.shape
    (torch.Size([1, 4, 300, 300]), torch.Size([1, 4, 300, 32]), torch.Size([1, 4, 300]), torch.Size([1, 4, 300, 3]))
    >>> torch.allclose(A.received(), A[...].sum(-2), atol=1e-5)
    True

    Every answer comes from q, k and one number a row, in memory linear in the sequence. Products, tiles, entropy,
    received, max and distance are differentiable once; topk, pool, mass and summary return detached numbers.
    Weights are those before dropout.
    """

    def __init__(self, call: Call, statistic: Tensor | None = None) -> None:
        self._call = call
        self._statistic = statistic  # b h i 1
        self._versions = [(x, x._version) for x in call.tensors() if not x.is_inference()]

    @property
    def call(self) -> Call:
        """What these are the weights of: q and k, the four terms, the offset; leading dims as one."""
        return self._call

    @property
    def known_statistic(self) -> Tensor | None:
        """The row statistic if it was found, or given, already: `b h i 1`, leading dims as one."""
        return self._statistic

    @property
    def shape(self) -> torch.Size:
        """Leading dims, then h i j."""
        return torch.Size((*self._call.lead, *self._call.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of everything but `A @ X`, which has that of X: float32, or float64 for float64 inputs."""
        return self._call.dtype

    @property
    def device(self) -> torch.device:
        return self._call.q.device

    @property
    def T(self) -> Transposed:
        """A.T, lazy too: `A.T @ x`, `A.T[...]`, `A.T.dense()`."""
        return Transposed(self)

    def __repr__(self) -> str:
        slots = self._call.slots.items()
        shown = [" x ".join(map(str, self.shape))]
        shown += [f"{name}={term!r}" for name, term in slots if term is not None and repr(term) not in PLAIN]
        return f"Weights({', '.join(shown)})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """The whole matrix as numpy takes it, as `dense` under its limit."""
        if copy is False:
            raise ValueError("the matrix is made when it is asked for; np.asarray(A) without copy=False makes it")
        array = self.dense().detach().cpu().numpy()
        return array if dtype is None else array.astype(dtype)

    def __matmul__(self, x: Tensor) -> Tensor:
        """A @ x, x with dims b g j e (g, h or 1 heads), in the dtype of x; fused where a backend can."""
        if not isinstance(x, Tensor):
            return NotImplemented
        self._guard()
        call = self._call.with_values(factor(self._call, x, self._call.shape[3], "A @ x"))
        with no_autocast(self.device):
            out, statistic = dispatch.choose(call).run(call)
        if self._statistic is None and statistic is not None:
            self._statistic = statistic.detach()
        return self._restore(out)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        """x @ A, x with dims b h n i."""
        if not isinstance(x, Tensor):
            return NotImplemented
        if x.ndim < 2:
            raise ValueError(f"x @ A takes x with dims b h n {self._call.shape[2]}, got shape {tuple(x.shape)}")
        return (self.T @ x.mT).mT

    def __getitem__(self, index: Any) -> Tensor:
        """A[index] as PyTorch would index the dense matrix, computing only the rows and keys it names."""
        ids, rest = split(index, self.shape, self.device)
        n = 1
        for axis in ids:
            n *= axis.numel()
        check_fits("this part of the matrix", n, self.dtype)
        *lead, heads, rows, cols = ids
        flat = torch.arange(self._call.shape[0], device=self.device).view(self._call.lead)
        batch = take_entries(flat, tuple(lead)).reshape(-1) if lead else flat.view(-1)
        part = self._tile(batch, heads, rows, cols)
        return part.view(*(axis.numel() for axis in ids))[rest]

    def select(
        self, batch: int | slice | list[int] | None = None, heads: int | slice | list[int] | None = None
    ) -> Weights:
        """Some batch rows (leading dims counted as one) and heads, still lazy: `A.select(heads=3).entropy()`."""
        self._guard()
        b, h = self._call.shape[:2]
        named = (("batch", batch, b), ("heads", heads, h))
        chosen = [None if x is None else chosen_ids(name, x, n, self.device) for name, x, n in named]
        statistic = self._statistic
        for dim, ids in enumerate(chosen):
            if ids is not None and statistic is not None:
                statistic = statistic.index_select(dim, ids)
        return Weights(self._call.select(*chosen), statistic)

    def entropy(self) -> Tensor:
        """-sum_j A log A of each query, in nats: `b h i`."""
        return self._reduce(measures.entropy())

    def received(self) -> Tensor:
        """The attention each key receives, summed over queries: `b h j`."""
        return self._reduce(measures.received())

    def max(self) -> Tensor:
        """The largest weight of each query: `b h i`."""
        return self._reduce(measures.largest())

    def distance(self) -> Tensor:
        """How far each query looks, sum_j A abs(i - j): `b h i`."""
        return self._reduce(measures.distance())

    @run_uncompiled
    def topk(self, k: int) -> torch.return_types.topk:
        """The k largest weights of each query and their keys: `b h i k` twice, as `values` and `indices`."""
        n = self._call.shape[3]
        check_within("k", k, n, "keys")
        check_fits("this many weights and their keys", 2 * k * self._call.q.shape[:3].numel(), self.dtype)
        with self._numbers():
            if self._has_kernel() and worthwhile(self._call, k):
                values, indices = top(self._call, self._fused_statistic(), k)
            else:
                values, indices = measures.top(self._walked(), k)
        return torch.return_types.topk((self._restore(values), self._restore(indices)))

    @run_uncompiled
    def pool(self, rows: int, cols: int, how: How = "mean") -> Tensor:
        """A map of any resolution: `b h rows cols`, query r in row r * rows // i; hidden entries count as 0."""
        b, h, i, j = self._call.shape
        for name, count, n, axis in (("rows", rows, i, "queries"), ("cols", cols, j, "keys")):
            check_within(name, count, n, axis)
        if how not in ("mean", "sum", "max"):
            raise ValueError(f"how must be 'mean', 'sum' or 'max', got {how!r}")
        check_fits("this map", b * h * rows * cols, self.dtype)
        mesh = fused.Mesh(Axis.even(i, rows), Axis.even(j, cols), self.device, how)
        with self._numbers():
            if self._has_kernel():
                want = "peaks" if how == "max" else "map"
                found = self._by_kernel(frozenset((want,)), mesh)[want]
            else:
                reduction = measures.bin_maxima if how == "max" else measures.bin_sums
                found = reduction(self._walked(), *mesh.ids, rows, cols)
                found = found / mesh.area if how == "mean" else found
        return self._restore(found)

    @run_uncompiled
    def mass(self, query_groups: Tensor, key_groups: Tensor) -> Tensor:
        """Attention between groups of tokens, say sentences: summed over a group's keys, averaged over its queries.

        Groups are whole numbers from 0, dims (i,) or (b, i); the result has dims b h query-groups key-groups.
        """
        b, h, i, j = self._call.shape
        query_groups = groups("query_groups", query_groups, b, i, self.device)
        key_groups = groups("key_groups", key_groups, b, j, self.device)
        rows, cols = (int(x.max()) + 1 if x.numel() else 0 for x in (query_groups, key_groups))
        check_fits("the mass between these groups", b * h * rows * cols, self.dtype)
        with self._numbers():
            if self._has_kernel() and rows and cols:
                statistic = self._fused_statistic()
                sums = fused.group_sums(self._call, statistic, query_groups, key_groups, rows, cols)
            else:
                sums = measures.bin_sums(self._walked(), query_groups, key_groups, rows, cols)
        counts = torch.stack([x.bincount(minlength=rows) for x in query_groups]).clamp(min=1)
        return self._restore(sums / counts[:, None, :, None])

    def summary(self) -> Summary:
        """Entropy, received mass, maximum, distance and a map of at most 512 x 512, in one pass.

        A cell of the map is 1, 2, 4, ... queries by 1, 2, 4, ... keys, as few as will do; the last ones may have fewer.
        """
        return self.summary_in(*map_axes(*self._call.shape[2:]))

    @run_uncompiled
    def summary_in(self, rows: Axis, cols: Axis) -> Summary:
        """The same with a map in other bins."""
        mesh = fused.Mesh(rows, cols, self.device)
        with self._numbers():
            if self._has_kernel():
                found = self._by_kernel(SUMMARY, mesh)
            else:
                found, self._statistic = measures.fold(self._walked(), *mesh.ids, *mesh.shape)
                found["map"] = found["map"] / mesh.area
        return Summary(
            entropy=self._restore(found["entropy"]),
            received=self._restore(found["received"]),
            max=self._restore(found["max"]),
            distance=self._restore(found["distance"]),
            map=self._restore(found["map"]),
            statistic=None if self._statistic is None else self._restore(self._statistic.squeeze(-1)),
        )

    def dense(self, limit: str = LIMIT) -> Tensor:
        """The whole matrix, if it takes no more memory than `limit`."""
        n = 1
        for size in self.shape:
            n *= size
        check_fits("the dense matrix", n, self.dtype, limit)
        b, h, i, j = self._call.shape
        part = self._tile(*(torch.arange(n, device=self.device) for n in (b, h, i, j)))
        return self._restore(part)

    @property
    def statistic(self) -> Tensor | None:
        """The row statistic, detached: `b h i`; None for normalizers that need none."""
        self._guard()
        if self._statistic is None:
            with self._numbers():
                if empty_row_statistic(self._prepared()) is not None:
                    self._reduce(measures.statistic())
        return None if self._statistic is None else self._restore(self._statistic.squeeze(-1))

    @property
    def lse(self) -> Tensor:
        """log sum exp of each row's scores (and the sink, if there is one), for softmax kinds: `b h i`."""
        kind: Normalizer = self._call.normalize
        while isinstance(kind, Tapered):
            kind = kind.inner
        if not isinstance(kind, (Softmax, SinkSoftmax)):
            raise AttributeError(f"lse exists for softmax kinds, not for {kind!r}; use A.statistic")
        if self._differentiated():
            return self._reduce(measures.statistic())
        assert self.statistic is not None
        return self.statistic

    @contextmanager
    def _numbers(self) -> Iterator[None]:
        """Where numbers are gathered: no gradients, no autocast."""
        with torch.no_grad(), no_autocast(self.device):
            yield

    def _prepared(self) -> PreparedCall:
        self._guard()
        with no_autocast(self.device):
            return prepare_with_kernel(self._call, self._statistic)

    def _walked(self) -> PreparedCall:
        """The prepared, for what is gathered block by block."""
        if in_functorch():
            raise ValueError(
                "topk, pool, mass and summary are gathered block by block, in place, which torch.func cannot follow; "
                "take them of weights(..., backend='reference').dense(), or outside of vmap, grad and their kin"
            )
        return self._prepared()

    @run_uncompiled
    def _by_blocks(self, reduction: Reduction) -> tuple[Tensor, Tensor | None]:
        with no_autocast(self.device):
            return evaluate(self._prepared(), reduction)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._call, self._statistic)

    def __deepcopy__(self, memo: dict[int, Any]) -> Weights:
        return Weights(deepcopy(self._call, memo), deepcopy(self._statistic, memo))

    def _reduce(self, reduction: Reduction) -> Tensor:
        if reduction.measure is not None and self._has_kernel(reduction.measure):
            return self._restore(self._measured(reduction.measure))
        if in_functorch() and self._call.backend != "reference":
            raise ValueError(
                "measures are taken block by block, in place, which torch.func cannot follow; "
                "pass weights(..., backend='reference') to store the matrix"
            )
        if self._call.backend == "reference":
            prepared = self._prepared()
            with no_autocast(self.device):
                A, statistic = reference.weigh(prepared)
                value = reduction.of(prepared, prepared.whole(), A, statistic)
        else:
            value, statistic = self._by_blocks(reduction)
        if self._statistic is None and statistic is not None:
            self._statistic = statistic.detach()
        return self._restore(value)

    def _differentiated(self) -> bool:
        return in_forward_mode() or (torch.is_grad_enabled() and any(x.requires_grad for x in self._call.tensors()))

    def _has_kernel(self, measure: str | None = None) -> bool:
        """Is there a kernel for this call, and, where a measure is to be differentiated, for its gradient?"""
        if self._call.backend not in (None, "triton") or fused.objections(self._call):
            return False
        return measure is None or not self._differentiated() or fused.differentiable(self._call, measure)

    def _measured(self, measure: str) -> Tensor:
        if self._differentiated():
            return fused.differentiated(self._call, self._fused_statistic(), measure)
        with self._numbers():
            return self._by_kernel(frozenset((measure,)))[measure]

    def _by_kernel(self, want: frozenset[str], bins: fused.Binning | None = None) -> dict[str, Tensor]:
        return fused.reduce_by_kernel(self._call, self._fused_statistic(), want, bins)

    def _fused_statistic(self) -> Tensor:
        """The row statistic `b h i 1`, by a fused product where none has been taken yet."""
        self._guard()
        if self._statistic is None:
            call = self._call.with_values(self._call.k)
            with self._numbers():
                _, self._statistic = dispatch.choose(call).run(call)
        assert self._statistic is not None
        return self._statistic

    def _tile(self, batch: Tensor, heads: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        """The entries where those batch rows, heads, rows and keys cross: `batch heads rows cols`."""
        self._guard()
        call = self._call.select(batch, heads, rows)
        known = self._statistic
        if known is not None and not self._differentiated() and call.backend != "reference":
            with self._numbers():
                prepared = prepare_with_kernel(call, take_entries(known, (batch, heads, rows)))
                if prepared.nonfinite_keys is None:
                    return measures.known_columns(prepared, cols)
        part = Weights(call)._reduce(measures.columns(cols, call.shape[3]))
        return part.reshape(batch.numel(), heads.numel(), rows.numel(), cols.numel())

    def _restore(self, x: Tensor) -> Tensor:
        return x if len(self._call.lead) == 1 else x.unflatten(0, self._call.lead)

    def _guard(self) -> None:
        for x, version in self._versions:
            if x._version != version:
                raise RuntimeError(
                    f"a tensor of these weights, shape {tuple(x.shape)}, was changed in place after weights(...); "
                    "call weights(...) again, or on a clone"
                )


PLAIN = ("Dot()", "Softmax()")
