"""Ablate heads, and estimate how much a loss depends on each head.

Ablation is one of the edits of `regard.lens.edits`, so every attention that `capture` records can be ablated. Layers go
by their name in the model, `model.layers.3.self_attn`; a model that is itself one layer has the name "", and a tape
shows it as "(model)".
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..edits.edit import Editor, check_layers_exist, guess_message
from ..edits.edit_values import Scale, check_head_numbers
from ..interception.diagnostics import RECOGNIZED
from ..interception.intercept import intercept
from ..interception.intercepted import InterceptedAttention
from ..layer_names import own_name, shown_name


@contextmanager
def ablate(
    model: nn.Module, heads: Mapping[str, Iterable[int]], *, layout: str | Mapping[str, str] | None = None
) -> Iterator[None]:
    """The model without some heads: within the block their outputs are zeros. Nothing of the model is changed.

    It is `edit` with `Scale(heads, 0)` in each layer:

    >>> import torch
    >>> from regard.nn import Attention
    >>> model = nn.Sequential(Attention(16, heads=4), Attention(16, heads=4))
    >>> x = torch.randn(1, 5, 16)
    >>> with ablate(model, {"0": [1, 3], "1": [0]}):
    ...     without = model(x)
    >>> torch.equal(without, model(x))
    False

    A layer that was named but did not attend within the block raises at its end. A layer whose heads are a guess raises
    when it attends: pass its `layout`, as to `capture`. Gradients pass, and are zero through an ablated head.
    """
    scales = {
        glob.escape(own_name(name)): (Scale(check_head_numbers(f"heads of {shown_name(own_name(name))!r}", ids), 0),)
        for name, ids in heads.items()
    }
    check_layers_exist(model, scales)
    editor = Editor(scales, what="ablating")
    with intercept(model, editor, layout=layout) as mode:
        yield
    editor.check_done(mode)


@contextmanager
def importance(
    model: nn.Module, *, layout: str | Mapping[str, str] | None = None
) -> Iterator[dict[str, Float[Tensor, " h"]]]:
    """sum over tokens of abs(out_h . dL/dout_h), for each layer and head: how much the loss depends on each (Michel et
    al. 2019, sec. 4.1). The dot product is also the sum over keys of A * dL/dA.

    >>> import torch
    >>> from regard.nn import Attention
    >>> model = Attention(16, heads=4)
    >>> with importance(model) as scores:
    ...     model(torch.randn(2, 5, 16)).square().mean().backward()
    >>> scores[""].shape
    torch.Size([4])

    Run forward and backward within the block, over as many batches as you like: the sums add up. Layers come in the
    order in which the model ran them. Compare heads within a layer, or divide each layer by its norm, as the paper
    does. It is a first-order estimate of what `ablate` measures.
    `layout` says which dims are heads, as for `capture`; a layer whose heads are a guess raises without it.
    """
    scores: dict[str, Tensor] = {}

    with intercept(model, _HeadGradients(scores), layout=layout):
        yield scores
    if not scores:
        raise RuntimeError(f"no gradient reached an attention; call backward within the block; {RECOGNIZED}")


def ablation_importance(
    model: nn.Module,
    loss: Callable[[], float | Tensor],
    layers: Sequence[str] | None = None,
    *,
    layout: str | Mapping[str, str] | None = None,
) -> dict[str, Float[Tensor, " h"]]:
    """loss without head h - loss, for each layer and head: what `ablate` costs (Michel et al. 2019, sec. 3.2).

    >>> import torch
    >>> from regard.nn import Attention
    >>> model, x = Attention(16, heads=4), torch.randn(2, 5, 16)
    >>> ablation_importance(model, lambda: model(x).square().mean())[""].shape
    torch.Size([4])

    `loss` runs the model on data of your choice, once for every head: put the model in evaluation mode and keep the
    data fixed. `layers` are the names to go through, all unless given; `layout` is that of `ablate`.
    """
    heads: dict[str, int] = {}

    with torch.no_grad():
        with intercept(model, _HeadCounts(heads), layout=layout):
            whole = float(loss())
        layers = list(heads) if layers is None else [own_name(name) for name in layers]
        if missed := [shown_name(name) for name in layers if name not in heads]:
            attended = [shown_name(name) for name in heads]
            raise RuntimeError(
                f"no attention was found in {missed}; the layers that attended are {attended}; {RECOGNIZED}"
            )
        costs: dict[str, Tensor] = {}
        for name in layers:
            without = []
            for head in range(heads[name]):
                with ablate(model, {name: [head]}, layout=layout):
                    without.append(float(loss()) - whole)
            costs[name] = torch.tensor(without, dtype=torch.float64)
    return costs


class _HeadCounts:
    """Consumer that counts the heads of each layer."""

    def __init__(self, counts: dict[str, int]) -> None:
        self.counts = counts

    def observe(self, attention: InterceptedAttention) -> Tensor:
        self.counts[attention.layer] = attention.heads.shape[1]
        return attention.out


class _HeadGradients:
    """Consumer that adds up abs(out_h . dL/dout_h) over tokens, for each layer and head, layers in forward order."""

    def __init__(self, scores: dict[str, Tensor]) -> None:
        self.scores, self.layers = scores, list[str]()

    def observe(self, attention: InterceptedAttention) -> Tensor:
        out, layer, layout = attention.out, attention.layer, attention.layout
        if out.requires_grad:
            if layer not in self.layers:
                self.layers.append(layer)
            if attention.guess is not None:
                raise ValueError(guess_message(layer, attention.guess))
            heads = layout.heads(out.detach())  # b h i e

            def add(grad: Tensor) -> None:
                dtype = torch.promote_types(grad.dtype, torch.float32)
                per_token = (heads.to(dtype) * layout.heads(grad).to(dtype)).sum(-1).abs()  # b h i
                self._add(layer, per_token.sum((0, 2)))

            out.register_hook(add)
        return out

    def _add(self, layer: str, total: Tensor) -> None:
        """Add to the scores of a layer; a backward pass reaches the last layer first, so later ones are moved back."""
        if layer in self.scores:
            self.scores[layer] = self.scores[layer] + total
            return
        self.scores[layer] = total
        for later in self.layers[self.layers.index(layer) + 1 :]:
            if later in self.scores:
                self.scores[later] = self.scores.pop(later)
