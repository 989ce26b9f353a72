"""edit: change what a model attends to while it runs, at the speed of its kernels.

The consumer of the interception reads a call in terms, changes the terms, and lets the operator compute the new output
in place of the model's kernel. Edits of heads alone change the output that the model's kernel computed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...nn.core import Core
from ..capture import capture
from ..interception import diagnostics
from ..interception.function_mode import AttentionMode, layer_of, observers_quiet
from ..interception.intercept import intercept
from ..interception.intercepted import InterceptedAttention
from ..interception.kernel_call import NotUnderstood
from ..interception.module_scan import attends, multiplies
from ..layer_names import list_names, matches, named_modules, own_name, shown_name
from ..real_tokens import CROSS_NAMES
from ..recording.unseen import EXPERT_GATE
from ..tape.annotations import Tokens, TokensByLayer
from ..tape.tape import Tape
from .call_tokens import TokenFinder
from .edit_values import Edit, EditedCall, constant
from .edited_parts import run_parts


@contextmanager
def edit(
    model: nn.Module,
    edits: Mapping[str, Edit | Sequence[Edit]],
    tokens: Tokens | TokensByLayer | None = None,
    *,
    layout: str | Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Change the attention of some layers within the block: what their queries see, and what their heads put out.

    No query of the first layer sees the first two tokens; in both layers head 3 is off:

    >>> import torch
    >>> from regard.lens import Cut, Scale, capture, edit
    >>> from regard.nn import Attention
    >>> model, x = nn.Sequential(Attention(16, heads=4), Attention(16, heads=4)), torch.randn(1, 5, 16)
    >>> with edit(model, {"0": Cut(keys=slice(0, 2)), "*": Scale(3, 0)}):
    ...     out = model(x)

    A capture within the block shows the edited weights:

    >>> with edit(model, {"0": Cut(keys=slice(0, 2))}), capture(model) as tape:
    ...     out = model(x)
    >>> tape["0"][0, 0, 4, :2].tolist()
    [0.0, 0.0]

    The last token does not see the tokens of a word, and looks more at another; edits in a list run from left to right:

    >>> from regard.lens import Boost, words
    >>> tokens = ["the", "cat", "saw", "the", "dog"]
    >>> cut = Cut(queries=-1, keys=lambda tokens: words(tokens)["the"], heads=[0, 1])
    >>> with edit(model, {"1": [cut, Boost(words(tokens)["cat"], 2.0)]}, tokens):
    ...     out = model(x)

    The operator runs the edited attention, with the model's own kernel where that can express the edit, and never
    stores queries x keys. Gradients pass. Nothing of the model is changed: after the block, and after an error in it,
    the model is as before. Blocks nest: an inner `edit` changes what the outer one made of a call.

    A layer that was named and did not attend within the block raises at its end, and so does an edit that selected no
    token. Attention that `capture` could not record cannot be edited, and raises with the reason. Weights that a layer
    writes out by hand and returns are those before the edit.

    Args:
        model: the model to edit; it is not changed.
        edits: from patterns of layer names, as "decoder.*.cross", to an edit or a list of edits. A layer that matches
            several patterns gets the edits of all, in this order.
        tokens: the tokens of the text, or of each batch row, for edits that select by a function of the tokens; as for
            `capture`.
        layout: the dims of the batch and the heads, as for `capture`.
    """
    diagnostics.check_capturable(model)
    checked = check_edits(model, edits)
    consumer = Editor(checked, tokens, follows_all=must_follow_all(model, checked))
    with intercept(model, consumer, layout=layout) as mode, consumer.clean_runs(mode, layout):
        yield
    consumer.check_done(mode)


