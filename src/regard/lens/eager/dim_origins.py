"""Track what the dims of tensors come from: heads are the dims that a model splits off the features of a projection.

    q = linear(x)                               # b n (h d): the last dim are features
    q = q.view(b, n, h, d).transpose(1, 2)      # b h n d: h was split off the features, so it counts heads
    q = q.reshape(b * h, n, d)                  # (b h) n d: a fold, whose parts and order are known

What
    `DimOrigins` keeps an `Origin` beside each tensor: for each dim the factors that were merged into it, the outer
    first, each with its kind and size. Layers that map features (linear, convolutions, norms, embeddings) begin it,
    reshapes split and merge factors, permutes move them, and a product of queries and keys joins those of both.

Lifetimes
    Tensors are referenced weakly. `clear` forgets all when the outermost module of the model returns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from math import prod
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.parameter import Parameter

from .matmul import parse_contraction

FEATURES = "features"  # from the features of a projection
PRESUMED = "presumed features"  # from the last dim of a tensor of unknown origin with two or three dims
LEARNED = "learned"  # a dim of a parameter
ROWS = "rows"  # texts, positions: no features
STACKED = "stacked"  # tensors that were computed apart, stacked or concatenated
REPEATED = "repeated"  # a dim that was expanded
UNKNOWN = "unknown"
CONTEXT = "context"  # followed by a number: rows of an average that may be the context of a linear attention

MAX_RECORDS = 2048  # records of dead tensors are dropped beyond this number
MAX_RESULTS = 4096  # remembered results of rules are dropped beyond this number


class Factor(NamedTuple):
    """A part of a dim."""

    kind: str
    size: int


Dim = tuple[Factor, ...]  # the factors of a dim, the outer first; a dim of size 1 may have none


class Piece(NamedTuple):
    """A position along a dim that a tensor was cut from, by an index, a slice, `split` or `unbind`."""

    family: tuple[int, int]  # id of the whole tensor, and its dim
    start: int
    kind: str


class Origin(NamedTuple):
    """The origin of the dims of a tensor."""

    dims: tuple[Dim, ...]
    piece: Piece | None = None
    is_learned: bool = False  # a function of parameters and constants alone


class DimOrigins:
    """The origins of live tensors, and which tensors hold constants: among them the buffers of the model."""

    def __init__(self, is_buffer: Callable[[Tensor], bool] = lambda x: False) -> None:
        self._is_buffer = is_buffer
        self._records: dict[int, tuple[weakref.ref[Tensor], Origin | None]] = {}
        self._written: set[int] = set()  # memories that the model wrote to in this pass
        self._caches: set[int] = set()  # memories of buffers that it wrote to in any pass

    def get(self, x: Any) -> Origin | None:
        """Return the origin of a tensor; None if it is unknown, or the tensor a constant."""
        record = self._records.get(id(x))
        return record[1] if record is not None and record[0]() is x else None

    def origin_of(self, x: Tensor) -> Origin:
        """Return the origin of a tensor, or what its shape lets presume."""
        if (origin := self.get(x)) is not None:
            return origin
        if is_parameter(x):
            return Origin(tuple(_dim(LEARNED, size) for size in x.shape))
        kinds = [UNKNOWN] * x.ndim
        if x.ndim in (2, 3):
            kinds[-1] = PRESUMED
        return Origin(tuple(map(_dim, kinds, x.shape)))

    def is_constant(self, x: Tensor) -> bool:
        """Whether a tensor holds numbers that depend on no input and no parameter, such as a grid of coordinates.

        A buffer that the model wrote to is a cache, and no constant.
        """
        record = self._records.get(id(x))
        if record is not None and record[0]() is x:
            is_constant = record[1] is None
        else:
            is_constant = self._is_buffer(x) or (x._base is not None and self.is_constant(x._base))
        written = self._written or self._caches
        return is_constant and not (written and (_memory(x) in self._written or _memory(x) in self._caches))

    def is_learned(self, x: Tensor) -> bool:
        """Whether a tensor depends on parameters and constants alone, as a parameter that was normalized."""
        return is_parameter(x) or ((origin := self.get(x)) is not None and origin.is_learned)

    def follow(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Note the origin of the result of a call that ran."""
        try:
            rule = _RULE_OF[func]
        except KeyError:
            rule = _RULE_OF[func] = _rule_of(func)
        if rule is None:
            return
        asked = None if self._written or type(out) is not Tensor else self._signature(func, rule, args, kwargs)
        if asked is not None and (known := _RESULTS.get(asked)) is not None:
            origin, source, _ = known
            if origin is not None and source is not None:
                origin = origin._replace(piece=_piece(self, (*args, *kwargs.values())[source]))
            self.add_known(out, origin)
            return
        # A call in a form that no rule expects, or with nested tensors, leaves the origin unknown.
        try:
            rule(self, args, kwargs, out)
        except (TypeError, ValueError, IndexError, AttributeError, RuntimeError):
            return
        if asked is not None:
            self._remember(asked, (*args, *kwargs.values()), out)

    def _remember(self, asked: tuple[Any, ...], given: Sequence[Any], out: Tensor) -> None:
        """Remember the origin that a rule found for a result of the arguments that are given."""
        record = self._records.get(id(out))
        if record is None or record[0]() is not out:
            return
        origin = record[1]
        if origin is None:
            _RESULTS[asked] = None, None, []
            return
        if len(_RESULTS) > MAX_RESULTS:
            _RESULTS.clear()
            _DIMS.clear()
        source = None
        if origin.piece is not None:
            source = next((n for n, x in enumerate(given) if _piece(self, x) is origin.piece), -1)
        if source != -1:
            origins = [known for x in given if (known := self.get(x)) is not None]
            _RESULTS[asked] = (
                origin._replace(piece=None),
                source,
                origins,
            )  # the origins are held: their ids stay unique

    def _signature(
        self, func: Any, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...] | None:
        """Return what the result of a rule depends on; None if that is more than shapes, origins and numbers."""
        if rule in _DEPEND_ON_IDENTITY:
            return None
        parts: list[Any] = [func, *kwargs]
        for x in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(x, Tensor):
                record = self._records.get(id(x))
                if record is not None and record[0]() is x:
                    origin = record[1]
                    if origin is None:
                        parts += None, x.shape, x.dtype
                    else:
                        parts += id(origin.dims), origin.piece is not None, origin.is_learned, x.shape, x.dtype
                elif type(x) is Parameter:
                    parts += Parameter, x.shape
                else:
                    return None
            elif x is None or type(x) in _PLAIN or (type(x) is tuple and all(type(y) is int for y in x)):
                parts.append(x)
            else:
                return None
        return tuple(parts)

    def add(self, x: Tensor, origin: Origin | None) -> None:
        """Set the origin of a tensor; None for a constant."""
        self.add_known(x, None if origin is None else with_known_dims(origin))

    def add_known(self, x: Tensor, origin: Origin | None) -> None:
        """Set the origin of a tensor, as `with_known_dims` returned it."""
        if len(self._records) > MAX_RECORDS:
            self._records = {key: record for key, record in self._records.items() if record[0]() is not None}
        self._records[id(x)] = weakref.ref(x), origin

    def note_write(self, x: Tensor) -> None:
        """Note that the model wrote to a tensor: it is no constant."""
        self._written.add(_memory(x))
        if self._is_buffer(x) or (x._base is not None and self._is_buffer(x._base)):
            self._caches.add(_memory(x))

    @property
    def were_written(self) -> bool:
        """Whether the model wrote to a tensor in this pass."""
        return bool(self._written)

    def follows(self, x: Tensor) -> bool:
        """Whether the dims of a tensor may lead to heads: it is floating, and no constant."""
        return x.is_floating_point() and not self.is_constant(x)

    def add_like(self, x: Any, out: Any) -> None:
        """Note that a result is a constant if it was made of one."""
        if isinstance(x, Tensor) and isinstance(out, Tensor) and self.is_constant(x):
            self.add(out, None)

    def clear(self) -> None:
        """Forget all but the caches of the model."""
        self._records, self._written = {}, set()


