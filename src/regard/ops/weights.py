"""Weights: the attention matrix that is never stored.

What it is. `Weights` holds a `Call` (q, k and the terms) and, once it is known, one number per row: the row statistic,
for a softmax the log-sum-exp. From the statistic any weight is recomputed from its own score, so no answer needs the
matrix. `Transposed` is the same matrix read the other way, `Summary` the measures of one pass.

How it flows. A product `A @ x` goes to a backend, as `attend` does (`dispatch.choose`). Every other answer goes to a
`Reducer`, which `choose_reducer` picks per question: `KernelReducer` (ops/fused) launches one Triton kernel,
`BlockReducer` (ops/blocks) walks blocks of rows in PyTorch. Entries `A[...]` score only the rows and keys of the index.
Methods of `Weights` check arguments, ask, and restore the leading dims.

Lifetimes. The first answer that computes the row statistic leaves it in the object, detached; later answers reuse it,
unless they need gradients. The tensors of the call are not copied: after one was changed in place, every answer raises.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, overload

import torch
from torch import Tensor

from ..checks import check_within
from . import dispatch
from .blocks import measures
from .blocks.block_reducer import Answer, BlockReducer
from .blocks.pool_bins import Axis, How, Mesh, check_groups
from .blocks.products import check_factor
from .blocks.reduction import Reduction, has_row_statistic
from .blocks.score_entries import score_entries
from .call import FLOATS, Call, no_autocast
from .checksums import row_and_column_sums
from .divergence import Operand, Rows, divergence_of
from .fused import kernel_reductions
from .fused.kernel_reducer import KernelReducer
from .indexing import chosen_ids, split_index
from .map_image import image_of_maps
from .memory_limit import LIMIT as LIMIT
from .memory_limit import check_fits
from .terms.coordinates import take_entries
from .terms.normalizers import Normalizer, SinkSoftmax, Softmax, Tapered
from .torch_functions import LazyMatrix
from .torch_state import in_forward_mode, run_uncompiled

MAX_MAP_CELLS = 512  # rows and columns of the map of a summary
PICTURED_HEADS = 8  # in a notebook
PICTURED_CELLS, PICTURE_PIXELS = 48, 96  # a side of a head's picture there
MAX_PICTURED_ENTRIES = 2**24  # computed for the picture
DEFAULT_TERMS = ("Dot()", "Softmax()")  # left out of the repr

AnswerT = TypeVar("AnswerT")


def map_axes(n_i: int, n_j: int) -> tuple[Axis, Axis]:
    """The cells of the map of a summary."""
    return Axis.cells(n_i, MAX_MAP_CELLS), Axis.cells(n_j, MAX_MAP_CELLS)


class Reducer(Protocol):
    """A strategy for everything but products `A @ x`; answers come with the row statistic, if it is known by then."""

    def describe(self) -> str:
        """How `summary` runs, for `explain`."""
        ...

    def summary(
        self, mesh: Mesh | None, peaks: bool = False, queries: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Tensor | None]: ...
    def pool(self, mesh: Mesh) -> Answer: ...
    def group_sums(self, query_groups: Tensor, key_groups: Tensor, rows: int, cols: int) -> Answer: ...
    def topk(self, k: int) -> tuple[tuple[Tensor, Tensor], Tensor | None]: ...
    def transposed_product(self, x: Tensor) -> Answer: ...
    def measure(self, reduction: Reduction) -> Answer: ...
    def columns(self, ids: Tensor) -> Tensor: ...


def choose_reducer(call: Call, statistic: Tensor | None = None) -> Reducer:
    """Kernels if they can take this call, else blocks."""
    blocks = BlockReducer(call, statistic)
    if call.backend in (None, "triton") and not kernel_reductions.objections(call):
        return KernelReducer(call, statistic, blocks)
    return blocks


@dataclass(frozen=True, eq=False)
class Summary:
    """The measures of one pass over the matrix."""

    entropy: Tensor  # b h i
    received: Tensor  # b h j
    max: Tensor  # b h i
    distance: Tensor  # b h i
    map: Tensor  # b h rows cols, at most 512 x 512: the mean of each cell, `axes` are the cells
    statistic: Tensor | None  # b h i
    peaks: Tensor | None = None  # b h rows cols: the largest weight of each cell of the map
    logit: Tensor | None = None  # b h i: the largest score; None in files of earlier versions

    @property
    def axes(self) -> tuple[Axis, Axis]:
        """The cells of the map, a power of two a side, the last ones smaller."""
        sizes = zip((self.entropy.shape[-1], self.received.shape[-1]), self.map.shape[-2:], strict=True)
        rows, cols = (Axis.cells(n, count) for n, count in sizes)
        return rows, cols


def _raise_for_tensor_method(self: Any, name: str) -> NoReturn:
    """`__getattr__`: Python calls it for a missing attribute, and for a property that raised AttributeError."""
    if hasattr(type(self), name) or name.startswith("_") or not hasattr(Tensor, name):
        object.__getattribute__(self, name)  # raises the usual AttributeError
    if name in ("mT", "transpose", "swapaxes", "permute", "t") and isinstance(self, Weights):
        raise AttributeError(f"Weights has no {name}; A.T is the transpose, lazy too: A.T @ x, A.T[...]")
    if name in ("cpu", "cuda", "float", "double", "half", "bfloat16") and isinstance(self, Weights):
        raise AttributeError(f"Weights has no {name}; write A.to(device) or A.to(dtype), lazy too")
    raise AttributeError(
        f"{type(self).__name__} has no {name}: the matrix is never stored. It has received(), entropy(), max(), "
        "distance(), logit(), topk(k), pool(rows, cols), mass(...), summary() and A @ v; of a small one write "
        f"A.dense().{name}, of a part A[..., :9, :].{name}"
    )


class Weights(LazyMatrix):
    """A = normalize(mask(score(q, k) + bias)), dims b h i j, computed on demand.

    >>> import torch
    >>> from regard import Causal, weights
    >>> q, k, v = torch.randn(3, 1, 4, 300, 32)
    >>> A = weights(q, k, mask=Causal())
    >>> A.shape, (A @ v).shape, A.entropy().shape, A.topk(3).values.shape
    (torch.Size([1, 4, 300, 300]), torch.Size([1, 4, 300, 32]), torch.Size([1, 4, 300]), torch.Size([1, 4, 300, 3]))
    >>> torch.allclose(A.received(), A[...].sum(-2), atol=1e-5)
    True

    Every answer comes from q, k and one number a row, in memory linear in the sequence. Products, tiles, entropy,
    received, max, distance and logit are differentiable once; topk, pool, mass and summary return detached numbers.
    Weights are those before dropout.
    """

    def __init__(self, call: Call, statistic: Tensor | None = None) -> None:
        self._call = call
        self._statistic = statistic  # b h i 1
        tensors = call.tensors()
        self._versions = [(x, x._version) for x in tensors if not x.is_inference()]
        self._has_inference_tensors = len(self._versions) < len(tensors)
        # Writes to inference tensors are not counted: their numbers are compared once a statistic of them is kept.
        self._sums = [] if statistic is None else self._current_sums()

    if not TYPE_CHECKING:  # else a type checker would accept any attribute
        __getattr__ = _raise_for_tensor_method

    @property
    def call(self) -> Call:
        """The attention these weights belong to: q, k, the four terms and the offset; leading dims flattened to one."""
        return self._call

    @property
    def known_statistic(self) -> Tensor | None:
        """The row statistic if it is known already: `b h i 1`, leading dims flattened to one."""
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
        shown += [f"{name}={term!r}" for name, term in slots if term is not None and repr(term) not in DEFAULT_TERMS]
        return f"Weights({', '.join(shown)})"

    def _repr_html_(self) -> str:
        """Return the text and a small picture of the first heads, for notebooks; of a long matrix the text alone."""
        text = f"<pre>{html.escape(repr(self))}</pre>"
        heads, n_i, n_j = min(self.shape[-3], PICTURED_HEADS), *self.shape[-2:]
        if not self.shape.numel() or heads * n_i * n_j > MAX_PICTURED_ENTRIES:
            return text
        side = PICTURED_CELLS
        with torch.no_grad():
            maps = self.select(batch=[0], heads=slice(heads)).pool(min(n_i, side), min(n_j, side))
        pixels = max(2, PICTURE_PIXELS // max(maps.shape[-2:]))
        image = image_of_maps(maps, cell_pixels=pixels, alt=f"attention of {heads} heads")
        note = f"heads 0 to {heads - 1} of the first text, queries down, keys across, each to its own largest weight"
        return f"{text}{image}<p>{note}</p>"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """The whole matrix as a numpy array; raises above the limit of `dense`."""
        if copy is False:
            raise ValueError(
                "the matrix is not stored, so numpy cannot share it; write np.asarray(A) without copy=False"
            )
        array = self.dense().detach().cpu().numpy()
        return array if dtype is None else array.astype(dtype)

    @property
    def scores(self) -> ScoreMatrix:
        """The scores before the normalizer, lazy too: `A.scores[0, 3, :16]`, hidden entries at -inf."""
        return ScoreMatrix(self)

    @property
    def ndim(self) -> int:
        """The number of dims: leading dims, then h i j."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __bool__(self) -> bool:
        raise TypeError("weights are neither true nor false; write A is None, or A.dense().any()")

    @overload
    def size(self, dim: None = None) -> torch.Size: ...
    @overload
    def size(self, dim: int) -> int: ...
    def size(self, dim: int | None = None) -> torch.Size | int:
        """The shape, or its entry `dim`."""
        return self.shape if dim is None else self.shape[dim]

    def detach(self) -> Weights:
        """The same weights without gradients, lazy too."""
        self._check_unchanged()
        return Weights(self._call.map_tensors(Tensor.detach), self._statistic)

    def to(self, target: torch.device | str | torch.dtype | Tensor, *, dtype: torch.dtype | None = None) -> Weights:
        """The same weights on a device, or from q, k and terms of a floating dtype; lazy too, and itself if it is."""
        self._check_unchanged()
        call = self._call
        wanted = torch.empty(0, dtype=call.q.dtype, device=self.device).to(target)
        wanted = wanted if dtype is None else wanted.to(dtype)
        if wanted.dtype not in FLOATS:
            raise TypeError(f"weights have a floating dtype, got {wanted.dtype}; write A.dense().to({wanted.dtype})")
        if wanted.device != self.device:
            call = call.to(wanted.device)
        if wanted.dtype != call.q.dtype:
            call = call.map_tensors(lambda x: x.to(wanted.dtype) if x.is_floating_point() else x)
            return Weights(call)
        statistic = None if self._statistic is None else self._statistic.to(wanted.device)
        return self if call is self._call else Weights(call, statistic)

    def __matmul__(self, x: Tensor) -> Tensor:
        """A @ x, x with dims b g j e (g, h or 1 heads), in the dtype of x; fused where a backend can."""
        if not isinstance(x, Tensor):
            return NotImplemented
        self._check_unchanged()
        call = self._call.with_values(check_factor(self._call, x, self._call.shape[3], "A @ x"))
        with no_autocast(self.device):
            out, statistic = dispatch.choose(call).run()
        self._keep(statistic)
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
        return self._part(index, self._entries)

    def select(
        self, batch: int | slice | list[int] | None = None, heads: int | slice | list[int] | None = None
    ) -> Weights:
        """The weights of some batch rows (leading dims count as one) and heads, lazy: `A.select(heads=3).entropy()`."""
        self._check_unchanged()
        b, h = self._call.shape[:2]
        named = (("batch", batch, b), ("heads", heads, h))
        chosen = [None if x is None else chosen_ids(name, x, n, self.device) for name, x, n in named]
        statistic = self._statistic
        for dim, ids in enumerate(chosen):
            if ids is not None and statistic is not None:
                statistic = statistic.index_select(dim, ids)
        return Weights(self._call.select(*chosen), statistic)

    def entropy(self) -> Tensor:
        """-sum_j A log A of each query, in nats: `b h i`.

        Rows that do not sum to 1 are taken as they are. Weights that a model changed after the softmax may be negative:
        then this raises, and the entropy of such a row in `summary` is NaN.
        """
        found = self.reduce(measures.entropy())
        if self._call.normalize.signed and bool((negative := found.isnan()).any()):
            raise ValueError(
                "entropy is not defined for negative weights, which the model made after the softmax; "
                f"{int(negative.sum())} of {negative.numel()} rows have one. Use A.summary().entropy, NaN in these rows"
            )
        return found

    def received(self) -> Tensor:
        """The attention each key receives, summed over queries: `b h j`."""
        return self.reduce(measures.key_sums())

    def max(self) -> Tensor:
        """The largest weight of each query: `b h i`."""
        return self.reduce(measures.largest())

    def distance(self) -> Tensor:
        """The mean distance of each query to its keys, sum_j A abs(i - j): `b h i`."""
        return self.reduce(measures.distance())

    def logit(self) -> Tensor:
        """max_j s_ij, the largest score of each query before the normalizer, cap, bias and mask included: `b h i`.

        >>> import torch
        >>> from regard import Causal, weights
        >>> A = weights(*torch.randn(2, 1, 4, 300, 32), mask=Causal())
        >>> torch.allclose(A.logit(), A.max().log() + A.lse, atol=1e-5)
        True

        A sink and the bias of a sigmoid are no scores. A query that sees no key has -inf. Weights that a model changed
        after the softmax, and that are kept themselves, have no scores: then this raises, and `summary` has NaN.
        """
        if not self._call.normalize.has_scores:
            raise ValueError(
                "the scores of these weights are not known: the model changed the weights after the softmax, and they "
                "are kept instead of queries and keys. Use A.max() or A.entropy()"
            )
        return self.reduce(measures.logit())

    def kl(self, other: Weights | HeadMean | Tensor, *, rows: Rows = None) -> Tensor:
        """KL(A || B) = sum_j A log(A / B) of each query, in nats: `b h i`. B is `other`.

        >>> import torch
        >>> from regard import Causal, weights
        >>> q, k, student, keys = torch.randn(4, 1, 2, 300, 32)
        >>> A, B = (weights(*x, mask=Causal()) for x in ((q, k), (student, keys)))
        >>> A.kl(B).shape, A.mean_heads().kl(B).shape, B.kl(B).abs().max() < 1e-6
        (torch.Size([1, 2, 300]), torch.Size([1, 2, 300]), tensor(True))

        The other matrix has the same queries, keys and heads, or one head; its widths and terms may differ. It is lazy
        weights, their mean over heads, or a target: a tensor with dims that broadcast to b h i j. Neither matrix
        is stored, and the result is differentiable once for both. `rows` names the queries to compare, as an index
        does; a target has these rows alone.

        A key with A = 0 counts 0. KL is infinite if a key has B = 0 and A > 0, and such a row passes no gradient; `js`
        is finite there. A row of A that sees no key has KL 0. Rows are taken as they are: for rows that do not sum to 1
        KL may be negative. Negative weights make it NaN.
        """
        return divergence_of("kl", self._operand(), _operand_of(other), rows)

    def js(self, other: Weights | HeadMean | Tensor, *, rows: Rows = None) -> Tensor:
        """The Jensen-Shannon divergence of each query, (KL(A || M) + KL(B || M)) / 2 with M = (A + B) / 2: `b h i`.

        Symmetric, from 0 to log 2, finite for any masks. If one side of a row sees no key, it is log 2 / 2; if neither
        does, 0. `other` and `rows` are those of `kl`.
        """
        return divergence_of("js", self._operand(), _operand_of(other), rows)

    def mse(self, other: Weights | HeadMean | Tensor, *, rows: Rows = None) -> Tensor:
        """The squared difference of each query, averaged over all keys, hidden ones included: `b h i`.

        `other` and `rows` are those of `kl`.
        """
        return divergence_of("mse", self._operand(), _operand_of(other), rows)

    def dot(self, other: Weights | HeadMean | Tensor, *, rows: Rows = None) -> Tensor:
        """The overlap of each query, sum_j A B: `b h i`. With a target of 0 and 1, the attention on its keys.

        `other` and `rows` are those of `kl`.
        """
        return divergence_of("dot", self._operand(), _operand_of(other), rows)

    def mean_heads(self) -> HeadMean:
        """The mean over heads, lazy too, to compare: `A.mean_heads().kl(B)`, `B.js(A.mean_heads())`."""
        return HeadMean(self)

    @run_uncompiled
    def topk(self, k: int) -> torch.return_types.topk:
        """The k largest weights of each query and their keys: `b h i k` twice, as `values` and `indices`."""
        n = self._call.shape[3]
        check_within("k", k, n, "keys")
        check_fits("this many weights and their keys", 2 * k * self._call.q.shape[:3].numel(), self.dtype)
        values, indices = self._gather(lambda reducer: reducer.topk(k))
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
        mesh = Mesh(Axis.even(i, rows), Axis.even(j, cols), self.device, how)
        return self._restore(self._gather(lambda reducer: reducer.pool(mesh)))

    @run_uncompiled
    def mass(self, query_groups: Tensor, key_groups: Tensor) -> Tensor:
        """Attention between groups of tokens, say sentences: summed over a group's keys, averaged over its queries.

        Groups are whole numbers from 0, dims (i,) or (b, i); the result has dims b h query-groups key-groups.
        """
        b, h, i, j = self._call.shape
        query_groups = check_groups("query_groups", query_groups, b, i, self.device)
        key_groups = check_groups("key_groups", key_groups, b, j, self.device)
        rows, cols = (int(x.max()) + 1 if x.numel() else 0 for x in (query_groups, key_groups))
        check_fits("the mass between these groups", b * h * rows * cols, self.dtype)
        sums = self._gather(lambda reducer: reducer.group_sums(query_groups, key_groups, rows, cols))
        counts = torch.stack([x.bincount(minlength=rows) for x in query_groups]).clamp(min=1)
        return self._restore(sums / counts[:, None, :, None])

    def summary(self, *, peaks: bool = False, queries: Tensor | None = None) -> Summary:
        """Entropy, received mass, maximum, distance, logit and a map of at most 512 x 512, in one pass.

        A cell of the map is 1, 2, 4, ... queries by 1, 2, 4, ... keys, as few as will do; the last ones may have fewer.
        The map holds the mean of each cell; with `peaks` the summary also holds the largest weight of each cell. With
        `queries`, `*b i`, the rows of all others, such as padding, count as rows that see no key.
        """
        return self.summary_in(*map_axes(*self._call.shape[2:]), peaks=peaks, queries=queries)

    @run_uncompiled
    def summary_in(self, rows: Axis, cols: Axis, *, peaks: bool = False, queries: Tensor | None = None) -> Summary:
        """The same with a map in other bins."""
        mesh, counted = Mesh(rows, cols, self.device), self._check_queries(queries)
        values = self._gather(lambda reducer: reducer.summary(mesh, peaks, counted))
        return Summary(
            **{name: self._restore(value) for name, value in values.items()},
            statistic=None if self._statistic is None else self._restore(self._statistic.squeeze(-1)),
        )

    @run_uncompiled
    def measures(self, *, queries: Tensor | None = None) -> dict[str, Tensor]:
        """Entropy, received mass, maximum, distance and logit by name, in one pass: a summary without its map."""
        counted = self._check_queries(queries)
        values = self._gather(lambda reducer: reducer.summary(None, queries=counted))
        return {name: self._restore(value) for name, value in values.items()}

    def _check_queries(self, queries: Tensor | None) -> Tensor | None:
        """Check which queries count, and return them as `b i`."""
        if queries is None:
            return None
        b, _, i, _ = self._call.shape
        if queries.dtype != torch.bool or queries.shape not in ((*self.shape[:-3], i), (b, i)):
            raise ValueError(
                f"queries must be a bool tensor of shape {(*self.shape[:-3], i)}, True for those that count, got "
                f"{queries.dtype} of {tuple(queries.shape)}"
            )
        return queries.to(self.device).reshape(b, i)

    def reduce(self, reduction: Reduction) -> Tensor:
        """The result of a reduction over blocks of rows, differentiable once."""
        value, statistic = self._reducer().measure(reduction)
        self._keep(statistic)
        return self._restore(value)

    def dense(self, limit: str = LIMIT) -> Tensor:
        """The whole matrix, if it takes no more memory than `limit`."""
        check_fits("the dense matrix", self.shape.numel(), self.dtype, limit)
        part = self._entries(*(torch.arange(n, device=self.device) for n in self._call.shape))
        return self._restore(part)

    @property
    def statistic(self) -> Tensor | None:
        """The row statistic, detached: `b h i`; None for normalizers that need none."""
        self._check_unchanged()
        if self._statistic is None and has_row_statistic(self._call):
            with torch.no_grad():
                self.reduce(measures.statistic())
        return None if self._statistic is None else self._restore(self._statistic.squeeze(-1))

    @property
    def lse(self) -> Tensor:
        """log sum exp of each row's scores (and the sink, if there is one), for softmax kinds: `b h i`."""
        kind: Normalizer = self._call.normalize
        while isinstance(kind, Tapered):
            kind = kind.inner
        if not isinstance(kind, (Softmax, SinkSoftmax)):
            raise AttributeError(f"lse exists for softmax kinds, not for {kind!r}; use A.statistic")
        if self._call.records_gradients:
            return self.reduce(measures.statistic())
        assert self.statistic is not None
        return self.statistic

    def _operand(self) -> Operand:
        self._check_unchanged()
        return Operand(self._call, self._statistic, self._keep)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._call, self._statistic)

    def __deepcopy__(self, memo: dict[int, Any]) -> Weights:
        return Weights(deepcopy(self._call, memo), deepcopy(self._statistic, memo))

    def _reducer(self) -> Reducer:
        self._check_unchanged()
        return choose_reducer(self._call, self._statistic)

    def _gather(self, question: Callable[[Reducer], tuple[AnswerT, Tensor | None]]) -> AnswerT:
        """An answer without gradients."""
        with torch.no_grad(), no_autocast(self.device):
            answer, statistic = question(self._reducer())
        self._keep(statistic)
        return answer

    def _keep(self, statistic: Tensor | None) -> None:
        if self._statistic is None and statistic is not None:
            self._sums = self._current_sums()
            carries_derivative = statistic.requires_grad or in_forward_mode()
            self._statistic = statistic.detach() if carries_derivative else statistic

    def _current_sums(self) -> list[tuple[Tensor, Tensor]]:
        if not self._has_inference_tensors:
            return []
        return [(x, row_and_column_sums(x)) for x in self._call.tensors() if x.is_inference()]

    def _part(self, index: Any, entries: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """The part that an index names, from a function that returns the entries where ids of each axis cross."""
        ids, rest = split_index(index, self.shape, self.device)
        check_fits("this part of the matrix", math.prod(axis.numel() for axis in ids), self.dtype)
        *lead, heads, rows, cols = ids
        flat = torch.arange(self._call.shape[0], device=self.device).view(self._call.lead)
        batch = take_entries(flat, tuple(lead)).reshape(-1) if lead else flat.view(-1)
        part = entries(batch, heads, rows, cols)
        return part.view(*(axis.numel() for axis in ids))[rest]

    def _entries(self, batch: Tensor, heads: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        """The entries where those batch rows, heads, rows and keys cross: `batch heads rows cols`."""
        self._check_unchanged()
        statistic = None if self._statistic is None else take_entries(self._statistic, (batch, heads, rows))
        selection = self._call.select(batch, heads, rows)
        part = choose_reducer(selection, statistic).columns(cols)
        return part.reshape(batch.numel(), heads.numel(), rows.numel(), cols.numel())

    def _restore(self, x: Tensor) -> Tensor:
        return x if len(self._call.lead) == 1 else x.unflatten(0, self._call.lead)

    def _check_unchanged(self) -> None:
        changed = [x for x, version in self._versions if x._version != version]
        changed += [x for x, sums in self._sums if not torch.equal(row_and_column_sums(x), sums)]
        if changed:
            raise RuntimeError(
                f"a tensor of these weights, shape {tuple(changed[0].shape)}, was changed in place after weights(...); "
                "call weights(...) again, or on a clone"
            )


class ScoreMatrix:
    """mask(score(q, k) + bias), the scores of `Weights` before their normalizer: dims b h i j, hidden entries -inf.

    >>> import torch
    >>> from regard import Causal, weights
    >>> A = weights(*torch.randn(2, 1, 4, 5, 32), mask=Causal())
    >>> A.scores[0, 0, 0].isneginf().tolist()
    [False, True, True, True, True]
    >>> torch.allclose(A.scores[0].softmax(-1), A[0], atol=1e-5)
    True
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    @property
    def shape(self) -> torch.Size:
        return self._weights.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.dtype

    def __repr__(self) -> str:
        return f"{self._weights!r}.scores"

    def __getitem__(self, index: Any) -> Tensor:
        """The scores that PyTorch would index in the dense matrix, differentiable in q, k and the terms."""
        A = self._weights
        A._check_unchanged()
        return A._part(index, lambda batch, heads, rows, cols: score_entries(A.call.select(batch, heads, rows), cols))

    def dense(self, limit: str = LIMIT) -> Tensor:
        """All scores, if they take no more memory than `limit`."""
        A = self._weights
        check_fits("the dense matrix of scores", A.shape.numel(), A.dtype, limit)
        A._check_unchanged()
        return A._restore(score_entries(A.call, torch.arange(A.shape[-1], device=A.device)))


class Transposed(LazyMatrix):
    """A.T: dims b h j i."""

    is_transposed = True

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    @property
    def shape(self) -> torch.Size:
        *lead, i, j = self._weights.shape
        return torch.Size((*lead, j, i))

    @property
    def T(self) -> Weights:
        """A again."""
        return self._weights

    def __repr__(self) -> str:
        return f"{self._weights!r}.T"

    def __rmatmul__(self, x: Tensor) -> Tensor:
        """x @ A.T, x with dims b h n j."""
        if not isinstance(x, Tensor):
            return NotImplemented
        return (self._weights @ x.mT).mT

    def __matmul__(self, x: Tensor) -> Tensor:
        """A.T @ x, x with dims b g i e (g, h or 1 heads), in the dtype of A."""
        if not isinstance(x, Tensor):
            return NotImplemented
        A = self._weights
        x = check_factor(A.call, x, A.call.shape[2], "A.T @ x")
        product, statistic = A._reducer().transposed_product(x)
        A._keep(statistic)
        return A._restore(product)

    def __getitem__(self, index: Any) -> Tensor:
        """A.T[index] as PyTorch would index the dense matrix."""
        ids, rest = split_index(index, self.shape, self._weights.device)
        swapped = (*ids[:-2], ids[-1], ids[-2])
        A = self._weights
        return A[tuple(x.view([-1 if m == n else 1 for m in range(len(ids))]) for n, x in enumerate(swapped))].mT[rest]

    def dense(self, limit: str = LIMIT) -> Tensor:
        """The whole transposed matrix."""
        return self._weights.dense(limit).mT


class HeadMean:
    """The mean of weights over their heads, `A.mean_heads()`: dims b 1 i j, never stored either."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    @property
    def shape(self) -> torch.Size:
        *lead, _, i, j = self._weights.shape
        return torch.Size((*lead, 1, i, j))

    def __repr__(self) -> str:
        return f"{self._weights!r}.mean_heads()"

    def kl(self, other: Weights | HeadMean | Tensor, *, rows: Rows = None) -> Tensor:
        """KL(mean of A || B) of each query, as `Weights.kl`."""
        return divergence_of("kl", self._operand(), _operand_of(other), rows)

    def js(self, other: Weights | HeadMean | Tensor, *, rows: Rows = None) -> Tensor:
        """The Jensen-Shannon divergence of each query, as `Weights.js`."""
        return divergence_of("js", self._operand(), _operand_of(other), rows)

    def mse(self, other: Weights | HeadMean | Tensor, *, rows: Rows = None) -> Tensor:
        """The mean squared difference of each query, as `Weights.mse`."""
        return divergence_of("mse", self._operand(), _operand_of(other), rows)

    def dot(self, other: Weights | HeadMean | Tensor, *, rows: Rows = None) -> Tensor:
        """The overlap of each query, as `Weights.dot`."""
        return divergence_of("dot", self._operand(), _operand_of(other), rows)

    def dense(self, limit: str = LIMIT) -> Tensor:
        """The whole mean; the matrices of all heads must fit in `limit`."""
        return self._weights.dense(limit).mean(-3, keepdim=True)

    def _operand(self) -> Operand:
        return replace(self._weights._operand(), mean=True)


def _operand_of(other: object) -> Operand | Tensor:
    if isinstance(other, (Weights, HeadMean)):
        return other._operand()
    if isinstance(other, Tensor):
        return other
    raise TypeError(
        f"the other side must be weights, A.mean_heads() or a tensor of targets, got {type(other).__name__}; "
        "write A.kl(weights(q, k))"
    )
