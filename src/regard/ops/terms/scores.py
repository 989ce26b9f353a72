"""Scores: a number for each pair of a query and a key.

A score does its work per token once, in `prepare`, and its work per pair in `tile`. For every score but `Additive`,
`tile` is a matrix product. `modify` may then change the scores of a tile by their coordinates.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...checks import check_broadcast, check_number, check_tensor
from ..shape import Sizes
from .coordinates import Coordinates, leaves_of
from .term import Term, term
from .user_function import UserFunction


class Score(Term):
    """A number for each pair of a query and a key."""

    def prepare(self, q: Tensor, k: Tensor, heads: Tensor | None) -> tuple[Tensor, Tensor]:
        """Do the work per token: return what `tile` takes for q and k. `heads` are the selected heads, None for all."""
        return q, k

    def tile(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the scores of prepared tensors, `b h i d, b g j d -> b h i j`: the work per pair."""
        return grouped_product(q, k.mT)

    def modify(self, s: Tensor, at: Coordinates) -> Tensor:
        """Return the scores of a tile, changed by their coordinates; by default as they are."""
        return s

    def check(self, sizes: Sizes) -> None:
        _check_same_width(self, sizes)

    @staticmethod
    def of(fn: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor], score: Score | None = None) -> FunctionScore:
        """Return the score fn(score, b, h, i, j): any `score_mod` written for FlexAttention, over `Dot()` or `score`.

        >>> Score.of(lambda score, b, h, i, j: torch.tanh(score / 30) * 30, Dot(scale=1.0))
        Score.of(<lambda>, Dot(scale=1.0))

        Tensors that the function closes over get gradients.
        """
        return FunctionScore(UserFunction("Score.of", fn, "score, b, h, i, j"), Dot() if score is None else score)


@term
class Dot(Score):
    """q_i . k_j * scale (Vaswani et al. 2017, eq. 1); the default scale is 1/sqrt(d).

    `scale` may be a tensor, with one number or one per head: a learnable inverse temperature. `cap` bounds the score
    softly: cap * tanh(score / cap).
    """

    scale: float | Tensor | None = None
    cap: float | None = None

    def __post_init__(self) -> None:
        if self.scale is not None and not isinstance(self.scale, Tensor):
            check_number("Dot scale", self.scale)
        if self.cap is not None:
            check_number("Dot cap", self.cap, above=0)

    def check(self, sizes: Sizes) -> None:
        _check_same_width(self, sizes)
        _check_per_head("Dot scale", self.scale, sizes)

    def prepare(self, q: Tensor, k: Tensor, heads: Tensor | None) -> tuple[Tensor, Tensor]:
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        return q * _per_head(scale, heads, q), k

    def tile(self, q: Tensor, k: Tensor) -> Tensor:
        s = grouped_product(q, k.mT)
        return s if self.cap is None else torch.tanh(s / self.cap) * self.cap


@term
class Cosine(Score):
    """cos(q_i, k_j) / temperature; `temperature` is a number, or a tensor with one number or one per head."""

    temperature: float | Tensor = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.temperature, Tensor):
            check_number("Cosine temperature", self.temperature, above=0)

    def check(self, sizes: Sizes) -> None:
        _check_same_width(self, sizes)
        _check_per_head("Cosine temperature", self.temperature, sizes)

    def prepare(self, q: Tensor, k: Tensor, heads: Tensor | None) -> tuple[Tensor, Tensor]:
        return F.normalize(q, dim=-1) / _per_head(self.temperature, heads, q), F.normalize(k, dim=-1)


@term
class Bilinear(Score):
    """q_i . w . k_j: Luong's general score (2015, section 3.1).

    w has dims (d_q, d_k) or (h, d_q, d_k); the widths of queries and keys may differ.
    """

    w: Tensor

    def __post_init__(self) -> None:
        check_tensor("Bilinear w", self.w)
        if self.w.ndim not in (2, 3):
            raise ValueError(f"Bilinear w must have dims (d_q, d_k) or (h, d_q, d_k), got shape {tuple(self.w.shape)}")

    def check(self, sizes: Sizes) -> None:
        want = (sizes.d, sizes.k_width)
        if tuple(self.w.shape[-2:]) != want:
            raise ValueError(f"Bilinear w must map query width to key width {want}, got {tuple(self.w.shape[-2:])}")
        check_broadcast("Bilinear w", self.w, {"h": sizes.h, "d_q": None, "d_k": None})

    def prepare(self, q: Tensor, k: Tensor, heads: Tensor | None) -> tuple[Tensor, Tensor]:
        return q @ select_heads(self.w, 3, heads).to(q.dtype), k


