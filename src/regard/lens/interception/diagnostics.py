"""Errors and warnings of `capture`: why a model, or a layer of it, was not recorded, and what to do."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from ..capture_warning import CaptureWarning
from ..layer_names import list_names, shown_name, within
from ..recording.recorder import Recorder
from .function_mode import SCRIPTED, AttentionMode
from .module_scan import attends_aside

RECOGNIZED = (
    "recognized are regard.attend, F.scaled_dot_product_attention, F.multi_head_attention_forward, flex_attention, the "
    "attention interface of transformers, flash_attn and memory_efficient_attention of xformers, kernels passed to "
    "regard.lens.register_kernel, and softmax(q @ k.mT) @ v as a model writes it out"
)
COMPILED = (
    "ran inside a torch.compile'd function and may be missing. Disable compilation while capturing: "
    "with torch.compiler.set_stance('force_eager'), capture(model)"
)
FLEX_COMPILED = (
    "calls flex_attention inside a torch.compile'd function, or through a reference that capture does not find, "
    "where it cannot be recorded. Compile flex_attention alone, flex = torch.compile(flex_attention), "
    "and call flex in a layer"
)


def check_capturable(model: nn.Module) -> None:
    """Raise if the model cannot be captured, whatever it runs."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("a scripted model runs outside Python and cannot be recorded; capture the original model")
    if "_orig_mod" in model._modules:
        raise TypeError(
            "attention inside torch.compile cannot be recorded; capture model._orig_mod instead, and call that within "
            "the block"
        )


def check_not_compiled(mode: AttentionMode) -> None:
    """Raise for compiled submodules; warn for scripted ones."""
    for part in mode.parts:
        if type(part) in SCRIPTED:
            name = shown_name(mode.names[id(part)])
            warnings.warn(
                f"the submodule {name!r} is scripted and runs outside Python, so its attention is not recorded",
                CaptureWarning,
                stacklevel=4,
            )
        elif part._compiled_call_impl is not None or "_orig_mod" in part._modules:
            name = shown_name(mode.names[id(part)])
            raise TypeError(
                f"{name!r} is compiled, and attention inside torch.compile cannot be recorded; capture the model "
                "before you compile it, or compile a copy"
            )


def warn_only_submodules_ran(mode: AttentionMode) -> None:
    """Warn if the model has a method that attends, and only its submodules were called."""
    kind: type = type(mode.model)
    if not mode.called and attends_aside(kind):
        warnings.warn(
            f"only submodules of {kind.__name__} ran inside capture; attention called from its own methods is recorded "
            "only when you call model(...)",
            CaptureWarning,
            stacklevel=4,
        )


def warn_compiled(mode: AttentionMode) -> None:
    """Warn if an attention ran inside a compiled function."""
    kind = type(mode.model).__name__
    if mode.compiled:
        warnings.warn(f"an attention of {kind} {COMPILED}", CaptureWarning, stacklevel=4)
    if mode.flexed:
        warnings.warn(f"{kind} {FLEX_COMPILED}", CaptureWarning, stacklevel=4)


def warn_unrecognized_softmax(mode: AttentionMode, recorder: Recorder) -> None:
    """Warn of each softmax that looks like attention and was not recorded."""
    for message in _unrecognized_softmax(mode, recorder):
        warnings.warn(message, CaptureWarning, stacklevel=4)


def warn_finished_rows(recorder: Recorder) -> None:
    """Warn if sequences were removed from the batch when they ended: their rows are gone."""
    ended = recorder.ended
    if any(ended):
        left = [n for n, gone in enumerate(ended) if not gone]
        warnings.warn(
            f"the tape holds batch rows {left} of {len(ended)}: the other sequences finished earlier and were removed "
            "from the batch. Capture one sequence at a time, or run one forward pass over the generated text",
            CaptureWarning,
            stacklevel=4,
        )


def check_recorded(mode: AttentionMode, recorder: Recorder) -> None:
    """Raise with the reason if nothing was recorded."""
    if not recorder.is_empty:
        return
    kind = type(mode.model).__name__
    if recorder.passed_over:
        names = list_names(sorted(recorder.passed_over))
        raise ValueError(f"no layer that attended matches layers={list(recorder.layers or ())}; there were {names}")
    if not mode.ran:
        raise ValueError(f"{kind} was not called within the block; call model(...), not model.forward(...)")
    if mode.flexed:
        raise ValueError(f"no attention was recorded: {kind} {FLEX_COMPILED}")
    if mode.compiled:
        raise ValueError(f"no attention was recorded: an attention of {kind} {COMPILED}")
    if lost := _unrecognized_softmax(mode, recorder):
        raise ValueError(f"no attention of {kind} was recorded: {'; '.join(lost)}")
    raise ValueError(
        f"no attention of {kind} was recorded; {RECOGNIZED}. A model that attends in another way can call one of "
        "these, or build its weights with regard.weights(q, k)"
    )


def _unrecognized_softmax(mode: AttentionMode, recorder: Recorder) -> list[str]:
    """Return a message for each kind of softmax that looks like attention and was not recorded."""
    messages = []
    lost = [layer for layer, each in mode.softmaxes.items() if not all(each) and recorder.should_record(layer)]
    if mode.unclear:
        known = [*lost, *(layer for layer, _ in recorder.entries)]
        unclear = [
            layer
            for layer in mode.unclear
            if recorder.should_record(layer) and not any(within(layer, part) for part in known)
        ]
        if unclear:
            messages.append(
                f"{list_names(sorted(unclear))} was not recorded: its softmax input could not be traced back to "
                "q @ k.mT. Compute scores as q @ k.mT, or call regard.attend(q, k, v)"
            )
    if lost:
        messages.append(
            f"{list_names(lost)} computes softmax(q @ k.mT), but its result was never multiplied with values in a form "
            "regard recognizes, so it was not recorded. Multiply the softmax output with v directly, or call "
            "regard.attend(q, k, v)"
        )
    return messages
