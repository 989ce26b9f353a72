"""Watch: sees the attention functions while a model runs, and which of its layers calls them.

A torch function mode sees every call of `attend`, `F.scaled_dot_product_attention` and
`F.multi_head_attention_forward`, and the functions by which a model writes attention out; hooks say whose it is. While
a mode is active `nn.TransformerEncoder` leaves its fused fast path, in which there would be nothing to see, for its
plain one.

A mode costs a few microseconds for every function of PyTorch, more than many of them take to launch. So it is active
only within layers that may attend by themselves: most of transformers ask an interface instead, where they are seen.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.jit._script import RecursiveScriptModule
from torch.jit._trace import TopLevelTracedModule, TracedModule
from torch.overrides import TorchFunctionMode

from ...nn.core import Core
from ...nn.dropout import Dropout
from ...ops.call import SLOTS
from ...ops.operator import attend
from ...ops.terms.masks import Causal
from ..eager.head_layout import head_count, to_heads_function
from ..eager.op_rules import SOFTMAX
from ..eager.tracker import Handwriting, Written, touches
from ..layer_names import shown_name
from ..recording.observed import ObservedAttention
from ..recording.record import Record
from ..recording.recorder import Recorder
from ..recording.store import check_holds_numbers
from .mode_stack import is_on, withdraw
from .module_scan import ATTENTIONS, attends, is_an_attention, may_attend, multiplies
from .output_projection import projection
from .patching import Shown, Unread
from .sdpa import SDPA, attended
from .torch_multihead import hidden, projected

FLEX = frozenset((torch.ops.higher_order.flex_attention,))


class _Here(threading.local):
    """What a thread is at: a model may run in several."""

    def __init__(self) -> None:
        self.parts: list[nn.Module] = []  # those under way that may call what is watched for
        self.whole = False  # is a pass of the whole model under way?
        self.silent = 0  # how many ask that nothing be seen now
        self.places: dict[tuple[int, int], int] = {}  # of the first query, by the queries and keys of the latest mask
        self.joining: tuple[Record, Tensor] | None = None  # whose heads, b h i e, want a projection
        self.handwriting = Handwriting()


class _Opened(threading.local):
    """The watches that a thread has opened."""

    def __init__(self) -> None:
        self.watches: list[Watch] = []


_OPENED = _Opened()


class Watch(TorchFunctionMode):
    """Hands every attention of a model to a recorder.

    A model may run in threads that somebody starts within the block, and is seen there; but where several threads watch
    the same model, each sees what it runs itself.
    """

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        super().__init__()
        self.model, self.recorder = model, recorder
        self.parts, self.names = _parts(model)
        self.ran = False
        self.called = False  # was the model itself, and not just parts of it?
        self.compiled = False  # did any attend within a compiled function?
        self.flexed = False  # or by flex_attention within one?
        self.here = _Here()
        self.softmaxes: dict[str, list[list[bool]]] = {}  # of products, by layer: were values averaged by them?
        self.unclear: set[str] = set()  # layers with a softmax of something else, that are attentions by their names
        self._on = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the model within the block."""
        everywhere = self.recorder.values  # output projections are linear maps of any layer
        kinds = {kind for kind in set(map(type, self.parts)) if everywhere or may_attend(kind)}
        hooks = [self.model.register_forward_pre_hook(self._begin)]
        if kinds:
            hooks.append(self.model.register_forward_hook(self._end, always_call=True))
        self._on = True
        opened = _OPENED.watches
        opened.append(self)
        try:
            for module in self.parts if kinds else ():
                kind: type = type(module)
                if kind in kinds and kind not in SCRIPTED:
                    entering = self._enter_attention if attends(kind) or multiplies(kind) else self._enter
                    hooks.append(module.register_forward_pre_hook(entering))
                    hooks.append(module.register_forward_hook(self._leave, always_call=True))
            yield
        finally:
            self._on = False
            opened.remove(self)
            for hook in hooks:
                hook.remove()
            self._withdraw()

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        """A copy of a watched model has its hooks, but is not watched."""
        return self

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """What is called within is of no interest, or has been seen already."""
        self.here.silent += 1
        try:
            yield
        finally:
            self.here.silent -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_compiling():  # what is written into a graph has no numbers to see
            self.compiled = self.compiled or func in ATTENTIONS
            self.flexed = self.flexed or func in FLEX
            return func(*args, **kwargs)
        if self.here.silent or not self._on:
            return func(*args, **kwargs)
        if recomputing():  # as before, so that it saves for its own backward pass what was saved before
            return attended(*args, **kwargs)[0] if func is SDPA else func(*args, **kwargs)
        if func in ATTENTIONS:
            check_holds_numbers(*args, **kwargs)
        if func is attend:
            out = func(*args, **kwargs)
            self._attention(out, *args, **kwargs)
            return out
        if func is SDPA:
            out, statistic = attended(*args, **kwargs)
            self._dot_product(out, statistic, *args, **kwargs)
            return out
        if func is F.multi_head_attention_forward:
            result = func(*args, **kwargs)
            self._multi_head(result[0], inspect.signature(func).bind(*args, **kwargs))
            return result
        if self.here.joining is not None:
            record, heads = self.here.joining
            if (weight := projection(heads, func, args, kwargs)) is not None:
                self.recorder.project(record, weight)
                self.here.joining = None
        out = func(*args, **kwargs)
        handwriting, name = self.here.handwriting, touches(func)
        if handwriting.traces.held and name != SOFTMAX:
            handwriting.traces.follow(func, args, kwargs, out)
        if name is not None:
            written = handwriting.follow(name, args, kwargs, out, self._heads)
            if written is not None:
                self._written(written, out)
            elif name == SOFTMAX:
                self._softmaxed(handwriting.is_averaged(out))
        return out

    def _softmaxed(self, averaged: list[bool] | None) -> None:
        """Remember a softmax of queries and keys, or of something else where a layer should attend."""
        if averaged is not None:
            open_ = [other for other in self.softmaxes.get(self._layer, ()) if not other]
            self.softmaxes[self._layer] = [*open_, averaged]
        elif self.here.parts:
            kind: type = type(self.here.parts[-1])
            if is_an_attention(kind):
                self.unclear.add(self._layer)

    def see(
        self, layer: str, seen: ObservedAttention, out: Tensor, heads: Callable[[Tensor], Tensor] = lambda x: x
    ) -> None:
        """Have an attention taken in, and find its projection; as `Recorder.see`."""
        record = self.recorder.see(layer, seen, out, heads)
        self.here.joining = None if record is None else (record, heads(out.detach()))

    def _begin(self, module: nn.Module, args: Any) -> None:
        if is_compiling():
            self.ran = self.called = True
        elif self.concerns(module):
            self.ran = self.called = self.here.whole = True
            self.recorder.reader.begin_pass()

    def _end(self, module: nn.Module, args: Any, out: Any) -> None:
        if not is_compiling():
            self.here.whole = False

    def _enter_attention(self, module: nn.Module, args: Any) -> None:
        self.compiled = self.compiled or is_compiling()
        self._enter(module, args)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not is_compiling() and self._watches(module):
            if type(module) is nn.MultiheadAttention:  # which takes nested tensors only where nobody watches
                check_holds_numbers(*args)
            self.ran = True
            self.here.parts.append(module)
            if len(self.here.parts) == 1:
                if not self.here.whole:
                    self.recorder.reader.begin_pass()
                self.__enter__()

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        # One that failed before it was entered, in a hook of somebody else's, is left all the same.
        if not is_compiling() and self._watches(module) and self.here.parts[-1:] == [module]:
            self.here.parts.pop()
            if not self.here.parts:
                self.here.handwriting.clear()
                self.__exit__(None, None, None)

    @property
    def is_inside(self) -> bool:
        """Is a part of the model under way in this thread, and of interest?"""
        return self._on and bool(self.here.parts) and not self.here.silent

    def _withdraw(self) -> None:
        """Where somebody interrupts, PyTorch calls no hooks: parts are still under way, and this mode with them."""
        if self.here.parts and is_on(self):
            withdraw(self)
        if self.here.parts:
            self.here.parts.clear()
            self.here.handwriting.clear()

    @property
    def _layer(self) -> str:
        """The layer under way; a `Core` is a part of the one it belongs to."""
        part = self.here.parts[-1]
        return layer_of(self.names[id(part)], part)

    def _wants_this(self) -> bool:
        """Was the layer under way asked for? To understand one takes time, and may take its matrix."""
        wanted = self.recorder.wants(self._layer)
        if not wanted:
            self.recorder.passed_over.add(self._layer)
        return wanted

    def _watches(self, module: nn.Module) -> bool:
        """Is it a part of the model itself, and not of a copy of it?"""
        return self._on and id(module) in self.names and self.concerns(module)

    def concerns(self, module: nn.Module) -> bool:
        """Does it matter here if this thread calls the module? Not if it has it watched by somebody else alone."""
        watches = _OPENED.watches
        return self in watches or not any(id(module) in other.names for other in watches)

    def _attention(
        self,
        out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        dropout: float = 0.0,
        backend: str | None = None,
        **terms: Any,
    ) -> None:
        with torch.no_grad():
            self.see(self._layer, self.recorder.own(ObservedAttention(q, k, v, **terms), *SLOTS), out)

    def _dot_product(
        self,
        out: Tensor,
        statistic: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        # Among other dims than `b h` a layer says where its heads are, unless keys have fewer of them.
        given, laid = out.shape[:-2], None
        if out.ndim != 4 and not enable_gqa:
            laid = to_heads_function(given, self._heads(given.numel()))
        with torch.no_grad():
            if laid is not None:
                query, key, value = map(laid, (query, key, value))
                attn_mask = attn_mask if attn_mask is None or attn_mask.ndim < 3 else laid(attn_mask)
            # PyTorch counts causal from the top left: its first query stands at position 0, whatever the lengths.
            place: dict[str, Any] = {"mask": Causal(), "offset": 0} if is_causal else {"mask": attn_mask}
            seen = self.recorder.reader.read(query, key, value, scale=scale, statistic=statistic, **place)
            self.see(self._layer, seen, out, laid or (lambda x: x.reshape(*seen.q.shape[:3], -1)))

    def shown(self, call: Shown) -> Tensor:
        """Take in a call of a kernel that runs outside of PyTorch's functions, if it can be told."""
        if recomputing() or not self._wants_this():
            return call.out
        layer, why = self._layer, call.kernel.otherwise
        with self.quiet(), torch.no_grad():
            try:
                readings = call.readings(self.recorder.reader)
            except Unread as reason:
                readings, why = [], str(reason)
            for told in readings:
                seen = self.recorder.reader.read(**told)
                if call.is_explained(seen, len(readings)):
                    self.see(layer, seen, call.out, call.heads)
                    return call.out
        warnings.warn(f"an attention of {shown_name(layer)} is not on the tape: {why}", stacklevel=2)
        return call.out

    def _written(self, written: Written, out: Tensor) -> None:
        """Take in an attention that a model has written out, as it tells itself."""
        if not self._wants_this():
            return
        layer = self._layer
        with torch.no_grad():
            for told in written.told():
                seen = self.recorder.reader.read(**told)
                if written.is_told_by(seen.weights):
                    self.see(layer, seen, out, written.heads)
                    return
        warnings.warn(
            f"an attention of {shown_name(layer)} is not on the tape: its weights are not the softmax of its scores",
            stacklevel=2,
        )

    def _heads(self, matrices: int) -> int | None:
        return head_count([(self.names[id(part)], part) for part in self.here.parts], matrices)

    def _multi_head(self, out: Tensor, call: inspect.BoundArguments) -> None:
        call.apply_defaults()
        given = call.arguments
        heads, weight = given["num_heads"], given["out_proj_weight"].detach()

        def of_heads(grad: Tensor) -> Tensor:
            # The output is the heads side by side times the projection, so its gradient goes back through it.
            joined = grad.reshape(grad.shape[0], -1, grad.shape[-1]) @ weight
            return joined.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)

        with torch.no_grad():
            q, k, v = projected(given)
            seen = self.recorder.reader.read(q, k, v, mask=hidden(given, k.shape[2]))
            record = self.recorder.see(self._layer, seen, out, of_heads)
        self.here.joining = None
        if record is not None:
            self.recorder.project(record, weight)


