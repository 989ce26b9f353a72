"""PyTorch's fused attention kernels, called by their private names because only those return the log-sum-exp.

softmax(q k^T * scale + added) v and the log-sum-exp of each row, whichever kernel it is. The kernels return the
log-sum-exp in different shapes; this file makes them one. All are differentiable once and take grouped heads.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import torch_internals
from ..blocks.reduction import DifferentiableOnce
from ..call import Call
from ..terms.scores import Dot, product_of
from ..torch_state import is_traced

MAX_EFFICIENT_SCORES = 2**24


class SdpaKernel(IntEnum):
    """The kernels `torch_internals.choose_sdp_kernel` chooses from; math stores the matrix."""

    ERROR = -1
    MATH = 0
    FLASH = 1
    EFFICIENT = 2
    CUDNN = 3

    @property
    def is_fused(self) -> bool:
        """True if the kernel does not store the matrix."""
        return self > SdpaKernel.MATH


def run_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    added: Tensor | None,
    causal: bool,
    dropout: float,
    kernel: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`b h i d, b g j d, b g j d -> b h i d` and `b h i`; `causal` counts from the top left.

    `kernel` is PyTorch's choice for these tensors, if the caller knows it. Compiled for a GPU, the compiler chooses
    the kernel and there is no log-sum-exp.
    """
    out, lse = run_kernel(q, k, v, scale=scale, added=added, causal=causal, dropout=dropout, kernel=kernel)
    if lse is not None:
        differentiable_once(out)
    return out, lse


def run_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    added: Tensor | None,
    causal: bool,
    dropout: float,
    kernel: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The same with the second derivatives of PyTorch's function, which raise its own error."""
    if q.is_cpu:
        if not torch.compiler.is_compiling() and not torch.backends.cuda.flash_sdp_enabled():  # set by `sdpa_kernel`
            grouped = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=added, is_causal=causal, scale=scale, enable_gqa=grouped
            )
            return out, None
        if kernel is None and not (q.stride(-1) == k.stride(-1) == v.stride(-1) == 1):
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()  # the kernel ignores the stride of the last dim
        return torch_internals.cpu_flash_attention(q, k, v, scale=scale, added=added, causal=causal)
    added = _align_rows(added, q)
    if torch.compiler.is_compiling():
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=added, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
        )
        return out, None
    i, d = q.shape[2:]
    match _choose(q, k, v, added, causal, dropout) if kernel is None else kernel:
        case SdpaKernel.FLASH:
            if d % 8:
                q, k, v = (F.pad(x, (0, -d % 8)) for x in (q, k, v))
            out, lse, *_ = torch_internals.flash_attention(q, k, v, dropout, causal, scale)
            return out[..., :d] if d % 8 else out, lse
        case SdpaKernel.EFFICIENT:
            out, lse, *_ = torch_internals.efficient_attention(q, k, v, added, dropout, causal, scale)
        case SdpaKernel.CUDNN:
            out, lse, *_ = torch_internals.cudnn_attention(q, k, v, added, dropout, causal, scale)
        case other:
            raise RuntimeError(
                f"PyTorch has no fused kernel for q {tuple(q.shape)} {q.dtype}, it chose {SdpaKernel(other).name}"
            )
    return out, lse.flatten(2)[..., :i]  # b h i-rounded-up of efficient, b h i 1 of cuDNN


def prefers_efficient(q: Tensor, k: Tensor) -> bool:
    """True if a short call with a mask takes the memory-efficient kernel rather than cuDNN.

    cuDNN takes 0.7 seconds for its first mask in a process, and 0.05 for each new shape. On an H200 a mask of 2 x 8 x
    1024 takes it 0.33 ms forward and backward, and the other 0.25; of 8 x 12 x 1024, 0.63 and 1.01 ms.
    """
    return (
        q.shape[:3].numel() * k.shape[2] <= MAX_EFFICIENT_SCORES
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] % 8 == 0
        and q.shape[1] == k.shape[1]
        and not is_traced()
        and torch.backends.cuda.mem_efficient_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled()
    )