def with_known_dims(origin: Origin) -> Origin:
    """Return an origin whose dims are the one object that equal dims share."""
    return origin._replace(dims=_DIMS.setdefault(origin.dims, origin.dims))


def join_dims(dims: Sequence[Sequence[Dim]]) -> tuple[Dim, ...]:
    """Return the dims of a result to which tensors with these dims broadcast, aligned at the last dim."""
    first, *others = dims
    if all(each == first for each in others):
        return tuple(first)
    longest = max(map(len, dims))
    return tuple(
        reduce(_join_dim, (each[n - longest + len(each)] for each in dims if n >= longest - len(each)))
        for n in range(longest)
    )


def kinds_of(dims: Sequence[Dim]) -> set[str]:
    """Return the kinds of all factors of some dims."""
    return {factor.kind for dim in dims for factor in dim}


def is_parameter(x: Tensor) -> bool:
    """True for a parameter or a view of one."""
    kind, base = type(x), x._base
    if kind is Tensor and base is None:
        return False
    return kind is Parameter or isinstance(x, Parameter) or isinstance(base, Parameter)


def dim_order(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], ndim: int) -> list[int]:
    """Return the dims of the argument in the order in which the result of a transpose or permutation has them."""
    order = list(range(ndim))
    if name in ("mT", "T", "t"):
        return [*order[:-2], *reversed(order[-2:])] if name == "mT" or ndim == 2 else order[::-1]
    dims = args[1] if len(args) == 2 and not isinstance(args[1], int) else args[1:]
    if name in ("movedim", "moveaxis"):
        given = [*dims, *kwargs.values()]
        sources, targets = ([x] if isinstance(x, int) else list(x) for x in given)
        moved = {target % ndim: source % ndim for source, target in zip(sources, targets, strict=True)}
        rest = (dim for dim in order if dim not in moved.values())
        return [moved[dim] if dim in moved else next(rest) for dim in order]
    dims = [*dims, *(x for value in kwargs.values() for x in ([value] if isinstance(value, int) else value))]
    if name == "permute":
        return [dim % ndim for dim in dims]
    a, b = dims
    order[a], order[b] = order[b], order[a]
    return order


