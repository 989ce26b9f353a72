"""Heads at work: switch some off, and ask which of them a loss depends on.

Seen are the layers of `regard.nn`, `nn.MultiheadAttention`, and every module that calls `attend`,
`F.scaled_dot_product_attention`, `flex_attention`, a function of `flash_attn` or `memory_efficient_attention` of
xformers, Hugging Face models on their default implementation included.
Layers go by their name in the model, `model.layers.3.self_attn`; a model that is itself one layer has the name "", and
a tape shows it as "(model)".
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...nn.core import Core
from ...ops.operator import attend
from ..eager.head_layout import head_count, replace_heads, to_heads_function
from ..eager.tracker import Handwriting, touches
from ..interception import known_kernels as kernels
from ..interception.function_mode import layer_of
from ..interception.mode_stack import is_on
from ..interception.module_scan import attends, multiplies
from ..interception.patching import Shown
from ..interception.sdpa import SDPA
from ..layer_names import own_name, shown_name

SEEN = (
    "seen are attend, nn.MultiheadAttention, F.scaled_dot_product_attention, flex_attention, flash_attn, "
    "memory_efficient_attention of xformers, and softmax(q @ k.mT) @ v as a model writes it out"
)


@contextmanager
def ablate(model: nn.Module, heads: Mapping[str, Iterable[int]]) -> Iterator[None]:
    """The model without some heads: within the block their outputs are zeros. Nothing of the model is changed.

    >>> import torch
    >>> from regard.nn import Attention
    >>> model = nn.Sequential(Attention(16, heads=4), Attention(16, heads=4))
    >>> x = torch.randn(1, 5, 16)
    >>> with ablate(model, {"0": [1, 3], "1": [0]}):
    ...     without = model(x)
    >>> torch.equal(without, model(x))
    False

    A layer that was named but did not attend within the block raises at its end. Gradients pass, and are zero through
    an ablated head.
    """
    heads = {own_name(name): ids for name, ids in heads.items()}
    _check_layers_exist(model, heads)
    chosen = {layer_of(name, model.get_submodule(name)): _numbers(name, ids) for name, ids in heads.items()}
    met: set[str] = set()

    def silence(name: str, out: Tensor) -> Tensor:
        if name not in chosen:
            return out
        met.add(name)
        n, ids = out.shape[-3], chosen[name]
        if ids and not 0 <= ids[0] <= ids[-1] < n:
            raise IndexError(f"heads of {shown_name(name)!r} must be from 0 to {n - 1}, got {ids}")
        keep = torch.ones(n, dtype=torch.bool, device=out.device)
        keep[ids] = False
        return torch.where(keep[:, None, None], out, 0.0)

    with _through(model, silence):
        yield
    if missed := [shown_name(name) for name in chosen if name not in met]:
        raise RuntimeError(f"no attention was seen in {missed} while ablating; {SEEN}")


@contextmanager
def importance(model: nn.Module) -> Iterator[dict[str, Float[Tensor, " h"]]]:
    """sum over tokens of abs(out_h . dL/dout_h), for each layer and head: how much a loss leans on each (Michel et al.
    2019, sec. 4.1). The dot product is also the sum over keys of A * dL/dA.

    >>> import torch
    >>> from regard.nn import Attention
    >>> model = Attention(16, heads=4)
    >>> with importance(model) as scores:
    ...     model(torch.randn(2, 5, 16)).square().mean().backward()
    >>> scores[""].shape
    torch.Size([4])

    Run forward and backward within the block, over as many batches as you like: the sums add up. Compare heads within a
    layer, or divide each layer by its norm, as the paper does. It is a first-order estimate of what `ablate` measures.
    """
    scores: dict[str, Tensor] = {}

    def watch(name: str, out: Tensor) -> Tensor:
        if out.requires_grad:
            kept = out.detach()

            def add(grad: Tensor) -> None:
                dtype = torch.promote_types(grad.dtype, torch.float32)
                per_token = (kept.to(dtype) * grad.to(dtype)).sum(-1).abs()  # b h i
                total = per_token.sum(-1).view(-1, kept.shape[-3]).sum(0)
                scores[name] = scores[name] + total if name in scores else total

            out.register_hook(add)
        return out

    with _through(model, watch):
        yield scores
    if not scores:
        raise RuntimeError(f"no gradient of an attention was seen; call backward within the block; {SEEN}")


def ablation_importance(
    model: nn.Module, loss: Callable[[], float | Tensor], layers: Sequence[str] | None = None
) -> dict[str, Float[Tensor, " h"]]:
    """loss without head h - loss, for each layer and head: what `ablate` costs (Michel et al. 2019, sec. 3.2).

    >>> import torch
    >>> from regard.nn import Attention
    >>> model, x = Attention(16, heads=4), torch.randn(2, 5, 16)
    >>> ablation_importance(model, lambda: model(x).square().mean())[""].shape
    torch.Size([4])

    `loss` runs the model on data of your choice, once for every head: put the model in evaluation mode and keep the
    data fixed. `layers` are the names to go through, all unless given.
    """
    heads: dict[str, int] = {}

    def count(name: str, out: Tensor) -> Tensor:
        heads[name] = out.shape[-3]
        return out

    with torch.no_grad():
        with _through(model, count):
            whole = float(loss())
        layers = list(heads) if layers is None else [own_name(name) for name in layers]
        if missed := [shown_name(name) for name in layers if name not in heads]:
            attended = [shown_name(name) for name in heads]
            raise RuntimeError(f"no attention was seen in {missed}; the layers that attended are {attended}; {SEEN}")
        costs: dict[str, Tensor] = {}
        for name in layers:
            without = []
            for head in range(heads[name]):
                with ablate(model, {name: [head]}):
                    without.append(float(loss()) - whole)
            costs[name] = torch.tensor(without, dtype=torch.float64)
    return costs


@contextmanager
def _through(model: nn.Module, change: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Put the output of every attention of the model, `b h i e`, through `change(layer name, output)`."""
    calls = _Calls(model, change)
    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(calls.entering(name)).remove)
            stack.callback(module.register_forward_hook(calls.leaving(name), always_call=True).remove)
        stack.enter_context(calls)
        stack.enter_context(kernels.watching(calls, calls.modules.values()))
        yield