def differentiable_once(out: Tensor) -> None:
    """Let the gradients of a fused kernel raise, and say what to write, if they are differentiated again."""
    if torch.compiler.is_compiling() or (node := out.grad_fn) is None:
        return
    if type(node).__name__.startswith("Slice") and (inner := node.next_functions[0][0]) is not None:
        node = inner  # the kernel took wider heads
    if type(node).__name__.startswith(
        ("ScaledDotProduct", "FlashAttention")
    ):  # not so PyTorch's math, by `sdpa_kernel`
        node.register_hook(_refuse_second_derivative)


def _refuse_second_derivative(
    grads: tuple[Tensor | None, ...], _: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...] | None:
    if not torch.is_grad_enabled():
        return None
    return tuple(None if g is None else DifferentiableOnce.apply(g) for g in grads)


def choose_kernel(q: Tensor, k: Tensor, v: Tensor, *, added: Tensor | None, causal: bool, dropout: float) -> SdpaKernel:
    """The kernel PyTorch chooses for these tensors on a GPU."""
    return _choose(q, k, v, _align_rows(added, q), causal, dropout)


def _choose(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, causal: bool, dropout: float) -> SdpaKernel:
    grouped = q.shape[1] != k.shape[1]
    return SdpaKernel(torch_internals.choose_sdp_kernel(q, k, v, added, dropout, causal, enable_gqa=grouped))


def is_surely_fused(q: Tensor) -> bool:
    """True if PyTorch surely has a fused kernel for q, and k and v of its shape and dtype, square under a causal mask.

    For most calls PyTorch's choice is known, and in a short call asking for it takes nearly as long as all else.
    """
    d = q.shape[-1]
    half = q.dtype in (torch.float16, torch.bfloat16)
    return half and d <= 128 and d % 8 == 0 and torch.backends.cuda.flash_sdp_enabled() and has_flash(q.get_device())


@cache
def has_flash(device: int) -> bool:
    """True if this build of PyTorch has its flash kernel, and the kernel runs on this GPU."""
    built = torch.version.hip is None and torch.backends.cuda.is_flash_attention_available()
    return built and (8, 0) <= torch.cuda.get_device_capability(device) <= (12, 1)


def scaled_product_inputs(call: Call) -> tuple[Tensor, Tensor, float]:
    """q and k such that the score is their product times a positive number, in the dtype the kernels take."""
    score = product_of(call.score)
    match score:
        case Dot(scale=scale) if not isinstance(scale, Tensor):
            number = call.q.shape[-1] ** -0.5 if scale is None else float(scale)
            if number > 0:
                return call.q, call.k, number
            # The kernels need a positive scale, since they look for the largest product. Negating q is exact.
            return (-call.q, call.k, -number) if number < 0 else (call.q * 0, call.k, 1.0)
    q, k = score.prepare(call.q.to(call.dtype), call.k.to(call.dtype), call.head_ids)
    return (q, k, 1.0) if q.is_cpu else (q.to(call.q.dtype), k.to(call.q.dtype), 1.0)


def with_equal_widths(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same attention with zeros behind the narrower of keys and values: the kernels take one width.

    Features of zeros change no product of queries and keys; the caller cuts the output to the width of the values.
    """
    width, value_width = k.shape[-1], v.shape[-1]
    if value_width < width:
        return q, k, F.pad(v, (0, width - value_width))
    if value_width > width:
        return F.pad(q, (0, value_width - width)), F.pad(k, (0, value_width - width)), v
    return q, k, v


def score_cap(call: Call) -> float | None:
    """The bound of capped scores, `Dot.cap`; None if there is none."""
    score = product_of(call.score)
    return score.cap if isinstance(score, Dot) else None


def _align_rows(added: Tensor | None, q: Tensor) -> Tensor | None:
    """The same numbers over b h i j, every row aligned to 16 entries as the kernels require."""
    if added is None:
        return None
    j = added.shape[-1]
    if j % 16:  # a pad of nothing would copy the numbers, of all heads and rows if they are expanded
        added = F.pad(added, (0, -j % 16))[..., :j]
    return added.expand(*q.shape[:3], j)
