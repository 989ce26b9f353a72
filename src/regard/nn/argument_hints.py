"""Error hints for argument names of PyTorch (num_heads, embed_dim, ...) that our layers call otherwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

P = ParamSpec("P")

HINTS = {
    "num_heads": "heads=",
    "embed_dim": "the width first, without a name",
    "kdim": "key_width=",
    "vdim": "value_width=",
    "batch_first": "nothing: the batch comes first",
    "is_causal": "mask=Causal()",
}


def with_argument_hints(init: Callable[P, None]) -> Callable[P, None]:
    """Decorate the `__init__` of a layer: an argument name of PyTorch raises with our name for it."""

    @wraps(init)
    def checked_init(*args: P.args, **kwargs: P.kwargs) -> None:
        if theirs := sorted(kwargs.keys() & HINTS.keys()):
            layer = init.__qualname__.partition(".")[0]
            raise TypeError(f"{layer} has no {theirs[0]}=; write {HINTS[theirs[0]]}")
        init(*args, **kwargs)

    return checked_init
