"""What PyTorch's layers call otherwise: whoever makes a layer by those names is told ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

P = ParamSpec("P")

OURS = {
    "num_heads": "heads=",
    "embed_dim": "the width first, without a name",
    "kdim": "key_width=",
    "vdim": "value_width=",
    "batch_first": "nothing: the batch comes first",
    "is_causal": "mask=Causal()",
}


def with_argument_hints(init: Callable[P, None]) -> Callable[P, None]:
    """The `__init__` of a layer, which tells whoever makes one by PyTorch's names what to write."""

    @wraps(init)
    def made(*args: P.args, **kwargs: P.kwargs) -> None:
        if theirs := sorted(kwargs.keys() & OURS.keys()):
            layer = init.__qualname__.partition(".")[0]
            raise TypeError(f"{layer} has no {theirs[0]}=; write {OURS[theirs[0]]}")
        init(*args, **kwargs)

    return made
