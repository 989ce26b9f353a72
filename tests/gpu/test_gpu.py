"""The operator on a CUDA GPU: every backend against the oracle in half and single precision, compiled.

Run with `pytest -m gpu`; FlexAttention compiles for seconds a kind of term, so use several processes.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard as R
from regard import attend, weights
from regard.ops.backend_plan import BackendPlan
from regard.ops.backends import flex
from regard.ops.backends import torch_kernels as kernels
from regard.ops.call import Call
from regard.ops.dispatch import BACKENDS, choose
from tests.cases import CASES, MASKS
from tests.oracle import Case, Shape
from tests.test_conformance import FORWARD, GRADIENT, _largest, close, cotangent, judged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    # TorchDynamo reads .grad of every input, and hides this warning from users by replacing `showwarning`.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

SHAPES = [Shape(b=2, h=4, g=2, i=33, j=70, d=32, e=32), Shape(b=1, h=2, g=2, i=130, j=130, d=24, e=24)]
HALVES = [torch.bfloat16, torch.float16]
DTYPES = [*HALVES, torch.float32]


def on_gpu(tensors, grad=True):
    moved = [x.detach().cuda() for x in tensors]
    return [x.requires_grad_() if grad and x.is_floating_point() else x for x in moved]


def short(dtype):
    return str(dtype)[6:]


@pytest.mark.parametrize("backend", ["sdpa", "flex", "tiled"])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_gradients_are_those_of_the_oracle(case: Case, dtype: torch.dtype, backend: str):
    if not case.smooth and dtype != torch.float32:
        pytest.skip("a first maximum or a support may change with rounding")
    shape = next(shape for shape in SHAPES if case.fits(shape))
    qkv, tensors, truth, errors = judged(case, shape, dtype, "cuda")
    x, t = on_gpu(qkv), on_gpu(tensors)
    call = Call.of(*x, **case.terms(*t), offset=shape.offset)
    plan = BACKENDS[backend].plan(call)
    if not isinstance(plan, BackendPlan):
        pytest.skip(plan[0])
    out = attend(*x, **case.terms(*t), offset=shape.offset, backend=backend)
    assert out.dtype == dtype
    close(out.cpu(), truth[0], errors[0], FORWARD, dtype, "output")
    wanted = [y for y in x + t if y.requires_grad]
    grads = torch.autograd.grad(out, wanted, cotangent(out), allow_unused=True, materialize_grads=True)
    # Sums that cancel round once a term, in an order of the kernel's own.
    scale = 2 * GRADIENT * max([1.0, *(_largest(want) for want in truth[1:] if want is not None)])
    for n, (grad, want, error) in enumerate(zip(grads, truth[1:], errors[1:], strict=True)):
        want, error = (torch.zeros_like(grad).double().cpu(), 0.0) if want is None else (want, error)
        close(grad.cpu(), want, error, GRADIENT, dtype, f"gradient {n}", scale)


@pytest.mark.parametrize("dtype", HALVES, ids=short)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_every_kernel_returns_the_log_sum_exp_of_each_row(kernel, causal, dtype):
    torch.manual_seed(0)
    for n, d in ((33, 64), (130, 128), (257, 64)):
        q, k, v = (torch.randn(2, 4, n, d, device="cuda", dtype=dtype) for _ in range(3))
        with sdpa_kernel(getattr(SDPBackend, kernel)):
            chosen = kernels.choose_kernel(q, k, v, added=None, causal=causal, dropout=0.0)
            assert chosen.name == kernel.removesuffix("_ATTENTION")
            out, lse = kernels.run_fused(q, k, v, scale=d**-0.5, added=None, causal=causal, dropout=0.0)
        mask = R.Causal() if causal else None
        A = weights(q.double(), k.double(), mask=mask)
        assert lse.shape == (2, 4, n)
        torch.testing.assert_close(lse.double(), A.lse, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(out.double(), A @ v.double(), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_measures_reuse_the_statistic_of_the_fused_kernel(dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 300, 64, device="cuda", dtype=dtype) for _ in range(3))
    for terms in ({}, {"mask": R.Causal()}, {"mask": R.Causal() & R.Window(50)}):
        A, exact = weights(q, k, **terms), weights(q.double(), k.double(), **terms)
        A @ v
        assert A._statistic is not None
        summary, want = A.summary(), exact.summary()
        for name in ("entropy", "received", "max", "distance", "map"):
            torch.testing.assert_close(getattr(summary, name).double(), getattr(want, name), atol=1e-2, rtol=1e-3)
        torch.testing.assert_close(A[0, 1, 250:].double(), exact[0, 1, 250:], atol=1e-4, rtol=1e-3)


def peak(fn):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(
    "terms",
    [{}, {"mask": R.Causal()}, {"mask": R.Causal() & R.Window(500)}, {"mask": R.Causal(), "bias": R.Alibi(2)}],
    ids=str,
)
def test_no_call_stores_the_matrix(terms):
    q, k, v = (torch.randn(1, 2, 16384, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    attend(q[:, :, :300], k[:, :, :300], v[:, :, :300], **terms)
    matrix = 2 * 16384 * 16384
    assert peak(lambda: attend(q, k, v, **terms)) < matrix / 4
    assert peak(lambda: weights(q, k, **terms) @ v) < matrix / 4


@pytest.mark.parametrize("case", MASKS, ids=str)
def test_masks_use_sdpa_or_flex_on_a_gpu(case):
    shape = next(shape for shape in SHAPES if case.fits(shape))
    torch.manual_seed(0)
    (q, k, v), t = (torch.randn(2, 4, 33, 32), torch.randn(2, 2, 70, 32), torch.randn(2, 2, 70, 32)), []
    if shape is SHAPES[1]:
        q, k, v = torch.randn(3, 1, 2, 130, 32)
    t = case.tensors(shape)
    q, k, v, *t = on_gpu([x.to(torch.bfloat16) for x in (q, k, v)] + t, grad=False)
    terms = case.terms(*t)
    backend = choose(Call.of(q, k, v, **terms)).backend
    assert backend in ("sdpa", "flex")
    got = attend(q, k, v, **terms)
    want = attend(q.double(), k.double(), v.double(), **terms, backend="reference")
    torch.testing.assert_close(got.double(), want, atol=2e-2, rtol=2e-2)


def test_decoding_does_not_compile_at_each_step():
    torch._dynamo.reset()
    flex._compile_kind.cache_clear()
    mask = R.Causal() & R.Window(40)
    k, v = (torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for n in range(130, 160):
        q = torch.randn(1, 2, 1, 64, device="cuda", dtype=torch.bfloat16)
        out = attend(q, k[:, :, :n], v[:, :, :n], mask=mask, backend="flex")
        want = attend(q, k[:, :, :n], v[:, :, :n], mask=mask, backend="tiled")
        torch.testing.assert_close(out, want, atol=2e-2, rtol=2e-2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 3


def test_an_offset_alone_does_not_compile_again():
    torch._dynamo.reset()
    flex._compile_kind.cache_clear()
    q, k, v = (torch.randn(1, 2, n, 64, device="cuda", dtype=torch.bfloat16) for n in (20, 300, 300))
    attend(q, k, v, mask=R.Causal(), offset=3, backend="flex")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for offset in range(10, 200, 30):
        out = attend(q, k, v, mask=R.Causal(), offset=offset, backend="flex")
        torch.testing.assert_close(
            out, attend(q, k, v, mask=R.Causal(), offset=offset, backend="tiled"), atol=2e-2, rtol=2e-2
        )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_many_masks_do_not_exhaust_the_compile_cache():
    torch._dynamo.reset()
    flex._compile_kind.cache_clear()
    q, k, v = (torch.randn(1, 1, 200, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for width in range(1, 13):
        mask = R.Window(width)
        out, want = (attend(q, k, v, mask=mask, backend=name) for name in ("flex", "tiled"))
        torch.testing.assert_close(out, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("mask", ["plain", "causal", "padded"])
def test_compiled_calls_on_a_gpu_have_no_graph_break(mask):
    def fn(q, k, v, lengths):
        terms = {"plain": None, "causal": R.Causal(), "padded": R.Padding(lengths)}
        return attend(q, k, v, mask=terms[mask])

    compiled = torch.compile(fn, fullgraph=True)
    for n in (64, 100, 129):
        q, k, v = (torch.randn(2, 4, n, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        lengths = torch.tensor([n, n // 3], device="cuda")
        torch.testing.assert_close(compiled(q, k, v, lengths), fn(q, k, v, lengths), atol=2e-2, rtol=2e-2)


def test_a_compiled_function_may_hold_a_call_that_flex_takes():
    def fn(q, k, v):
        return attend(q * 2, k, v, mask=R.Causal() & R.Window(100)) + 1

    q, k, v = (torch.randn(1, 2, 8192, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    compiled = torch.compile(fn)
    torch.testing.assert_close(compiled(q, k, v), fn(q, k, v), atol=2e-2, rtol=2e-2)
    assert peak(lambda: compiled(q, k, v)) < 2 * 8192 * 8192


@pytest.mark.parametrize("dtype", HALVES, ids=short)
def test_dropout_of_the_fused_kernel_keeps_the_mean(dtype):
    q, k = (torch.randn(1, 2, 64, 64, device="cuda", dtype=dtype) for _ in range(2))
    v = torch.ones(1, 2, 64, 64, device="cuda", dtype=dtype)
    assert choose(Call.of(q, k, v, dropout=0.5)).backend == "sdpa"
    out = torch.stack([attend(q, k, v, dropout=0.5) for _ in range(50)]).double()
    assert abs(out.mean().item() - 1) < 0.05
    assert out.std() > 0.01
