"""What models demand of configs, ids and batches: checks that raise with name, expectation and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from torch import Tensor, nn

from ..checks import must_be_number, must_count
from ..checks import must_be_share as must_be_share


def must_be_one_of(name: str, value: object, known: Any) -> None:
    """Raise unless `value` is among those of a `Literal`."""
    if value not in get_args(known):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(known)))}, got {value!r}")


def must_be_flag(name: str, value: object) -> None:
    """Raise unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def must_be_eps(value: float) -> None:
    """Raise unless a norm may add `value` to a variance."""
    must_be_number("eps", value)
    if value < 0:
        raise ValueError(f"eps must be 0 or more, got {value}")


def must_be_token(name: str, value: int, vocabulary: int) -> None:
    """Raise unless `value` is a token of a vocabulary of that size."""
    must_count(name, value)
    if value >= vocabulary:
        raise ValueError(f"{name} must be a token of the vocabulary of {vocabulary}, got {value}")


def must_tie(tied: str, source_vocabulary: int, target_vocabulary: int) -> None:
    """Raise unless two vocabularies are as `tied` needs them."""
    if tied == "all" and source_vocabulary != target_vocabulary:
        raise ValueError(
            f"tied='all' needs one vocabulary for both sides, got source_vocabulary={source_vocabulary} and "
            f"target_vocabulary={target_vocabulary}; pass tied='output'"
        )


def must_be_rows(name: str, ids: Tensor) -> None:
    """Raise unless `ids` have dims b n."""
    if ids.ndim != 2:
        hint = f"{name}[None]" if ids.ndim == 1 else f"{name}.view(b, n)"
        raise ValueError(f"{name} must have dims b n, got shape {tuple(ids.shape)}; write {hint}")


def must_hold(batch: object, *names: str) -> None:
    """Raise unless `batch` has a tensor of each of these names."""
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"a batch must be a mapping from names to tensors, got {type(batch).__name__}; "
            f"pass {{{', '.join(f'{name!r}: ...' for name in names)}}}"
        )
    missing = [name for name in names if name not in batch]
    if missing:
        raise ValueError(
            f"the batch must hold {', '.join(map(repr, names))}, got {', '.join(map(repr, batch)) or 'nothing'}; "
            f"add {', '.join(map(repr, missing))}"
        )


def must_be_model(name: str, value: object, kind: str, inside: str) -> None:
    """Raise unless `value` is a module, such as the `kind` that stands `inside` another."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"{name} must be a {kind}, got {type(value).__name__}; write {inside}({kind}(config), ...)")
