"""Intercept Hugging Face models at the two interfaces by which transformers looks up attention functions and masks.

What
    While a mode is open, every function that `AttentionInterface` returns, whichever implementation it is, also reports
    its arguments. The model runs what it always runs. Functions of `AttentionMaskInterface` note the position of the
    first query of each mask: a model with a static or sliding cache knows it there and nowhere later.

How it flows
    A layer looks up its implementation and calls it. The wrapper runs it, with the hook of `sdpa.run_with_lse` for the
    log-sum-exp, builds the `KernelCall` by what the implementation means by its arguments, and hands it to each mode.
    A recorder may defer: then only q and k are held, and they are interpreted when the tape is read, so that a short
    forward pass waits for nothing.

Lifetimes
    The interfaces are patched when the first mode opens and restored when the last one closes. `generate` is wrapped
    too (`transformers_generate.py`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling

from ...ops.terms.masks import Causal, Padding, Window
from ...ops.terms.normalizers import SinkSoftmax
from ...ops.torch_state import is_traced
from ..recording.observed import ObservedAttention
from ..recording.recorder import HeldStep
from ..terms.interpret import Interpreter
from .compiled_models import is_watched_trace
from .function_mode import AttentionMode, is_recomputing, run_resumed
from .intercepted import HEADS_THIRD, replacement_of
from .kernel_call import KernelCall
from .operator_for_transformers import PositionedMask
from .sdpa import install_hook, is_recompute_cheap, recompute_lse, remove_hook, run_with_call, run_with_lse
from .transformers_generate import unwrap_generate, wrap_generate
from .transformers_proof import ForeignCall, is_own

EAGER, CAUSAL = "eager", Causal()
NUMBERS = ("is_causal", "scaling", "sliding_window", "softcap")  # arguments that hold no tensor of queries by keys


@contextmanager
def patched_interfaces(mode: AttentionMode) -> Iterator[None]:
    """Intercept transformers models within the block; does nothing if the model has no layer of transformers."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not any(type(part).__module__.startswith("transformers.") for part in mode.parts):
        yield
        return
    with _LOCK:
        if not _MODES:
            _patch(transformers)
        _MODES.append(mode)
        generating = wrap_generate(mode.parts, _modes_of)
    try:
        yield
    finally:
        with _LOCK:
            _MODES.remove(mode)
            for part in generating:
                if not any(id(part) in other.names for other in _MODES):
                    unwrap_generate(part)
            if not _MODES:
                _unpatch(transformers)


_LOCK = threading.Lock()
_MODES: list[AttentionMode] = []
_ORIGINALS: dict[str, Any] = {}  # the methods of the interfaces before they were patched


def _modes_of(module: nn.Module) -> list[AttentionMode]:
    """Return the modes that see a call of the module in this thread; observers last, to see the final output."""
    modes = tuple(_MODES)
    concerned = [x for x in modes if id(module) in x.names and not x.here.silent and x.concerns(module)]
    return sorted(concerned, key=lambda mode: mode.is_observer) if concerned[1:] else concerned


def _patch(transformers: Any) -> None:
    attention, masks = transformers.AttentionInterface, transformers.AttentionMaskInterface
    _ORIGINALS.update(attention=attention.get_interface, masks=masks.__getitem__)
    attention.get_interface = _intercepting(attention.get_interface)
    masks.__getitem__ = _noting_positions(masks.__getitem__)
    install_hook()


def _unpatch(transformers: Any) -> None:
    remove_hook()
    transformers.AttentionInterface.get_interface = _ORIGINALS.pop("attention")
    transformers.AttentionMaskInterface.__getitem__ = _ORIGINALS.pop("masks")


