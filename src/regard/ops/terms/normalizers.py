"""Normalizers: functions from a row of scores to a row of weights.

Each is a row statistic and an elementwise map, `A = map(s, statistic(s))`, so any tile of A can be computed from its
scores and one number per row. Hidden entries are -inf in s and exactly 0 in A; a row that is -inf throughout gives
zeros, forward and backward.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ...checks import check_broadcast, check_number
from ..shape import Sizes
from ..torch_state import has_no_values, in_forward_mode, in_functorch
from .biases import Bias
from .coordinates import Coordinates
from .term import Term, term

INF = float("inf")
NAN_KEY = -2  # statistic of `Hard` for rows with a NaN score


class Normalizer(Term):
    """A row statistic and an elementwise map."""

    signed: ClassVar[bool] = False  # weights may be negative
    has_scores: ClassVar[bool] = True  # weights are a function of the scores of q and k

    def statistic(self, s: Tensor, at: Coordinates) -> Tensor | None:
        """Return one number per row of scores, `b h i j -> b h i 1`; None if the map needs none."""
        return None

    def map(self, s: Tensor, statistic: Tensor | None, at: Coordinates) -> Tensor:
        """Return the weights of any entries of rows with this statistic."""
        raise NotImplementedError

    def weigh(self, s: Tensor, at: Coordinates) -> tuple[Tensor, Tensor | None]:
        """Return the weights of whole rows, and their statistic."""
        statistic = self.statistic(s, at)
        return self.map(s, statistic, at), statistic


@term
class Softmax(Normalizer):
    """exp(s - lse), lse = log sum exp(s)."""

    def statistic(self, s: Tensor, at: Coordinates) -> Tensor:
        return self.weigh(s, at)[1]

    def map(self, s: Tensor, statistic: Tensor | None, at: Coordinates) -> Tensor:
        assert statistic is not None
        return (s - torch.where(statistic == -INF, 0.0, statistic)).exp_()

    def weigh(self, s: Tensor, at: Coordinates) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() or in_forward_mode() or in_functorch():
            return (CompiledSoftmax if torch.compiler.is_compiling() else SafeSoftmax).apply(s)
        return SafeSoftmax.forward(s)  # apply takes longer than the softmax of a few rows


@term
class SinkSoftmax(Normalizer):
    """Softmax with one more logit, the sink, in the denominator: a head may attend to nothing.

    The sink is a number, or a tensor with one number or one per head; `SinkSoftmax(0.0)` is softmax-off-by-one.
    """

    sink: float | Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.sink, Tensor):
            check_number("SinkSoftmax sink", self.sink)

    def check(self, sizes: Sizes) -> None:
        _check_per_head("SinkSoftmax sink", self.sink, sizes)

    def statistic(self, s: Tensor, at: Coordinates) -> Tensor:
        sink = _per_head(self.sink, at)
        top = _row_max(s, sink)
        total = (s - top).exp().sum(-1, keepdim=True) + (sink - top).exp()
        return torch.where(total == 0, -INF, top + total.clamp(min=1).log())

    def map(self, s: Tensor, statistic: Tensor | None, at: Coordinates) -> Tensor:
        assert statistic is not None
        return (s - torch.where(statistic == -INF, 0.0, statistic)).exp_()


@term
class Sigmoid(Normalizer):
    """1 / (1 + exp(-(s + bias))): each entry by itself, no row statistic. -log(n) is a good bias for n keys."""

    bias: float | Tensor = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.bias, Tensor):
            check_number("Sigmoid bias", self.bias)

    def check(self, sizes: Sizes) -> None:
        _check_per_head("Sigmoid bias", self.bias, sizes)

    def map(self, s: Tensor, statistic: Tensor | None, at: Coordinates) -> Tensor:
        return torch.sigmoid(s + _per_head(self.bias, at))


@term
class Entmax(Normalizer):
    """max((alpha - 1) (s - tau), 0) ^ (1 / (alpha - 1)); tau makes the row sum to 1 (Peters et al. 2019).

    alpha between 1 (softmax, excluded) and 2 (sparsemax): the higher, the more weights are exactly 0.
    """

    alpha: float = 1.5

    def __post_init__(self) -> None:
        check_number("Entmax alpha", self.alpha)
        if not 1 < self.alpha <= 2:
            raise ValueError(f"Entmax alpha must be above 1 and at most 2, got {self.alpha}; 1 is Softmax()")

    def statistic(self, s: Tensor, at: Coordinates) -> Tensor:
        return self.weigh(s, at)[1]

    def map(self, s: Tensor, statistic: Tensor | None, at: Coordinates) -> Tensor:
        assert statistic is not None
        return self._power((s - statistic) * (self.alpha - 1))

    def weigh(self, s: Tensor, at: Coordinates) -> tuple[Tensor, Tensor]:
        # The largest score is shifted to 0, so that large scores cost no precision.
        top = _row_max(s)
        z = (s - top) * (self.alpha - 1)
        threshold = self._threshold(z)
        return self._power(z - threshold), threshold / (self.alpha - 1) + top

    def _threshold(self, z: Tensor) -> Tensor:
        return (CompiledThreshold if torch.compiler.is_compiling() else Threshold).apply(z, 1 / (self.alpha - 1))

    def _power(self, z: Tensor) -> Tensor:
        over = z.clamp(min=0)
        return over if self.alpha == 2 else over ** (1 / (self.alpha - 1))


@term
class Sparsemax(Normalizer):
    """max(s - tau, 0); tau makes the row sum to 1 (Martins and Astudillo 2016). It is a Euclidean projection."""

    def statistic(self, s: Tensor, at: Coordinates) -> Tensor:
        return Entmax(2.0).statistic(s, at)

    def map(self, s: Tensor, statistic: Tensor | None, at: Coordinates) -> Tensor:
        return Entmax(2.0).map(s, statistic, at)

    def weigh(self, s: Tensor, at: Coordinates) -> tuple[Tensor, Tensor]:
        return Entmax(2.0).weigh(s, at)


@term
class Hard(Normalizer):
    """1 at the first largest score, 0 elsewhere. Gradients are those of softmax (straight-through estimator)."""

    def statistic(self, s: Tensor, at: Coordinates) -> Tensor:
        s = s.detach()
        top = s.amax(-1, keepdim=True) if s.shape[-1] else _row_max(s)
        if not s.shape[-1]:
            return torch.full_like(top, -1, dtype=torch.long)
        none = torch.iinfo(torch.long).max
        first = torch.where((s == top) & (s > -INF), at.j, none).amin(-1, keepdim=True)
        return torch.where(first == none, -1, first).masked_fill(top.isnan(), NAN_KEY)

    def map(self, s: Tensor, statistic: Tensor | None, at: Coordinates) -> Tensor:
        assert statistic is not None
        chosen = torch.eq(at.j, statistic).to(s.dtype).expand_as(s)
        return chosen.masked_fill(statistic == NAN_KEY, torch.nan)

    def weigh(self, s: Tensor, at: Coordinates) -> tuple[Tensor, Tensor]:
        statistic = self.statistic(s, at)
        hard = self.map(s, statistic, at)
        if s.requires_grad or in_forward_mode():
            soft, _ = Softmax().weigh(s, at)
            hard = hard + (soft - soft.detach())
        return hard, statistic


@term
class Tapered(Normalizer):
    """inner(s) * exp(taper): weights times a taper such as `Gaussian(center, sigma)`; rows sum to at most 1."""

    inner: Normalizer
    taper: Bias

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Normalizer) or not isinstance(self.taper, Bias):
            raise TypeError(
                f"Tapered takes a normalizer and a bias, got {self.inner!r} and {self.taper!r}; "
                "write Tapered(Softmax(), Gaussian(center, sigma))"
            )

    def check(self, sizes: Sizes) -> None:
        self.inner.check(sizes)
        self.taper.check(sizes)

    def statistic(self, s: Tensor, at: Coordinates) -> Tensor | None:
        return self.inner.statistic(s, at)

    def map(self, s: Tensor, statistic: Tensor | None, at: Coordinates) -> Tensor:
        return self.inner.map(s, statistic, at) * self.taper.over(at).exp()

    def weigh(self, s: Tensor, at: Coordinates) -> tuple[Tensor, Tensor | None]:
        inner, statistic = self.inner.weigh(s, at)
        return inner * self.taper.over(at).exp(), statistic


class CompiledSoftmax(torch.autograd.Function):
    """Softmax and log-sum-exp of each row; a row that is -inf throughout gives zeros and -inf.

    torch.compile refuses functions with a derivative in forward mode, which `SafeSoftmax` adds.
    """

    @staticmethod
    def forward(s: Tensor) -> tuple[Tensor, Tensor]:
        top = _row_max(s)
        e = (s - top).exp_()
        total = e.sum(-1, keepdim=True)
        # The largest term is exp(0), so a row that sees a key sums to 1 or more; clamping avoids 0 / 0 in an empty row.
        floor = total.clamp(min=1)
        return e.div_(floor), torch.where(total == 0, -INF, top + floor.log())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(output[0])
        ctx.save_for_forward(output[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> Tensor:
        (A,) = ctx.saved_tensors
        g = A * grad
        return g - A * (g.sum(-1, keepdim=True) - grad_lse)


class SafeSoftmax(CompiledSoftmax):
    """The same within forward-mode AD and torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> tuple[Tensor, Tensor]:
        (A,) = ctx.saved_tensors
        t = A * tangent
        mean = t.sum(-1, keepdim=True)
        return t - A * mean, mean


