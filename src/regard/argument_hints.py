"""Argument names of PyTorch, which raise with ours, and former names of ours, which warn with the new one."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

LAYERS = {  # arguments of layers, when they are built
    "num_heads": "heads=",
    "embed_dim": "the width first, without a name",
    "kdim": "key_width=",
    "vdim": "value_width=",
    "batch_first": "nothing: the batch comes first",
    "is_causal": "mask=Causal()",
}
OPERATOR = {  # arguments of PyTorch's attention functions
    "attn_mask": "mask=Dense(attn_mask) if it is bool, True = may attend, or bias=Added(attn_mask) for numbers",
    "is_causal": "mask=Causal(), which aligns the last query with the last key",
    "key_padding_mask": "mask=Padding(~key_padding_mask), True = a real key",
    "dropout_p": "dropout=",
    "scale": "score=Dot(scale=...)",
    "enable_gqa": "nothing: k and v may have fewer heads than q",
    "score_mod": "score=Score.of(score_mod)",
    "block_mask": "mask=Rule(mask_mod), or a mask such as Causal() & Window(256)",
    "need_weights": "weights(q, k, ...), the matrix that is never stored",
    "return_lse": "weights(q, k, ...).lse",
}
CALLS = {  # arguments of calls of layers and models
    "attn_mask": "mask=Dense(~attn_mask) if it is bool, True = may attend; numbers are the bias= of the layer",
    "attention_mask": "keep=attention_mask.bool(), True = a real token",
    "key_padding_mask": "keep=~key_padding_mask, True = a real key",
    "src_mask": "mask=Dense(~src_mask), True = may attend",
    "src_key_padding_mask": "keep=~src_key_padding_mask, True = a real key",
    "tgt_mask": "mask=Dense(~tgt_mask), True = may attend",
    "tgt_key_padding_mask": "keep=~tgt_key_padding_mask, True = a real key",
    "memory_mask": "context_mask=Dense(~memory_mask), True = may attend",
    "memory_key_padding_mask": "context_keep=~memory_key_padding_mask, True = a real key",
    "is_causal": "mask=Causal()",
    "need_weights": "layer.weights(...), which takes the same arguments",
    "average_attn_weights": "layer.weights(...)[...].mean(1)",
    "dropout_p": "dropout= when you build the layer; it acts in training only",
    "scale": "score=Dot(scale=...) when you build the layer",
    "enable_gqa": "kv_heads= when you build the layer",
}
KEEP = {"key_padding": "keep"}  # former names, which work until the next release
PADDING = {"padding": "keep"}
HOME = (str(Path(__file__).parent), str(Path(torch.__file__).parent))


def with_argument_hints(
    hints: Mapping[str, str], *, renamed: Mapping[str, str] | None = None
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function: arguments named in `hints` raise with what to write, those `renamed` warn and are passed on.

    >>> @with_argument_hints({"num_heads": "heads="}, renamed={"key_padding": "keep"})
    ... def layer(x, *, heads=1, keep=None):
    ...     return x, heads, keep
    >>> layer(1, num_heads=2)
    Traceback (most recent call last):
    ...
    TypeError: layer has no num_heads=; write heads=
    >>> layer(1, 2)
    Traceback (most recent call last):
    ...
    TypeError: layer takes 1 argument without a name, x, got 2; name the others: heads=, keep=
    """
    former = renamed or {}

    def decorate(fn: Callable[P, T]) -> Callable[P, T]:
        name = fn.__qualname__.removesuffix(".__init__").removesuffix(".forward").rpartition("<locals>.")[2]
        parameters = inspect.signature(fn).parameters.values()
        unnamed = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
        named = [f"{x.name}=" for x in parameters if x.kind is x.KEYWORD_ONLY]
        most = sys.maxsize if any(x.kind is x.VAR_POSITIONAL for x in parameters) or not named else len(unnamed)

        @wraps(fn)
        def check_names(*args: P.args, **kwargs: P.kwargs) -> T:
            if len(args) > most:
                shown, count = [x for x in unnamed if x != "self"], len(args) - ("self" in unnamed)
                raise TypeError(
                    f"{name} takes {len(shown)} argument{'s' * (len(shown) != 1)} without a name, {', '.join(shown)}, "
                    f"got {count}; name the others: {', '.join(named)}"
                )
            for given in kwargs:
                if given in hints:
                    first = min(x for x in kwargs if x in hints)
                    raise TypeError(f"{name} has no {first}=; write {hints[first]}")
                if given in former:
                    return fn(*args, **_with_new_names(name, kwargs, former))
            return fn(*args, **kwargs)

        return check_names

    return decorate


def _with_new_names(owner: str, given: Mapping[str, Any], former: Mapping[str, str]) -> dict[str, Any]:
    renamed = dict(given)
    for old, new in former.items():
        if old in renamed:
            if new in renamed:
                raise TypeError(f"{owner} got {old}= and {new}=, which are the same; write {new}= alone")
            renamed[new] = renamed.pop(old)
            if not torch.compiler.is_compiling():
                message = f"{old}= of {owner} is now called {new}=: lengths, or True = a real key; write {new}="
                warnings.warn(message, DeprecationWarning, stacklevel=_level_of_user())
    return renamed


def _level_of_user() -> int:
    """The stacklevel, for `_with_new_names`, of the nearest frame outside regard and PyTorch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(HOME):
        level, frame = level + 1, frame.f_back
    return level