def _intercepting(find: Callable[..., Any]) -> Callable[..., Any]:
    """Return a lookup whose functions report their calls to the modes that see the module."""

    def get_interface(self: Any, attn_implementation: str | None, default: Callable[..., Any]) -> Callable[..., Any]:
        function, name = find(self, attn_implementation, default), attn_implementation or EAGER
        if is_compiling() and is_watched_trace():
            return function

        # Layers of transformers pass these arguments by the names that transformers uses.
        def attend(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
        ) -> Any:
            q, k, v, mask = query, key, value, attention_mask
            modes = _modes_of(module)
            if is_traced():
                for mode in modes:
                    mode.note_traced(module)
                return function(module, q, k, v, mask, *args, **kwargs)
            if not modes:
                return function(module, q, k, v, mask, *args, **kwargs)
            observed, defers, holds, part = modes[-1].is_observer, False, False, id(module)
            own = is_own(function, kwargs)
            if is_recomputing():
                modes = [mode for mode in modes if not mode.is_observer]
            elif own and mask is None and kwargs.get("position_bias") is None and kwargs.get("s_aux") is None:
                defers = observed  # a deferred call must hold little memory: no mask and no bias of queries by keys
                if q.shape[2] == 1 and observed and len(modes) == 1 and name in ("sdpa", EAGER):
                    holds = _can_hold(modes[0], part, q, k)
            for mode in modes:
                mode.interrupt_run()
                if mode.recorder is not None:
                    defers = defers and mode.recorder.can_defer(mode.names[part], q, k)
                mode.here.silent += 1
            try:
                if own and len(modes) == 1 and not observed and name != EAGER and not kwargs.get("output_attentions"):
                    result: Any = (None, None)

                    def run() -> Tensor:
                        nonlocal result
                        result = function(module, q, k, v, mask, *args, **kwargs)
                        return result[0]

                    position = None if mask is None else modes[0].here.first_positions.get((q.shape[2], k.shape[2]))
                    read_call = partial(_kernel_call, name, module, q, k, v, mask, position, None, kwargs)
                    out = modes[0].observe(modes[0].names[part], read_call, partial(run_resumed, run), HEADS_THIRD)
                    return (out, *result[1:])
                foreign = ran = None
                if not own:
                    result, inner = run_with_call(function, module, q, k, v, mask, *args, **kwargs)
                    foreign = ForeignCall(function, q, k, v, mask, kwargs.get("dropout") or 0.0, result, inner)
                elif not observed or holds or (defers and is_recompute_cheap(q, k)):
                    result = function(module, q, k, v, mask, *args, **kwargs)
                else:
                    result, ran = run_with_lse(function, module, q, k, v, mask, *args, **kwargs)
                statistic = None if ran is None else ran.lse
                for mode in modes:
                    layer = mode.names[part]
                    alone = not modes[1:] or replacement_of(result[0]) is None
                    if mode.recorder is not None and (holds or defers) and alone:
                        given = {argument: kwargs[argument] for argument in NUMBERS if argument in kwargs}
                        if holds:
                            read_step = partial(_read_step, mode.interpreter, name, module, given)
                            mode.recorder.hold_step(HeldStep(layer, q, k, given, read_step))
                        else:
                            read = partial(_read_deferred, mode.interpreter, name, module, q, k, statistic, given)
                            mode.recorder.record_deferred(layer, read)
                        continue
                    position = None if mask is None else mode.here.first_positions.get((q.shape[2], k.shape[2]))
                    recorded = (q, k) if ran is None or mode.recorder is None else (ran.as_cast(q), ran.as_cast(k))
                    read_call = partial(_kernel_call, name, module, *recorded, v, mask, position, statistic, kwargs)
                    if foreign is None:
                        out = mode.observe(layer, read_call, result[0], HEADS_THIRD)
                    else:
                        readings, proof = partial(foreign.kernel_call, read_call), foreign.proof(mode.recorder, layer)
                        out = mode.observe(layer, readings, result[0], foreign.layout, proof)
                    if out is not result[0]:
                        result = (out, *_returned_weights(result[1:], replacement_of(out)))
            finally:
                for mode in modes:
                    mode.here.silent -= 1
            return result

        return attend

    return get_interface


def _returned_weights(rest: tuple[Any, ...], replacement: ObservedAttention | None) -> tuple[Any, ...]:
    """Return what a function returned beside its output; weights of the model become those of the replacement."""
    if replacement is None or not rest or not isinstance(rest[0], Tensor) or rest[0].ndim != 4:
        return rest
    return replacement.dense().to(rest[0].dtype), *rest[1:]


