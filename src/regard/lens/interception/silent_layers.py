"""Note layers that ran and left no entry on the tape because nothing in them can be recorded.

They are known by their class: a mixer without attention weights (`known_mixers`), or code that calls attention in a
compiled, scripted or vmapped function (`opaque_calls`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn
from torch.compiler import is_compiling

from ... import torch_internals
from ..layer_names import within
from ..recording.recorder import Recorder
from .function_mode import AttentionMode
from .known_mixers import known_mixer
from .module_scan import attends, multiplies
from .opaque_calls import COMPILED, attached_values, opaque_attention


class SilentReason(NamedTuple):
    """Why nothing of a layer can be recorded."""

    kind: str
    reason: str
    holds_parts: bool  # may an entry of a part of the layer stand for it?


@contextmanager
def note_silent_layers(mode: AttentionMode, recorder: Recorder) -> Iterator[None]:
    """Note each silent layer that ran within the block and has no entry on the tape."""
    ran: dict[str, SilentReason] = {}
    hooks = [
        part.register_forward_pre_hook(_NoteCall(ran, silences))
        for part in mode.parts
        if (silences := _silences(part, mode.names))
    ]
    mode.needs_modules = mode.needs_modules or bool(hooks)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    recorded = set(recorder.recorded_layers)
    for name, silence in ran.items():
        has_inner = any(other != name and within(name, other) for other in ran)
        known = {layer for layer in recorded if within(name, layer)} if silence.holds_parts else {name} & recorded
        if not known and not (has_inner and silence.holds_parts):
            recorder.note_unseen(name, silence.kind, silence.reason)


def _silences(module: nn.Module, names: dict[int, str]) -> dict[str, SilentReason]:
    """Return the layers that run silently in a module: the module itself, or modules that it holds compiled."""
    kind: type = type(module)
    values = attached_values(module)
    found: dict[str, SilentReason] = {}
    if (known := known_mixer(kind)) is not None:
        found[names[id(module)]] = SilentReason(known.kind, known.reason, holds_parts=True)
    elif (opaque := opaque_attention(kind, values)) is not None and (opaque != COMPILED or torch_internals.compiles()):
        found[names[id(module)]] = SilentReason(*opaque, holds_parts=False)
    for value in values:
        if isinstance(value, nn.Module) and "_orig_mod" in value._modules and torch_internals.compiles():
            for part in value.modules():
                inner: type = type(part)
                if id(part) in names and (attends(inner) or multiplies(inner)):
                    found[names[id(part)]] = SilentReason(*COMPILED, holds_parts=False)
    return found


class _NoteCall:
    """A hook that adds the silent layers of a module to those that ran; a copy of the model shares it."""

    def __init__(self, ran: dict[str, SilentReason], silences: dict[str, SilentReason]) -> None:
        self.ran, self.silences = ran, silences

    def __deepcopy__(self, memo: object) -> _NoteCall:
        return self

    def __call__(self, module: nn.Module, args: object) -> None:
        if not is_compiling():
            self.ran.update(self.silences)
