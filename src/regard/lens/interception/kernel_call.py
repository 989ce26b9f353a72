"""KernelCall: the arguments of one attention call, whichever function the model calls.

Every entrance of the interception (attend, SDPA, MultiheadAttention, transformers, flex_attention, flash_attn,
xformers, registered kernels, attention written out by hand) builds this one value. `terms.interpret` turns it
into terms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from ...ops.terms.biases import Bias
from ...ops.terms.masks.mask_algebra import Mask
from ...ops.terms.normalizers import Normalizer
from ...ops.terms.scores import Score

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from ..recording.observed import ObservedAttention
    from ..terms.infer_mask import Rows
    from .graph_masks import GraphMask


class NotUnderstood(Exception):
    """The reason why an attention call cannot be expressed in terms.

    The functions that read arguments raise it; `Interpreter.interpret` returns it.
    """


class FlexArguments(NamedTuple):
    """The arguments of `flex_attention` that hold functions."""

    block_mask: BlockMask | None
    score_mod: Callable[..., Tensor] | None
    is_compiled: bool  # a compiled kernel skips the blocks that the block mask leaves out


class OutputProof(NamedTuple):
    """A test whether an interpretation reproduces what the model computed."""

    agrees: Callable[[ObservedAttention], bool]
    mismatch: str  # the reason to report if no reading of the call agrees
    only_if_ambiguous: bool = False  # trust a call that has a single reading


@dataclass(frozen=True, eq=False, kw_only=True)
class KernelCall:
    """One attention call: queries, keys, values, and what changes their scores.

    q is `b h i d`, k `b g j d` and v `b g j e`, or they have other batch dims, as
    `F.scaled_dot_product_attention` takes them. A tensor `mask` is boolean (True = may attend) or added to the scores.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | BlockMask | Rows | GraphMask | Mask | None = None
    bias: Tensor | Bias | None = None
    scale: float | None = None  # default: 1 / sqrt(d)
    cap: float | None = None  # scores become cap * tanh(scores / cap)
    score: Score | None = None  # set by attend only: then mask, bias and normalize are terms already
    normalize: Normalizer | None = None  # default: softmax
    offset: int | None = None  # position of the first query among the keys, if the caller knows it
    statistic: Tensor | None = None  # b h i: the log-sum-exp of each row, if the kernel returned it
    dropout: float = 0.0
    flex: FlexArguments | None = None
    changed: str = ""  # how the model changed the weights after the softmax, if these terms give the final ones
    alternative: KernelCall | None = None  # another reading of the same call, if this one does not reproduce the output
