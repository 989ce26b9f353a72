"""capture: watch what a model attends to while it runs, without changing it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .interception import known_kernels as kernels
from .interception import transformers as huggingface
from .interception.function_mode import SCRIPTED, Watch
from .interception.module_scan import attends_aside
from .layer_names import listed, within
from .recording.recorder import Recorder
from .recording.reduced import check_measures
from .recording.store import Store
from .tape.annotations import Tokens, TokensByLayer
from .tape.tape import Tape

SEEN = (
    "seen are regard.attend, F.scaled_dot_product_attention, F.multi_head_attention_forward, flex_attention, the "
    "attention interface of transformers, flash_attn and memory_efficient_attention of xformers where the code of a "
    "layer calls them, and softmax(q @ k.mT) @ v as a model writes it out"
)
COMPILED = (
    "within a function that torch.compile made, where it may go unseen; let it run as it is written: "
    "with torch.compiler.set_stance('force_eager'), capture(model)"
)
FLEXED = (
    "within a function that torch.compile made, or that the code of its layers does not lead to, of which nothing is "
    "on the tape; let flex_attention alone be compiled, once, flex = torch.compile(flex_attention), and a layer call it"
)


@contextmanager
def capture(
    model: nn.Module,
    tokens: Tokens | TokensByLayer | None = None,
    *,
    layers: str | Sequence[str] | None = None,
    heads: Sequence[int] | None = None,
    keep: Sequence[str] | None = None,
    values: bool = False,
    gradients: bool = False,
    to: torch.device | str | Path | None = None,
    budget: str | None = None,
) -> Iterator[Tape]:
    """A tape of every attention of the model within the block: layer by layer, the weights, lazy.

    >>> from regard.lens import capture
    >>> from regard.nn import Attention
    >>> model = nn.Sequential(Attention(16, heads=4), nn.MultiheadAttention(16, 2))
    >>> with capture(model) as tape:
    ...     x = model[0](torch.randn(1, 7, 16))
    ...     x, _ = model[1](x, x, x, need_weights=False)
    >>> tape
    Tape(2 layers)
    0  Weights(1 x 4 x 7 x 7)
    1  Weights(7 x 2 x 1 x 1)

    It keeps queries and keys, detached, in memory linear in the sequence, and the model runs the kernels it always
    runs: its outputs are the same to the bit. (`nn.TransformerEncoder` and `nn.MultiheadAttention` in evaluation leave
    their fused fast path, so there outputs agree to rounding, and at padding the plain path writes numbers where the
    fused one writes zeros.)
    While a model generates with a cache, the rows of each new token join those of the prompt. What the model runs in
    threads that are started within the block is seen too; of threads that capture the same model at once each sees what
    it runs itself.

    `tokens` are those of a text, a list of them for each batch row, or by pattern of layers, with pairs for queries and
    keys of different texts: {"decoder.*.cross": (words, source)}.
    `layers` are name patterns such as "decoder.*", `heads` numbers of heads to keep. `to` is a device to move what is
    kept to, or the `Path` of a folder to keep it in; `budget`, such as "2GB", bounds the memory it takes. `keep` names
    measures to reduce to at once, "entropy", "received", "max", "distance" or "pool:512", after which nothing else is
    kept; steps of a generation then stay apart. `values` also keeps values and output projections, `gradients` the
    gradient of each output once backward has run: both under `tape.extras(layer)`.
    """
    _check_capturable(model)
    if keep is not None:
        check_measures(keep)
        if values or gradients:
            raise ValueError(
                "keep=[...] reduces to measures at once; values and gradients are kept beside queries and keys"
            )
    layers = [layers] if isinstance(layers, str) else layers
    if layers is not None and not all(isinstance(pattern, str) for pattern in layers):
        raise TypeError(f"layers must be name patterns such as 'encoder.*', got {list(layers)!r}")
    if heads is not None:
        heads = _numbers(heads)
    recorder = Recorder(
        store=Store(to, budget),
        layers=layers,
        heads=heads,
        keep=keep,
        values=values,
        gradients=gradients,
    )
    watch = Watch(model, recorder)
    _check_not_compiled(watch)
    tape = Tape.live(recorder, tokens, model)
    with watch.watching(), huggingface.watching(watch), kernels.watching(watch, watch.parts):
        yield tape
    recorder.close()
    _check_recorded(watch)
    _tell_compiled(watch)
    _tell_lost(watch)
    _tell_uncalled(watch)
    _tell_ended(recorder)
    tape._warn_unmatched_tokens(stacklevel=4)


def _check_capturable(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "a scripted model runs outside Python, where nothing can be watched; capture the model it was made of"
        )
    if "_orig_mod" in model._modules:
        raise TypeError(
            "a compiled model calls its attention by other names; capture the model itself, model._orig_mod, and call "
            "that within the block"
        )


def _numbers(heads: object) -> list[int]:
    """Numbers of heads as they were given."""
    given = heads.tolist() if isinstance(heads, Tensor) else heads
    numbers: list[Any] = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [None]
    if any(isinstance(head, bool) or not isinstance(head, Integral) for head in numbers):
        raise TypeError(f"heads must be numbers of heads, as in heads=[0, 3], got {heads!r}")
    if not numbers:
        raise ValueError("heads must name at least one head, got heads=[]; write heads=[0], or leave it out for all")
    return [int(head) for head in numbers]


def _check_not_compiled(watch: Watch) -> None:
    for part in watch.parts:
        if type(part) in SCRIPTED:
            name = watch.names[id(part)]
            warnings.warn(f"the part {name!r} is scripted and runs outside Python, where it is not seen", stacklevel=4)
        elif part._compiled_call_impl is not None or "_orig_mod" in part._modules:
            name = watch.names[id(part)]
            raise TypeError(
                f"{f'the part {name!r}' if name else 'the model'} is compiled, and calls its attention by other names; "
                "capture it before it is compiled, or compile a copy"
            )


def _tell_uncalled(watch: Watch) -> None:
    kind: type = type(watch.model)
    if not watch.called and attends_aside(kind):
        warnings.warn(
            f"{kind.__name__} was not called within the block, only parts of it were: an attention that a method of "
            "its own calls is seen where the model runs as a whole, model(...)",
            stacklevel=4,
        )


def _tell_compiled(watch: Watch) -> None:
    if not (watch.compiled or watch.flexed):
        return
    kind = type(watch.model).__name__
    if watch.compiled:
        warnings.warn(f"an attention of {kind} ran {COMPILED}", stacklevel=4)
    if watch.flexed:
        warnings.warn(f"{kind} calls flex_attention {FLEXED}", stacklevel=4)


def _tell_lost(watch: Watch) -> None:
    for what in _lost(watch):
        warnings.warn(what, stacklevel=4)


def _lost(watch: Watch) -> list[str]:
    """What is to be said of attention that was not understood."""
    wants, said = watch.recorder.wants, []
    lost = [layer for layer, each in watch.softmaxes.items() if not all(each) and wants(layer)]
    if watch.unclear:
        known = [*lost, *(layer for layer, _ in watch.recorder.entries)]
        unclear = [layer for layer in watch.unclear if wants(layer) and not any(within(layer, one) for one in known)]
        if unclear:
            said.append(
                f"nothing of {listed(sorted(unclear))} is on the tape: it has a softmax, of scores that are not "
                "understood; let them be q @ k.mT, or call regard.attend(q, k, v)"
            )
    if lost:
        said.append(
            f"in {listed(lost)} a softmax of queries and keys led to something that is not understood, and is not on "
            "the tape; if values are averaged by it, let them be multiplied as it is, or call regard.attend(q, k, v)"
        )
    return said


def _tell_ended(recorder: Recorder) -> None:
    """A search goes on without the texts that have come to their end, and their rows are gone."""
    ended = recorder.ended
    if any(ended):
        left = [n for n, gone in enumerate(ended) if not gone]
        warnings.warn(
            f"of {len(ended)} texts the tape holds those of rows {left}; the others were at their end before, and the "
            "search went on without them. Capture one text at a time, or a pass of the model over what was written",
            stacklevel=4,
        )


def _check_recorded(watch: Watch) -> None:
    recorder = watch.recorder
    if not recorder.is_empty:
        return
    kind = type(watch.model).__name__
    if recorder.passed_over:
        names = listed(sorted(recorder.passed_over))
        raise ValueError(f"no layer that attended matches layers={list(recorder.layers or ())}; there were {names}")
    if not watch.ran:
        raise ValueError(f"{kind} was not called within the block; call model(...), not model.forward(...)")
    if watch.flexed:
        raise ValueError(f"no attention of {kind} was seen: it calls flex_attention {FLEXED}")
    if watch.compiled:
        raise ValueError(f"no attention of {kind} was seen: it ran {COMPILED}")
    if lost := _lost(watch):
        raise ValueError(f"no attention of {kind} was seen: {'; '.join(lost)}")
    raise ValueError(
        f"no attention of {kind} was seen; {SEEN}. A model that attends in another way can call one of these, or show "
        "its own with regard.weights(q, k)"
    )
