"""Recognize attention that a model writes out itself, as matmul, softmax and matmul ("eager" attention).

    scores = (q @ k.mT / d**0.5).masked_fill(hidden, -inf)
    out = dropout(scores.softmax(-1)) @ v

What
    `EagerTracker` keeps a symbolic value beside each tensor of scores: the q and k whose product it is, its scale, and
    the numbers added to it or hidden in it. So a tape holds q, k and terms, as for any other attention.

How it flows
    The function mode passes each relevant call to `follow`. `matmul.py` recognizes products, `op_rules.py` has one rule
    per function (mul, masked_fill, softmax, ...), and a product of a softmax output with values completes an
    `EagerAttention`. If the model did something to the scores that has no rule, the scores themselves are stored,
    queries x keys. Either way some rows of the weights that the model computed are compared with the interpretation.
    What the model does to the weights after the softmax is followed by `final_weights.py`, and `weight_change.py` finds
    terms for it: a factor, a mask, or the dense weights as they multiply the values.

Lifetimes
    Symbolic values live as long as their tensors, which are referenced weakly, and as nothing writes to them in place.
    `clear` forgets all when the outermost module of the model returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from math import inf, isclose, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ops.backends import reference
from ...ops.blocks.prepared_call import prepare
from ...ops.terms.normalizers import Normalizer, SinkSoftmax, Softmax
from ...ops.torch_state import in_functorch
from ...ops.weights import Weights
from ...torch_internals import innermost_tensor, outside_transforms
from ..interception.func_transforms import unwrap_transforms
from ..interception.kernel_call import KernelCall, OutputProof
from ..interception.output_check import reproduces_output
from ..recording.observed import ObservedAttention
from ..terms.changed_weights import Scaled
from .dim_origins import FEATURES, Dim, DimOrigins, is_parameter, join_dims, kinds_of
from .final_weights import Descent, FinalWeights, is_over_keys
from .given_layout import LayoutMismatch
from .head_layout import HeadChoice, HeadLayout, LayerEvidence, choose_layout, common_batch_dims, with_batch_dims
from .layer_weights import is_layer_weight
from .linear_context import LinearContexts
from .matmul import MATMUL_NAMES, Average, Projection, has_data, operands, parse_average, parse_product
from .not_attention import (
    CHANNELS,
    FACTORS,
    FIXED_VALUES,
    FIXED_WEIGHTS,
    ROUTING,
    SLOTS,
    AverageOrigin,
    NotAttention,
    kind_of_average,
)
from .op_rules import EXP_NAMES, OP_RULES, SOFTMAX_NAMES, OpCall, SymbolicTensors, change_weights, is_in_place
from .provenance import Pair, Provenance
from .sampled_points import SampledPoints
from .symbolic_scores import Scores, SoftmaxOutput, WeightedValues
from .unnormalized import Exponentials, UndividedAverage
from .weight_change import WeightChange, given_call

ROWS = 8  # rows of each matrix that are compared with the weights of the model
MAX_COMPARED_ENTRIES = 2**24  # matrix entries compared at once if all rows are compared
TOLERANCE, HALF_TOLERANCE = 0.03, 0.1  # error relative to the largest weight of a row, in float32 and half precision
LINEAR, SUM = "linear", "sum"
DIVISION_NAMES = frozenset(("div", "div_", "divide", "true_divide", "mul", "mul_", "multiply", "normalize"))
STARTING_NAMES = MATMUL_NAMES | SOFTMAX_NAMES | EXP_NAMES  # functions that matter before there are scores
NAMES = STARTING_NAMES | OP_RULES.keys() | {SUM}
SOFTMAX_BY_HAND = DIVISION_NAMES | MATMUL_NAMES | EXP_NAMES  # results may be a softmax of exponentials, or its average

Evidence = Callable[[], LayerEvidence]


class EagerAttention(NamedTuple):
    """One attention that a model has written out as matmul, softmax and matmul."""

    scores: Scores | None
    logits: Tensor  # b h i j
    found: Tensor  # b h i j: the weights that the model computed
    v: Tensor  # b h j e
    heads: Callable[[Tensor], Tensor]  # b h i e of the output, or of its gradient
    out: Tensor  # the averages of the values, as the call that completed the attention returned them
    softmaxed: SoftmaxOutput
    normalize: Normalizer | None = None  # the function of the logits, if it is no softmax
    projection: Projection | None = None  # set if the call also maps the averages to its output
    guess: str | None = None  # why the choice between batch and heads is a guess
    context: str = ""  # set if it may be the context of a linear attention: what `LinearContexts` follows it by

    @classmethod
    def of(
        cls,
        x: Tensor,
        softmaxed: SoftmaxOutput,
        average: Average,
        out: Tensor,
        choose: Callable[[torch.Size, torch.Size | None], HeadChoice],
    ) -> EagerAttention:
        """Return the attention of a softmax output, whose current tensor is x, with its values.

        `choose` takes the batch dims, and finer ones if some were merged along the way.
        """
        v, scores, shape = average.v, softmaxed.scores, softmaxed.keys_last(x).shape
        logits, found = (average.weights(y.reshape(shape)) for y in (softmaxed.logits, softmaxed.weights_in(x)))
        given, (i, j) = common_batch_dims(logits.shape[:-2], v.shape[:-2]), logits.shape[-2:]
        if scores is not None and (prod(scores.lead) != prod(given) or not scores.inputs_are_unmodified):
            scores = None
        layout, guess = choose(given, scores.lead if scores is not None and len(scores.lead) > len(given) else None)

        def to_layout(y: Tensor) -> Tensor:
            return layout.of_matrices(y.expand(*given, i, j).reshape(*layout.lead, i, j))

        sink = softmaxed.sink
        by_head = None if sink is None else _by_head(to_layout(average.weights(sink.reshape(shape))))
        return cls(
            None if scores is None else scores.with_batch_dims(layout.lead).in_layout(layout),
            to_layout(logits),
            to_layout(found),
            layout.of_matrices(with_batch_dims(v, given, layout.lead)),
            lambda out: layout.of_matrices(average.heads(out).reshape(*layout.lead, i, -1)),
            out if average.projection is None else average.projection.averages,
            softmaxed,
            softmaxed.normalize if by_head is None else SinkSoftmax(by_head),
            average.projection,
            guess,
        )

    def without_transforms(self, evidence: LayerEvidence) -> EagerAttention:
        """Return the attention over the batches that the open vmaps map, whose output is `b h i e`.

        The open vmaps are batch dims, or heads if each function sees no heads.
        """
        lead = unwrap_transforms(self.logits).shape[:-2]
        sizes = torch.Size(size for size in lead if size > 1)
        layout, guess = HeadLayout(torch.Size((lead[:-1].numel(), lead[-1])), 1), None
        if lead[-1] == 1:
            layout, guess = choose_layout(sizes, None, evidence)

        def values(x: Tensor) -> Tensor:
            x = unwrap_transforms(x, ndim=4)
            with outside_transforms():
                return layout.of_matrices(with_batch_dims(x, lead, layout.lead))

        scores = None
        if self.scores is not None:
            scores = replace(self.scores.map_terms(values), q=values(self.scores.q), k=values(self.scores.k), inputs=())
        logits, found, v, averages = map(values, (self.logits, self.found, self.v, self.heads(self.out)))
        normalize = self.normalize
        if isinstance(normalize, SinkSoftmax) and isinstance(normalize.sink, Tensor):
            normalize = SinkSoftmax(innermost_tensor(normalize.sink))
        return self._replace(
            scores=scores,
            logits=logits,
            found=found,
            v=v,
            heads=lambda heads: heads,
            out=averages,
            normalize=normalize,
            guess=guess,
        )

    def kernel_call(self) -> KernelCall:
        """Return the attention over queries and keys: with the final weights, if they are not the softmax of scores."""
        changes = self.softmaxed.changes
        if not changes:
            return self._softmax_call(self.scores)
        if self.softmaxed.is_final:
            return given_call(self.found, self.v, changes)
        change = WeightChange.of(self.found, self.logits, self.normalize)
        is_known = self.softmaxed.is_attention or self.softmaxed.is_elementwise
        if change.is_none or not is_known:
            return self._softmax_call(self.scores)
        given = given_call(self.found, self.v, changes)
        scores, hidden, factor = self.scores, change.hidden, change.factor
        if scores is None or factor is None:
            return given
        if hidden is not None:
            if scores.zeroed is not None and bool((scores.zeroed & ~hidden).any()):
                return given
            scores = replace(scores, zeroed=None).without(hidden, scores.lead, by=-inf)
        normalize = self.normalize if bool((factor == 1).all()) else Scaled(self.normalize or Softmax(), factor)
        call = self._softmax_call(scores)
        return replace(call, normalize=normalize, changed=given.changed, alternative=given)

    def _softmax_call(self, scores: Scores | None) -> KernelCall:
        """Return the call whose weights are the softmax; its alternative stores the scores as a mask, with q = 0."""
        q = self.v.new_zeros(()).expand(*self.logits.shape[:3], self.v.shape[-1])
        normalize = self.normalize
        stored = KernelCall(q=q, k=self.v, v=self.v, mask=self.logits, normalize=normalize)
        if scores is None or scores.zeroed is not None:
            return stored
        scale = None if isclose(scores.scale, scores.q.shape[-1] ** -0.5, rel_tol=1e-6) else scores.scale
        terms: dict[str, Any] = dict(scores.mask_and_bias())
        return KernelCall(
            q=scores.q, k=scores.k, v=self.v, scale=scale, normalize=normalize, **terms, alternative=stored
        )

    @property
    def proof(self) -> OutputProof:
        """A test whether an interpretation has the weights that the model computed."""
        return OutputProof(self._agrees, "the weights that it multiplies with v are not the softmax of its scores")

    def _agrees(self, observed: ObservedAttention) -> bool:
        if not observed.changed:
            return self.has_weights(observed.weights)
        is_product = self.softmaxed.is_dropped or reproduces_output(observed, self.heads(self.out.detach()), rows=ROWS)
        return is_product and self.has_weights(observed.weights, strict=True)

    def has_weights(self, weights: Weights, *, strict: bool = False) -> bool:
        """True if the model computed these weights: compare ROWS rows, or all if it changed them after the softmax.

        Fully masked rows are compared only if `strict`.
        """
        b, h, i, j = self.found.shape
        if not self.found.numel():
            return True
        if not self.softmaxed.changes:
            rows = compared_rows(i, self.found.device)
            # The reference takes the fewest calls for a few rows, but a key that is not finite spoils it.
            return self._has_rows(reference_rows(weights, rows), rows, strict) or self._has_rows(
                weights[:, :, rows], rows, strict
            )
        step = max(1, MAX_COMPARED_ENTRIES // (b * h * j))
        parts = torch.arange(i, device=self.found.device).split(step)
        return all(self._has_rows(weights[:, :, part], part, strict) for part in parts)

    def _has_rows(self, ours: Tensor, rows: Tensor, strict: bool) -> bool:
        ours, theirs = ours.float(), self.found[:, :, rows, : ours.shape[-1]].float()
        if strict or self.normalize is not None:
            theirs = theirs.nan_to_num()
        off, largest = (ours - theirs).abs().amax(-1), ours.amax(-1)
        if self.normalize is not None:  # a row of zeros need not be a masked one
            largest = torch.maximum(largest, theirs.amax(-1))
        if strict:
            return bool((off <= self._tolerance * theirs.abs().amax(-1)).all())
        return bool(((off <= self._tolerance * largest) | (largest <= 0)).all())

    @property
    def _tolerance(self) -> float:
        # Scores may be cast up before a softmax.
        halves = any(x.dtype.itemsize <= 2 for x in (self.logits, self.v))
        return HALF_TOLERANCE if halves else TOLERANCE


@cache
def compared_rows(n: int, device: torch.device) -> Tensor:
    """Return at most ROWS of n rows, the first and the last among them."""
    return torch.linspace(0, n - 1, ROWS).round().long().unique().to(device)


def reference_rows(weights: Weights, rows: Tensor) -> Tensor:
    """Return some rows of weights whose keys are finite."""
    return reference.weigh(prepare(weights.call.select(rows=rows), finite=True))[0]


class EagerTracker:
    """Follows scores through the functions of PyTorch; without gradients unless a consumer may replace the call."""

    def __init__(
        self,
        *,
        with_gradients: bool = False,
        parts: Sequence[nn.Module] = (),
        is_buffer: Callable[[Tensor], bool] = lambda x: False,
    ) -> None:
        self._with_gradients = with_gradients
        self._parts = parts  # the running modules, the innermost last
        self._symbolic = SymbolicTensors()
        self.traces = Provenance()
        self.final = FinalWeights()
        self.origins = DimOrigins(is_buffer)
        self.contexts = LinearContexts(self.origins)
        self.samples = SampledPoints()
        self._routed: set[tuple[int, torch.Size]] = set()  # memory and shape of values that fixed weights averaged

    def follow(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, evidence: Evidence
    ) -> EagerAttention | NotAttention | None:
        """Process a call, which has run, of a function with a `traced_name`; return the attention that it completes."""
        if not self._symbolic.entries and not self.final.held and name not in STARTING_NAMES:
            return None
        weight = (args[1] if len(args) > 1 else kwargs.get("weight")) if name == LINEAR else None
        if isinstance(weight, nn.Parameter) and not self.holds_weights:
            return None
        with torch.set_grad_enabled(self._with_gradients and torch.is_grad_enabled()):
            found = self._follow(name, args, kwargs, out, evidence)
            if found is None and self.holds_weights:
                self._follow_weights(name, args, kwargs, out)
            return found

    @property
    def holds_weights(self) -> bool:
        """True while the model may still change weights, or multiply them with values: then follow every function."""
        return bool(self._symbolic.weights or self.final.held)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is followed but the origins of dims: what comes next depends on no earlier call."""
        followed = self._symbolic.entries or self.final.held or self.traces.held or self.samples.held
        return not (followed or self.contexts.held or self._routed or self.origins.were_written)

    def _follow(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, evidence: Evidence
    ) -> EagerAttention | NotAttention | None:
        if name == LINEAR and isinstance(args[1] if len(args) > 1 else kwargs.get("weight"), nn.Parameter):
            return None
        if name in MATMUL_NAMES:
            return self._follow_matmul(name, args, kwargs, out, evidence)
        if not self._symbolic.entries and name not in SOFTMAX_NAMES and name not in EXP_NAMES:
            return None
        return self._follow_op(OpCall(self._symbolic, name, args, kwargs, out), evidence)

    def _follow_weights(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Track what a function without an exact rule made of weights."""
        if name not in SOFTMAX_NAMES and not isinstance(
            self._symbolic.get(args[0] if out is None else out), (SoftmaxOutput, WeightedValues)
        ):
            self.final.follow(name, args, kwargs, out, self._descent_of)

    def _descent_of(self, x: Any) -> Descent | None:
        """Return the origin of a tensor of attention weights; None for other tensors."""
        if not isinstance(x, Tensor):
            return None
        note = self._symbolic.get(x)
        if not isinstance(note, SoftmaxOutput):
            return self.final.get(x)
        if note.pair is None or note.averaged:
            return None
        return Descent(note.pair, (note.averaged,), note.changes + ("dropped out",) * note.is_dropped)

    def is_averaged(self, x: Tensor) -> list[bool] | None:
        """Return a list that holds True once values are averaged by this softmax over q-k scores; None for others."""
        note = self._symbolic.get(x)
        if isinstance(note, UndividedAverage) or (isinstance(note, SoftmaxOutput) and note.is_attention):
            return note.averaged
        return None

    def is_followed(self, x: Any) -> bool:
        """Whether a tensor is scores, weights, or a function of them."""
        return self._symbolic.get(x) is not None or self.traces.holds(x) or self.final.get(x) is not None

    def follow_as(self, x: Tensor, same: Tensor) -> None:
        """Follow a tensor as another one with the same values."""
        if (value := self._symbolic.get(same)) is not None:
            self._symbolic.add(x, value)
        if (descent := self.final.get(same)) is not None:
            self.final.add(x, descent)
        self.traces.follow_as(x, same)

    def is_softmax(self, x: Any) -> bool:
        """Whether a tensor holds attention weights."""
        return isinstance(self._symbolic.get(x), SoftmaxOutput)

    def clear(self) -> None:
        """Forget all."""
        self._symbolic.clear()
        self.traces.clear()
        self.final.clear()
        self.origins.clear()
        self.contexts.clear()
        self.samples.clear()
        self._routed = set()

    def _follow_op(self, call: OpCall, evidence: Evidence) -> EagerAttention | NotAttention | None:
        """Apply the rule of an op to scores or weights; a sum over weights times values completes an attention."""
        if call.name == SUM:
            note = self._symbolic.get(call.argument(0))
            if isinstance(note, WeightedValues) and (found := note.average(call.args, call.kwargs)) is not None:
                return self._attention_from(
                    note.softmaxed,
                    found,
                    note.weights,
                    note.values,
                    lambda weights, values: note._replace(weights=weights, values=values).average(
                        call.args, call.kwargs
                    ),
                    call.out,
                    evidence,
                )
            return None
        if call.name in DIVISION_NAMES:
            product = self._symbolic.get(call.argument(0), written=is_in_place(call.name))
            if isinstance(product, UndividedAverage):
                return self._divide_average(product, call, evidence)
        step = OP_RULES.get(call.name)
        what = None if step is None else step(call)
        if what is None and self._symbolic.weights:
            what = change_weights(call)
        if is_in_place(call.name):
            self._symbolic.forget(call.argument(0))
        if isinstance(what, SoftmaxOutput) and what.pair is None and not what.is_elementwise:
            what = replace(what, pair=self._queries_and_keys(call, what))
        if isinstance(what, SoftmaxOutput) and what.scores is None and call.name in SOFTMAX_NAMES:
            what = replace(what, is_fixed=self.origins.is_constant(call.argument(0, "input")))
        if isinstance(what, SoftmaxOutput) and what.is_elementwise and self._has_fixed_keys(what):
            what = None  # features of linear attention, made by a fixed matrix
        if isinstance(what, Exponentials) and what.scores is None and self.traces.holds(call.argument(0, "input")):
            what = what.as_weights(call.result) or what
        if what is not None:
            self._symbolic.add(call.result, what)
        return None

    def _divide_average(
        self, product: UndividedAverage, call: OpCall, evidence: Evidence
    ) -> EagerAttention | NotAttention | None:
        """Return the attention that a division of exp(s) @ v by its row sums completes."""
        divisor = call.argument(1, "other")
        if not isinstance(divisor, Tensor):
            return None
        found = product.divide(1 / divisor if call.name in ("mul", "mul_", "multiply") else divisor)
        if found is None:
            return None
        softmaxed, weights = found
        if (origin := self.origins.get(product.e)) is not None:
            self.origins.add(weights, origin)
        return self._attention_from(
            softmaxed, product.average, weights, product.values, product.average_of, call.result, evidence
        )

    def _queries_and_keys(self, call: OpCall, softmaxed: SoftmaxOutput) -> Pair | None:
        """Return the numbers of queries and keys if the softmax is over either.

        A product with an nn.Parameter is a classifier or vocabulary projection.
        """
        if (scores := softmaxed.scores) is not None and not self.origins.is_learned(scores.k):
            return scores.q.shape[-2], scores.k.shape[-2]
        if call.name not in SOFTMAX_NAMES:
            return None
        x = call.argument(0, "input")
        return self.traces.pair_of(x) if self.traces.is_attention_softmax(x, call.argument(1, "dim")) else None

    def _follow_matmul(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor, evidence: Evidence
    ) -> EagerAttention | NotAttention | None:
        if (read := self.contexts.read(name, args, kwargs, self._may_be_queries)) is not None:
            if isinstance(note := self._symbolic.get(read.queries), SoftmaxOutput):
                self._leave_out(note, CHANNELS)
            return CHANNELS._replace(withdrawn=read.entry)
        if self._symbolic.entries or self.final.held:
            given = operands(name, args, kwargs)
            for x in given:
                note = self._symbolic.get(x)
                if isinstance(note, SoftmaxOutput) and (
                    found := parse_average(name, args, kwargs, x, behind=note.behind)
                ):
                    values = _values_among(given, x, found)
                    again = partial(_average_again, name, args, kwargs, x, note.behind, values)
                    return self._attention_from(note, found, x, values, again, out, evidence)
                if isinstance(note, Exponentials) and note.scores is not None and not is_parameter(note.scores.k):
                    found = parse_average(name, args, kwargs, x, behind=0)
                    if found is not None and found.projection is None and out.shape[:-1] == x.shape[:-1]:
                        values = _values_among(given, x, found)
                        again = partial(_average_again, name, args, kwargs, x, 0, values)
                        self._symbolic.add(out, UndividedAverage(note, x, values, found, again))
                        return None
            if self.holds_weights and (attention := self._final_attention(name, args, kwargs, out, given, evidence)):
                return attention
        if has_data(out) and (scored := parse_product(name, args, kwargs)) is not None:
            self._symbolic.add(out, Scores.of(scored))
            if not (self.origins.is_learned(scored.left) or self.origins.is_learned(scored.right)):
                self.traces.begin(out)
        return None

    def _final_attention(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Tensor,
        given: Sequence[Any],
        evidence: Evidence,
    ) -> EagerAttention | NotAttention | None:
        """Return the attention that a product with weights completes that were changed beyond the rules."""
        for x in given:
            descent = self._descent_of(x)
            others = [y for y in given if y is not x and isinstance(y, Tensor)]
            if descent is None or any(self._descent_of(y) is not None for y in others):
                continue
            for behind in range(x.ndim):
                found = parse_average(name, args, kwargs, x, behind=behind)
                if found is None or not is_over_keys(x, behind, descent.pair, found.v, others):
                    continue
                averaged, *rest = descent.averaged
                logits = x.movedim(-1 - behind, -1)
                is_softmax = self._symbolic.get(x) is not None
                changes = descent.changes or ("softmax over queries" if is_softmax else "changed",)
                note = SoftmaxOutput(
                    None, logits, behind, pair=descent.pair, changes=changes, averaged=averaged, is_final=True
                )
                values = _values_among(given, x, found)
                again = partial(_average_again, name, args, kwargs, x, behind, values)
                attention = self._attention_from(note, found, x, values, again, out, evidence)
                if attention is not None:
                    for each in rest:
                        each.append(True)
                return attention
        return None

    def _attention_from(
        self,
        note: SoftmaxOutput,
        found: Average,
        x: Tensor,
        values: Any,
        average_of: Callable[[Tensor, Tensor], Average | None],
        out: Tensor,
        evidence: Evidence,
    ) -> EagerAttention | NotAttention | None:
        """Return the attention that an average by weights x completes; None if it was returned before.

        The first average counts; averages of relative positions come after it.
        """
        shape = note.keys_last(x).shape
        if note.averaged or shape.numel() != note.logits.numel() or is_parameter(found.v):
            return None
        if note.is_elementwise and self._is_feed_forward(note, found):
            return None
        weights_dims, values_dims = self._dims_of_average(note, found, x, values, average_of)
        in_transform = in_functorch()
        other = None if in_transform else self._kind_of_average(note, found, x, values, weights_dims, values_dims)
        if other is not None:
            if other.is_final:
                self._leave_out(note, other)
            return other
        note.averaged.append(True)
        self._symbolic.forget_softmax(note)
        self.final.forget_recorded()
        known = [dims[:-2] for dims in (weights_dims, values_dims) if dims is not None]

        def choose(lead: torch.Size, finer: torch.Size | None) -> HeadChoice:
            facts = evidence()._replace(inputs=()) if in_transform else evidence()  # inputs are whole batches
            return choose_layout(lead, join_dims(known) if known else None, facts, finer)

        try:
            attention = EagerAttention.of(x, note, found, out, choose)
        except LayoutMismatch as reason:
            return NotAttention("attention", str(reason))
        if note.is_attention and not (note.scores is not None and self.origins.is_learned(note.scores.q)):
            return attention
        return attention._replace(context=self.contexts.begin(found, out))

    def _may_be_queries(self, x: Tensor) -> bool:
        """Whether a tensor may be the queries of a linear attention: activations that are no weights over keys."""
        note = self._symbolic.get(x)
        is_weights = isinstance(note, Exponentials) and note.scores is not None
        is_weights = is_weights or (isinstance(note, SoftmaxOutput) and note.is_attention)
        is_weights = is_weights or self.final.get(x) is not None
        return not (is_weights or self.origins.is_constant(x) or self.origins.is_learned(x))

    def _dims_of_average(
        self,
        note: SoftmaxOutput,
        found: Average,
        x: Tensor,
        values: Any,
        average_of: Callable[[Tensor, Tensor], Average | None],
    ) -> tuple[Sequence[Dim] | None, Sequence[Dim] | None]:
        """Return the origins of the dims of the weights, *lead i j, and of the values, *lead j e.

        The average is parsed once more, of tensors without memory whose strides number their dims.
        """
        weights_origin, values_origin = self.origins.get(x), self.origins.get(values)
        if not isinstance(values, Tensor) or (weights_origin is None and values_origin is None):
            return None, None
        if found.v is values and not note.behind:  # weights @ v
            return weights_origin and weights_origin.dims, values_origin and values_origin.dims
        probes = [torch.empty_strided(y.shape, tuple(range(1, y.ndim + 1)), device="meta") for y in (x, values)]
        if (average := average_of(*probes)) is None:
            return None, None

        def dims_of(origin: Any, probe: Tensor) -> Sequence[Dim] | None:
            sources = [n if size > 1 else 0 for n, size in zip(probe.stride(), probe.shape, strict=True)]
            if origin is None or max(sources, default=0) > len(origin.dims):
                return None
            return [origin.dims[n - 1] if n else () for n in sources]

        weights = dims_of(weights_origin, average.weights(note.keys_last(probes[0])))
        return weights, dims_of(values_origin, average.v)

    def _kind_of_average(
        self,
        note: SoftmaxOutput,
        found: Average,
        x: Tensor,
        values: Any,
        weights_dims: Sequence[Dim] | None,
        values_dims: Sequence[Dim] | None,
    ) -> NotAttention | None:
        """Return the kind of an average that is no attention of queries over keys."""
        memory = (found.v.untyped_storage().data_ptr(), found.v.shape)
        if note.is_fixed:
            self._routed.add(memory)
            return FIXED_WEIGHTS
        if memory in self._routed:
            return ROUTING
        if isinstance(values, Tensor) and self.origins.is_constant(values):
            return FIXED_VALUES._replace(is_final=not note.is_attention)
        origin, scores = self.origins.get(x), note.scores
        return kind_of_average(
            AverageOrigin(
                weights_dims,
                values_dims,
                None if origin is None else origin.piece,
                from_product=note.is_attention and not (scores is not None and self.origins.is_learned(scores.k)),
                is_summed=found.summed,
                is_shared=bool(self._softmaxes_of_same_logits(note)),
                has_feature_softmax=weights_dims is not None and self._has_feature_softmax(note, weights_dims[-2]),
            )
        )

    def _has_feature_softmax(self, note: SoftmaxOutput, rows: Dim) -> bool:
        """Whether another softmax is over features equal in number to the rows, as in linear attention."""
        for ref, _, other in self._symbolic.entries.values():
            if isinstance(other, SoftmaxOutput) and other is not note and not other.averaged:
                origin = self.origins.get(ref())
                keys = () if origin is None else origin.dims[-1 - other.behind]
                if keys == rows and kinds_of([keys]) == {FEATURES}:
                    return True
        return False

    def _softmaxes_of_same_logits(self, note: SoftmaxOutput) -> list[SoftmaxOutput]:
        """Return the softmaxes over another dim of the same logits, which wait for their products."""
        return [
            other
            for _, _, other in self._symbolic.entries.values()
            if isinstance(other, SoftmaxOutput)
            and not other.averaged
            and other.logits.stride(-1) != note.logits.stride(-1)
            and other.logits.data_ptr() == note.logits.data_ptr()
        ]

    def _leave_out(self, note: SoftmaxOutput, kind: NotAttention) -> None:
        """Forget a softmax that is no attention, and those that belong to it: the other factors, or the way back."""
        notes = [note]
        if kind is SLOTS:
            notes += self._softmaxes_of_same_logits(note)
        if kind is FACTORS:
            notes += [other for _, _, other in self._symbolic.entries.values() if isinstance(other, SoftmaxOutput)]
        for each in notes:
            each.averaged.append(True)
            self._symbolic.forget_softmax(each)
        self.final.forget_recorded()

    def _has_fixed_keys(self, note: SoftmaxOutput) -> bool:
        """Whether the keys, or the queries, are constants, such as the random features of a kernel."""
        return note.scores is not None and any(map(self.origins.is_constant, (note.scores.q, note.scores.k)))

    def _is_feed_forward(self, note: SoftmaxOutput, found: Average) -> bool:
        """True if the keys or the values of weights that are no softmax are weight matrices of the layer."""
        matrices = (found.v, note.scores.q, note.scores.k) if note.scores is not None else (found.v,)
        return any(is_parameter(x) or is_layer_weight(x, self._parts) for x in matrices)


_TRACED_NAMES: dict[Any, str | None] = {Tensor.mT.__get__: "mT", Tensor.T.__get__: "T"}  # type: ignore[attr-defined]


def traced_name(func: Any) -> str | None:
    """Return the name of a function that may be a step of an attention or writes in place; None for others."""
    try:
        return _TRACED_NAMES[func]
    except KeyError:
        name = getattr(func, "__name__", "")
        return _TRACED_NAMES.setdefault(func, name if name in NAMES or is_in_place(name) else None)


def _values_among(given: Sequence[Any], weights: Tensor, found: Average) -> Any:
    """Return the operand that is averaged."""
    others = [y for y in given if isinstance(y, Tensor) and y is not weights]
    return next((y for y in others if y is found.v or found.v._base is y), others[0] if others else None)


def _average_again(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    weights: Tensor,
    behind: int,
    values: Any,
    weights_now: Tensor,
    values_now: Tensor,
) -> Average | None:
    """Parse the call of an average with other tensors in place of its weights and values."""

    pairs = (weights, weights_now), (values, values_now)
    kwargs = {key: _swap(x, pairs) for key, x in kwargs.items()}
    return parse_average(name, [_swap(x, pairs) for x in args], kwargs, weights_now, behind=behind)


def _swap(x: Any, pairs: Sequence[tuple[Any, Tensor]]) -> Any:
    """Return an argument with the second of each pair in place of the first."""
    if isinstance(x, (list, tuple)):
        return [_swap(y, pairs) for y in x]
    return next((new for old, new in pairs if x is old), x)


def _by_head(sink: Tensor) -> Tensor | None:
    """Return one number per head, `h`, if it is the same in all rows of a head; else None."""
    first = sink[:1, :, :1, :1]
    return first.flatten().clone() if bool((sink[..., :1] == first).all()) else None
