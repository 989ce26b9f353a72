"""Indices of a matrix: the entries of each axis that an index names, and the same index within those entries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def split_index(index: Any, shape: torch.Size, device: torch.device) -> tuple[list[Tensor], Any]:
    """Return the entries of each axis that an index names, and the same index within those entries.

    If `part` holds only the entries `ids[n]` of each axis n of x, then `x[index]` equals `part[rest]`; `ids` and `rest`
    are the two results.
    """
    index = index if isinstance(index, tuple) else (index,)
    named = sum(x is not None and x is not Ellipsis for x in index)
    if named > len(shape):
        raise IndexError(f"too many indices: the weights have {len(shape)} dims, got {named}")
    if sum(x is Ellipsis for x in index) > 1:
        raise IndexError("an index can hold one Ellipsis, got more")
    if not any(x is Ellipsis for x in index):
        index = (*index, Ellipsis)
    filled: list[Any] = []
    for x in index:
        filled += [slice(None)] * (len(shape) - named) if x is Ellipsis else [x]
    ids: list[Tensor] = []
    rest: list[Any] = []
    for x in filled:
        if x is None:
            rest.append(None)
            continue
        n = shape[len(ids)]
        if isinstance(x, slice):
            ids.append(torch.arange(n, device=device)[x])
            rest.append(slice(None))
            continue
        if isinstance(x, int) and not isinstance(x, bool):
            ids.append(_single(f"dim {len(ids)}", x, n, device))
            rest.append(0)
            continue
        chosen = _as_index_tensor(x, device)
        if chosen.dtype == torch.bool:
            if chosen.shape != (n,):
                raise IndexError(f"a bool index of dim {len(ids)} must have shape ({n},), got {tuple(chosen.shape)}")
            chosen = chosen.nonzero().squeeze(-1)
        touched, place = _nonnegative_ids(f"dim {len(ids)}", chosen, n).unique(return_inverse=True)
        ids.append(touched)
        rest.append(int(place) if chosen.ndim == 0 and not isinstance(x, Tensor) else place)
    return ids, tuple(rest)


def chosen_ids(name: str, x: int | slice | list[int] | Tensor, n: int, device: torch.device) -> Tensor:
    """Return the ids below n that an int, a slice or a list names; negative numbers count from the end."""
    if isinstance(x, slice):
        return torch.arange(n, device=device)[x]
    if isinstance(x, int) and not isinstance(x, bool):
        return _single(name, x, n, device)
    ids = _as_index_tensor(x, device)
    if isinstance(x, bool) or ids.dtype == torch.bool:
        raise IndexError(f"{name} must be a whole number, a slice or a list of whole numbers, got {x!r}")
    return _nonnegative_ids(name, ids, n).reshape(-1)


def _single(name: str, x: int, n: int, device: torch.device) -> Tensor:
    """Return the one entry x, checked and counted from 0, as a tensor; the host does not wait for the device."""
    if not -n <= x < n:
        raise IndexError(_outside(name, n, x))
    return torch.arange(x % n, x % n + 1, device=device)


def _outside(name: str, n: int, got: object) -> str:
    return f"index out of range: {name} of the weights has {n} entries, got {got}"


def _nonnegative_ids(name: str, ids: Tensor, n: int) -> Tensor:
    if ids.numel() and not -n <= int(ids.min()) <= int(ids.max()) < n:
        raise IndexError(_outside(name, n, ids.tolist()))
    return ids.long().remainder(max(n, 1))


def _as_index_tensor(x: Any, device: torch.device) -> Tensor:
    try:
        chosen = torch.as_tensor(x, device=device)
    except (TypeError, ValueError, RuntimeError):
        chosen = None
    if chosen is not None and not chosen.numel() and not isinstance(x, Tensor):
        return chosen.long()
    if chosen is None or chosen.is_floating_point() or chosen.is_complex():
        raise IndexError(f"an index must be whole numbers, slices, bools, None or ..., got {x!r}")
    return chosen
