"""Several sets of edits in one pass: copies of the inputs, one behind the other in the batch, each with its own edits.

The consumer cuts every attention call into the copies and hands each to the `Editor` of its set, so that an edit is
what it would be alone. Tensors with the batch as their first dim are cut; that is verified by the caller, which
compares stacked passes with single ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.call import SLOTS
from ...torch_internals import tree_leaves, tree_map
from ..interception.intercept import intercept
from ..interception.intercepted import InterceptedAttention
from ..interception.kernel_call import NotUnderstood
from ..recording.observed import ObservedAttention
from ..tape.annotations import Tokens, TokensByLayer
from .edit import Editor, must_follow_all
from .edit_values import Edit


class NotStackable(Exception):
    """A model whose inputs or calls cannot be cut into copies."""


def stack(value: Any, b: int, copies: int) -> Any:
    """Return `copies` of each tensor with b rows, one behind the other."""

    def repeat(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.ndim or len(x) != b:
            return x
        return x.repeat(copies, *[1] * (x.ndim - 1))

    return tree_map(repeat, value)


def unstack(value: Any, plain: Any, copies: int) -> list[Any]:
    """Return the output of each copy; `plain` is the output of one. Raise `NotStackable` if it has other shapes."""
    for x, one in zip(tree_leaves(value), tree_leaves(plain), strict=True):
        if isinstance(x, Tensor) and (not one.ndim or x.shape != (copies * len(one), *one.shape[1:])):
            raise NotStackable
        if not isinstance(x, (Tensor, type(None), bool, int, float, str)):
            raise NotStackable

    def rows(n: int) -> Any:
        return tree_map(lambda x: x.chunk(copies)[n] if isinstance(x, Tensor) else x, value)

    return [rows(n) for n in range(copies)]


@contextmanager
def edit_copies(
    model: nn.Module,
    sets: Sequence[Mapping[str, Sequence[Edit]]],
    tokens: Tokens | TokensByLayer | None,
    layout: str | Mapping[str, str] | None,
) -> Iterator[None]:
    """Edit each copy of the inputs by its own set within the block."""
    consumer = StackedEditors([Editor(each, tokens, follows_all=must_follow_all(model, each)) for each in sets])
    with intercept(model, consumer, layout=layout) as mode:
        yield
    for each in consumer.editors:
        each.check_done(mode)


class StackedEditors:
    """Consumer that hands each copy of an attention call to its own editor."""

    def __init__(self, editors: Sequence[Editor]) -> None:
        self.editors = editors
        self._terms: dict[tuple[int, int], tuple[Any, Any]] = {}  # id of a term and number of a copy -> both terms

    def observe(self, attention: InterceptedAttention) -> Tensor:
        """Return the output of all copies."""
        interested = [each.is_interested(attention.layer) for each in self.editors]
        if not any(interested):
            return attention.out
        copies, heads = len(self.editors), attention.heads
        if len(heads) % copies:
            raise NotStackable
        interpret = cache(attention.interpret)
        outs = list(heads.chunk(copies))
        for n, editor in enumerate(self.editors):
            if interested[n]:
                outs[n] = editor.observe(
                    attention.part(partial(outs.__getitem__, n), partial(self._interpret, interpret, n))
                )
        return attention.with_heads(torch.cat(outs))

    def _interpret(
        self, interpret: Callable[[], ObservedAttention | NotUnderstood], n: int
    ) -> ObservedAttention | NotUnderstood:
        """Return one copy of an attention."""
        seen, copies = interpret(), len(self.editors)
        if isinstance(seen, NotUnderstood):
            return seen
        b, *sizes = seen.q.shape
        if b in (*sizes, *seen.k.shape[1:]):
            raise NotStackable  # the first dim of a term's tensor may be another one than the batch

        def rows(x: Any) -> Any:
            return x.chunk(copies)[n] if isinstance(x, Tensor) and x.ndim and len(x) == b else x

        def term(slot: str) -> Any:
            whole = getattr(seen, slot)
            key = id(whole), n
            if whole is not None and key not in self._terms:
                self._terms[key] = whole, whole.map_tensors(rows)
            return None if whole is None else self._terms[key][1]

        terms: dict[str, Any] = {slot: term(slot) for slot in SLOTS}
        q, k, v, offset = map(rows, (seen.q, seen.k, seen.v, seen.offset))
        return seen._replace(q=q, k=k, v=v, offset=offset, statistic=None, **terms)
