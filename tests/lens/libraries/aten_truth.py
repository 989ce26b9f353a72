"""The weights that a model used, read from PyTorch's own operators while it runs without any capture.

A dispatch mode sees every softmax and every fused attention at the level of aten. It follows the output of a softmax
through views, copies and elementwise operators to the product with the values, and keeps the operand of that product:
the final weights. Nothing here uses the lens.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
SOFTMAX = {aten._softmax.default, aten._safe_softmax.default}
FUSED = {aten._scaled_dot_product_flash_attention_for_cpu.default}
PRODUCTS = {aten.bmm.default: (0, 1), aten.mm.default: (0, 1), aten.baddbmm.default: (1, 2), aten.addmm.default: (1, 2)}
OUT_PRODUCTS = {aten.bmm.out: (0, 1), aten.mm.out: (0, 1), aten.baddbmm.out: (1, 2), aten.addmm.out: (1, 2)}
MOST = 2**20  # elements of an operand without a softmax that are kept
MULTIPLY = {aten.mul.Tensor, aten.mul_.Tensor}
SUM = {aten.sum.dim_IntList, aten.sum.default}
# Operators whose output carries no weights of their own: numbers of another kind, or one number.
STOPS = {aten._log_softmax.default, aten.nll_loss_forward.default, aten.multinomial.default, aten.argmax.default}


@dataclass
class Softmax:
    """One softmax or fused attention that ran: its rows, and the rows that were multiplied with values."""

    layer: str  # name of the module that was running
    rows: Tensor  # (rows, keys): the softmax, in float64
    largest: float  # largest finite score, in size
    fused: bool = False
    finals: list[Tensor] = field(default_factory=list)  # operands of products, as (rows, keys)
    summed: bool = False  # multiplied elementwise and summed over keys

    @property
    def is_used(self) -> bool:
        """Whether a product with values followed; a softmax over one key says nothing."""
        return self.rows.shape[1] > 1 and (self.fused or self.summed or bool(self.finals))

    def has_width(self, widths: set[int]) -> bool:
        """Whether it ran a softmax, or is the operand of a product of one of these widths."""
        return bool(len(self.rows)) or self.finals[0].shape[1] in widths

    def alternatives(self) -> list[Tensor]:
        """Every form of these weights that a correct tape may show."""
        return [*self.finals, *([self.rows] if self.fused or self.summed else [])]


def rows_along(x: Tensor, dim: int) -> Tensor:
    """Return the vectors along one dim, as (rows, size of the dim)."""
    return x.movedim(dim, -1).reshape(-1, x.shape[dim])


def fused_scores(q: Tensor, k: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None) -> Tensor:
    """Return the scores of a fused call in float64."""
    q, k = q.double(), k.double()
    if k.shape[1] != q.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
        s = s.masked_fill(hidden, -torch.inf)
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask.double()
    return s


def largest_score(s: Tensor) -> float:
    """Return the size of the largest score; scores below the visible ones by 1e3 are masks."""
    visible = s[s.isfinite() & (s > -1e3)]
    return float(visible.abs().max()) if visible.numel() else 0.0


def summed_sizes(args: Any) -> set[int]:
    """Return the sizes of the dims that a call of sum removes."""
    x, dims = args[0], args[1] if len(args) > 1 else None
    return {x.shape[dim] for dim in (dims or range(x.ndim))}


class AtenTruth(TorchDispatchMode):
    """Record each softmax, each fused attention, and the products that follow."""

    def __init__(self, layers: list[str]) -> None:
        super().__init__()
        self.layers = layers  # names of the modules that are running, innermost last
        self.calls: list[Softmax] = []
        self.products: list[Softmax] = []  # operands of products that came from no softmax
        self._sources: dict[int, set[int]] = {}  # storage -> softmaxes it came from
        self._scaled: dict[int, set[int]] = {}  # storage -> softmaxes it was multiplied by
        self._alive: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in PRODUCTS or func in OUT_PRODUCTS:
            out = func(*args, **kwargs)
            self._note_product(args, PRODUCTS.get(func) or OUT_PRODUCTS[func], out)
            return out
        out = func(*args, **kwargs)
        layer = self.layers[-1] if self.layers else ""
        if func in SOFTMAX:
            s, dim = args[0], args[1]
            self._follow(out, {len(self.calls)})
            self._append(layer, s.detach().double(), dim)
        elif func in FUSED:
            given = dict(zip(("query", "key", "value", "dropout_p", "is_causal"), args, strict=False)) | kwargs
            s = fused_scores(
                given["query"].detach(),
                given["key"].detach(),
                given.get("is_causal", False),
                given.get("attn_mask"),
                given.get("scale"),
            )
            self._append(layer, s, -1, fused=True)
        elif func not in STOPS:
            self._propagate(func, args, kwargs, out)
        return out

    def _append(self, layer: str, s: Tensor, dim: int, fused: bool = False) -> None:
        rows = rows_along(s.softmax(dim).nan_to_num(0.0), dim)
        self.calls.append(Softmax(layer, rows, largest_score(s), fused))

    def _follow(self, x: Tensor, sources: set[int], scaled: bool = False) -> None:
        table = self._scaled if scaled else self._sources
        table.setdefault(x.untyped_storage()._cdata, set()).update(sources)
        self._alive.append(x)

    def _of(self, x: Any, scaled: bool = False) -> set[int]:
        table = self._scaled if scaled else self._sources
        return table.get(x.untyped_storage()._cdata, set()) if table and isinstance(x, Tensor) else set()

    def _propagate(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        sources: set[int] = set().union(*(self._of(x) for x in inputs))
        scaled: set[int] = set().union(*(self._of(x, scaled=True) for x in inputs))
        if func in SUM and scaled:
            sizes = summed_sizes(args)
            summed = {each for each in scaled if self.calls[each].rows.shape[-1] in sizes}
            for each in summed:
                self.calls[each].summed = True
            scaled = scaled - summed
        if not sources and not scaled:
            return
        for x in tree_leaves(out):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                continue
            if func in MULTIPLY and sources and x.numel() > max(y.numel() for y in inputs if self._of(y)):
                self._follow(x, sources | scaled, scaled=True)
                continue
            if scaled:
                self._follow(x, scaled, scaled=True)
            if sources and x.numel() > 1:
                self._follow(x, sources)

    def _note_product(self, args: Any, operands: tuple[int, int], out: Tensor) -> None:
        for place, dim in zip(operands, (-1, -2), strict=True):
            x = args[place]
            rows = rows_along(x.detach().double(), dim)  # shared by all softmaxes that it came from
            sources = self._of(x)
            if not sources and rows.numel() < MOST:
                layer = self.layers[-1] if self.layers else ""
                self.products.append(Softmax(layer, rows[:0], 0.0, finals=[rows]))
            for source in sources:
                if 2 * x.shape[dim] < self.calls[source].rows.shape[1]:  # a sum over heads, not over keys
                    self._follow(out, {source})
                elif x.shape[dim] > 1:
                    self.calls[source].finals.append(rows)


@contextmanager
def aten_truth(model: nn.Module):
    """Record the softmaxes and fused attentions of a model that runs inside the block, with the names of its layers."""
    layers: list[str] = []
    hooks = []
    for name, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            continue
        hooks.append(part.register_forward_pre_hook(lambda *_, name=name: layers.append(name)))
        hooks.append(part.register_forward_hook(lambda *_: layers.__delitem__(-1), always_call=True))
    try:
        with AtenTruth(layers) as truth:
            yield truth
    finally:
        for hook in hooks:
            hook.remove()
