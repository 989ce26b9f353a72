"""Argument checks: each raises an error with the name, the expected value, the actual value and a correction.

`suggest_name` writes the correction for an unknown name.
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, get_args

import torch
from torch import Tensor, nn

MAX_LISTED_NAMES = 20  # in the message about an unknown name


def check_int(name: str, value: object, least: int = 0, below: int = 2**63) -> None:
    """Raise unless `value` is an integer of at least `least` and below `below`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r} ({type(value).__name__})")
    if value < least:
        raise ValueError(f"{name} must be {least} or more, got {value}")
    if int(value) >= below:
        raise ValueError(
            f"{name} must be below 2^{below.bit_length() - 1}, got 2^{int(value).bit_length() - 1} or more"
        )


def check_within(name: str, value: object, most: int, what: str) -> None:
    """Raise unless `value` is an integer from 1 to `most`, the number of `what`."""
    check_int(name, value, least=-(2**63))
    if not 1 <= int(value) <= most:  # type: ignore[call-overload]
        raise ValueError(f"{name} must be from 1 to the number of {what} {most}, got {value}")


def check_number(name: str, value: object, above: float = -math.inf) -> None:
    """Raise unless `value` is a finite number above `above`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not -math.inf < number < math.inf:
        raise ValueError(f"{name} must be finite, got {number}")
    if not number > above:
        raise ValueError(f"{name} must be above {above:g}, got {value}")


def check_probability(name: str, value: float) -> None:
    """Raise unless `value` is at least 0 and below 1."""
    check_number(name, value)
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value}")


def check_letters(name: str, value: object, known: str) -> None:
    """Raise unless `value` is a string of letters of `known`, in their order."""
    if not isinstance(value, str) or not set(value) <= set(known):
        raise ValueError(f"{name} must contain only letters of {known!r}, got {value!r}")
    if value != (ordered := "".join(letter for letter in known if letter in value)):
        raise ValueError(f"{name} must have letters in the order of {known!r}, got {value!r}; write {ordered!r}")


def check_tensor(name: str, value: object, hint: str = "torch.as_tensor(...)") -> None:
    """Raise unless `value` is a tensor."""
    if not isinstance(value, Tensor):
        hint = "torch.as_tensor(x)" if hasattr(value, "__array__") else hint
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}; write {hint}")


def check_bool_mask(name: str, value: object) -> None:
    """Raise unless `value` is a bool tensor of 2 to 4 dims."""
    check_tensor(name, value)
    assert isinstance(value, Tensor)
    if value.dtype != torch.bool:
        raise TypeError(
            f"{name} must be bool, True = may attend, got {value.dtype}; write x.bool() for a 0/1 mask, "
            "x == 0 for one made of 0 and -inf, or pass numbers to be added as bias=Added(x)"
        )
    if not 2 <= value.ndim <= 4:
        raise ValueError(
            f"{name} must have 2 to 4 dims (b h i j, aligned right), got shape {tuple(value.shape)}; if there are "
            "several batch dims, write x.flatten(0, -4)"
        )


def check_integer_tensor(name: str, value: Tensor, *dims: int) -> None:
    """Raise unless `value` is an integer tensor whose number of dims is one of `dims`."""
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name} must hold whole numbers, got {value.dtype}; write x.long()")
    if value.ndim not in dims:
        allowed = " or ".join(map(str, dims))
        raise ValueError(f"{name} must have {allowed} dims, got shape {tuple(value.shape)}")


def check_broadcast(name: str, x: Tensor, sizes: Mapping[str, int | None]) -> None:
    """Raise unless `x` broadcasts to `sizes`, a size per letter from left to right; None allows any size.

    As in broadcasting, `x` may lack dims on the left, and each of its dims is 1 or the size of its letter.
    """
    letters = list(sizes)
    if x.ndim > len(letters):
        raise ValueError(
            f"{name} must have at most {len(letters)} dims ({_format_sizes(sizes)}), got shape {tuple(x.shape)}"
        )
    for letter, size in zip(letters[len(letters) - x.ndim :], x.shape, strict=True):
        if sizes[letter] is not None and size != 1 and size != sizes[letter]:
            raise ValueError(
                f"{name} must broadcast to ({_format_sizes(sizes)}), got shape {tuple(x.shape)}: "
                f"its dim '{letter}' is {size}; pass 1 or {sizes[letter]} there"
            )


def check_choice(name: str, value: object, known: Any) -> None:
    """Raise unless `value` is one of the values of the `Literal` type `known`."""
    if value not in get_args(known):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(known)))}, got {value!r}")


def check_flag(name: str, value: object) -> None:
    """Raise unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_keys(batch: object, *names: str) -> None:
    """Raise unless `batch` is a mapping with each of the names."""
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


def check_token_rows(name: str, ids: Tensor) -> None:
    """Raise unless `ids` have dims b n."""
    if ids.ndim != 2:
        hint = f"{name}[None]" if ids.ndim == 1 else f"{name}.view(b, n)"
        raise ValueError(f"{name} must have dims b n, got shape {tuple(ids.shape)}; write {hint}")


def check_token_id(name: str, value: int, vocabulary: int) -> None:
    """Raise unless `value` is a token id of a vocabulary of this size."""
    check_int(name, value)
    if value >= vocabulary:
        raise ValueError(f"{name} must be a token of the vocabulary of {vocabulary}, got {value}")


def check_token_ids(name: str, tokens: Tensor, vocabulary: int) -> None:
    """Raise unless all tokens are below the vocabulary size; checked on the CPU only, where reading values is cheap."""
    if tokens.device.type == "cpu" and tokens.numel():
        low, high = (int(x) for x in tokens.aminmax())
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"{name} must be within the vocabulary of {vocabulary}, got {low if low < 0 else high}; "
                "pass tokens the model knows"
            )


def check_eps(value: float) -> None:
    """Raise unless `value` is 0 or more, so that a norm can add it to a variance."""
    check_number("eps", value)
    if value < 0:
        raise ValueError(f"eps must be 0 or more, got {value}")


def check_tied_vocabularies(tied: str, source_vocabulary: int, target_vocabulary: int) -> None:
    """Raise unless the two vocabularies allow the weight tying `tied`."""
    if tied == "all" and source_vocabulary != target_vocabulary:
        raise ValueError(
            f"tied='all' needs one vocabulary for both sides, got source_vocabulary={source_vocabulary} and "
            f"target_vocabulary={target_vocabulary}; pass tied='output'"
        )


def check_submodel(name: str, value: object, kind: str, inside: str) -> None:
    """Raise unless `value` is a module, such as `kind`; the hint shows it as an argument of `inside`."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"{name} must be a {kind}, got {type(value).__name__}; write {inside}({kind}(config), ...)")


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known name, or a list of the known names.

    >>> suggest_name("Casual", ["Causal", "Window"]), suggest_name("xyz", ["Causal", "Window"])
    ("did you mean 'Causal'?", "known: 'Causal', 'Window'")
    """
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    listed, rest = known[:MAX_LISTED_NAMES], known[MAX_LISTED_NAMES:]
    return f"known: {', '.join(map(repr, listed)) or 'none'}{f' and {len(rest)} more' if rest else ''}"


def _format_sizes(sizes: Mapping[str, int | None]) -> str:
    # Called on errors only: torch.compile specializes on a length that is formatted into a string.
    return " ".join(letter if size is None else f"{letter}={size}" for letter, size in sizes.items())
