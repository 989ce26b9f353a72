"""Core: `attend` as a module, through which every layer attends."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from ..checks import check_probability
from ..ops.call import Offset
from ..ops.operator import attend
from ..ops.terms.biases import Bias
from ..ops.terms.masks.mask_algebra import Mask
from ..ops.terms.normalizers import Normalizer
from ..ops.terms.scores import Score


class Core(nn.Module):
    """dropout(normalize(mask(score(q, k) + bias))) @ v: `attend` as a module without parameters.

    Every layer has one, so a forward hook on `Core` modules gets the queries, keys, values and terms of each attention
    of a model. Dropout acts in training only. `backend` is the argument of `attend`.
    """

    def __init__(self, *, dropout: float = 0.0, backend: str | None = None) -> None:
        super().__init__()
        check_probability("dropout", dropout)
        self.dropout, self.backend = dropout, backend

    def forward(
        self,
        q: Float[Tensor, "b h i d"],
        k: Float[Tensor, "b g j d_k"],
        v: Float[Tensor, "b g j e"],
        *,
        score: Score | None = None,
        mask: Mask | None = None,
        bias: Bias | None = None,
        normalize: Normalizer | None = None,
        offset: Offset | None = None,
    ) -> Float[Tensor, "b h i e"]:
        dropout = self.dropout if self.training else 0.0
        return attend(
            q,
            k,
            v,
            score=score,
            mask=mask,
            bias=bias,
            normalize=normalize,
            dropout=dropout,
            offset=offset,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}" + (f", backend={self.backend!r}" if self.backend else "")
