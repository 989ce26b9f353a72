"""Audit a capture: note every layer that mixes positions and has no entry on the tape.

`capture(audit=True)` records the inputs of the model's first call. After the block, two copies of the model run on
them: one while each attention operator of ATen is seen (`attention_ops`), one while each module is tested for mixing
positions (`position_mixing`). The copies share the parameters of the model, not its buffers, attributes and hooks, and
the random states are restored, so the model and its outputs stay equal to the bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..capture_warning import CaptureWarning
from ..interception.function_mode import AttentionMode, layer_of
from ..interception.known_mixers import known_mixer
from ..interception.opaque_calls import attached_values, opaque_attention
from ..layer_names import named_modules, within
from ..recording.recorder import Recorder
from .attention_ops import attention_ops
from .model_copy import CannotAudit, FirstCall, copy_model, map_tensors, same_random_state, tensors_in
from .position_mixing import MIXES, Mixing, mixing_modules

NOT_RECORDED = "it mixes positions, as changing one of them shows, and no attention of it was recorded"


def note_audited_layers(mode: AttentionMode, first: FirstCall, recorder: Recorder) -> None:
    """Note the layers that mix positions and have no entry; warn if the audit cannot run."""
    model = mode.model
    # A copy of a compiled part would be compiled with the hooks of the audit.
    as_written = torch.compiler.set_stance("force_eager") if mode.compiled_parts else nullcontext()
    try:
        with as_written:
            operators, mixing = _run_copies(model, first)
    except CannotAudit as reason:
        warnings.warn(f"the audit of {type(model).__name__} did not run: {reason}", CaptureWarning, stacklevel=5)
        return
    names = {module: mode.names.get(id(module), name) for name, module in named_modules(model).items()}
    recorded, noted = recorder.recorded_layers, [each.layer for each in recorder.unseen]
    for module, found in mixing.items():
        if module not in names:  # what torch.compile made of another
            continue
        name = layer_of(names[module], module)
        if any(within(name, layer) for layer in recorded) or any(layer and within(layer, name) for layer in noted):
            continue
        if found.kind == MIXES:
            if _owner(name) in recorded:  # a part of an attention, such as a module that computes its scores
                continue
            found = _explain(module, operators.get(module))
        recorder.note_unseen(name, *found)


def _run_copies(model: nn.Module, first: FirstCall) -> tuple[dict[nn.Module, str], dict[nn.Module, Mixing]]:
    """Return the attention operators and the mixing modules of a model's first call, by its own modules."""
    if first.refused is not None:
        raise first.refused
    if first.inputs is None:
        raise CannotAudit("the model itself was not called in the block, only submodules of it were")
    with same_random_state(model):
        test = partial(mixing_modules, lead=_lead(tensors_in(list(first.inputs))))
        return _run_copy(model, first, attention_ops), _run_copy(model, first, test)


def _lead(inputs: list[Tensor]) -> tuple[int, ...]:
    """Return the number of batch rows of a model's first input, and of positions if it is b n of ids or b n d."""
    first = next((x for x in inputs if x.ndim), None)
    if first is None or first.ndim == 1:
        return ()
    is_text = first.ndim == 2 and not first.is_floating_point()
    return tuple(first.shape[:2]) if is_text or first.ndim == 3 else tuple(first.shape[:1])


Found = TypeVar("Found")


def _run_copy(
    model: nn.Module, first: FirstCall, test: Callable[[nn.Module, Callable[[], Any]], dict[nn.Module, Found]]
) -> dict[nn.Module, Found]:
    """Run a test on a copy of the model; return what it found by the modules of the model."""
    assert first.inputs is not None
    copied = copy_model(model)
    args, kwargs = map_tensors(Tensor.clone, first.inputs)
    try:
        found = test(copied, lambda: copied(*args, **kwargs))
    except Exception as error:  # the model may raise anything
        raise CannotAudit(f"its first call cannot be repeated: {type(error).__name__}: {error}") from error
    originals = dict(zip(copied.modules(), model.modules(), strict=True))
    return {originals[module]: each for module, each in found.items() if module in originals}


def _explain(module: nn.Module, operator: str | None) -> Mixing:
    """Return the most specific kind and reason of a mixing module."""
    if (opaque := opaque_attention(type(module), attached_values(module))) is not None:
        return Mixing(*opaque)
    kind: type = type(module)
    if (known := known_mixer(kind)) is not None:
        return Mixing(known.kind, known.reason)
    if operator is not None:
        return Mixing("attention", f"{operator} ran in it and averaged activations, and no call of it was recorded")
    return Mixing(MIXES, NOT_RECORDED)


def _owner(name: str) -> str | None:
    """Return the name of the module that holds this one; None for the model itself."""
    return name.rpartition(".")[0] if name else None
