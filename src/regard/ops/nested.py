"""Attention of jagged nested tensors: texts of different lengths in one tensor, without padding.

Terms of distances, over queries and keys of the same texts, run on one row in which the texts follow each other, under
`Documents`; on a GPU, plain and causal attention in half precision on PyTorch's kernel for variable lengths. All else,
and batches that padding would not double, runs on a padded copy whose padding no tile computes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .call import Call, Offset
from .terms.masks import Causal, Documents
from .terms.masks.mask_algebra import Mask
from .terms.normalizers import Softmax
from .terms.reach import depends_on_distance_only, reads_key_positions
from .terms.scores import Dot
from .torch_state import run_uncompiled

MAX_PADDED = 2  # times the tokens, up to which a batch is padded


class Texts(NamedTuple):
    """The values of all texts one after another, and where each begins."""

    values: Tensor  # tokens heads width
    offsets: Tensor  # one more than there are texts
    lengths: list[int]

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    def pad(self) -> Tensor:
        """The values as `b heads n width`, 0 in the padding."""
        rows, places = self.indices
        shape = len(self.lengths), self.longest, *self.values.shape[1:]
        return self.values.new_zeros(shape).index_put((rows, places), self.values).transpose(1, 2)

    @property
    def indices(self) -> tuple[Tensor, Tensor]:
        """The text of each token, and its place within."""
        lengths = self.offsets.diff()
        rows = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        return rows, torch.arange(len(rows), device=lengths.device) - self.offsets[rows]

    def ids(self, padding: int) -> Tensor:
        """0 for tokens of the padded texts, else `padding`: `b n`."""
        places = torch.arange(self.longest, device=self.values.device)
        return torch.where(places < self.offsets.diff()[:, None], 0, padding)


@run_uncompiled
def attend_nested(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | None, offset: Offset | None, attend: Any, **options: Any
) -> Tensor:
    """`attend` of nested tensors, plain ones beside them: `b h i d, b g j d, b g j e -> b h i e`, nested if q is."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_jagged(name, x)
    given, queries, keys, values = q, *(_texts(x) for x in (q, k, v))
    if keys.lengths != values.lengths:
        raise ValueError(
            f"k and v must hold texts of the same lengths, got {keys.lengths[:8]} and {values.lengths[:8]}"
        )
    if len(queries.lengths) != len(keys.lengths):
        raise ValueError(
            f"q and k must have the same number of texts, got {len(queries.lengths)} and {len(keys.lengths)}"
        )
    same = queries.lengths == keys.lengths and offset is None
    if same and _fits_kernel(queries, keys, values, mask, options):
        out = _run_kernel(queries, keys, values, causal=mask is not None)
    elif (
        same
        and len(queries.lengths) * queries.longest > MAX_PADDED * len(queries.values)
        and _is_relative(mask, options)
    ):
        documents = Documents(queries.indices[0])
        q, k, v = (x.values.transpose(0, 1)[None] for x in (queries, keys, values))
        out = attend(q, k, v, mask=documents if mask is None else mask & documents, **options)[0].transpose(0, 1)
    else:
        real = Documents(queries.ids(-1), keys.ids(-2))
        if offset is None and not same:
            offset = keys.offsets.diff() - queries.offsets.diff()
        padded = (x.pad() for x in (queries, keys, values))
        out = attend(*padded, mask=real if mask is None else mask & real, offset=offset, **options)
        rows, places = queries.indices
        out = out.transpose(1, 2)[rows, places]
    return _like_queries(out, given, queries)


def _like_queries(out: Tensor, q: Tensor, queries: Texts) -> Tensor:
    """The output `tokens h e` as `b h i e`, with the jagged dim of q if q is nested."""
    if not q.is_nested:
        return out.unflatten(0, q.shape[::2][:2]).transpose(1, 2)
    return torch.nested.nested_tensor_from_jagged(out, queries.offsets).transpose(1, 2)


def _texts(x: Any) -> Texts:
    if x.is_nested:
        offsets = x.offsets()
        return Texts(x.transpose(1, 2).values(), offsets, offsets.diff().tolist())
    b, _, n, _ = x.shape
    return Texts(x.transpose(1, 2).flatten(0, 1), torch.arange(b + 1, device=x.device) * n, [n] * b)


def _check_jagged(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        Call.of(x, x)  # raises
    letter = "i" if name == "q" else "j"
    if not x.is_nested:
        if x.ndim != 4:
            raise ValueError(f"{name} must have dims b h {letter} d beside nested tensors, got shape {tuple(x.shape)}")
        return
    if x.layout != torch.jagged:
        raise ValueError(
            f"{name} must be a nested tensor of layout torch.jagged, got {x.layout}; write "
            "torch.nested.nested_tensor(texts, layout=torch.jagged)"
        )
    ragged = [n for n, size in enumerate(x.shape) if not isinstance(size, int)]
    if x.ndim != 4 or ragged != [2]:
        hint = f"; write {name}.transpose(1, 2)" if x.ndim == 4 and ragged == [1] else ""
        raise ValueError(f"{name} must have dims b h {letter} d with texts along {letter}, got {tuple(x.shape)}{hint}")
    if x.lengths() is not None:
        raise ValueError(f"{name} has gaps between its texts, which nested tensors with lengths have; make it anew")


def _is_relative(mask: Mask | None, options: dict[str, Any]) -> bool:
    """Whether terms depend on distances alone, so that texts may stand anywhere."""
    terms = (options[name] for name in ("score", "bias", "normalize"))
    return (mask is None or depends_on_distance_only(mask)) and not any(map(reads_key_positions, terms))


def _fits_kernel(queries: Texts, keys: Texts, values: Texts, mask: Mask | None, options: dict[str, Any]) -> bool:
    """Whether PyTorch's kernel for variable lengths computes this attention."""
    q, k, v = queries.values, keys.values, values.values
    plain = (mask is None or type(mask) is Causal) and options["bias"] is None and options["backend"] is None
    softmax = options["score"] in (None, Dot()) and options["normalize"] in (None, Softmax()) and not options["dropout"]
    sizes = q.shape == k.shape == v.shape and q.shape[2] <= 256 and q.shape[2] % 8 == 0 and q.numel() > 0
    half = q.is_cuda and q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
    return plain and softmax and sizes and half and not torch.is_autocast_enabled("cuda")


def _run_kernel(queries: Texts, keys: Texts, values: Texts, *, causal: bool) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    ends, longest = queries.offsets.int(), queries.longest
    window = (-1, 0) if causal else (-1, -1)
    texts = (queries.values, keys.values, values.values)
    out = varlen_attn(*texts, ends, ends, longest, longest, window_size=window)
    assert isinstance(out, Tensor)
    return out