class CompiledThreshold(torch.autograd.Function):
    """The tau with sum(max(z - tau, 0)^p) = 1, for rows whose largest z is 0 and p >= 1; for torch.compile."""

    @staticmethod
    def forward(z: Tensor, p: float) -> Tensor:
        # The sum is convex and decreasing in tau, so Newton's method from the left never passes the root.
        tau = z.new_full((*z.shape[:-1], 1), -1.0)
        for _ in range(64):
            over = (z - tau).clamp(min=0)
            slope = p * (over ** (p - 1) * (over > 0)).sum(-1, keepdim=True)
            step = ((over**p).sum(-1, keepdim=True) - 1) / slope.clamp(min=1e-30)
            next_tau = torch.maximum(tau, tau + step)
            # A compiled program cannot read values, so it takes all steps; steps at the root change nothing.
            if not torch.compiler.is_compiling() and not has_no_values(z) and bool((next_tau == tau).all()):
                break
            tau = next_tau
        return tau

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        z, ctx.p = inputs
        ctx.save_for_backward(z, output)
        ctx.save_for_forward(z, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * _threshold_gradient(ctx), None


class Threshold(CompiledThreshold):
    """The same within forward-mode AD and torch.func."""

    @staticmethod
    def vmap(info: Any, dims: tuple[int, None], z: Tensor, p: float) -> tuple[Tensor, int]:
        # Rows are independent, so a batch dim in front changes nothing.
        return Threshold.apply(z.movedim(dims[0], 0), p), 0

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return (_threshold_gradient(ctx) * tangent).sum(-1, keepdim=True)


def _threshold_gradient(ctx: Any) -> Tensor:
    """Return d tau / d z of each row."""
    z, tau = ctx.saved_tensors
    over = (z - tau).clamp(min=0)
    share = torch.where(over > 0, over, 1.0) ** (ctx.p - 1) * (over > 0)
    return share / share.sum(-1, keepdim=True).clamp(min=1e-30)


def _row_max(s: Tensor, sink: Tensor | None = None) -> Tensor:
    """Return the largest score of each row (or its sink), 0 for a row without any. Shifts by it change no gradient."""
    top = s.detach().amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -INF)
    top = top if sink is None else torch.maximum(top, sink.detach())
    return torch.where(top == -INF, 0.0, top)


def _per_head(x: float | Tensor, at: Coordinates) -> Tensor:
    return (
        at.slice_of(x, "h").to(at.dtype)
        if isinstance(x, Tensor)
        else torch.full((), x, dtype=at.dtype, device=at.device)
    )


def _check_per_head(name: str, x: float | Tensor, sizes: Sizes) -> None:
    if isinstance(x, Tensor):
        check_broadcast(name, x, {"h": sizes.h})