Rule = Callable[[DimOrigins, Sequence[Any], Mapping[str, Any], Any], None]


def _project(origins: DimOrigins, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """A map of the last dim to features: linear, layer norm."""
    x, weight = args[0] if args else kwargs.get("input"), args[1] if len(args) > 1 else kwargs.get("weight")
    keys = origins.get(weight)
    if isinstance(x, Tensor) and keys is not None and len(keys.dims) == 2 and not keys.is_learned:  # F.linear(q, k)
        origins.add(out, Origin((*origins.origin_of(x).dims[:-1], keys.dims[0])))
    elif isinstance(x, Tensor) and out.ndim:
        origins.add(out, Origin((*_rows(origins, x)[:-1], _dim(FEATURES, out.shape[-1]))))


def _embed(origins: DimOrigins, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
    origins.add(out, Origin((*(_dim(ROWS, size) for size in out.shape[:-1]), _dim(FEATURES, out.shape[-1]))))


def _convolve(origins: DimOrigins, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
    """A convolution: features are the dim before those of space."""
    x, weight = (args[n] if len(args) > n else kwargs.get(name) for n, name in enumerate(("input", "weight")))
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or x.ndim != weight.ndim:
        return
    origin = origins.get(x)
    batch = _dim(ROWS, out.shape[0]) if origin is None or kinds_of(origin.dims[:1]) == {UNKNOWN} else origin.dims[0]
    origins.add(out, Origin((batch, _dim(FEATURES, out.shape[1]), *(_dim(ROWS, size) for size in out.shape[2:]))))


def _reshape(origins: DimOrigins, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    x = args[0]
    if isinstance(x, Tensor) and isinstance(out, Tensor) and not out.is_nested:
        if not origins.follows(x):
            origins.add_like(x, out)
        elif (dims := resize_dims(origins.origin_of(x).dims, out.shape)) is not None:
            origins.add(out, Origin(dims, _piece(origins, x), origins.is_learned(x)))


def resize_dims(dims: Sequence[Dim], shape: Sequence[int]) -> tuple[Dim, ...] | None:
    """Return the dims of a tensor that was reshaped to `shape`; None if they do not fit it."""
    if 0 in shape:
        return None
    left, result = [factor for dim in dims for factor in dim if factor.size != 1], []
    left.reverse()
    for size in shape:
        dim: list[Factor] = []
        while size > 1:
            if not left:
                return None
            kind, n = left.pop()
            if size % n == 0:
                dim.append(Factor(kind, n))
                size //= n
            elif n % size == 0:
                dim.append(Factor(kind, size))
                left.append(Factor(kind, n // size))
                size = 1
            else:
                return None
        result.append(tuple(dim))
    return None if left else tuple(result)


def _permute(origins: DimOrigins, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor, name: str) -> None:
    x = args[0] if args else kwargs.get("input")
    if isinstance(x, Tensor):
        if not origins.follows(x):
            origins.add_like(x, out)
            return
        dims, order = origins.origin_of(x).dims, dim_order(name, args, kwargs, x.ndim)
        origins.add(out, Origin(tuple(dims[dim] for dim in order), _piece(origins, x), origins.is_learned(x)))


def _split(origins: DimOrigins, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, at: int) -> None:
    """`split`, `chunk` and `unbind`; `at` is the position of their argument `dim`."""
    x = args[0] if args else kwargs.get("input", kwargs.get("tensor"))
    if not isinstance(x, Tensor) or not origins.follows(x):
        return
    dim = (args[at] if len(args) > at else kwargs.get("dim", 0)) % x.ndim
    dims, start = origins.origin_of(x).dims, 0
    kind, family, is_learned = _kind(dims[dim]), (id(x), dim), origins.is_learned(x)
    for part in out:
        rest = (_dim(kind, part.shape[dim]),) if part.ndim == x.ndim else ()
        origins.add(part, Origin((*dims[:dim], *rest, *dims[dim + 1 :]), Piece(family, start, kind), is_learned))
        start += part.shape[dim] if rest else 1


def _index(origins: DimOrigins, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
    """Numbers, slices, None and `...`; other indices only if they keep the number of dims."""
    x, index = args[0], args[1]
    if not isinstance(x, Tensor) or not origins.follows(x):
        origins.add_like(x, out)
        return
    index = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(each, (Tensor, list)) for each in index):
        _keep(origins, (x,), kwargs, out)
        return
    taken = sum(each is not None and each is not Ellipsis for each in index)
    if Ellipsis not in index:
        index.append(Ellipsis)
    at = index.index(Ellipsis)
    index[at : at + 1] = [slice(None)] * (x.ndim - taken)
    result: list[Dim] = []
    dims, piece, n = origins.origin_of(x).dims, _piece(origins, x), 0
    for each in index:
        if each is None:
            result.append(())
            continue
        size, kind = x.shape[n], _kind(dims[n])
        if isinstance(each, slice):
            start, stop, step = each.indices(size)
            count = len(range(start, stop, step))
            result.append(dims[n] if count == size else _dim(kind, count))
            if count < size:
                piece = Piece((id(x), n), start, kind)
        elif size > 1:
            piece = Piece((id(x), n), int(each) % size, kind)
        n += 1
    origins.add(out, Origin(tuple(result), piece, origins.is_learned(x)))


def _select(origins: DimOrigins, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
    if len(args) == 3:
        x, dim, n = args
        _index(origins, (x, (*[slice(None)] * (dim % x.ndim), n)), {}, out)


def _narrow(origins: DimOrigins, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
    if len(args) == 4 and not isinstance(args[2], Tensor):
        x, dim, start, length = args
        _index(origins, (x, (*[slice(None)] * (dim % x.ndim), slice(start, start + length))), {}, out)


def _concatenate(origins: DimOrigins, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
    parts, dim = _parts(args, kwargs)
    if not (known := [origin for x in parts if (origin := origins.get(x)) is not None]):
        _keep(origins, parts, {}, out)
        return
    origin = max(known, key=lambda each: sum(factor.kind == FEATURES for dim in each.dims for factor in dim))
    if len(origin.dims) != out.ndim:
        return
    dims, dim = list(origin.dims), dim % out.ndim
    kind, size = _kind_of_pieces(known, len(parts)), prod(factor.size for factor in dims[dim])
    if kind is not None and kind not in kinds_of(dims[dim : dim + 1]) and len(parts) * size == out.shape[dim]:
        dims[dim] = (Factor(kind, len(parts)), *dims[dim])
    elif len(parts) > 1 and len(known) == len(parts) and kind is None and all(x is parts[0] for x in parts):
        dims[dim] = (Factor(REPEATED, len(parts)), *dims[dim])
    elif size != out.shape[dim]:
        joined = tuple(factor for each in known for factor in each.dims[dim])
        dims[dim] = _dim(kind or _kind(joined), out.shape[dim])
    origins.add(out, Origin(tuple(dims)))


def _stack(origins: DimOrigins, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
    parts, dim = _parts(args, kwargs)
    if known := [origin for x in parts if (origin := origins.get(x)) is not None]:
        dims = list(known[0].dims)
        dims.insert(dim % out.ndim, _dim(_kind_of_pieces(known, len(parts)) or STACKED, len(parts)))
        origins.add(out, Origin(tuple(dims)))
    else:
        _keep(origins, parts, {}, out)


def _kind_of_pieces(known: Sequence[Origin], count: int) -> str | None:
    """Return the kind of the dim that tensors are all pieces of, each another one; None if they are none."""
    pieces = {each.piece for each in known if each.piece is not None}
    if count < 2 or len(pieces) < count or len({piece.family for piece in pieces}) > 1:
        return None
    return next(iter(pieces)).kind


def _expand(origins: DimOrigins, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
    """`expand`, and `repeat`, which puts the copies outside."""
    x = args[0]
    if not isinstance(x, Tensor) or not origins.follows(x):
        origins.add_like(x, out)
        return
    dims = ((),) * (out.ndim - x.ndim) + origins.origin_of(x).dims
    sizes = (1,) * (out.ndim - x.ndim) + tuple(x.shape)
    new = (
        dim if size == after or not size else (Factor(REPEATED, after // size), *dim)
        for dim, size, after in zip(dims, sizes, out.shape, strict=True)
    )
    origins.add(out, Origin(tuple(new), _piece(origins, x), origins.is_learned(x)))


def _multiply(origins: DimOrigins, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
    """matmul, bmm and mm; of addmm and baddbmm the product."""
    left, right = args if len(args) == 2 else args[1:3] if len(args) > 2 else (None, None)
    if not isinstance(left, Tensor) or not isinstance(right, Tensor) or out.is_nested:
        return
    if left.ndim < 2 or right.ndim < 2 or out.ndim < 2:
        return
    if origins.is_learned(right) and right.ndim == 2:
        origins.add(out, Origin((*_rows(origins, left)[:-1], _dim(FEATURES, out.shape[-1]))))
    elif origins.get(left) is not None or origins.get(right) is not None:
        a, b = origins.origin_of(left), origins.origin_of(right)
        column = _dim(FEATURES, out.shape[-1]) if origins.is_learned(right) else b.dims[-1]
        lead = join_dims((a.dims[:-2], b.dims[:-2]))
        origins.add(out, Origin((*lead, a.dims[-2], column), a.piece or b.piece))


def _contract(origins: DimOrigins, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor, name: str) -> None:
    """einsum, tensordot and inner."""
    if (parsed := parse_contraction(name, args, kwargs)) is None:
        return
    *factors, labels = parsed
    if all(origins.get(x) is None and not is_parameter(x) for _, x in factors):
        return
    found: dict[str, Dim] = {}
    for names, operand in factors:
        shared = {label for others, x in factors if x is not operand for label in others}
        own = [label for label in names if label not in shared]
        for label, dim in zip(names, origins.origin_of(operand).dims, strict=True):
            if origins.is_learned(operand) and own[-1:] == [label] and len(own) < len(names):
                dim = _dim(FEATURES, operand.shape[names.index(label)])
            found[label] = _join_dim(found[label], dim) if label in found else dim
    if found.keys() >= set(labels):
        piece = next((piece for _, x in factors if (piece := _piece(origins, x)) is not None), None)
        origins.add(out, Origin(tuple(found[label] for label in labels), piece))


def _distances(origins: DimOrigins, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
    left, right = args[:2]
    if origins.get(left) is not None or origins.get(right) is not None:
        a, b = origins.origin_of(left), origins.origin_of(right)
        origins.add(out, Origin((*join_dims((a.dims[:-2], b.dims[:-2])), a.dims[-2], b.dims[-2])))


def _reduce(origins: DimOrigins, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """Sums, means and the like over dims; `max` and `min` return a pair."""
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, Tensor) or (origin := origins.get(x)) is None:
        return
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
    keeps = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    over = {each % x.ndim for each in ([dim] if isinstance(dim, int) else dim or ()) if isinstance(each, int)}
    if not over:
        _keep(origins, args, kwargs, out)
        return
    dims = tuple(() if n in over else each for n, each in enumerate(origin.dims) if keeps or n not in over)
    for each in out if isinstance(out, tuple) else (out,):
        if isinstance(each, Tensor) and each.ndim == len(dims):
            origins.add(each, Origin(dims, origin.piece))


def _resize(origins: DimOrigins, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
    """A change of sizes that keeps the kinds of dims: padding, gathering, repeating."""
    x = args[0] if args else kwargs.get("input")
    if isinstance(x, Tensor) and (origin := origins.get(x)) is not None and len(origin.dims) == out.ndim:
        new = (
            dim if before == after else _dim(_kind(dim), after)
            for dim, before, after in zip(origin.dims, x.shape, out.shape, strict=True)
        )
        origins.add(out, Origin(tuple(new), origin.piece))


def _unfold(origins: DimOrigins, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
    """`Tensor.unfold`: windows along a dim, whose entries are a new last dim. `F.unfold` is another function."""
    x, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dimension")
    if isinstance(x, Tensor) and isinstance(dim, int) and origins.follows(x) and out.ndim == x.ndim + 1:
        dims = list(origins.origin_of(x).dims)
        kind = _kind(dims[dim % x.ndim])
        dims[dim % x.ndim] = _dim(kind, out.shape[dim % x.ndim])
        origins.add(out, Origin((*dims, _dim(kind, out.shape[-1])), _piece(origins, x)))


def _create(origins: DimOrigins, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    for each in out if isinstance(out, (list, tuple)) else (out,):
        if isinstance(each, Tensor):
            origins.add(each, None)


def _keep(origins: DimOrigins, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """Any other function: a result of the shape of its arguments has their dims."""
    if type(out) is not Tensor:
        return
    records, shape, known, inputs = origins._records, out.shape, [], 0
    for x in args:
        if isinstance(x, Tensor):
            inputs += 1
            record = records.get(id(x))
            if record is not None and record[0]() is x and record[1] is not None:
                inputs = -MAX_RECORDS
                if len(record[1].dims) <= len(shape):
                    known.append((x, record[1]))
            elif inputs > 0 and x.numel() > 1 and not origins.is_constant(x):
                inputs = -MAX_RECORDS
    if not known:
        if inputs > 0:
            origins.add(out, None)  # constants alone
        elif _are_learned(origins, args):
            x = next(x for x in args if isinstance(x, Tensor))
            if x.shape == shape and is_parameter(x):
                origins.add(out, origins.origin_of(x)._replace(is_learned=True))
        return
    x, origin = known[0]
    if origin.is_learned and not _are_learned(origins, args):
        origin = origin._replace(is_learned=False)
    if len(known) == 1 and x.shape == shape:
        if x is not out:
            origins.add(out, origin)
        return
    dims = join_dims([each.dims for _, each in known])
    if len(dims) != len(shape):
        return
    sizes = [prod(factor.size for factor in dim) for dim in dims]
    if all(size == after for size, after in zip(sizes, shape, strict=True)):
        piece = next((each.piece for _, each in known if each.piece is not None), None)
        origins.add(out, Origin(dims, piece))
    elif all(size in (1, after) for size, after in zip(sizes, shape, strict=True)):
        dims = tuple(dim if size == n else _dim(UNKNOWN, n) for dim, size, n in zip(dims, sizes, shape, strict=True))
        origins.add(out, Origin(dims))


def _are_learned(origins: DimOrigins, args: Sequence[Any]) -> bool:
    """Whether all tensors among the arguments are parameters or constants, and there is one."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    return bool(tensors) and all(x.numel() == 1 or origins.is_learned(x) or origins.is_constant(x) for x in tensors)


def _write(origins: DimOrigins, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """A function that writes to its first argument."""
    x, *rest = args or (None,)
    values = [y for y in (*rest, *kwargs.values()) if isinstance(y, Tensor) and y.is_floating_point()]
    if isinstance(x, Tensor) and any(origins.follows(y) for y in values):
        origins.note_write(x)


_RESHAPES = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as")
_CREATIONS = (
    *("arange", "linspace", "logspace", "eye", "zeros", "ones", "full", "empty", "rand", "randn", "tensor", "meshgrid"),
    *("as_tensor", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"),
)
_SPLITS = {"split": 2, "chunk": 2, "unbind": 1, "unsafe_chunk": 2, "tensor_split": 2}  # name -> position of `dim`
_PERMUTES = ("transpose", "swapaxes", "swapdims", "permute", "t", "movedim", "moveaxis")
_RULES: dict[str, Rule] = {
    **dict.fromkeys(("linear", "layer_norm", "rms_norm"), _project),
    "embedding": _embed,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolve),
    **dict.fromkeys(_RESHAPES, _reshape),
    "__getitem__": _index,
    "select": _select,
    "narrow": _narrow,
    **dict.fromkeys(("cat", "concat", "concatenate"), _concatenate),
    "stack": _stack,
    **dict.fromkeys(("expand", "expand_as", "repeat", "tile", "broadcast_to"), _expand),
    **dict.fromkeys(("matmul", "__matmul__", "linalg_matmul", "bmm", "mm", "baddbmm", "addmm"), _multiply),
    **{name: partial(_contract, name=name) for name in ("einsum", "tensordot", "inner")},
    "cdist": _distances,
    **dict.fromkeys(("sum", "mean", "amax", "amin", "max", "min", "logsumexp", "norm"), _reduce),
    **dict.fromkeys(("pad", "repeat_interleave", "index_select", "gather", "roll", "flip"), _resize),
    "unfold": _unfold,
    **dict.fromkeys(_CREATIONS, _create),
    **{name: partial(_permute, name=name) for name in _PERMUTES},
    **{name: partial(_split, at=at) for name, at in _SPLITS.items()},
}
_SKIPPED = frozenset(
    (
        *("__get__", "__set__", "__len__", "size", "dim", "numel", "stride", "is_floating_point", "is_contiguous"),
        *("item", "tolist", "data_ptr", "backward", "register_hook", "requires_grad_", "lstm", "gru", "nonzero"),
    )
)
_RULE_OF: dict[Any, Rule | None] = {}
# Results of rules for the layers so far: those of the next layer are mostly the same.
_RESULTS: dict[tuple[Any, ...], tuple[Origin | None, int | None, list[Origin]]] = {}
_DIMS: dict[tuple[Dim, ...], tuple[Dim, ...]] = {}  # equal dims are one object, so that an id says what they are
_PLAIN = frozenset((int, float, bool, str))
_DEPEND_ON_IDENTITY = frozenset(
    (_index, _select, _narrow, _concatenate, _stack, _create, _write, *(_RULES[name] for name in _SPLITS))
)


def _rule_of(func: Any) -> Rule | None:
    """Return the rule of a function, judged by its name; None for one whose result has no origin."""
    if func in (Tensor.mT.__get__, Tensor.T.__get__):  # type: ignore[attr-defined]
        return partial(_permute, name="mT" if func == Tensor.mT.__get__ else "T")  # type: ignore[attr-defined]
    name = getattr(func, "__name__", "")
    if name in _SKIPPED:
        return None
    if name == "__setitem__" or (name.endswith("_") and not name.startswith("_")):
        return _write
    return _RULES.get(name, _keep)


def _rows(origins: DimOrigins, x: Tensor) -> tuple[Dim, ...]:
    """Return the dims of the input of a map of its features: of a tensor of unknown origin the others are rows.

    A tensor with more than three dims may have heads among them.
    """
    if (origin := origins.get(x)) is not None:
        plain = (UNKNOWN, CONTEXT) if x.ndim < 4 else (CONTEXT,)
        return tuple(
            (Factor(ROWS, dim[0].size),) if len(dim) == 1 and dim[0].kind.startswith(plain) else dim
            for dim in origin.dims
        )
    if is_parameter(x):
        return origins.origin_of(x).dims
    return tuple(_dim(ROWS if x.ndim < 4 or not n else UNKNOWN, size) for n, size in enumerate(x.shape))


def _piece(origins: DimOrigins, x: Tensor) -> Piece | None:
    origin = origins.get(x)
    return None if origin is None else origin.piece


def _parts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], int]:
    parts = args[0] if args else kwargs.get("tensors", ())
    return parts, args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))


def _join_dim(a: Dim, b: Dim) -> Dim:
    """Return the factors of a dim to which two broadcast: those that know of more features."""
    if a == b:
        return a
    sizes = [prod(factor.size for factor in dim) for dim in (a, b)]
    if sizes[0] != sizes[1]:
        return a if sizes[0] > sizes[1] else b
    return max((a, b), key=_certainty)


_RANKS = {FEATURES: 3, PRESUMED: 2, LEARNED: 1, ROWS: 1}


def _certainty(dim: Dim) -> tuple[int, int]:
    """Order factorizations of a dim by the number of features in them, then by the number of known factors."""
    features = prod(factor.size for factor in dim if factor.kind == FEATURES)
    return features, sum(_RANKS.get(factor.kind, 0) for factor in dim)


def _dim(kind: str, size: int) -> Dim:
    return (Factor(kind, size),) if size != 1 else ()


def _kind(dim: Dim) -> str:
    """Return the kind that all factors of a dim share; UNKNOWN if there is none."""
    kinds = {factor.kind for factor in dim}
    return next(iter(kinds)) if len(kinds) == 1 else UNKNOWN


def _memory(x: Tensor) -> int:
    try:
        return x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor without memory of its own
        return 0