class _Here(threading.local):
    """The modules that a thread is at, and whether the mode came with them; and the scores they write out."""

    def __init__(self) -> None:
        self.under_way: list[tuple[str, bool]] = []
        self.handwriting = Handwriting()


class _Calls(TorchFunctionMode):
    """Sees the attention functions as they are called.

    A mode is one thread's, and is away while a function it sees runs, a backward pass that computes layers again among
    them. So modules bring it along where it is not.
    """

    def __init__(self, model: nn.Module, change: Callable[[str, Tensor], Tensor]) -> None:
        super().__init__()
        self.modules = dict(model.named_modules())
        self.layers = {name: layer_of(name, module) for name, module in self.modules.items()}
        self.change = change  # what is done to the heads of a layer
        self.here = _Here()

    def entering(self, name: str) -> Callable[..., None]:
        """A hook for a module that begins."""

        def enter(*_: Any) -> None:
            brought = not is_on(self)
            if brought:
                self.__enter__()
            self.here.under_way.append((name, brought))

        return enter

    def leaving(self, name: str) -> Callable[..., None]:
        """A hook for a module that ends."""

        def leave(*_: Any) -> None:
            # One that failed before it was entered, in a hook of somebody else's, is left all the same.
            if self.here.under_way and self.here.under_way[-1][0] == name and self.here.under_way.pop()[1]:
                self.here.handwriting.clear()
                self.__exit__(None, None, None)

        return leave

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.here.under_way:
            return func(*args, **kwargs)
        name = self.layers[self.here.under_way[-1][0]]
        if func is attend:
            return self.change(name, func(*args, **kwargs))
        if func is SDPA:
            out = func(*args, **kwargs)
            if out.ndim == 4:
                return self.change(name, out)
            laid = to_heads_function(out.shape[:-2], self._heads(out.shape[:-2].numel()))
            return replace_heads(out, self.change(name, laid(out)), laid)
        if func is F.multi_head_attention_forward:
            return self._multi_head(name, MULTI_HEAD.bind(*args, **kwargs))
        out = func(*args, **kwargs)
        if (step := touches(func)) is not None:
            written = self.here.handwriting.follow(step, args, kwargs, out, self._heads)
            if written is not None:
                return replace_heads(out, self.change(name, written.heads(out)), written.heads)
        return out

    @property
    def is_inside(self) -> bool:
        """Is a layer of the model under way in this thread?"""
        return bool(self.here.under_way)

    def shown(self, call: Shown) -> Tensor:
        """Take in a call of a kernel that runs outside of PyTorch's functions."""
        return call.changed(partial(self.change, self.layers[self.here.under_way[-1][0]]))

    def _heads(self, matrices: int) -> int | None:
        return head_count([(name, self.modules[name]) for name, _ in self.here.under_way], matrices)

    def _multi_head(self, name: str, call: inspect.BoundArguments) -> tuple[Tensor, Tensor | None]:
        weight, bias = call.arguments["out_proj_weight"], call.arguments["out_proj_bias"]
        call.arguments |= {"out_proj_weight": torch.eye(len(weight)).to(weight), "out_proj_bias": None}
        # With the identity for a projection, the function returns its heads side by side.
        joined, A = F.multi_head_attention_forward(*call.args, **call.kwargs)  # i b (h e)
        heads = joined.unflatten(-1, (call.arguments["num_heads"], -1)).movedim(0, -2)  # b h i e
        return F.linear(self.change(name, heads).movedim(-2, 0).flatten(-2), weight, bias), A


MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)
BESIDE = (Core, nn.TransformerEncoderLayer)  # within a layer of ours, and around one of PyTorch's


def _check_layers_exist(model: nn.Module, names: Iterable[str]) -> None:
    known = dict(model.named_modules())
    for name in names:
        if name not in known:
            kinds: dict[str, type] = {n: type(m) for n, m in known.items() if type(m) not in BESIDE}
            some = [n for n, kind in kinds.items() if hasattr(known[n], "core") or attends(kind) or multiplies(kind)]
            there = [shown_name(n) for n in some or list(known)[:20]]
            raise ValueError(f"the model has no layer {name!r}; its attention layers are {there}")


def _numbers(name: str, heads: object) -> list[int]:
    """The numbers of the heads of a layer, in order and each once."""
    of = f"heads of {shown_name(name)!r} must be"
    heads = heads.tolist() if isinstance(heads, Tensor) else heads
    if isinstance(heads, str) or not isinstance(heads, Iterable):
        hint = f"; write [{heads}]" if type(heads) is int else ""
        raise TypeError(f"{of} a list of their numbers, as in [0, 3], got {heads!r}{hint}")
    ids = list(heads)
    for head in ids:
        if isinstance(head, bool) or not isinstance(head, Integral):
            raise TypeError(f"{of} whole numbers, got {head!r}")
    return sorted({int(head) for head in ids})