class _ThreadCalls(threading.local):
    """The calls that a thread has made within the block."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.clean: Tape | None = None

    def count_call(self, layer: str) -> int:
        """Count a call of a layer; return its number, from 0."""
        self.counts[layer] += 1
        return self.counts[layer] - 1


class Editor:
    """Consumer that changes every attention whose layer has edits."""

    def __init__(
        self,
        edits: Mapping[str, Sequence[Edit]],
        tokens: Tokens | TokensByLayer | None = None,
        what: str = "editing",
        follows_all: bool = False,
    ) -> None:
        self.edits, self.what = edits, what
        self._finder = TokenFinder(tokens)
        self._here = _ThreadCalls()
        self._by_layer: dict[str, tuple[Edit, ...]] = {}
        self._selected: dict[int, Tensor] = {}  # id of an edit -> True if it has selected a token
        # The queries of a cross-attention are found by the self-attention of its block, which may have no edits.
        self._follows_all = follows_all

    def is_interested(self, layer: str) -> bool:
        """Whether the calls of a layer are edited, or their tokens are followed."""
        return self._follows_all or bool(self._edits_of(layer))

    def observe(self, attention: InterceptedAttention) -> Tensor:
        """Return the output of the edited attention."""
        layer = attention.layer
        edits = self._edits_of(layer)
        if not edits:
            if self._follows_all and not isinstance(seen := attention.interpret(), NotUnderstood):
                self._finder.tokens_of(layer, seen)
            return attention.out
        if attention.guess is not None:
            raise ValueError(guess_message(layer, attention.guess))
        changing = [each for each in edits if each.changes_weights]
        out = self._with_weights(attention, changing) if changing else attention.out
        heads = attention.layout.heads(out)
        factors = [1.0] * heads.shape[1]
        for each in edits:
            _check_heads(layer, each, len(factors))
            factors = [x * y for x, y in zip(factors, each.factors(len(factors)), strict=True)]
        return attention.with_heads(_scale_heads(heads, factors)) if set(factors) != {1.0} else out

    def _with_weights(self, attention: InterceptedAttention, edits: Sequence[Edit]) -> Tensor:
        layer, seen = attention.layer, attention.interpret_or_raise()
        for each in edits:
            _check_heads(layer, each, seen.q.shape[1])
        tokens = None
        if any(each.needs_tokens for each in edits):
            tokens = self._finder.tokens_of(layer, seen)
        at = EditedCall(layer, self._here.count_call(layer), tokens, self._here.clean)
        stages = [seen]
        for each in edits:
            if tokens is not None and (selected := each.selects_tokens(tokens)) is not None:
                known = self._selected.get(id(each), selected)
                self._selected[id(each)] = known if known is selected else known | selected
            try:
                stages.append(each.change(stages[-1], at))
            except NotUnderstood as reason:
                raise NotUnderstood(f"{each!r} cannot edit {shown_name(layer)}: {reason}") from reason
        before, after = stages[0], stages[-1]
        if attention.dropout == 0:
            heads = run_parts(lambda: attention.heads, before, after, edits, at)
            if heads is not None:
                return attention.replaced_by_heads(after, heads)
        run = before
        for each, given, changed in zip(edits, stages, stages[1:], strict=False):
            faster = each.change_for_speed(run, at)
            run = faster if faster is not None else changed if run is given else each.change(run, at)
        return attention.replaced_by(after, run)

    def _edits_of(self, layer: str) -> tuple[Edit, ...]:
        if layer not in self._by_layer:
            found = [edits for pattern, edits in self.edits.items() if is_meant(layer, pattern)]
            self._by_layer[layer] = tuple(each for edits in found for each in edits)
        return self._by_layer[layer]

    @contextmanager
    def clean_runs(self, mode: AttentionMode, layout: str | Mapping[str, str] | None) -> Iterator[None]:
        """Run the model once more without edits, before each of its passes, if frozen weights need it."""
        found = [each for edits in self.edits.values() for each in edits]
        if all(each.is_frozen for each in found) or not any(each.is_frozen for each in found):
            yield
            return
        mode.needs_modules = True
        frozen = [pattern for pattern, edits in self.edits.items() if any(each.is_frozen for each in edits)]
        here = self._here

        def run(model: nn.Module, args: Any, kwargs: Any) -> None:
            if mode.here.silent:  # this is the clean run
                return
            check_runs_twice(model, kwargs)
            devices = sorted({x.device for x in model.parameters() if x.is_cuda}, key=str)
            with (
                torch.no_grad(),
                torch.random.fork_rng(devices),
                mode.quiet(),
                observers_quiet(),
                capture(model, layers=frozen, layout=layout) as tape,
            ):
                model(*args, **kwargs)
            here.clean = tape
            here.counts.clear()

        hook = mode.model.register_forward_pre_hook(run, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def check_done(self, mode: AttentionMode) -> None:
        """Raise if a layer with edits was not edited, or an edit selected no token."""
        lost = diagnostics.unrecognized_softmax(mode, list(self._by_layer))
        reasons = {layer: why for layer, (kind, why) in lost.items() if kind != EXPERT_GATE}
        reasons |= dict.fromkeys(mode.over_edges, "its softmax is over the edges of a graph")
        if left := [
            f"{shown_name(layer)}: {why}"
            for layer, why in reasons.items()
            if any(is_meant(layer, pattern) for pattern in self.edits)
        ]:
            raise RuntimeError(f"these layers ran as they are while {self.what}: {'; '.join(left)}")
        if mode.compiled or mode.flexed:
            raise RuntimeError(
                f"attention ran inside a torch.compile'd function while {self.what}, where it stays as it is; disable "
                "compilation with torch.compiler.set_stance('force_eager')"
            )
        missed = [pattern for pattern in self.edits if not any(is_meant(layer, pattern) for layer in self._by_layer)]
        if missed:
            raise RuntimeError(
                f"no attention was found in {list(map(shown_name, missed))} while {self.what}; the layers that "
                f"attended are {list_names(self._by_layer)}; {diagnostics.RECOGNIZED}"
            )
        for edits in self.edits.values():
            for each in edits:
                selected = self._selected.get(id(each))
                if selected is not None and not bool(selected):
                    raise RuntimeError(f"{each!r} changed nothing: no call had these tokens; count them from 0")


def check_runs_twice(model: nn.Module, given: Mapping[str, Any]) -> None:
    """Raise if running the model twice on these arguments would not leave it as running it once does."""
    caches = [name for name, value in given.items() if value is not None and ("past" in name or "cache_params" in name)]
    if caches:
        raise ValueError(
            f"Freeze beside other edits runs the model twice, and {caches[0]} would be written twice; generate with "
            "use_cache=False"
        )
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training for part in model.modules()):
        raise ValueError(
            "Freeze beside other edits runs the model twice, and batch norm in training would count the batch twice; "
            "write model.eval()"
        )


def must_follow_all(model: nn.Module, edits: Mapping[str, Sequence[Edit]]) -> bool:
    """Whether an editor must see layers without edits too: queries of a cross-attention are those of another layer."""
    selects_queries = any(getattr(each, "queries", None) is not None for found in edits.values() for each in found)
    return selects_queries and _may_cross_attend(model)


def _may_cross_attend(model: nn.Module) -> bool:
    """Whether the name of a layer is that of a cross-attention, or of a decoder."""
    names = [name.lower() for name in named_modules(model)]
    return any(part in name for name in names for part in (*CROSS_NAMES, "decoder", "multihead_attn"))


def _scale_heads(heads: Tensor, factors: Sequence[float]) -> Tensor:
    """Return heads, `b h i e`, times one factor each; a factor of 0 gives zeros, whatever the head is."""
    if any(factor not in (0.0, 1.0) for factor in factors):
        heads = heads * constant(tuple(factors), heads.dtype, heads.device)[:, None, None]
    if 0.0 not in factors:
        return heads
    keep = constant(tuple(factor != 0.0 for factor in factors), torch.bool, heads.device)
    return torch.where(keep[:, None, None], heads, 0.0)


def _check_heads(layer: str, each: Edit, n: int) -> None:
    heads = each.head_numbers()
    if heads and not 0 <= heads[0] <= heads[-1] < n:
        raise IndexError(f"heads of {shown_name(layer)!r} must be from 0 to {n - 1}, got {list(heads)}")


def is_meant(layer: str, pattern: str) -> bool:
    """Whether a pattern names a layer, or the `Core` within it, which attends for it."""
    return matches(layer, pattern) or matches(f"{layer}.core".removeprefix("."), pattern)


def check_edits(model: nn.Module, edits: Any) -> dict[str, tuple[Edit, ...]]:
    """Return the edits of each pattern; raise if one names no module of the model."""
    if not isinstance(edits, Mapping):
        raise TypeError(
            f"edits must be a dict from patterns of layer names to edits, got {type(edits).__name__}; "
            'write edit(model, {"*": Scale(0, 0)})'
        )
    checked = {}
    for pattern, given in edits.items():
        found = (given,) if isinstance(given, Edit) else tuple(given) if isinstance(given, Iterable) else (given,)
        for each in found:
            if not isinstance(each, Edit):
                raise TypeError(f"edits of {pattern!r} must be Cut, Boost, Scale, Only or Temperature, got {each!r}")
        checked[pattern] = found
    check_layers_exist(model, checked)
    return checked


BESIDE = (Core, nn.TransformerEncoderLayer)  # within a layer of ours, and around one of PyTorch's


def check_layers_exist(model: nn.Module, patterns: Iterable[str]) -> None:
    """Raise if a pattern names no module of the model; the message has the layers that attend."""
    known = named_modules(model)
    for pattern in patterns:
        if not any(is_meant(layer_of(name, module), pattern) for name, module in known.items()):
            kinds: dict[str, type] = {n: type(m) for n, m in known.items() if type(m) not in BESIDE}
            some = [n for n, kind in kinds.items() if hasattr(known[n], "core") or attends(kind) or multiplies(kind)]
            there = [shown_name(n) for n in some or list(known)[:20]]
            raise ValueError(f"the model has no layer {own_name(pattern)!r}; its attention layers are {there}")


def guess_message(layer: str, guess: str) -> str:
    """Return the reason why heads cannot be named in a layer whose heads are a guess."""
    return (
        f"it is a guess which dims of {shown_name(layer)!r} are its heads: {guess}; "
        f"pass layout={{{shown_name(layer)!r}: '(b h) i j'}}, or whichever it is"
    )
