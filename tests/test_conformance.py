"""Every backend x every term it claims x shapes, forward and gradients, judged by the oracle."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import Tensor

import regard
import tests.oracle as oracle
from tests.backends import attend_on
from tests.cases import BIASES, CASES, EMPTY, MASKS, NORMALIZERS, SCORES, SHAPES
from tests.oracle import Case, Shape

BACKENDS = ["sdpa", "tiled", "reference"]  # flex has no backward on the CPU: it has a test of its own here
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FORWARD, GRADIENT = 2.0, 3.0  # how much larger than plain PyTorch's an error may be


def typed(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [x.to(dtype) if x.is_floating_point() else x for x in tensors]


def leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in tensors]


def strided(x: Tensor) -> Tensor:
    """The same numbers with an offset and no contiguous dim."""
    padded = x.new_empty([n * 2 + 1 for n in x.shape])[tuple(slice(1, None, 2) for _ in x.shape)]
    return padded.copy_(x)


@lru_cache(maxsize=64)
def judged(case: Case, shape: Shape, dtype: torch.dtype, device: str = "cpu") -> tuple:
    """Inputs rounded to the dtype, the truth and its gradients, and the errors of plain PyTorch in that dtype."""
    qkv, tensors = oracle.inputs(shape, case)
    qkv, tensors = typed(qkv, dtype), typed(tensors, dtype)
    results = []
    # In double precision on the CPU plain PyTorch is the judge itself.
    for kind, place in dict.fromkeys(((torch.float64, "cpu"), (dtype, device))):
        with torch.device(place):
            x, t = (leaves([y.to(place) for y in typed(given, kind)]) for given in (qkv, tensors))
            out = oracle.attention(case, shape, *x, t)
        grad = cotangent(out)
        wanted = [y for y in x + t if y.requires_grad]
        grads = torch.autograd.grad(out, wanted, grad, allow_unused=True) if out.requires_grad else [None] * len(wanted)
        results.append([y.detach().double().cpu() if y is not None else None for y in (out, *grads)])
    truth, plain = results[0], results[-1]
    errors = [_largest(t - p) if t is not None else 0.0 for t, p in zip(truth, plain, strict=True)]
    sizes = [_largest(t) if t is not None else 0.0 for t in truth]
    # A gradient of few entries may come out right by luck; the worst relative error of the case is the fair one.
    worst = max((error / size for error, size in zip(errors[1:], sizes[1:], strict=True) if size), default=0.0)
    errors[1:] = [max(error, worst * size) for error, size in zip(errors[1:], sizes[1:], strict=True)]
    return qkv, tensors, truth, errors


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def cotangent(out: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(out.shape, generator=generator, dtype=torch.float64).to(torch.bfloat16).to(out)


def close(
    ours: Tensor, truth: Tensor, plain_error: float, factor: float, dtype: torch.dtype, what: str, scale: float = 1.0
) -> None:
    assert ours.isfinite().all(), f"{what} is not finite"
    if not truth.numel():
        return
    # One rounding of the result, in float32 two, for processors add in different orders; in float64, where plain
    # PyTorch is the judge itself, room for another order.
    rounding = {torch.float64: 1e-12, torch.float32: 2 * torch.finfo(torch.float32).eps}
    floor = rounding.get(dtype, torch.finfo(dtype).eps) * max(scale, truth.abs().max().item())
    error = (ours.double() - truth).abs().max().item()
    assert error <= factor * plain_error + floor, f"{what}: error {error:.3g}, plain PyTorch {plain_error:.3g}"


def dtypes(case: Case) -> list[torch.dtype]:
    # A first maximum or a support may change with rounding; then nothing is to be compared in half precision.
    return DTYPES if case.smooth else DTYPES[:2]


LARGE = [shape for shape in SHAPES if shape.i * shape.j > 1000]


def group(number: int, case: Case, shape: Shape, dtype: torch.dtype) -> list[pytest.MarkDecorator]:
    """The core has single and double precision, and one large shape of each case, in double precision alone.

    It has none where the search for a support takes seconds.
    """
    if shape in LARGE:
        is_core = dtype == torch.float64 and case.smooth and shape == LARGE[number % len(LARGE)]
    else:
        is_core = dtype in (torch.float64, torch.float32)
    return [] if is_core else [pytest.mark.thorough]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("case", "shape", "dtype"),
    [
        pytest.param(case, shape, dtype, id=f"{case}-{shape}-{str(dtype)[6:]}", marks=group(number, case, shape, dtype))
        for number, case in enumerate(CASES)
        for n, shape in enumerate(SHAPES)
        for m, dtype in enumerate(dtypes(case))
        if case.fits(shape) and (m == 0 or (n + m) % 3 == 0)
    ],
)
@pytest.mark.usefixtures("small_blocks", "poisoned")
def test_output_and_gradients_are_those_of_the_oracle(case, shape, dtype, backend):
    qkv, tensors, truth, errors = judged(case, shape, dtype)
    x, t = leaves(qkv), leaves(tensors)
    given = [strided(y) for y in x] if shape.strided else x
    out = attend_on(backend, *given, **case.terms(*t), offset=shape.offset)
    assert out.dtype == dtype
    close(out, truth[0], errors[0], FORWARD, dtype, "output")
    wanted = [y for y in x + t if y.requires_grad]
    grads = torch.autograd.grad(out, wanted, cotangent(out), allow_unused=True, materialize_grads=True)
    # Gradients that cancel to nothing are sums of terms as large as the others: each rounds once a factor.
    scale = GRADIENT * max([1.0, *(_largest(want) for want in truth[1:] if want is not None)])
    for n, (grad, want, error) in enumerate(zip(grads, truth[1:], errors[1:], strict=True)):
        want, error = (torch.zeros_like(grad).double(), 0.0) if want is None else (want, error)
        close(grad, want, error, GRADIENT, dtype, f"gradient {n}", scale)


@pytest.mark.parametrize(("number", "case"), [*enumerate(CASES)], ids=str)
@pytest.mark.usefixtures("poisoned")
def test_flex_without_its_compiler_gives_the_output_of_the_oracle(number, case):
    """In one of three shapes: its code for a term is the same in all of them."""
    shapes = [shape for shape in (SHAPES[2], SHAPES[6], SHAPES[-1]) if case.fits(shape)]
    shape = shapes[number % len(shapes)]
    qkv, tensors, (truth, *_), (error, *_) = judged(case, shape, torch.float64)
    out = attend_on("flex", *qkv, **case.terms(*tensors), offset=shape.offset)
    close(out, truth, error, FORWARD, torch.float64, "output")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("small_blocks", "poisoned")
def test_weights_are_those_of_the_oracle(case, backend):
    for shape in (SHAPES[2], SHAPES[3], SHAPES[-1]):
        if case.fits(shape):
            (q, k, _), tensors = oracle.inputs(shape, case)
            A = regard.weights(q, k, **case.terms(*tensors), offset=shape.offset, backend=backend)
            want = oracle.weights(case, shape, q, k, tensors)
            assert (A.dense() - want).abs().max() < 1e-12
            assert (A[...] - want).abs().max() < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("small_blocks", "poisoned")
def test_logits_are_the_largest_scores_of_the_oracle(case, backend):
    for shape in (SHAPES[2], SHAPES[3], SHAPES[-1]):
        if case.fits(shape):
            (q, k, _), tensors = oracle.inputs(shape, case)
            A = regard.weights(q, k, **case.terms(*tensors), offset=shape.offset, backend=backend)
            want = oracle.logits(case, shape, q, k, tensors)
            for found in (A.logit(), A.measures()["logit"], A.summary().logit):
                torch.testing.assert_close(found, want, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [case for case in CASES if any(map(case.fits, EMPTY))], ids=str)
def test_empty_sequences_give_zeros_of_the_right_shape(case, backend):
    for shape in filter(case.fits, EMPTY):
        qkv, tensors = oracle.inputs(shape, case)
        x, t = leaves(qkv), leaves(tensors)
        out = attend_on(backend, *x, **case.terms(*t), offset=shape.offset)
        assert out.shape == (shape.b, shape.h, shape.i, shape.e)
        assert (out == 0).all()
        grads = torch.autograd.grad(out.sum(), x, allow_unused=True, materialize_grads=True)
        assert all((grad == 0).all() for grad in grads)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("small_blocks")
def test_gradients_pass_gradcheck(case, backend):
    if case.name in ("Hard",):
        pytest.skip("a straight-through gradient is not the slope of its function")
    shape = (
        Shape(b=2, h=2, g=1, i=4, j=5, d=3, e=2)
        if case.fits(Shape(h=2, i=4, j=5))
        else Shape(b=1, h=4, g=2, i=4, j=4, d=3, e=2)
    )
    qkv, tensors = oracle.inputs(shape, case, seed=3)
    if case.name == "Added":
        tensors = [tensors[0].clamp(min=-3)]
    x, t = leaves(qkv), leaves(tensors)
    floating = [y for y in x + t if y.requires_grad]
    fixed = [y for y in t if not y.requires_grad]

    def run(*args: Tensor) -> Tensor:
        q, k, v, *rest = args
        return attend_on(backend, q, k, v, **case.terms(*rest, *fixed))

    assert torch.autograd.gradcheck(run, floating)


def test_every_public_term_has_a_case():
    used = " ".join(
        repr(term)
        for case in CASES
        for shape in [next(s for s in SHAPES if case.fits(s))]
        for term in case.terms(*case.tensors(shape)).values()
    )
    terms = [
        name
        for name in regard.__all__
        if isinstance(getattr(regard, name), type) and name not in ("Weights", "Summary", "Mask", "Normalizer")
    ]
    unused = [
        name for name in terms if f"{name}(" not in used and f"{name}.of(" not in used and name not in ("Softmax",)
    ]
    assert not unused
    assert len(SCORES) + len(MASKS) + len(BIASES) + len(NORMALIZERS) == len(CASES)