def _noting_positions(find: Callable[..., Any]) -> Callable[..., Any]:
    """Return a lookup whose functions note the position of the first query of each mask that they make."""

    def get(self: Any, name: str) -> Callable[..., Any]:
        function = find(self, name)

        def make(*args: Any, **kwargs: Any) -> Any:
            mask = function(*args, **kwargs)
            if not is_traced() and mask is not None and "q_offset" in kwargs:
                size = int(kwargs["q_length"]), int(kwargs["kv_length"])
                for mode in tuple(_MODES):  # the call has no reference to its model, but runs in the same thread
                    mode.here.first_positions[size] = int(kwargs["q_offset"]) - int(kwargs.get("kv_offset", 0))
            return mask

        return make

    return get


def _can_hold(mode: AttentionMode, part: int, q: Tensor, k: Tensor) -> bool:
    """Whether a call adds one token per text, and may be recorded together with those of later steps."""
    return mode.recorder is not None and mode.recorder.can_hold(mode.names[part], q, k)


def _read_step(
    interpreter: Interpreter, implementation: str, module: nn.Module, given: dict[str, Any], q: Tensor, k: Tensor
) -> ObservedAttention:
    """Interpret steps of one token each, without a mask, as one call; k stands in for v."""
    call = _kernel_call(implementation, module, q[:, :, -1:], k, k, None, None, None, given)
    return interpreter.read(replace(call, q=q, mask=CAUSAL) if q.shape[2] > 1 else call)


def _read_deferred(
    interpreter: Interpreter,
    implementation: str,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    statistic: Tensor | None,
    given: dict[str, Any],
) -> ObservedAttention:
    """Interpret a call without a mask after the forward pass; on the CPU a short one gets its log-sum-exp only now.

    On a GPU a launch takes longer than the work: there the log-sum-exp of all layers is found at once, if it is read.
    """
    if implementation == "sdpa" and not q.is_cuda and is_recompute_cheap(q, k):
        statistic = recompute_lse(q, k, is_causal=_is_causal(module, q, given), scale=given.get("scaling"))
    # A recorder defers only if it keeps no values; k stands in for v to find key heads that are repeated.
    return interpreter.read(_kernel_call(implementation, module, q, k, k, None, None, statistic, given))


def _kernel_call(
    implementation: str,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    position: int | None,
    statistic: Tensor | None,
    given: dict[str, Any],
) -> KernelCall:
    """Return the call by what its implementation means by its arguments."""
    causal = _is_causal(module, q, given)
    if isinstance(mask, PositionedMask):
        mask, position = mask.mask, mask.offset
    elif "flash" in implementation:
        mask = _flash_mask(mask, causal, given.get("sliding_window"))
    elif mask is None and causal and implementation not in (EAGER, "flex_attention"):
        mask, position = CAUSAL, 0  # SDPA's is_causal aligns top left
    sink = given.get("s_aux")
    return KernelCall(
        q=q,
        k=k,
        v=v,
        mask=mask,
        bias=given.get("position_bias"),
        scale=given.get("scaling"),
        cap=given.get("softcap"),
        normalize=None if sink is None else SinkSoftmax(sink),
        offset=position,
        statistic=statistic,
        dropout=given.get("dropout") or 0.0,
    )


def _is_causal(module: nn.Module, q: Tensor, given: dict[str, Any]) -> bool:
    flag = given.get("is_causal")
    return bool(getattr(module, "is_causal", True) if flag is None else flag) and q.shape[2] > 1


def _flash_mask(keep: Tensor | None, causal: bool, window: int | None) -> Any:
    """Return the mask of a flash attention call: a padding mask over keys, and flags for the rest."""
    mask: Any = Causal() if causal else None
    if window is not None:
        mask = Window(window) if mask is None else mask & Window(window)
    if keep is not None:
        padding = Padding(keep.bool())
        mask = padding if mask is None else mask & padding
    return mask
