"""Edits: small frozen values that say how an attention is changed; each prints as its source.

`Cut`, `Boost` and `Temperature` change the terms of the attention, which the operator then runs; `Scale` and `Only`
change the outputs of heads. In a list they are applied from left to right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...checks import check_number
from ...ops.terms.biases import ScaledBias
from ...ops.terms.masks import Dense, Documents, Padding
from ...ops.terms.masks.mask_algebra import Mask
from ...ops.torch_state import is_traced
from ..interception.kernel_call import NotUnderstood
from ..recording.observed import ObservedAttention
from ..terms.changed_weights import Given
from ..terms.pair_bias import PairBias
from .call_tokens import CallTokens
from .temperature import with_temperature
from .token_selection import Selection, checked_selection, name_of

if TYPE_CHECKING:
    from ..tape.tape import Tape

Heads = int | Iterable[int]


class EditedCall(NamedTuple):
    """One call of a layer that is edited."""

    layer: str
    number: int  # calls of the layer before it, within the block and the thread
    tokens: CallTokens | None  # None if no edit of the layer selects tokens
    clean: Tape | None  # the weights that this input gives without edits; None if there are no others than `Freeze`


class Edit:
    """A change of one attention: of its weights (`change`) or of the outputs of its heads (`factors`)."""

    changes_weights: ClassVar[bool] = True
    needs_tokens: ClassVar[bool] = False
    is_frozen: ClassVar[bool] = False  # it holds the weights of this input without other edits

    def change(self, seen: ObservedAttention, at: EditedCall) -> ObservedAttention:
        """Return the attention that takes the place of `seen`."""
        return seen

    def change_for_speed(self, seen: ObservedAttention, at: EditedCall) -> ObservedAttention | None:
        """Return the same as `change` in terms that run faster; None if there are none."""
        return None

    def factors(self, n: int) -> list[float]:
        """Return the factor of the output of each of n heads."""
        return [1.0] * n

    def head_numbers(self) -> tuple[int, ...] | None:
        """Return the numbers of the heads that are changed; None for all."""
        heads: tuple[int, ...] | None = getattr(self, "heads", None)
        return heads

    def selects_tokens(self, tokens: CallTokens) -> Tensor | None:
        """Return a tensor that is True if the edit selects a token of the call; None if it selects no tokens."""
        return None

    def __repr__(self) -> str:
        arguments = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.default is dataclasses.MISSING:
                arguments.append(name_of(value))
            elif value is not field.default:
                arguments.append(f"{field.name}={name_of(value)}")
        return f"{type(self).__name__}({', '.join(arguments)})"


@dataclass(frozen=True, repr=False, kw_only=True)
class Cut(Edit):
    """Hide these keys from these queries.

    >>> from regard.lens import Cut
    >>> Cut(queries=-1, keys=slice(0, 4), heads=3)
    Cut(queries=-1, keys=slice(0, 4), heads=(3,))

    Without `queries` no query sees these keys, without `keys` these queries see none. A query whose keys are all hidden
    gets zeros. The weights of the other keys still sum to 1.
    """

    queries: Selection | None = None
    keys: Selection | None = None
    heads: Heads | None = None

    needs_tokens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.queries is None and self.keys is None:
            raise ValueError("Cut must have queries or keys, got neither; to switch heads off write Scale(heads, 0)")
        normalize_fields(self, "queries", "keys")

    def selects_tokens(self, tokens: CallTokens) -> Tensor:
        return _pairs_exist(self, tokens)

    def change(self, seen: ObservedAttention, at: EditedCall) -> ObservedAttention:
        tokens = at.tokens
        assert tokens is not None
        h = seen.q.shape[1]
        mask = tokens.once((id(self), h), lambda: self._mask(tokens, h))
        joined = tokens.once((id(self), h, id(seen.mask)), lambda: mask if seen.mask is None else seen.mask & mask)
        check_softmax(seen, "Cut")
        return seen._replace(mask=joined, statistic=None)

    def change_for_speed(self, seen: ObservedAttention, at: EditedCall) -> ObservedAttention | None:
        if self.queries is not None or self.heads is not None or at.tokens is None:
            return None
        # Kernels are fast for padding. On a tape these terms would say that the keys are no tokens of the text.
        tokens, keys = at.tokens, self.keys
        mask = tokens.once((id(self), "speed"), lambda: Padding(~tokens.keys.select(keys)))  # type: ignore[arg-type]
        key = id(self), "speed", id(seen.mask)
        joined = tokens.once(key, lambda: mask if seen.mask is None else seen.mask & mask)
        return seen._replace(mask=joined, statistic=None)

    def _mask(self, tokens: CallTokens, h: int) -> Mask:
        queries, keys = _selected_pair(self, tokens)
        hidden = Documents(queries.long(), torch.where(keys, 1, 2))  # equal for a selected query and a selected key
        if self.heads is None:
            return ~hidden
        return ~hidden | Dense(~are_chosen(self.heads, h, queries.device)[:, None, None])  # type: ignore[arg-type]


@dataclass(frozen=True, repr=False)
class Boost(Edit):
    """Add a number to the scores of these keys, before the softmax: positive to attend more, negative to attend less.

    >>> from regard.lens import Boost
    >>> Boost(slice(3, 5), 2.0)
    Boost(slice(3, 5), 2.0)
    """

    keys: Selection
    amount: float
    _: dataclasses.KW_ONLY
    queries: Selection | None = None
    heads: Heads | None = None

    needs_tokens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("Boost amount", self.amount)
        normalize_fields(self, "queries", "keys")

    def selects_tokens(self, tokens: CallTokens) -> Tensor:
        return _pairs_exist(self, tokens)

    def change(self, seen: ObservedAttention, at: EditedCall) -> ObservedAttention:
        tokens = at.tokens
        assert tokens is not None
        h, dtype = seen.q.shape[1], torch.promote_types(seen.q.dtype, torch.float32)
        bias = tokens.once((id(self), h, dtype), lambda: self._bias(tokens, h, dtype))
        check_softmax(seen, "Boost")
        return seen._replace(bias=bias if seen.bias is None else seen.bias + bias, statistic=None)

    def _bias(self, tokens: CallTokens, h: int, dtype: torch.dtype) -> PairBias:
        queries, keys = _selected_pair(self, tokens)
        heads = are_chosen(self.heads, h, keys.device)  # type: ignore[arg-type]
        return PairBias(queries.to(dtype), keys.to(dtype) * self.amount, heads.to(dtype))


@dataclass(frozen=True, repr=False)
class Temperature(Edit):
    """Divide all scores of these heads by a factor: above 1 the weights are more even, below 1 sharper.

    >>> from regard.lens import Temperature
    >>> Temperature([0, 2], 0.5)
    Temperature((0, 2), 0.5)

    The scores are divided with the bias that the model adds to them; the logit of an attention sink is not. `None` are
    all heads.
    """

    heads: Heads | None
    factor: float

    def __post_init__(self) -> None:
        check_number("Temperature factor", self.factor, above=0)
        normalize_fields(self)

    def change(self, seen: ObservedAttention, at: EditedCall) -> ObservedAttention:
        check_softmax(seen, "Temperature")
        inverse: float | Tensor = 1 / self.factor
        if self.heads is not None:
            chosen = are_chosen(self.heads, seen.q.shape[1], seen.q.device)  # type: ignore[arg-type]
            dtype = torch.promote_types(seen.q.dtype, torch.float32)
            inverse = torch.where(chosen, 1 / self.factor, 1.0).to(dtype)
        bias = None if seen.bias is None else ScaledBias(seen.bias, inverse)
        score = with_temperature(seen.score, inverse, seen.q.shape[-1])
        return seen._replace(score=score, bias=bias, statistic=None)


@dataclass(frozen=True, repr=False)
class Scale(Edit):
    """Multiply the outputs of these heads by a factor: 0 switches them off. Their weights stay as they are.

    >>> from regard.lens import Scale
    >>> Scale([0, 3], 0)
    Scale((0, 3), 0)

    `None` are all heads.
    """

    heads: Heads | None
    factor: float

    changes_weights: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_number("Scale factor", self.factor)
        normalize_fields(self)

    def factors(self, n: int) -> list[float]:
        return [float(self.factor) if self.heads is None or h in self.heads else 1.0 for h in range(n)]  # type: ignore[operator]


@dataclass(frozen=True, repr=False)
class Only(Edit):
    """Switch off all heads but these: the outputs of the others are zeros.

    >>> from regard.lens import Only
    >>> Only([1, 2])
    Only((1, 2))
    """

    heads: Heads

    changes_weights: ClassVar[bool] = False

    def __post_init__(self) -> None:
        normalize_fields(self)

    def factors(self, n: int) -> list[float]:
        return [1.0 if h in self.heads else 0.0 for h in range(n)]  # type: ignore[operator]


def check_softmax(seen: ObservedAttention, edit: str) -> None:
    """Raise `NotUnderstood` if the weights are other numbers than the softmax, which a change of scores misses."""
    if isinstance(seen.normalize, Given):
        raise NotUnderstood(f"its weights were changed after the softmax ({seen.changed}), and {edit} comes before it")


def check_head_numbers(what: str, heads: object) -> tuple[int, ...]:
    """Return the numbers of heads in order, each once."""
    heads = heads.tolist() if isinstance(heads, Tensor) else heads
    if isinstance(heads, str) or not isinstance(heads, Iterable):
        hint = f"; write [{heads}]" if type(heads) is int else ""
        raise TypeError(f"{what} must be a list of their numbers, as in [0, 3], got {heads!r}{hint}")
    ids: list[Any] = list(heads)
    for head in ids:
        if isinstance(head, bool) or not isinstance(head, Integral):
            raise TypeError(f"{what} must be whole numbers, got {head!r}")
    return tuple(sorted({int(head) for head in ids}))


def normalize_fields(edit: Any, *selections: str) -> None:
    """Replace lists of positions and of heads by tuples of numbers."""
    kind = type(edit).__name__
    for name in selections:
        if (value := getattr(edit, name)) is not None:
            object.__setattr__(edit, name, checked_selection(f"{kind} {name}", value))
    if (heads := edit.heads) is not None:
        one = isinstance(heads, Integral) and not isinstance(heads, bool)
        object.__setattr__(edit, "heads", check_head_numbers(f"{kind} heads", [heads] if one else heads))


def _selected_pair(edit: Cut | Boost, tokens: CallTokens) -> tuple[Tensor, Tensor]:
    """Return True for each selected query, `b i`, and for each selected key, `b j`."""
    return tuple(
        torch.ones_like(axis.real) if chosen is None else axis.select(chosen)
        for chosen, axis in ((edit.queries, tokens.queries), (edit.keys, tokens.keys))
    )  # type: ignore[return-value]


def _pairs_exist(edit: Cut | Boost, tokens: CallTokens) -> Tensor:
    def find() -> Tensor:
        queries, keys = _selected_pair(edit, tokens)
        return (queries.any(1) & keys.any(1)).any()

    return tokens.once((id(edit), "pairs"), find)


def are_chosen(heads: tuple[int, ...] | None, n: int, device: torch.device) -> Tensor:
    """Return True for each chosen head."""
    return constant(tuple(heads is None or h in heads for h in range(n)), torch.bool, device)


def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor that is never written to; kept, because the host waits for a GPU to copy them."""
    if is_traced():  # the tensor would hold no numbers
        return torch.tensor(values, dtype=dtype, device=device)
    return _kept_constant(values, dtype, device)


@lru_cache(maxsize=256)
def _kept_constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)
