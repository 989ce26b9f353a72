"""Tell transformers' own attention functions from registered and patched ones, and prove what the others compute.

A function that hides keys, sharpens weights or calls another kernel can be registered at the attention interface, or
replace `eager_attention_forward` or `F.scaled_dot_product_attention`. The code of transformers is trusted. Any other
function is believed only if rows of `A @ v` equal its output. There are up to four readings of its call: its arguments
as transformers means them, the same without the causal mask that `is_causal` implies, the one call of SDPA that the
function made, and the weights that it returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..recording.observed import ObservedAttention
from ..terms.changed_weights import Given
from .intercepted import HEADS_THIRD, OutputLayout
from .kernel_call import KernelCall, NotUnderstood, OutputProof
from .output_check import reproduces_output
from .sdpa import is_sdpa_original

if TYPE_CHECKING:
    from ..recording.recorder import Recorder

MIN_ROWS, MAX_COMPARED_ENTRIES = 8, 2**21  # rows of each matrix that are compared, all if they have few entries
BYTES_PER_WEIGHT = 4  # the tape holds returned weights in float32
TRUSTED = ("transformers", "torch", "regard")  # packages whose attention functions do what their arguments say
TERMS = ("s_aux", "position_bias", "softcap")  # arguments that a function may take, or ignore
WEIGHT_TOLERANCE = 0.03  # error relative to the largest weight of a row
SUM_TOLERANCE = 0.02  # error of the sum of a row


def is_own(function: Callable[..., Any], given: dict[str, Any]) -> bool:
    """True if only code of transformers, PyTorch and regard computes this, and it reads the arguments `given`."""
    # This runs for each layer, so it calls no function of Python that it can avoid.
    if type(function) is not FunctionType:
        return False
    try:
        known = _KNOWN[function]
    except KeyError:
        if not _is_as_written(function):
            return False
        known = _KNOWN[function] = _Code(function)
    used = [function.__code__, F.softmax, F.scaled_dot_product_attention, *map(known.space.get, known.code.co_names)]
    if list(map(id, used)) != known.used_ids:
        known.judge(function, used)
    return known.is_own and list(map(type, map(given.get, known.ignored))) == known.absent


class _Code:
    """The code of an attention function, and the verdict on what its names referred to when it was last called."""

    def __init__(self, function: FunctionType) -> None:
        self.code, self.space = function.__code__, function.__globals__
        parameters = self.code.co_varnames[: self.code.co_argcount + self.code.co_kwonlyargcount]
        # A paged cache has more keys than the call; the other terms count only if they are parameters.
        self.ignored = [*(term for term in TERMS if term not in parameters), "cache"]
        self.absent = [type(None)] * len(self.ignored)
        self.used: list[Any] = []
        self.used_ids: list[int] = []
        self.is_own = False

    def judge(self, function: FunctionType, used: list[Any]) -> None:
        """Decide whether all functions that the code names are as transformers and PyTorch wrote them."""
        self.used, self.used_ids = used, list(map(id, used))  # the objects stay alive, so that their ids stay unique
        code, softmax, _, *named = used
        helpers = (x for x in named if callable(x) and not isinstance(x, (type, ModuleType)))
        self.is_own = code is self.code and is_sdpa_original() and all(map(_is_as_written, (softmax, *helpers)))


_KNOWN: dict[FunctionType, _Code] = {}  # only functions of transformers and PyTorch, which live as long as Python


def _is_as_written(value: Any) -> bool:
    """True for a function whose code comes from the file of a module of transformers or PyTorch."""
    if type(value) is not FunctionType:
        return False
    space = value.__globals__
    return space["__name__"].partition(".")[0] in TRUSTED and value.__code__.co_filename == space.get("__file__")


class ForeignCall:
    """A call of an attention function that is not transformers' own, which has run."""

    def __init__(
        self,
        function: Callable[..., Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        dropout: float,
        result: Any,
        inner: KernelCall | None,
    ) -> None:
        self.inner = inner  # the call of SDPA that the function made
        self.name = getattr(function, "__name__", type(function).__name__)
        self.q, self.k, self.v, self.mask, self.dropout = q, k, v, mask, dropout
        self.out = result[0]
        self.returned = result[1] if len(result) > 1 and _is_matrix(result[1], q, k) else None
        self.layout = self._layout()

    def kernel_call(self, read: Callable[[], KernelCall]) -> KernelCall:
        """Return the readings of the call in order of preference; `read` gives the one of transformers."""
        other = self._read_returned()
        if self.inner is not None:
            other = replace(self.inner, alternative=other)
        if not (self.mask is None or isinstance(self.mask, (Tensor, BlockMask))):
            if other is None:
                raise NotUnderstood(f"its mask is of the type {type(self.mask).__name__}, which is not supported")
            return other
        call = replace(read(), statistic=None)  # the function may have changed the scores before its kernel
        if self.mask is None and call.mask is not None:  # a function that has no mask registered gets none
            other = replace(call, mask=None, offset=None, alternative=other)
        return replace(call, alternative=other)

    def proof(self, recorder: Recorder | None, layer: str) -> OutputProof:
        """A test of a reading; the recorder notes if the tape has to hold the weights that the function returned."""

        def agrees(observed: ObservedAttention) -> bool:
            is_stored = bool(observed.changed)
            agreed = self._is_reproduced_by(observed, is_stored=is_stored)
            if agreed and is_stored and recorder is not None and self.returned is not None:
                recorder.note_returned(layer, self.name, BYTES_PER_WEIGHT * self.returned.numel())
            return agreed

        why = "dropout was active" if self.dropout else "its output is not softmax(q @ k.mT) @ v of its arguments"
        return OutputProof(agrees, f"{self.name} runs code that is not of transformers, and {why}")

    def _is_reproduced_by(self, observed: ObservedAttention, *, is_stored: bool) -> bool:
        """True if a reading gives the output or, with dropout, the weights that the function returned."""
        out, device = self.layout.heads(self.out.detach()), self.out.device.type
        if torch.is_autocast_enabled(device):
            out = out.to(torch.get_autocast_dtype(device))
        b, h, _, j = *self.q.shape[:3], self.k.shape[2]
        rows = max(MIN_ROWS, MAX_COMPARED_ENTRIES // max(1, b * h * j))
        if reproduces_output(observed, out, rows=rows, skip_blind_rows=True):
            return True
        return bool(self.dropout) and not is_stored and self._has_returned(observed, rows)

    def _has_returned(self, observed: ObservedAttention, rows: int) -> bool:
        """True if the function returned these weights: then it did not drop any of them."""
        if self.returned is None:
            return False
        i = self.q.shape[2]
        compared = torch.linspace(0, i - 1, min(rows, i), device=self.q.device).round().long()
        ours, theirs = observed.weights[:, :, compared].float(), self.returned[:, :, compared].float()
        if ours.shape != theirs.shape:
            return False
        off, largest = (ours - theirs).abs().amax(-1), ours.amax(-1)
        return bool((off <= WEIGHT_TOLERANCE * largest)[largest > 0].all())

    def _read_returned(self) -> KernelCall | None:
        """Return the weights that the function returned; None if dropout has changed them.

        If each row sums to 1, they become scores, with q = 0, so that the steps of a generation join.
        """
        weights, q, v = self.returned, self.q, self.v
        if weights is None or v.shape[2] != weights.shape[3]:
            return None
        weights, changed = weights.detach().float(), f"returned by {self.name}"
        sums = weights.sum(-1)
        if bool(((sums - 1).abs() <= SUM_TOLERANCE).logical_or(sums == 0).all() and (weights >= 0).all()):
            zeros = v.new_zeros(()).expand(*q.shape[:3], v.shape[3])
            return KernelCall(q=zeros, k=v, v=v, mask=weights.log(), changed=changed)
        return None if self.dropout else KernelCall(q=q, k=self.k, v=v, normalize=Given(weights), changed=changed)

    def _layout(self) -> OutputLayout:
        """Return the layout of the output: b i h e, or b i (h e), which layers of transformers accept too."""
        if self.out.ndim == 4:
            return HEADS_THIRD
        heads, shape = self.q.shape[1], self.out.shape
        return OutputLayout(
            lambda out: out.unflatten(-1, (heads, -1)).transpose(1, 2),
            lambda changed: changed.transpose(1, 2).reshape(shape),
        )


def _is_matrix(x: Any, q: Tensor, k: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == (*q.shape[:3], k.shape[2]) and x.is_floating_point()
