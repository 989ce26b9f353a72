"""The row statistic that PyTorch's kernels find on their way: the same output to the bit, and the log-sum-exp."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils._python_dispatch import TorchDispatchMode

from regard.lens.interception.sdpa import (
    _LSE_SINK,
    SDPA,
    install_hook,
    recompute_lse,
    remove_hook,
    run_with_lse,
    sdpa_with_lse,
)


def tensors(h=4, g=4, i=9, j=9, d=6, dtype=torch.float32):
    return torch.randn(2, h, i, d, dtype=dtype), *torch.randn(2, 2, g, j, d, dtype=dtype)


CALLS = [
    pytest.param({}, {}, id="plain"),
    pytest.param({"i": 1}, {}, id="one row"),
    pytest.param({"i": 5, "j": 7}, {"is_causal": True}, id="causal from the top left"),
    pytest.param({"d": 7}, {"scale": 0.3}, id="scale"),
    pytest.param({"g": 2}, {"enable_gqa": True, "is_causal": True}, id="grouped"),
    pytest.param({"dtype": torch.float64}, {}, id="double"),
    pytest.param({"dtype": torch.bfloat16}, {"is_causal": True}, id="half"),
]


@pytest.mark.parametrize(("made", "asked"), CALLS)
def test_output_is_pytorchs_to_the_bit_and_the_statistic_is_the_log_sum_exp(made, asked):
    q, k, v = tensors(**made)
    out, lse = sdpa_with_lse(q, k, v, **asked)
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v, **asked))
    s = q.double() @ k.double().repeat_interleave(4 // k.shape[1], 1).mT * asked.get("scale", q.shape[-1] ** -0.5)
    if "is_causal" in asked:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    assert lse.shape == q.shape[:3]
    assert (lse - s.logsumexp(-1)).abs().max() < (1e-3 if q.dtype == torch.bfloat16 else 1e-5)


def test_gradients_are_those_of_the_function():
    leaves = [x.requires_grad_() for x in tensors()]
    expected = torch.autograd.grad(F.scaled_dot_product_attention(*leaves, is_causal=True).square().sum(), leaves)
    out, lse = sdpa_with_lse(*leaves, is_causal=True)
    assert not lse.requires_grad
    assert all(map(torch.equal, torch.autograd.grad(out.square().sum(), leaves), expected))


@pytest.mark.parametrize(
    ("made", "asked"),
    [
        ({}, {"attn_mask": torch.ones(9, 9, dtype=torch.bool).tril()}),
        ({}, {"dropout_p": 0.5}),
        ({"j": 0}, {}),
        ({"i": 0}, {}),
    ],
)
def test_there_is_none_where_the_kernel_is_another(made, asked):
    q, k, v = tensors(**made)
    torch.manual_seed(0)
    expected = F.scaled_dot_product_attention(q, k, v, **asked)
    torch.manual_seed(0)
    out, lse = sdpa_with_lse(q, k, v, **asked)
    assert lse is None
    assert torch.equal(out, expected)


def test_there_is_none_for_three_dims_and_gaps():
    q, k, v = tensors()
    assert sdpa_with_lse(q[0], k[0], v[0])[1] is None
    assert sdpa_with_lse(q[..., ::2], k[..., ::2], v[..., ::2])[1] is None


def autocast_case(device, n=9, **made):
    """Leaves of several dtypes, of which rotated queries and keys are float32 and values are not."""
    q, k, v = tensors(i=n, j=n, **made)
    return [q.to(device), k.to(device), v.to(device, torch.bfloat16)]


def autocast_run(function, given, asked, device):
    """Output, lse or None, gradients, and the fused kernels that ran, under autocast."""
    leaves = [x.clone().requires_grad_() for x in given]
    with Kernels() as kernels, torch.autocast(device, torch.bfloat16):
        out = function(*leaves, **asked)
    out, lse = out if isinstance(out, tuple) else (out, None)
    return out, lse, torch.autograd.grad(out.float().square().sum(), leaves), kernels.ran


class Kernels(TorchDispatchMode):
    """Counts the fused attention kernels that run."""

    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attention" in str(func):
            self.ran.append((func, args[0].dtype))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("asked", [{}, {"is_causal": True}, {"scale": 0.3}])
@pytest.mark.parametrize("g", [4, 2])
def test_under_autocast_the_kernel_of_autocast_runs_once_with_its_bits(g, asked):
    given, asked = autocast_case("cpu", g=g), {**asked, "enable_gqa": g < 4}
    plain, _, plain_grads, plain_kernels = autocast_run(F.scaled_dot_product_attention, given, asked, "cpu")
    out, lse, grads, kernels = autocast_run(sdpa_with_lse, given, asked, "cpu")
    assert kernels == plain_kernels
    assert len(kernels) == 1
    assert kernels[0][1] == torch.bfloat16
    assert torch.equal(out, plain)
    assert all(map(torch.equal, grads, plain_grads))
    q, k = (x.bfloat16() for x in given[:2])
    assert torch.equal(lse, sdpa_with_lse(q, k, given[2], **asked)[1])


def test_autocast_leaves_float64_and_other_devices_alone():
    q, k, v = tensors(dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = sdpa_with_lse(q, k, v)
        assert torch.equal(out, F.scaled_dot_product_attention(q, k, v))
    assert out.dtype == lse.dtype == torch.float64


def test_a_statistic_of_a_call_before_autocast_is_not_cast():
    q, k, _ = tensors()
    expected = recompute_lse(q, k, is_causal=True, scale=None)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(recompute_lse(q, k, is_causal=True, scale=None), expected)


def test_wrong_calls_raise_as_they_do():
    q, k, v = tensors(g=2)
    with pytest.raises(RuntimeError):
        sdpa_with_lse(q, k, v)


@pytest.fixture
def telling():
    install_hook()
    yield
    remove_hook()
    assert F.scaled_dot_product_attention is SDPA


def test_the_statistic_of_a_single_call_is_heard(telling):
    q, k, v = tensors()
    out, ran = run_with_lse(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    assert torch.equal(out, SDPA(q, k, v, is_causal=True))
    assert torch.equal(ran.lse, sdpa_with_lse(q, k, v, is_causal=True)[1])
    assert ran.as_cast(q) is q
    with torch.autocast("cpu", torch.bfloat16):
        _, ran = run_with_lse(F.scaled_dot_product_attention, q, k, v)
    assert torch.equal(ran.as_cast(q), q.bfloat16())
    assert torch.equal(ran.as_cast(k), k.bfloat16())
    assert ran.as_cast(v) is v
    assert run_with_lse(lambda: [F.scaled_dot_product_attention(q, k, v) for _ in range(2)])[1] is None
    assert run_with_lse(lambda: run_with_lse(F.scaled_dot_product_attention, q, k, v))[1] is None


def test_whoever_does_not_listen_gets_the_plain_function(telling):
    q, k, v = tensors()

    def elsewhere():
        thread = threading.Thread(target=F.scaled_dot_product_attention, args=(q, k, v))
        thread.start()
        thread.join()

    assert run_with_lse(elsewhere) == (None, None)
    assert torch.equal(F.scaled_dot_product_attention(q, k, v), SDPA(q, k, v))


@pytest.mark.parametrize("mask", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("listens", [False, True])
def test_masks_that_know_the_function_by_its_name_do_their_work(telling, mask, listens):
    q, k, v = tensors(i=5, j=7)
    keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    keep = keep.tril(k.shape[2] - q.shape[2] if mask is causal_lower_right else 0)
    given = {"attn_mask": mask(*keep.shape)}
    if listens:
        out, _ = run_with_lse(F.scaled_dot_product_attention, q, k, v, **given)
    else:
        out = F.scaled_dot_product_attention(q, k, v, **given)
    assert type(out) is torch.Tensor
    assert torch.allclose(out, SDPA(q, k, v, attn_mask=keep), atol=1e-6)


def test_nothing_is_heard_after_a_function_has_failed(telling):
    q, k, v = tensors(g=2)
    with pytest.raises(RuntimeError):
        run_with_lse(F.scaled_dot_product_attention, q, k, v)
    assert _LSE_SINK.collected is None


def test_second_derivatives_raise_as_those_of_the_function():
    leaves = [x.requires_grad_() for x in tensors()]
    errors = []
    for function in (F.scaled_dot_product_attention, lambda *given: sdpa_with_lse(*given)[0]):
        grad = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)[0]
        with pytest.raises(RuntimeError) as error:
            grad.sum().backward()
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def test_a_function_somebody_put_in_its_place_stays(monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", other := lambda q, k, v: q)
    install_hook()
    assert F.scaled_dot_product_attention is other
    remove_hook()
    assert F.scaled_dot_product_attention is other


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("asked", [{}, {"is_causal": True}])
@pytest.mark.parametrize(("g", "d"), [(8, 64), (2, 128)])
def test_kernels_of_a_gpu_give_the_same_bits_and_tell_the_statistic(g, d, asked, learned):
    q, k, v = (x.bfloat16().cuda().requires_grad_(learned) for x in tensors(h=8, g=g, i=1000, j=1000, d=d))
    asked = {**asked, "enable_gqa": g < 8}
    out, lse = sdpa_with_lse(q, k, v, **asked)
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v, **asked))
    s = q.double() @ k.double().repeat_interleave(8 // g, 1).mT * d**-0.5
    if "is_causal" in asked:
        s = s.masked_fill(~torch.ones_like(s, dtype=torch.bool).tril(), -torch.inf)
    assert (lse - s.logsumexp(-1)).abs().max() < 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("n", [256, 250])
@pytest.mark.parametrize("rows", [1, None])
@pytest.mark.parametrize("is_bool", [True, False])
def test_kernels_of_a_gpu_tell_the_statistic_under_a_mask(is_bool, rows, n):
    q, k, v = (x.bfloat16().cuda() for x in tensors(h=8, g=8, i=n, j=n, d=64))
    seen = torch.rand(len(q), 1, rows or n, n, device="cuda") > 0.5
    seen[0, 0, 0] = False  # one row sees no key, or all of a text do
    mask = seen if is_bool else torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, -torch.inf)
    for _ in range(2):  # the second time the mask is remembered
        out, lse = sdpa_with_lse(q, k, v, mask)
        torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, mask), rtol=0, atol=0, equal_nan=True)
    s = (q.double() @ k.double().mT * 64**-0.5).masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(lse.double(), s.logsumexp(-1), rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("asked", [{}, {"is_causal": True}, {"masked": True}])
@pytest.mark.parametrize(("g", "d"), [(8, 64), (2, 128)])
def test_kernels_of_a_gpu_run_once_under_autocast_with_its_bits(g, d, asked):
    given, options = autocast_case("cuda", n=500, h=8, g=g, d=d), {"enable_gqa": g < 8}
    if "masked" in asked:
        options["attn_mask"] = torch.randn(2, 1, 500, 500, device="cuda")  # float32, which autocast casts
    else:
        options |= asked
    plain, _, plain_grads, plain_kernels = autocast_run(F.scaled_dot_product_attention, given, options, "cuda")
    out, lse, grads, kernels = autocast_run(sdpa_with_lse, given, options, "cuda")
    assert kernels == plain_kernels
    assert torch.equal(out, plain)
    for grad, expected in zip(grads, plain_grads, strict=True):  # the backward pass of cuDNN adds in any order
        torch.testing.assert_close(grad, expected, atol=0.02, rtol=0.02)
    q, k = (x.bfloat16().double() for x in given[:2])
    s = q @ k.repeat_interleave(8 // g, 1).mT * d**-0.5
    if "is_causal" in asked:
        s = s.masked_fill(~torch.ones_like(s, dtype=torch.bool).tril(), -torch.inf)
    if "masked" in asked:
        s = s + options["attn_mask"].bfloat16()
    assert (lse - s.logsumexp(-1)).abs().max() < 1e-3
