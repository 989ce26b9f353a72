"""capture: record every attention of a model while it runs, without changing it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .interception import diagnostics
from .interception.intercept import intercept
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
    tape = Tape.live(recorder, tokens, model)
    with intercept(model, recorder, interpreter) as mode:
        diagnostics.check_not_compiled(mode)
        yield tape
    recorder.close()
    interpreter.begin_pass()
    diagnostics.check_recorded(mode, recorder)
    diagnostics.warn_compiled(mode)
    diagnostics.warn_unrecognized_softmax(mode, recorder)
    diagnostics.warn_only_submodules_ran(mode)
    diagnostics.warn_finished_rows(recorder)
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
