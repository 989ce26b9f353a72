"""Errors and warnings of `capture`: why a model, or a layer of it, was not recorded, and what to do."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import nn

from ..capture_warning import CaptureWarning
from ..layer_names import list_names, named_modules, shown_name, within
from ..recording.recorder import Recorder
from ..recording.unseen import describe
from ..terms.interpret import MIN_REPORTED_BYTES
from .function_mode import SCRIPTED, AttentionMode
from .module_scan import attends_aside
from .opaque_calls import COMPILED

RECOGNIZED = (
    "recognized are regard.attend, F.scaled_dot_product_attention, F.multi_head_attention_forward, flex_attention, the "
    "attention interface of transformers, flash_attn and memory_efficient_attention of xformers, kernels passed to "
    "regard.lens.register_kernel, and softmax(q @ k.mT) @ v as a model writes it out"
)
FLEX_COMPILED = (
    "it calls flex_attention inside a torch.compile'd function, or through a reference that capture does not find, "
    "where it cannot be recorded. Compile flex_attention alone, flex = torch.compile(flex_attention), "
    "and call flex in a layer"
)
NO_PRODUCT = (
    "its softmax input could not be traced back to q @ k.mT. Compute scores as q @ k.mT, or call regard.attend(q, k, v)"
)
NEVER_AVERAGED = (
    "it computes softmax(q @ k.mT), but the result was never multiplied with values in a form regard recognizes. "
    "Multiply the softmax output with v directly, or call regard.attend(q, k, v)"
)


def check_capturable(model: nn.Module) -> None:
    """Raise if the model cannot be captured, whatever it runs."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("a scripted model runs outside Python and cannot be recorded; capture the original model")


def warn_scripted(mode: AttentionMode) -> None:
    """Warn of scripted submodules."""
    for part in mode.parts:
        if type(part) in SCRIPTED:
            name = shown_name(mode.names[id(part)])
            warnings.warn(
                f"the submodule {name!r} is scripted and runs outside Python, so its attention is not recorded",
                CaptureWarning,
                stacklevel=4,
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


def note_unseen_layers(mode: AttentionMode, recorder: Recorder) -> None:
    """Note every layer that attended and was not recorded, in the order of the model."""
    _note_unrecognized_softmax(mode, recorder)
    if mode.compiled and not any(each.kind == COMPILED.kind for each in recorder.unseen):
        recorder.note_unseen("", *COMPILED)
    if mode.flexed:
        recorder.note_unseen("", "flex_attention", FLEX_COMPILED)
    if len(recorder.unseen) > 1:
        recorder.order_unseen(named_modules(mode.model))


def _note_unrecognized_softmax(mode: AttentionMode, recorder: Recorder) -> None:
    """Note the layers with a softmax that looks like attention and was not recorded."""
    if not (mode.softmaxes or mode.unclear):
        return
    known = [*recorder.recorded_layers, *(each.layer for each in recorder.unseen)]
    for layer, (kind, reason) in unrecognized_softmax(mode, known).items():
        recorder.note_unseen(layer, kind, reason)


def unrecognized_softmax(mode: AttentionMode, known: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return kind and reason for each layer with a softmax that looks like attention and was not observed.

    `known` are the layers that were.
    """
    found = {}
    for layer in (layer for layer, each in mode.softmaxes.items() if not all(each)):
        average = mode.left_out.get(layer)
        found[layer] = ("softmax", NEVER_AVERAGED) if average is None else (average.kind, average.reason)
    seen = [*found, *known]
    for layer in sorted(mode.unclear):
        if not any(within(layer, part) for part in seen):
            found[layer] = "softmax", NO_PRODUCT
    return found


def warn_unseen(recorder: Recorder) -> None:
    """Warn once of all layers that mix positions and were not recorded."""
    if recorder.unseen:
        warnings.warn(f"{describe(recorder.unseen)} (tape.unseen lists them)", CaptureWarning, stacklevel=4)


def warn_dense_weights(recorder: Recorder) -> None:
    """Warn of the memory of weights that were changed after the softmax, if it is large."""
    if (size := sum(recorder.dense_bytes.values())) > MIN_REPORTED_BYTES:
        layers = {shown_name(layer): recorder.changed[layer] for layer in recorder.dense_bytes}
        how = ", ".join(sorted(set(layers.values())))
        warnings.warn(
            f"{list_names(list(layers))} changed the weights after the softmax ({how}). The tape holds the final "
            f"weights of each call densely, queries x keys: {size / 1e6:.3g} MB",
            CaptureWarning,
            stacklevel=4,
        )


def warn_returned_weights(recorder: Recorder) -> None:
    """Warn of attention functions that compute no softmax(q @ k.mT): their own weights are recorded, densely."""
    if recorder.returned:
        functions = sorted({function for function, _ in recorder.returned.values()})
        size = sum(size for _, size in recorder.returned.values())
        warnings.warn(
            f"{list_names(list(map(shown_name, recorder.returned)))} did not attend by softmax(q @ k.mT) of the "
            f"arguments of {', '.join(functions)}. The tape holds the weights that the function returned, queries x "
            f"keys: {size / 1e6:.3g} MB",
            CaptureWarning,
            stacklevel=4,
        )


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
    if recorder.unseen:
        raise ValueError(f"no attention of {kind} was recorded: {describe(recorder.unseen)}")
    raise ValueError(
        f"no attention of {kind} was recorded; {RECOGNIZED}. A model that attends in another way can call one of "
        "these, or build its weights with regard.weights(q, k)"
    )
