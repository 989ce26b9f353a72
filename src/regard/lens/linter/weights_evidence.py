"""Look for the bugs that weights show: heads that attend to heads, a softmax over the wrong axis, a wrong scale."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...ops.terms.scores import Dot
from ...ops.weights import Weights
from ..capture import capture
from .call_adapter import CONTEXT_LENGTH, CallAdapter
from .findings import Finding

SOFTMAXES = {"softmax", "_softmax"}
PRODUCTS = {"mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply"}
QUOTIENTS = {"div", "div_", "true_divide", "__truediv__", "__itruediv__", "divide"}
MAX_SCALED = 256  # scaled tensors that are remembered
CLOSE = 1e-3  # relative: two scales are the same
NORM_SPREAD = 0.02  # normalized queries: standard deviation of their lengths, as a share of the mean
SUM_ERROR = 1e-3  # largest error of a sum of weights that is one


class Evidence(NamedTuple):
    """Records of one pass: the weights by layer, the softmaxes and dropouts that ran, and tensors times a number."""

    entries: list[tuple[str, Weights]]
    softmaxes: list[tuple[tuple[int, ...], int]]  # shape and dim
    dropouts: list[str]
    scaled: list[tuple[float, Tensor]]  # factor and result
    reason: str | None  # why no weights were recorded


class _Recorder(TorchFunctionMode):
    """Records softmaxes, dropouts that drop, and products of a tensor with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.softmaxes: list[tuple[tuple[int, ...], int]] = []
        self.dropouts: list[str] = []
        self.scaled: list[tuple[float, Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        out = func(*args, **kwargs)
        if name in SOFTMAXES and isinstance(out, Tensor):
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if isinstance(dim, int):
                self.softmaxes.append((tuple(out.shape), dim % out.ndim))
        elif "dropout" in name and _drops(name, args, kwargs):
            self.dropouts.append(name)
        elif name == "scaled_dot_product_attention" and _number(
            kwargs.get("dropout_p", args[4] if len(args) > 4 else 0)
        ):
            self.dropouts.append("scaled_dot_product_attention with dropout_p")
        elif name in PRODUCTS | QUOTIENTS and len(args) > 1 and len(self.scaled) < MAX_SCALED:
            factor = _number(args[1]) if isinstance(out, Tensor) and out.ndim > 2 else None
            if factor and factor != 1:
                self.scaled.append((1 / factor if name in QUOTIENTS else factor, out))
        return out


def observe(adapter: CallAdapter, x: Tensor) -> Evidence:
    """Run a module once; return what its softmaxes and weights show."""
    recorder, entries, reason = _Recorder(), [], None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with capture(adapter.module) as tape, recorder:
                adapter.run(x)
            entries = [(layer, A) for (layer, _), A in tape.items() if isinstance(A, Weights)]
            reason = None if entries else "its attention has no weights of queries and keys"
        except ValueError as error:
            reason = str(error).split(";")[0]
    return Evidence(entries, recorder.softmaxes, recorder.dropouts, recorder.scaled, reason)


def heads_to_heads(adapter: CallAdapter, evidence: Evidence, n: int, *, has_gaps: bool) -> Finding | None:
    """Find weights between heads: h x h for each of n tokens, instead of n x n for each of h heads."""
    h = adapter.heads
    between_tokens = any(A.shape[-1] in (n, CONTEXT_LENGTH) for _, A in evidence.entries)
    for layer, A in evidence.entries:
        lead, (i, j) = math.prod(A.shape[:-2]), A.shape[-2:]
        is_constant = i == j and 1 < i != n and lead % n == 0
        if is_constant and (i == h or h is None) and has_gaps and not between_tokens:
            return Finding(
                "heads-to-heads",
                f"recorded the weights for a text of {n} tokens",
                f"{A!r}: for each token a matrix of {i} x {i}, so the {i} heads of a token attend to each other, and "
                "tokens do not attend to tokens",
                "heads were split by view(b, n, h, d) and never moved before the tokens; write "
                ".view(b, n, h, d).transpose(1, 2) for q, k and v, and .transpose(1, 2).flatten(2) on the result",
                _name(layer),
            )
    return None


def wrong_softmax_axis(adapter: CallAdapter, evidence: Evidence, n: int, *, texts_meet: bool) -> Finding | None:
    """Find weights that sum to one over queries, heads or texts instead of over keys."""
    b, h = adapter.batch, adapter.heads
    for layer, A in evidence.entries:
        if A.shape[-2:] == (b, b) and b != n and texts_meet:
            return Finding(
                "softmax-axis",
                f"recorded the weights of {b} texts of {n} tokens, and changed the last text",
                f"{A!r}: matrices of {b} x {b}, so the texts of the batch attend to each other, and the other outputs "
                "changed with the last text",
                "the layer reads dim 0 as tokens and dim 1 as the batch; transpose the input, build it with "
                "batch_first=True, or, if it is meant to read n b d, call check(..., batch_first=False)",
                _name(layer),
            )
        if A.shape[-1] not in (n, CONTEXT_LENGTH) or A.shape[-2] != n:
            continue
        dense = A.dense().double()
        rows, columns = dense.sum(-1), dense.sum(-2)
        if bool((columns - 1).abs().amax() < SUM_ERROR) and bool((rows - 1).abs().amax() > SUM_ERROR):
            return _axis_finding(
                f"over the queries: columns sum to 1, rows to {rows.min():.2f} up to {rows.max():.2f}", _name(layer)
            )
    if any(A.shape[-1] in (n, CONTEXT_LENGTH) for _, A in evidence.entries):
        return None
    for shape, dim in evidence.softmaxes:
        if shape[-2:] == (n, n) and dim < len(shape) - 2:
            over = "heads" if shape[dim] == h else "texts of the batch" if shape[dim] == b else f"axis {dim}"
            return _axis_finding(f"over the {over}: softmax(dim={dim}) of scores of shape {shape}", "")
    return None


def _axis_finding(result: str, layer: str) -> Finding:
    return Finding(
        "softmax-axis",
        "recorded the softmax that makes the weights, and summed the weights over queries and over keys",
        f"the softmax runs {result}",
        "dim= names another axis than the keys; for scores b h i j write softmax(dim=-1)",
        layer,
    )


def heads_without_their_token(adapter: CallAdapter, n: int) -> Finding | None:
    """Find heads whose query for a token is made of other tokens: heads that were cut from tokens by view()."""
    x = adapter.tokens(n)
    before = _queries(adapter, x, n)
    for token in (n // 2, n - 1):
        for layer, after in _queries(adapter, adapter.change(x, token), n).items():
            if layer not in before or before[layer].shape != after.shape:
                continue
            changed = (before[layer] != after).any(-1).any(0)  # h i
            if not changed.any():
                continue  # the layer of another sequence
            heads = (~changed[:, token]).nonzero().flatten().tolist()
            if heads:
                return Finding(
                    "unmet-tokens",
                    f"changed token {token} of {n} and recorded the queries",
                    f"the query at position {token} does not change in heads {heads}: these heads are made of other "
                    "tokens, so in each head only a part of the text meets",
                    "heads were cut from the tokens by view(b, h, n, d); write view(b, n, h, d).transpose(1, 2)",
                    _name(layer),
                )
            return None
    return None


def _queries(adapter: CallAdapter, x: Tensor, n: int) -> dict[str, Tensor]:
    """Return the recorded queries, b h i d, of the layers between the tokens of a text."""
    entries = observe(adapter, x).entries
    return {layer: A.call.q for layer, A in reversed(entries) if A.shape[-2:] == (n, n)}


def look_back_only(evidence: Evidence, n: int) -> bool:
    """Return whether the weights of all layers are zero above the diagonal, whatever tokens reach."""
    matrices = [A.dense() for _, A in evidence.entries if A.shape[-2:] == (n, n)]
    return bool(matrices) and all(bool((each.triu(1) == 0).all()) and bool(each.tril(-1).any()) for each in matrices)


def wrong_scale(adapter: CallAdapter, evidence: Evidence, n: int) -> Finding | None:
    """Find a scale that is made of another width than that of the head's queries and keys."""
    for layer, A in evidence.entries:
        score = A.call.score
        if not isinstance(score, Dot) or A.shape[-1] not in (n, CONTEXT_LENGTH):
            continue
        d = A.call.q.shape[-1]
        scale = d**-0.5 if score.scale is None else _number(score.scale)
        if scale is None or d == 1:
            continue
        if score.scale is not None:
            scale *= _factor(A.call.q, evidence.scaled) * _factor(A.call.k, evidence.scaled)
        if math.isclose(scale, d**-0.5, rel_tol=CLOSE) or _is_declared(adapter.config, scale):
            continue
        if math.isclose(scale, 1 / d, rel_tol=CLOSE) and _has_constant_norm(A.call.q):
            continue  # the mean of products of normalized vectors, a cosine
        h = A.shape[1]
        for wrong, what in _wrong_scales(d, h, A.call.k.shape[1], adapter, n):
            if math.isclose(abs(scale), wrong, rel_tol=CLOSE):
                return Finding(
                    "scale",
                    f"recorded the queries, the keys and the scale of the scores for {n} tokens",
                    f"scores are q k times {scale:.4g} = {what}, and the queries of a head are {d} wide: "
                    f"1/sqrt({d}) = {d**-0.5:.4g}",
                    "the scale is computed from another size than the width of one head; write q.shape[-1] ** -0.5 "
                    "where q is already split into heads",
                    _name(layer),
                )
    return None


def _wrong_scales(d: int, h: int, g: int, adapter: CallAdapter, n: int) -> list[tuple[float, str]]:
    """Return the scales that come from a known mistake, and in words what each is made of."""
    found = [
        ((h * d) ** -0.5, f"1/sqrt({h * d}), the width of all heads"),
        ((g * d) ** -0.5, f"1/sqrt({g * d}), the width of all key heads"),
        (1 / d, f"1/{d}, the width without its square root (or twice the scale)"),
        (d**0.5, f"sqrt({d}), multiplied where it should divide"),
        (n**-0.5, f"1/sqrt({n}), the number of tokens"),
        (h**-0.5, f"1/sqrt({h}), the number of heads"),
        (adapter.batch**-0.5, f"1/sqrt({adapter.batch}), the number of texts"),
    ]
    if adapter.kind == "vectors":
        found.append((adapter.dim**-0.5, f"1/sqrt({adapter.dim}), the width of the model"))
    return [(wrong, what) for wrong, what in found if not math.isclose(wrong, 1.0)]


def _factor(x: Tensor, scaled: list[tuple[float, Tensor]]) -> float:
    """Return the number by which queries or keys were multiplied before the product."""
    numbers = x.double().flatten().sort().values
    for factor, out in scaled:
        if out.numel() == x.numel() and torch.allclose(out.double().flatten().sort().values, numbers, rtol=1e-5):
            return factor
    return 1.0


def _has_constant_norm(q: Tensor) -> bool:
    """Return whether all queries are about as long, as after a norm."""
    norms = q.double().norm(dim=-1)
    return bool(norms.std() < NORM_SPREAD * norms.mean())


def _is_declared(config: Any, scale: float) -> bool:
    """Return whether the config of a model names the scale."""
    for name, value in vars(config).items() if config is not None and hasattr(config, "__dict__") else ():
        if ("scal" in name or "multiplier" in name or "mup" in name) and (number := _number(value)):
            if any(math.isclose(scale, each, rel_tol=CLOSE) for each in (number, abs(number) ** -0.5)):
                return True
            if "mup" in name and value is True:
                return True
    return False


def _drops(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of a dropout function drops anything: its p is not 0 and training is True."""
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(p) and bool(training)


def _number(value: Any) -> float | None:
    """Return a Python number, or the number in a tensor of one element; None for anything else."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.requires_grad else None
    return float(value) if isinstance(value, (int, float)) else None


def _name(layer: str) -> str:
    return "" if layer == "(model)" else layer
