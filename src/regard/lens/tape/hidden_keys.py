"""Attention without some keys, such as sinks, padding or punctuation: the rest of each row sums to 1 again.

In many models most of the attention goes to a few tokens that mean little, and a map shows little else. Without them
A_ij becomes A_ij / (1 - the weight of the hidden keys in row i), which is the softmax over the other keys.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor

from ...ops.terms.masks import Padding
from ...ops.terms.normalizers import SinkSoftmax, Softmax
from ...ops.weights import Weights
from .groups import LINE_BREAKS, WORD_STARTS

KINDS = "sinks", "padding", "punctuation"
PADDING_TOKENS = {"[pad]", "<pad>", "<|pad|>", "<|padding|>"}  # in lower case


def without_keys(A: Weights, keys: Bool[Tensor, "#b j"]) -> Weights:
    """Return the weights with these keys hidden and the rest of each row renormalized, lazy as before.

    A row that sees no other key becomes zeros. The weights must be those of a softmax; the sink logit of a
    `SinkSoftmax` is hidden too, so that rows sum to 1.
    """
    call = A.call
    if not isinstance(call.normalize, Softmax | SinkSoftmax):
        raise ValueError(
            f"keys can be hidden in a softmax, and these weights are {call.normalize!r}; "
            "divide dense rows by the sum of the keys that are left"
        )
    b, _, _, j = call.shape
    keep = ~keys.to(A.device).expand(b, j)
    if call.batch_ids is not None:  # terms count batch rows as they were numbered before a selection
        keep = keep.new_ones(int(call.batch_ids.max()) + 1, j).index_copy_(0, call.batch_ids, keep)
    mask = Padding(keep) if call.mask is None else call.mask & Padding(keep)
    return Weights(replace(call, mask=mask, normalize=Softmax()))


def is_punctuation(token: str) -> bool:
    """Whether a token is punctuation or a line break alone, with or without the mark of a tokenizer.

    >>> [is_punctuation(token) for token in ("Ġ,", "##'", "Ċ", "[SEP]", "U.S.")]
    [True, True, True, False, False]
    """
    if token in LINE_BREAKS:
        return True
    text = token.removeprefix("##").strip("".join(WORD_STARTS))
    return bool(text) and all(unicodedata.category(char).startswith("P") for char in text)


def punctuation(texts: Sequence[Sequence[str] | None], n: int) -> Bool[Tensor, "b n"]:
    """Return True for the tokens of each text that are punctuation; for none of a text without tokens."""
    rows = [[False] * n if tokens is None else [is_punctuation(token) for token in tokens] for tokens in texts]
    return torch.tensor(rows, dtype=torch.bool).view(len(texts), n)


def padding(texts: Sequence[Sequence[str] | None], real: Bool[Tensor, "b n"]) -> Bool[Tensor, "b n"]:
    """Return True for the keys that the mask shows to be padding, and for tokens with the name of a padding token."""
    n = real.shape[1]
    rows = [[False] * n if text is None else [token.lower() in PADDING_TOKENS for token in text] for text in texts]
    return torch.tensor(rows, dtype=torch.bool).view(len(texts), n) | ~real.cpu()
