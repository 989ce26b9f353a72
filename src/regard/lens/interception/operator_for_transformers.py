"""Run models of transformers on `regard.attend`, as the attention implementation "regard".

transformers asks for two functions under the name of an implementation: one that makes the mask of a pass, once for all
layers of a kind, and one that attends. The first describes the pattern of a pass as a term, read in blocks of rows from
the functions by which transformers defines its masks, so no mask of queries x keys is stored. The second calls
`attend` with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from ...ops.operator import attend, weights
from ...ops.terms.biases import Added, Bias
from ...ops.terms.masks import Causal, Dense
from ...ops.terms.masks.mask_algebra import Mask
from ...ops.terms.normalizers import SinkSoftmax
from ...ops.terms.scores import Dot
from ...ops.torch_state import is_traced
from ..terms.infer_mask import Rows, recognize

NAME = "regard"


class PositionedMask(BlockMask):
    """The mask of a pass, None if it hides nothing, and the position of the first query among the keys.

    transformers passes a mask that is prepared before the model runs on as it is if it is a tensor or a `BlockMask`, so
    this is one, without blocks.
    """

    def __init__(self, mask: Mask | None, offset: int, size: tuple[int, ...]) -> None:
        self.mask, self.offset, self.size = mask, offset, size

    @property
    def shape(self) -> tuple[int, ...]:
        """b 1 i j."""
        return self.size

    def contiguous(self) -> PositionedMask:
        """Return the mask itself: transformers asks for this before it generates with a static cache."""
        return self

    def __repr__(self) -> str:
        return f"PositionedMask({self.mask!r}, {self.offset})"


def register_transformers() -> None:
    """Make "regard" an attention implementation of transformers, which this call imports.

    >>> from regard.lens import register_transformers
    >>> register_transformers()

    Then `AutoModel.from_pretrained(name, attn_implementation="regard")` or `model.set_attn_implementation("regard")`
    runs each attention of the model by `regard.attend`, with the mask of transformers as a term: causal, windows,
    chunks, padding, packed sequences, or any other pattern as bits. Biases, soft caps and sinks become terms too. With
    `output_attentions=True` a layer returns its weights, densely.
    """
    import transformers

    transformers.AttentionInterface.register(NAME, regard_attention)
    transformers.AttentionMaskInterface.register(NAME, regard_mask)


def regard_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: PositionedMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the output, `b i h e`, and the weights if they were requested."""
    if cache is not None:
        raise ValueError("the implementation 'regard' has no paged cache; generate with another attn_implementation")
    mask: Mask | None = None
    bias: Bias | None = None
    offset: int | None = None
    if isinstance(attention_mask, PositionedMask):
        mask, offset = attention_mask.mask, attention_mask.offset
    elif attention_mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if causal and query.shape[2] > 1:
            mask, offset = Causal(), 0  # transformers aligns it as SDPA does
    elif attention_mask.dtype == torch.bool:
        mask = Dense(attention_mask[..., : key.shape[2]])
    else:
        bias = Added(attention_mask[..., : key.shape[2]])
    if position_bias is not None:
        more = Added(position_bias[..., : key.shape[2]])
        bias = more if bias is None else bias + more
    terms: dict[str, Any] = {
        "score": None if scaling is None and softcap is None else Dot(scale=scaling, cap=softcap),
        "mask": mask,
        "bias": bias,
        "normalize": None if s_aux is None else SinkSoftmax(s_aux),
        "offset": offset,
    }
    out = attend(query, key, value, **terms, dropout=dropout)
    A = weights(query, key, **terms).dense() if kwargs.get("output_attentions") else None
    return out.transpose(1, 2).contiguous(), A


def regard_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> PositionedMask | Tensor | None:
    """Return the mask of a pass as a term; as a tensor while torch.compile traces it, when no numbers can be read."""
    from transformers import masking_utils

    function = masking_utils.causal_mask_function if mask_function is None else mask_function
    given: Any = {"mask_function": function, "attention_mask": attention_mask, "use_vmap": use_vmap, "device": device}

    def block(start: int, stop: int) -> Tensor:
        found: Any = masking_utils.sdpa_mask(
            batch_size,
            stop - start,
            kv_length,
            q_offset + start,
            kv_offset,
            **given,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
        )
        return found

    # transformers compiles the steps of a generation with a static cache, and asks for a mask in any case.
    if is_traced() or (q_length == 1 and not kwargs.get("allow_is_causal_skip", True)):
        return block(0, q_length)
    offset, size = int(q_offset) - int(kv_offset), (batch_size, 1, q_length, kv_length)
    if function is masking_utils.causal_mask_function and (attention_mask is None or bool(attention_mask.all())):
        return PositionedMask(Causal() if q_length > 1 or offset + 1 < kv_length else None, offset, size)
    return PositionedMask(*recognize(Rows(size, block, torch.device(device)), offset=offset), size)
