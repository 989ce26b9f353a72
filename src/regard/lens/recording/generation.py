"""Join the calls of a generation into one matrix: find one mask and one bias that hold for the rows of all steps.

Each call knows the keys that it was passed, not the keys that came later or that its cache had dropped. `join_steps`
returns terms over all rows and keys: the term that the calls share if it means the same everywhere, else the term that
`infer_mask` recognizes in the evaluated rows of all calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.terms.biases import Alibi, Bias, Relative, ScaledBias, Sum
from ...ops.terms.coordinates import Point
from ...ops.terms.masks import Causal, Padding
from ...ops.terms.masks.mask_algebra import And, Mask
from ...ops.terms.reach import look_back
from ...ops.terms.term import Term
from ..terms.infer_mask import Rows, recognize, recognize_bias


class GenerationStep(NamedTuple):
    """The rows that one call added, and the terms that hide or bias keys in them."""

    rows: int
    keys: int
    first: int  # column of the joined matrix at which key 0 of the call stands
    mask: Mask | None
    bias: Bias | None
    offset: int
    batch: tuple[int, ...] | None = None  # the call's batch row that each batch row continues; None: unchanged

    def with_parents(self, parents: list[int]) -> GenerationStep:
        """Return the step after the batch rows were reordered: row n continues row `parents[n]`."""
        return self._replace(batch=tuple(parents if self.batch is None else (self.batch[n] for n in parents)))

    def identity(self) -> tuple[object, ...]:
        """Return a key that two steps share if they hide the same keys."""
        return self.rows, self.keys, self.first, id(self.mask), id(self.bias), self.offset, self.batch


Terms = tuple[Mask | None, Bias | None, int | None]  # mask, bias, first query position (None: last query at last key)
Memo = dict[object, tuple[tuple[GenerationStep, ...], Terms]]


class JoinedMatrix(NamedTuple):
    """Shape, device and dtype of the matrix that the steps add up to."""

    b: int
    h: int
    i: int
    j: int
    device: torch.device
    dtype: torch.dtype


def join_steps(steps: Sequence[GenerationStep], whole: JoinedMatrix, *, offset: int | None) -> Terms:
    """Return the mask, the bias and the first query position of all steps.

    `offset` is the position that the first call passed; it is returned if there is only one call.
    """
    first, last = steps[0], steps[-1]
    if len(steps) == 1:
        return to_device(first.mask, whole.device), to_device(first.bias, whole.device), offset
    is_cross = last.first == 0 and last.keys == first.keys
    position = whole.j - whole.i if is_cross else first.offset
    shared = _shared_mask(steps, is_cross)
    if shared is not None:
        mask: Mask | None = shared.mask
    else:
        mask, position = recognize(_joined_rows(steps, whole, "mask"), offset=position)
    if all(step.bias is None for step in steps):
        return to_device(mask, whole.device), None, position
    if _depends_on_distance_only(first.bias) and all(equal_terms(step.bias, first.bias) for step in steps):
        return to_device(mask, whole.device), to_device(first.bias, whole.device), position
    visible = _joined_rows(steps, whole, "mask")
    bias = recognize_bias(_joined_rows(steps, whole, "bias"), seen=visible, offset=position)
    return to_device(mask, whole.device), bias, position


def looks_back_only(mask: Mask | None) -> bool:
    """Whether the mask hides every key after the query's own position."""
    match mask:
        case Causal():
            return True
        case And(left=left, right=right):
            return looks_back_only(left) or looks_back_only(right)
        case _:
            return False


def equal_terms(a: Term | None, b: Term | None) -> bool:
    """Whether two terms are equal, their tensors compared by value.

    `==` compares a term that holds tensors by identity; `repr` is equal for two different functions of one name.
    """
    if a is None or b is None or a is b:
        return a is b
    if type(a) is not type(b):
        return False
    return all(_equal_values(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a))


def to_device(term: Any, device: torch.device) -> Any:
    """Return the term with its tensors on a device; None stays None."""
    return None if term is None else term.map_tensors(lambda x: x.to(device))


def _equal_values(x: Any, y: Any) -> bool:
    """Whether two values of one field are equal."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.dtype == y.dtype and x.device == y.device and torch.equal(x, y)
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return False
    return equal_terms(x, y) if isinstance(x, Term) and isinstance(y, Term) else bool(x == y)


class _SharedMask(NamedTuple):
    mask: Mask | None


def _shared_mask(steps: Sequence[GenerationStep], is_cross: bool) -> _SharedMask | None:
    """Return the mask of the joined matrix if the mask of every step is the same and says the same over all rows."""
    masks = [step.mask for step in steps]
    if is_cross:
        unchanged = all(mask is masks[0] for mask in masks) and not any(step.batch for step in steps)
        return _SharedMask(masks[0]) if unchanged and (masks[0] is None or isinstance(masks[0], Padding)) else None
    mask = next((mask for mask in masks if mask is not None), Causal())
    return _SharedMask(mask) if looks_back_only(mask) and all(_agrees(step, mask) for step in steps) else None


def _agrees(step: GenerationStep, mask: Mask) -> bool:
    """Whether a mask that looks back only shows a step the keys that it saw."""
    if step.mask is None:
        return mask == Causal() and step.first == 0 and step.rows == 1 and step.keys == step.offset + 1
    reach = look_back(mask)
    has_all_keys = step.first == 0 or (reach is not None and reach <= step.keys - step.rows)
    return has_all_keys and not mask.tensors() and step.mask == mask


def _depends_on_distance_only(bias: Bias | None) -> bool:
    """Whether a bias is a function of i - j, so that it means the same in every step."""
    if isinstance(bias, Sum):
        return _depends_on_distance_only(bias.left) and _depends_on_distance_only(bias.right)
    if isinstance(bias, ScaledBias):
        return _depends_on_distance_only(bias.bias)
    return isinstance(bias, (Alibi, Relative))


def _joined_rows(steps: Sequence[GenerationStep], whole: JoinedMatrix, slot: str) -> Rows:
    """Return the masks, or the biases, of all steps as the rows of one matrix."""
    device, dtype = whole.device, torch.bool if slot == "mask" else whole.dtype
    head = torch.arange(whole.h, device=device).view(-1, 1, 1)

    def rows_of_step(step: GenerationStep, start: int, stop: int) -> Tensor:
        term = to_device(getattr(step, slot), device)
        if term is None:
            return torch.full((1, 1, stop - start, step.keys), slot == "mask", device=device, dtype=dtype)
        batch = torch.arange(whole.b, device=device) if step.batch is None else torch.tensor(step.batch, device=device)
        row, keys = torch.arange(start, stop, device=device)[:, None], torch.arange(step.keys, device=device)
        value = term.over(Point(batch.view(-1, 1, 1, 1), head, row, keys, step.offset, whole.dtype))
        return value[(None,) * (4 - value.ndim)].expand(-1, -1, stop - start, step.keys)

    sizes = [rows_of_step(step, 0, 1).shape for step in steps]
    shape = (max(size[0] for size in sizes), max(size[1] for size in sizes), whole.i, whole.j)

    def block(start: int, stop: int) -> Tensor:
        rows = torch.zeros(*shape[:2], stop - start, whole.j, device=device, dtype=dtype)
        top = 0
        for step in steps:
            first, last = max(start, top), min(stop, top + step.rows)
            if first < last:
                columns = slice(step.first, step.first + step.keys)
                rows[:, :, first - start : last - start, columns] = rows_of_step(step, first - top, last - top)
            top += step.rows
        return rows

    return Rows(shape, block, device)