def recomputing() -> bool:
    """Does a backward pass run, and compute checkpointed layers once more, which have been seen?"""
    return torch._C._current_graph_task_id() != -1


def layer_of(name: str, part: nn.Module) -> str:
    """The name a layer goes by: a `Core` that is called so is a part of the layer it belongs to."""
    owner, _, own = name.rpartition(".")
    return owner if own == "core" and type(part) is Core else name


SCRIPTED = frozenset((RecursiveScriptModule, TracedModule, TopLevelTracedModule))
BARE = frozenset((nn.Linear, nn.Embedding, nn.LayerNorm, nn.Dropout, Dropout))  # have no parts to look for


def _parts(model: nn.Module) -> tuple[list[nn.Module], dict[int, str]]:
    """The parts of a model in which something may attend, itself the first, and their names by id.

    A walk over a model, which touches all its parts, takes as long as one of its layers takes to launch: it looks at as
    few things as it can.
    """
    parts, names = [model], {id(model): ""}
    for module in parts:  # which grows meanwhile
        if type(module) in SCRIPTED or not module._modules:
            continue
        prefix = f"{names[id(module)]}." if module is not model else ""
        for name, part in module._modules.items():
            kind: type = type(part)
            if part is None or kind in BARE or (_is_plain(kind) and not part._modules):
                continue
            if id(part) not in names:
                names[id(part)] = prefix + name
                parts.append(part)
    return parts, names


@cache
def _is_plain(kind: type) -> bool:
    """Is it PyTorch's own, in which, without parts, nothing attends?"""
    return kind.__module__.startswith("torch.nn.modules.")
