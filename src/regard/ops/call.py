"""Call: one attention as a frozen value, and the only place that validates shapes."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from ..checks import check_int, check_integer_tensor, check_probability
from .shape import Sizes
from .terms.biases import Bias
from .terms.coordinates import Block, Selector
from .terms.masks import Rule
from .terms.masks.mask_algebra import Mask
from .terms.normalizers import Normalizer, Softmax
from .terms.scores import Dot, Score
from .terms.term import Term
from .torch_state import can_read_values, in_forward_mode, untraced_shape

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Offset = int | Sequence[int] | Tensor  # the position of the first query, or one for each batch row
SLOTS = ("score", "mask", "bias", "normalize")  # the four terms of an attention, in the order of the equation


@dataclass(frozen=True, eq=False)
class Call:
    """One attention: tensors of four dims, four terms, and how to run them. Made by `Call.of`, which validates."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    score: Score
    mask: Mask | None
    bias: Bias | None
    normalize: Normalizer
    dropout: float
    offset: int | Tensor  # the position of the first query, or one for each batch row
    lead: tuple[int, ...]
    backend: str | None = None
    batch_ids: Tensor | None = None
    head_ids: Tensor | None = None
    row_ids: Tensor | None = None
    statistic: bool = False  # True if the backend must return the row statistic too

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor | None = None,
        *,
        score: Score | None = None,
        mask: Mask | None = None,
        bias: Bias | None = None,
        normalize: Normalizer | None = None,
        dropout: float = 0.0,
        offset: Offset | None = None,
        backend: str | None = None,
    ) -> Call:
        """Validate, flatten leading dims into b, and cast to the dtype of autocast."""
        _is_floating("q", q)
        _is_floating("k", k)
        if v is not None:
            _is_floating("v", v)
        q, k, v = _autocast(q, k, v)
        _same_dtype_and_device(q, k, v)
        lead = tuple(q.shape[:-3])
        if k.shape[:-3] != lead or (v is not None and v.shape[:-3] != lead):
            q, k, v = with_equal_batch_dims(q, k, v)
            lead = tuple(q.shape[:-3])
        if len(lead) != 1:
            with torch.enable_grad():
                q, k, v = q.flatten(0, -4), k.flatten(0, -4), None if v is None else v.flatten(0, -4)
        call = Call(
            q,
            k,
            v,
            score=_is_term("score", score, Score) or Dot(),
            mask=_is_term("mask", mask, Mask),
            bias=_is_term("bias", bias, Bias),
            normalize=_is_term("normalize", normalize, Normalizer) or Softmax(),
            dropout=0.0 if dropout == 0.0 and type(dropout) is float else _is_share(dropout),
            offset=untraced_shape(k)[2] - untraced_shape(q)[2] if offset is None else _is_offset(offset, q, lead),
            lead=lead,
            backend=backend,
        )
        call._check()
        return call

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of row statistics and accumulation: float32 for half precision, else that of the inputs."""
        return torch.float32 if self.q.dtype in (torch.float16, torch.bfloat16) else self.q.dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """b h i j."""
        b, h, i, _ = untraced_shape(self.q)
        return b, h, i, untraced_shape(self.k)[2]

    @property
    def first_position(self) -> int:
        """The position of the first query; raises if it differs between the batch rows."""
        if not isinstance(self.offset, Tensor):
            return self.offset
        rows = (self.offset if self.batch_ids is None else self.offset[self.batch_ids]).unique().tolist()
        if len(rows) > 1:
            raise ValueError(
                f"these batch rows have different offsets, {rows[:8]}; take one batch row at a "
                "time, as in weights(q[:1], k[:1], offset=...)"
            )
        return rows[0] if rows else 0

    @property
    def slots(self) -> dict[str, Any]:
        """The four terms by name; None for a slot that is empty. `Call.of` and `attend` take them as keywords."""
        return {name: getattr(self, name) for name in SLOTS}

    @property
    def terms(self) -> tuple[Score | Mask | Bias | Normalizer, ...]:
        """The terms that fill the four slots."""
        if self.mask is None and self.bias is None:
            return self.score, self.normalize
        slots = (self.score, self.mask, self.bias, self.normalize)
        return tuple([term for term in slots if term is not None])

    @property
    def is_selection(self) -> bool:
        """True if this call holds some batch rows, heads or query rows of a larger one."""
        return self.batch_ids is not None or self.head_ids is not None or self.row_ids is not None

    @property
    def records_gradients(self) -> bool:
        """True if autograd would now record a computation on q, k and the terms."""
        return in_forward_mode() or (torch.is_grad_enabled() and any(x.requires_grad for x in self.tensors()))

    def tensors(self) -> list[Tensor]:
        """Every tensor the weights depend on."""
        found = [self.q, self.k]
        for term in self.terms:
            found += term.tensors()
        return found

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> Call:
        """The same attention over other tensors: `fn` of q, k and the tensors of the terms, without v."""
        terms: Any = {name: None if term is None else term.map_tensors(fn) for name, term in self.slots.items()}
        return replace(self, q=fn(self.q), k=fn(self.k), v=None, **terms)

    def to(self, device: torch.device) -> Call:
        """The same attention on a device."""

        def move(x: Any) -> Any:
            return x.to(device) if isinstance(x, Tensor) else x

        moved: Any = {name: move(getattr(self, name)) for name in ("offset", "batch_ids", "head_ids", "row_ids")}
        return replace(self.map_tensors(move), **moved)

    def whole(self) -> Block:
        """The matrix as a single block."""
        b, h, i, j = self.shape
        return Block(
            slice(0, b),
            slice(0, h),
            slice(0, i),
            slice(0, j),
            n_h=h,
            offset=self.offset,
            device=self.q.device,
            dtype=self.dtype,
            q=self.q,
            batch_ids=self.batch_ids,
            head_ids=self.head_ids,
            row_ids=self.row_ids,
        )

    def with_values(self, v: Tensor) -> Call:
        """The same attention over these values, and its row statistic with them."""
        if torch.compiler.is_compiling():
            return replace(self, v=v, statistic=True)
        call = object.__new__(Call)  # in a fifth of the time that `replace` takes
        call.__dict__.update(self.__dict__, v=v, statistic=True)
        return call

    def select(
        self, batch: Selector | None = None, heads: Selector | None = None, rows: Selector | None = None
    ) -> Call:
        """The same attention for some batch rows, heads and query rows; terms still get their original indices."""
        q, k, batch_ids, head_ids, row_ids = self.q, self.k, self.batch_ids, self.head_ids, self.row_ids
        with torch.enable_grad():
            if batch is not None:
                q, k = q[batch], k[batch]
                batch_ids = _ids(batch_ids, self.shape[0], q.device)[batch]
            if heads is not None:
                each = torch.arange(self.shape[1], device=q.device)[heads]
                shared = self.shape[1] // k.shape[1]
                q, k = q[:, heads], k[:, each if shared == 1 else _shared(each // shared)]
                head_ids = _ids(head_ids, self.shape[1], q.device)[heads]
            if rows is not None:
                q = q[:, :, rows]
                row_ids = _ids(row_ids, self.shape[2], q.device)[rows]
        lead = self.lead if batch is None else (q.shape[0],)
        return replace(self, q=q, k=k, v=None, lead=lead, batch_ids=batch_ids, head_ids=head_ids, row_ids=row_ids)

    def _check(self) -> None:
        b, h, i, d = self.q.shape
        g, j = self.k.shape[1:3]
        if not (h and d and self.k.shape[3]):
            raise ValueError(f"q and k must have heads and a width, got q {(b, h, i, d)} and k {tuple(self.k.shape)}")
        if g == 0 or h % g:
            divisors = ", ".join(str(n) for n in range(1, h + 1) if h % n == 0)
            raise ValueError(
                f"q heads must be a multiple of k heads, got h={h} and g={g}; give k one of {divisors} heads"
            )
        if self.v is not None:
            if self.v.shape[1] != g:
                raise ValueError(f"v must have as many heads as k, got {self.v.shape[1]} and g={g}")
            if self.v.shape[2] != j:
                raise ValueError(f"v must have as many positions as k, got {self.v.shape[2]} and j={j}")
        sizes = Sizes(b, h, g, i, j, d, self.k.shape[3], can_read_values(self.q))
        for term in self.terms:
            for x in term.tensors():
                if x.device != self.q.device:
                    raise ValueError(
                        f"{term!r} must be on the device of q, {self.q.device}, got {x.device}; move it with .to(...)"
                    )
            term.check(sizes)


def _is_floating(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor of dims b h {'i' if name == 'q' else 'j'} d, got {type(x).__name__}")
    if x.is_nested:
        raise TypeError(
            f"{name} must be a tensor of texts of one length here, got a nested tensor, which attend alone takes; take "
            f"a text, {name}.unbind()[0][None], or pad, {name}.to_padded_tensor(0.0) with mask=Padding(lengths)"
        )
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}; write {name}.float()")
    if x.ndim < 4:
        hint = {3: f"{name}.unsqueeze(1) for a single head", 2: f"{name}[None, None] for one batch row and one head"}
        raise ValueError(
            f"{name} must have dims b h {'i' if name == 'q' else 'j'} d, got shape {tuple(x.shape)}; "
            f"write {hint.get(x.ndim, f'{name} with four dims')}"
        )


def _same_dtype_and_device(q: Tensor, k: Tensor, v: Tensor | None) -> None:
    for name, x in (("k", k), ("v", v)):
        if x is None:
            continue
        if x.dtype != q.dtype:
            raise ValueError(
                f"q, k and v must have the same dtype, got q {q.dtype} and {name} {x.dtype}; write {name}.to(q.dtype)"
            )
        if x.device != q.device:
            raise ValueError(
                f"q, k and v must be on the same device, got q {q.device} and {name} {x.device}; "
                f"write {name}.to(q.device)"
            )


def with_equal_batch_dims(q: Tensor, k: Tensor, v: Any) -> tuple[Tensor, Tensor, Any]:
    """Views whose batch dims are equal: dims of 1, and dims a tensor lacks in front, are expanded. v may be None."""
    given = [x for x in (q, k, v) if x is not None]
    try:
        lead = torch.broadcast_shapes(*(x.shape[:-3] for x in given))
    except RuntimeError:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip("qkv", given, strict=False))
        raise ValueError(
            f"q, k and v must have the same batch dims, or dims of 1, got {shapes}; write k.unsqueeze(...) where a dim "
            "is missing"
        ) from None
    with torch.enable_grad():
        q, k = q.expand(*lead, *q.shape[-3:]), k.expand(*lead, *k.shape[-3:])
        return q, k, None if v is None else v.expand(*lead, *v.shape[-3:])


def _is_term(name: str, value: Any, kind: type) -> Any:
    if value is None or isinstance(value, kind):
        return value
    raise TypeError(f"{name} must be a {kind.__name__} term, got {_type_label(value)}; {_next_step(name, value)}")


def _next_step(name: str, value: Any) -> str:
    is_function = callable(value) and not isinstance(value, (Term, type))
    if name in ("bias", "score") and (is_function or isinstance(value, Rule)):
        return f"write {name}={name.title()}.of(fn), fn({'score, ' if name == 'score' else ''}b, h, i, j)"
    for slot, kind in zip(SLOTS, (Score, Mask, Bias, Normalizer), strict=True):
        if isinstance(value, kind):
            return f"write {slot}={value!r}"
        if isinstance(value, type) and issubclass(value, kind):
            return f"write {slot}={value.__name__}(...)"
    if isinstance(value, Tensor):
        return "write mask=Dense(x)" if value.dtype == torch.bool else "write bias=Added(x), or mask=Dense(x.bool())"
    if name == "mask" and is_function:
        return "write mask=Rule(fn)"
    examples = dict(zip(SLOTS, ("Dot()", "Causal()", "Alibi(8)", "Softmax()"), strict=True))
    return f"write {name}={examples[name]}"


def _type_label(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _is_share(dropout: float) -> float:
    check_probability("dropout", dropout)
    return float(dropout)


def _is_offset(offset: Offset, q: Tensor, lead: tuple[int, ...]) -> int | Tensor:
    """The position of the first query as an int, or of each batch row's as a new tensor."""
    if isinstance(cast(object, offset), torch.SymInt):
        return cast(int, offset)
    if isinstance(offset, numbers.Integral) and not isinstance(offset, bool):
        return int(offset)
    if isinstance(offset, (tuple, list)):
        for position in offset:
            check_int("offset", position, least=-(2**62))
        offset = torch.tensor(offset, dtype=torch.long)
    if not isinstance(offset, Tensor) or not offset.ndim:
        raise TypeError(
            f"offset must be a whole number, the position of the first query, got {offset!r}; write int(offset)"
        )
    check_integer_tensor("offset", offset, 1, len(lead))
    if offset.shape not in ((q.shape[0],), lead):
        raise ValueError(
            f"offset must be a number, or one for each of the b={q.shape[0]} batch rows, "
            f"got shape {tuple(offset.shape)}"
        )
    # A copy: lengths of caches are counted up in place, and a backward pass needs those of its forward.
    return offset.flatten().to(q.device, torch.long, copy=True)


def _autocast(q: Tensor, k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    device = q.device.type
    if not _has_autocast(device) or q.dtype == torch.float64:
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    # Grad mode counts when weights are evaluated, not when they are made: record the cast in any mode.
    with torch.enable_grad():
        return q.to(dtype), k.to(dtype), None if v is None else v.to(dtype)


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context without autocast: `Call.of` has cast already, and the arithmetic keeps those dtypes."""
    return torch.autocast(device.type, enabled=False) if _has_autocast(device.type) else nullcontext()


def _has_autocast(device: str) -> bool:
    return device != "meta" and torch.is_autocast_enabled(device)


def _ids(ids: Tensor | None, n: int, device: torch.device) -> Tensor:
    return torch.arange(n, device=device) if ids is None else ids


def _shared(kv: Tensor) -> Tensor:
    """The key heads to keep: each once if the query heads share them evenly and in order, else one per query head."""
    heads, counts = torch.unique_consecutive(kv, return_counts=True)
    even = bool((counts == counts[:1]).all()) and bool((heads[1:] > heads[:-1]).all())
    return heads if even else kv