@term
class Additive(Score):
    """u . tanh(q_i + k_j): Bahdanau's score (2015, appendix A.1.2). u has dims (d,) or (h, d).

    Project queries and keys to the width of u before the call: `q = query @ W`, `k = key @ U`. The tiled backend
    computes a tanh per pair only if the queries of a block differ by more than 30, else one exponential per token.
    """

    u: Tensor

    def __post_init__(self) -> None:
        check_tensor("Additive u", self.u)
        if self.u.ndim not in (1, 2):
            raise ValueError(f"Additive u must have dims (d,) or (h, d), got shape {tuple(self.u.shape)}")

    def check(self, sizes: Sizes) -> None:
        _check_same_width(self, sizes)
        if self.u.shape[-1] != sizes.d:
            raise ValueError(f"Additive u must have the query's width d={sizes.d}, got {self.u.shape[-1]}")
        check_broadcast("Additive u", self.u, {"h": sizes.h, "d": None})

    def tile(self, q: Tensor, k: Tensor) -> Tensor:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1) if q.shape[1] != k.shape[1] else k
        u = self.u.to(q.dtype)
        u = u[:, None, None] if u.ndim == 2 else u
        return (torch.tanh(q[..., :, None, :] + k[..., None, :, :]) * u).sum(-1)


@term
class Location(Score):
    """q_i . w_j: Luong's location score (2015, eq. 8), from the query and the position of the key alone.

    w has dims (n, d) or (h, n, d), a row per key position.
    """

    w: Tensor

    def __post_init__(self) -> None:
        check_tensor("Location w", self.w)
        if self.w.ndim not in (2, 3):
            raise ValueError(f"Location w must have dims (n, d) or (h, n, d), got shape {tuple(self.w.shape)}")

    def check(self, sizes: Sizes) -> None:
        if self.w.shape[-1] != sizes.d:
            raise ValueError(f"Location w must have the query's width d={sizes.d}, got {self.w.shape[-1]}")
        if self.w.shape[-2] < sizes.j:
            raise ValueError(
                f"Location w has {self.w.shape[-2]} rows but there are {sizes.j} keys; give w at least {sizes.j} rows"
            )
        check_broadcast("Location w", self.w, {"h": sizes.h, "n": None, "d": None})

    def prepare(self, q: Tensor, k: Tensor, heads: Tensor | None) -> tuple[Tensor, Tensor]:
        w = select_heads(self.w, 3, heads)[..., : k.shape[2], :].to(q.dtype)
        return q, w.expand(q.shape[0], w.shape[0] if w.ndim == 3 else 1, -1, -1)


@term
class FunctionScore(Score):
    """fn(score, b, h, i, j), written `Score.of(fn)`; `captured` are the tensors that the function closes over."""

    fn: UserFunction
    score: Score
    captured: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.score, (Dot, Cosine, Bilinear, Location)):
            raise TypeError(
                "Score.of takes a score to change that is a product, Dot, Cosine, Bilinear or Location, got "
                f"{self.score!r}; write Score.of(fn, Dot(scale=1.0))"
            )
        object.__setattr__(self, "captured", self.fn.tensors)

    def check(self, sizes: Sizes) -> None:
        self.score.check(sizes)
        self.fn.check_tensors()

    def prepare(self, q: Tensor, k: Tensor, heads: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.score.prepare(q, k, heads)

    def tile(self, q: Tensor, k: Tensor) -> Tensor:
        return self.score.tile(q, k)

    def modify(self, s: Tensor, at: Coordinates) -> Tensor:
        found = self.fn(leaves_of(at, self.captured), s, at.b, at.h, at.i, at.j)
        # A copy: the mask is added in place, and autograd may have saved what the function returned.
        return found.to(s.dtype).expand(s.shape).clone()

    def __repr__(self) -> str:
        return f"Score.of({self.fn!r}{'' if self.score == Dot() else f', {self.score!r}'})"


def product_of(score: Score) -> Score:
    """The product of queries and keys that a function changes, or the score itself if there is no function."""
    return score.score if isinstance(score, FunctionScore) else score


def grouped_product(x: Tensor, y: Tensor) -> Tensor:
    """Multiply `b h i n, b g n m -> b h i m`; head n of x meets head n * g // h of y, and y is not repeated."""
    b, h, i, n = x.shape
    g = y.shape[1]
    if g == h:
        return x @ y
    if torch.compiler.is_exporting():  # torch.export cannot prove that the shapes below agree for every length
        return (x.unflatten(1, (g, h // g)) @ y[:, :, None]).flatten(1, 2)
    return (x.reshape(b, g, h // g * i, n) @ y).view(b, h, i, y.shape[-1])


def select_heads(x: Tensor, dims: int, heads: Tensor | None) -> Tensor:
    """Return the selected heads of a tensor whose first dim is heads if it has `dims` dims."""
    return x if heads is None or x.ndim < dims or x.shape[0] == 1 else x[heads]


def _per_head(x: float | Tensor, heads: Tensor | None, q: Tensor) -> float | Tensor:
    if not isinstance(x, Tensor):
        return x
    x = x.to(q.dtype)
    return select_heads(x, 1, heads)[:, None, None] if x.ndim else x


def _check_same_width(score: Score, sizes: Sizes) -> None:
    if sizes.d != sizes.k_width:
        raise ValueError(
            f"q and k must have the same width for {type(score).__name__}, got d={sizes.d} and {sizes.k_width}; "
            "project one of them, or use score=Bilinear(w)"
        )


def _check_per_head(name: str, x: object, sizes: Sizes) -> None:
    if isinstance(x, Tensor):
        check_broadcast(name, x, {"h": sizes.h})
