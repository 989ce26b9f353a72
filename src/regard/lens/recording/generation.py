"""Steps: the calls that add rows to one matrix, and what hides keys from all of them together.

Each call knows the keys it was handed, not those that came later or that its cache had forgotten. `joined` says the
same over all rows and keys: by the term the calls share, where they share one that means the same everywhere, else by
reading the rows of each and recognizing what they come to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.terms.biases import Alibi, Bias, Relative, Sum
from ...ops.terms.coordinates import Point
from ...ops.terms.masks import Causal, Padding
from ...ops.terms.masks.mask_algebra import And, Mask
from ...ops.terms.reach import look_back
from ...ops.terms.term import Term
from ..terms.infer_mask import Rows, recognize, recognize_bias


class Step(NamedTuple):
    """The rows one call added, and what hides keys from them; `first` is the column its own key 0 has in the whole."""

    rows: int
    keys: int
    first: int
    mask: Mask | None
    bias: Bias | None
    offset: int
    batch: tuple[int, ...] | None = None  # which batch row of the call each batch row is now, None as they were

    def moved(self, parents: list[int]) -> Step:
        """The step after the batch rows moved."""
        return self._replace(batch=tuple(parents if self.batch is None else (self.batch[n] for n in parents)))

    def known_as(self) -> tuple[object, ...]:
        """What makes two steps hide the same."""
        return self.rows, self.keys, self.first, id(self.mask), id(self.bias), self.offset, self.batch


Terms = tuple[Mask | None, Bias | None, int | None]  # and where the first query stands, None for the last at the end
Memo = dict[object, tuple[tuple[Step, ...], Terms]]


class Matrix(NamedTuple):
    """The matrix that steps add up to."""

    b: int
    h: int
    i: int
    j: int
    device: torch.device
    dtype: torch.dtype


def joined(steps: Sequence[Step], whole: Matrix, *, given: int | None) -> Terms:
    """The mask and the bias of all steps; `given` is the first query's place if the only call said so."""
    first, last = steps[0], steps[-1]
    if len(steps) == 1:
        return moved(first.mask, whole.device), moved(first.bias, whole.device), given
    cross = last.first == 0 and last.keys == first.keys
    offset = whole.j - whole.i if cross else first.offset
    shared = _shared_mask(steps, cross)
    if shared is not None:
        mask: Mask | None = shared.mask
    else:
        mask, offset = recognize(_rows(steps, whole, "mask"), offset=offset)
    if all(step.bias is None for step in steps):
        return moved(mask, whole.device), None, offset
    if _by_distance(first.bias) and all(same(step.bias, first.bias) for step in steps):
        return moved(mask, whole.device), moved(first.bias, whole.device), offset
    seen = _rows(steps, whole, "mask")
    return moved(mask, whole.device), recognize_bias(_rows(steps, whole, "bias"), seen=seen, offset=offset), offset


def looks_back_only(mask: Mask | None) -> bool:
    """Does the mask hide every key after the query's own place?"""
    match mask:
        case Causal():
            return True
        case And(left=left, right=right):
            return looks_back_only(left) or looks_back_only(right)
        case _:
            return False


def same(a: Term | None, b: Term | None) -> bool:
    """Do two terms say the same, tensors and all?"""
    if a is None or b is None or a is b:
        return a is b
    return repr(a) == repr(b) and all(map(torch.equal, a.tensors(), b.tensors()))


def moved(term: Any, device: torch.device) -> Any:
    """The term on a device; None stays None."""
    return None if term is None else term.map_tensors(lambda x: x.to(device))


class _Shared(NamedTuple):
    mask: Mask | None


def _shared_mask(steps: Sequence[Step], cross: bool) -> _Shared | None:
    """The mask of every step that is also the mask of the whole."""
    masks = [step.mask for step in steps]
    if cross:
        alike = all(mask is masks[0] for mask in masks) and not any(step.batch for step in steps)
        return _Shared(masks[0]) if alike and (masks[0] is None or isinstance(masks[0], Padding)) else None
    mask = next((mask for mask in masks if mask is not None), Causal())
    return _Shared(mask) if looks_back_only(mask) and all(_agrees(step, mask) for step in steps) else None


def _agrees(step: Step, mask: Mask) -> bool:
    """Does a mask that looks back show a step what it saw?"""
    if step.mask is None:
        return mask == Causal() and step.first == 0 and step.rows == 1 and step.keys == step.offset + 1
    reach = look_back(mask)
    complete = step.first == 0 or (reach is not None and reach <= step.keys - step.rows)
    return complete and not mask.tensors() and step.mask == mask


def _by_distance(bias: Bias | None) -> bool:
    return (
        _by_distance(bias.left) and _by_distance(bias.right)
        if isinstance(bias, Sum)
        else isinstance(bias, (Alibi, Relative))
    )


def _rows(steps: Sequence[Step], whole: Matrix, slot: str) -> Rows:
    """The masks, or the biases, of all steps as one matrix."""
    device, dtype = whole.device, torch.bool if slot == "mask" else whole.dtype
    head = torch.arange(whole.h, device=device).view(-1, 1, 1)

    def part(step: Step, start: int, stop: int) -> Tensor:
        term = moved(getattr(step, slot), device)
        if term is None:
            return torch.full((1, 1, stop - start, step.keys), slot == "mask", device=device, dtype=dtype)
        batch = torch.arange(whole.b, device=device) if step.batch is None else torch.tensor(step.batch, device=device)
        row, keys = torch.arange(start, stop, device=device)[:, None], torch.arange(step.keys, device=device)
        value = term.over(Point(batch.view(-1, 1, 1, 1), head, row, keys, step.offset, whole.dtype))
        return value[(None,) * (4 - value.ndim)].expand(-1, -1, stop - start, step.keys)

    sizes = [part(step, 0, 1).shape for step in steps]
    shape = (max(size[0] for size in sizes), max(size[1] for size in sizes), whole.i, whole.j)

    def block(start: int, stop: int) -> Tensor:
        rows = torch.zeros(*shape[:2], stop - start, whole.j, device=device, dtype=dtype)
        top = 0
        for step in steps:
            first, last = max(start, top), min(stop, top + step.rows)
            if first < last:
                columns = slice(step.first, step.first + step.keys)
                rows[:, :, first - start : last - start, columns] = part(step, first - top, last - top)
            top += step.rows
        return rows

    return Rows(shape, block, device)
