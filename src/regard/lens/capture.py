"""capture: record every attention of a model while it runs, without changing it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_internals import original_module
from .audit.audit import note_audited_layers
from .audit.model_copy import FirstCall
from .interception import diagnostics
from .interception.intercept import intercept
from .interception.silent_layers import note_silent_layers
from .recording.recorder import Recorder
from .recording.reduced import check_measures
from .recording.store import Store
from .tape.annotations import Tokens, TokensByLayer
from .tape.tape import Tape
from .terms.interpret import Interpreter


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
    audit: bool = False,
    layout: str | Mapping[str, str] | None = None,
) -> Iterator[Tape]:
    """Record every attention call that the model makes inside the block; yield the tape that holds the weights, lazily.

    Record a model of regard's layers and PyTorch's; the tape lists its layers by name:

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

    Name the tokens, and read the weights of one head, query by key:

    >>> model, x = nn.Sequential(Attention(16, heads=4), Attention(16, heads=4)), torch.randn(1, 3, 16)
    >>> with capture(model, ["the", "cat", "sat"]) as tape, torch.no_grad():
    ...     y = model(x)
    >>> tape["0"][0, 2].shape
    torch.Size([3, 3])

    Record one layer and two of its heads:

    >>> with capture(model, layers="1", heads=[0, 3]) as tape, torch.no_grad():
    ...     y = model(x)
    >>> tape
    Tape(1 layer)
    1  Weights(1 x 2 x 3 x 3)

    Keep two measures and nothing else, for texts whose queries and keys do not fit in memory:

    >>> with capture(model, keep=["entropy", "received"]) as tape, torch.no_grad():
    ...     y = model(x)
    >>> tape["0"].entropy().shape
    torch.Size([1, 4, 3])

    Keep values and output projections too, as `norm_attention` needs them:

    >>> with capture(model, values=True) as tape, torch.no_grad():
    ...     y = model(x)
    >>> tape.extras("0").v.shape
    torch.Size([1, 4, 3, 4])

    Keep the gradient of each head's output, once backward has run:

    >>> with capture(model, gradients=True) as tape:
    ...     model(x).square().sum().backward()
    >>> tape.extras("0").gradient.shape
    torch.Size([1, 4, 3, 4])

    The tape keeps detached queries and keys, in memory linear in the sequence length. The model runs its usual kernels,
    so its outputs are equal to the bit. (Exception: `nn.TransformerEncoder` and `nn.MultiheadAttention` in evaluation
    leave their fused fast path. There outputs agree to rounding, and at padded positions the plain path writes numbers
    where the fused one writes zeros.) While a model generates with a cache, the rows of each new token are appended to
    those of the prompt. Calls in threads started inside the block are recorded too; if several threads capture the same
    model at once, each records its own calls.

    Which dims are the batch and which the heads is taken from how the model split its features into heads, else from
    the shape of the layer's input. Where neither decides, `tape.guessed` has the layer and the reason.

    A layer that attends and cannot be recorded is listed in `tape.unseen` as (layer, kind, reason), and one
    `CaptureWarning` at the end of the block names them all. If nothing was recorded, capture raises with the reasons.

    Args:
        model: the model to watch; it is not changed.
        tokens: the tokens of a text, a list of them per batch row, with or without padding and in the order of the
            batch, or a dict by pattern of layer names, with a pair if queries and keys belong to different texts:
            {"decoder.*.cross": (words, source)}.
        layers: patterns of layer names to record, such as "decoder.*".
        heads: indices of the heads to record.
        keep: measures to compute at once instead of keeping queries and keys: "entropy", "received", "max", "distance",
            "logit" or "pool:512". The steps of a generation then stay separate. Padding queries do not count in
            "received".
        values: keep values and output projections too, under `tape.extras(layer)`.
        gradients: keep the gradient of each output, under `tape.extras(layer)`.
        to: a device to move the kept tensors to, or the `Path` of a folder to keep them in.
        budget: a bound on the memory of the kept tensors, such as "2GB"; capture raises when it would be exceeded.
        audit: run copies of the model again after the block and list in `tape.unseen` every module that mixes
            positions and has no entry, whatever code it runs. Costs 10 to 30 forward passes on small models. It tests
            the first call of the model alone; it warns and does not run if that call has a filled cache.
        layout: the batch dims of the weights, where they cannot be seen (`tape.guessed` lists such layers): "b h i j",
            "h b i j", "(b h) i j", "(h b) i j" or "b i j", or a dict from patterns of layer names to layouts. Write
            "(b h=4) i j" if the layer keeps its number of heads in no attribute. It holds for attention that a model
            writes out and for `F.scaled_dot_product_attention`.
    """
    diagnostics.check_capturable(model)
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
        heads = _head_indices(heads)
    recorder = Recorder(
        store=Store(to, budget),
        layers=layers,
        heads=heads,
        keep=keep,
        values=values,
        gradients=gradients,
    )
    interpreter = Interpreter(recorder.store, holds_biases=keep is None)
    original = original_module(model)
    tape = Tape.live(recorder, tokens, original)
    first = FirstCall(original)
    recording = first.recording() if audit else nullcontext()
    with intercept(model, recorder, interpreter, layout) as mode, note_silent_layers(mode, recorder), recording:
        mode.needs_modules = mode.needs_modules or audit
        diagnostics.warn_scripted(mode)
        yield tape
    recorder.close()
    interpreter.begin_pass()
    if audit:
        note_audited_layers(mode, first, recorder)
    diagnostics.note_unseen_layers(mode, recorder)
    diagnostics.check_recorded(mode, recorder)
    diagnostics.warn_unseen(recorder)
    diagnostics.warn_only_submodules_ran(mode)
    diagnostics.warn_finished_rows(recorder)
    diagnostics.warn_dense_weights(recorder)
    diagnostics.warn_returned_weights(recorder)
    tape._warn_unmatched_tokens(stacklevel=4)


def _head_indices(heads: object) -> list[int]:
    """Return the indices in any list, array or tensor of them."""
    values = heads.tolist() if isinstance(heads, Tensor) else heads
    indices: list[Any] = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else [None]
    if any(isinstance(head, bool) or not isinstance(head, Integral) for head in indices):
        raise TypeError(f"heads must be numbers of heads, as in heads=[0, 3], got {heads!r}")
    if not indices:
        raise ValueError("heads must name at least one head, got heads=[]; write heads=[0], or leave it out for all")
    return [int(head) for head in indices]
