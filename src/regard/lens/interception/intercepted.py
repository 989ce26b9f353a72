"""InterceptedAttention: one attention call of a model on its way to a consumer, and what a consumer may do with it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from ...ops.call import SLOTS
from ...ops.operator import attend
from ..layer_names import shown_name
from .kernel_call import KernelCall, NotUnderstood, OutputProof

if TYPE_CHECKING:
    from ..recording.observed import ObservedAttention
    from ..terms.interpret import Interpreter


class OutputLayout(NamedTuple):
    """The position of the heads in an output."""

    heads: Callable[[Tensor], Tensor]  # b h i e of an output, or of its gradient
    output: Callable[[Tensor], Tensor]  # an output from b h i e


HEADS_SECOND = OutputLayout(lambda out: out, lambda heads: heads)  # b h i e
HEADS_THIRD = OutputLayout(lambda out: out.transpose(1, 2), lambda heads: heads.transpose(1, 2).contiguous())  # b i h e


class Consumer(Protocol):
    """A user of the interception, such as `capture` or `ablate`."""

    def observe(self, attention: InterceptedAttention) -> Tensor:
        """Return the output that the model goes on with: `attention.out`, or another of its layout."""


class Source(Protocol):
    """The interception that an attention call comes from."""

    interpreter: Interpreter

    def await_projection(self, heads: Tensor, callback: Callable[[Tensor], None]) -> None:
        """Call back with the weight of the first linear map that takes these heads, `b h i e`."""


class _Replacements(threading.local):
    """The latest output of this thread that is not the one of the model's kernel, and the attention that gave it."""

    out: weakref.ref[Tensor] | None = None
    observed: ObservedAttention | None = None


_LATEST = _Replacements()


def note_replacement(out: Tensor | None, observed: ObservedAttention | None) -> None:
    """Note that an output comes from another attention than the one that the model called; None forgets the latest."""
    _LATEST.out, _LATEST.observed = None if out is None else weakref.ref(out), observed


def replacement_of(out: Tensor) -> ObservedAttention | None:
    """Return the attention that gave an output, if it is not the one that the model called."""
    return _LATEST.observed if _LATEST.out is not None and _LATEST.out() is out else None


class InterceptedAttention:
    """One attention call of a layer, the same value whichever function the model called.

    A consumer reads it (`interpret`), changes the heads of its output (`heads`, `with_heads`), or replaces it
    (`interpret_or_raise`, `replaced_by`). Nothing is interpreted before a consumer asks for it. If `out` is a function,
    the kernel of the model runs when `out` is first read: never, if the consumer replaces the call.

    Consumers that change the same call are one after the other: the second reads what the first put in its place, and
    so does a recorder after both.
    """

    def __init__(
        self,
        source: Source,
        layer: str,
        read_call: Callable[[], KernelCall],
        out: Tensor | Callable[[], Tensor],
        layout: OutputLayout = HEADS_SECOND,
        proof: OutputProof | None = None,
        projection: Tensor | None = None,
        guess: str | None = None,
    ) -> None:
        if isinstance(out, Tensor):
            self.out, self._run = out, None
        else:
            self._run = out
        self.layer, self.layout = layer, layout
        self.guess = guess  # why the choice between batch and heads is a guess; None if it is none
        # True once the attention is interpreted, if the call had terms and no tensors for masks: a call of attend.
        self.has_terms = False
        self.replacement: ObservedAttention | None = None  # the attention that a consumer put in its place
        self.observed: ObservedAttention | None = None  # the attention of the model in terms, once it is interpreted
        self._source, self._read_call, self._proof, self._projection = source, read_call, proof, projection
        self._interpret_part: Callable[[], ObservedAttention | NotUnderstood] | None = None

    @cached_property
    def out(self) -> Tensor:
        """The output of the model's kernel."""
        assert self._run is not None
        out, self._run = self._run(), None
        return out

    @cached_property
    def _call(self) -> KernelCall:
        return self._read_call()

    @property
    def has_run(self) -> bool:
        """True if the kernel of the model has run."""
        return self._run is None

    @property
    def dropout(self) -> float:
        """The share of weights that the model drops in this call."""
        return self._call.dropout

    @property
    def heads(self) -> Tensor:
        """The output of each head, `b h i e`."""
        return self.layout.heads(self.out)

    def with_heads(self, heads: Tensor) -> Tensor:
        """Return an output of the same layout with other heads, `b h i e`."""
        return self.layout.output(heads)

    def interpret(self) -> ObservedAttention | NotUnderstood:
        """Return the attention in terms, or the reason why it has none; if it was replaced, the one in its place."""
        if self._interpret_part is not None:
            return self._interpret_part()
        if self._run is None and (replaced := replacement_of(self.out)) is not None:
            return replaced
        try:
            observed = self._source.interpreter.interpret(self._call, self._proof)
        except NotUnderstood as reason:
            return reason
        self.has_terms = self._call.score is not None
        self.observed = None if isinstance(observed, NotUnderstood) else observed
        return observed

    def interpret_or_raise(self) -> ObservedAttention:
        """Return the attention in terms; raise `NotUnderstood`, with the name of the layer, if it has none."""
        observed = self.interpret()
        if isinstance(observed, NotUnderstood):
            raise NotUnderstood(
                f"the attention of {shown_name(self.layer)} cannot be replaced: {observed}"
            ) from observed
        return observed

    def replaced_by(self, observed: ObservedAttention, equal: ObservedAttention | None = None) -> Tensor:
        """Return the output of another attention in the layout of this one, computed by `regard.attend`.

        `equal` is the same attention in terms that run faster, if there are such.

        A kernel that may write to a cache, or whose arguments only its output can confirm, has run before; its output
        is dropped. All others do not run.
        """
        run = observed if equal is None else equal
        q, k, v = run.q, run.k, run.v
        terms: dict[str, Any] = {slot: term for slot in SLOTS if (term := getattr(run, slot)) is not None}
        heads = attend(q, k, v.to(q.dtype), **terms, offset=run.offset, dropout=self._call.dropout)
        return self.replaced_by_heads(observed, heads)

    def replaced_by_heads(self, observed: ObservedAttention, heads: Tensor) -> Tensor:
        """Return the output of another attention, whose heads, `b h i e`, are computed, in the layout of this one."""
        self.replacement = observed
        return self.layout.output(heads if self._run is not None else heads.to(self.out.dtype))

    def part(
        self, heads: Callable[[], Tensor], interpret: Callable[[], ObservedAttention | NotUnderstood]
    ) -> InterceptedAttention:
        """Return the attention of some batch rows, from what gives their heads, `b h i e`, and their terms."""
        part = InterceptedAttention(self._source, self.layer, lambda: self._call, heads, guess=self.guess)
        part._interpret_part = interpret
        return part

    def await_projection(self, callback: Callable[[Tensor], None]) -> None:
        """Call back with the weight of the output projection once it is known; never if there is none."""
        if self._projection is not None:
            callback(self._projection)
        else:
            self._source.await_projection(self.heads.detach(), callback)
