"""Every branch of the choice of a backend, forced once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard as R
from regard import attend, explain
from regard.ops import dispatch
from regard.ops.backend_plan import BackendPlan
from regard.ops.backends import flex, reference, sdpa, tiled, triton
from regard.ops.backends import sdpa_blocks as blocks
from regard.ops.backends import torch_kernels as kernels
from regard.ops.call import Call
from regard.ops.dispatch import choose, order
from regard.ops.explanation import cost
from tests.backends import attend_on, flex_on_the_cpu


def qkv(n=40, m=None, heads=4, shared=None, d=8):
    return (
        torch.randn(2, heads, n, d),
        torch.randn(2, shared or heads, m or n, d),
        torch.randn(2, shared or heads, m or n, d),
    )


@pytest.fixture
def calls(monkeypatch):
    """How often the shortcut, the single call and the blocks were taken."""
    taken = []
    for module, name in ((kernels, "run_fused"), (blocks, "run_blocks")):
        real = getattr(module, name)

        def counted(*args, real=real, name=name, **kwargs):
            taken.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(sdpa, name, counted)
    return taken


LENGTHS = torch.tensor([40, 23])
KEEP = torch.rand(2, 40, generator=torch.Generator().manual_seed(0)) > 0.3
SINGLE = {
    "plain": None,
    "causal": R.Causal(),
    "lengths": R.Padding(LENGTHS),
    "keep": R.Padding(KEEP),
    "both": R.Padding(KEEP) & R.Padding(LENGTHS),
    "causal lengths": R.Causal() & R.Padding(LENGTHS),
    "causal keep": R.Padding(KEEP) & R.Causal(),
}


@pytest.mark.parametrize("mask", SINGLE.values(), ids=SINGLE)
@pytest.mark.parametrize("shared", [None, 2])
def test_plain_causal_and_padded_calls_are_one_call_of_the_kernel(mask, shared, calls):
    leaves = [x.double().requires_grad_() for x in qkv(shared=shared)]
    out = attend(*leaves, mask=mask, backend="sdpa")
    assert calls == ["run_fused"]
    want = attend(*leaves, mask=mask, backend="reference")
    torch.testing.assert_close(out, want)
    grads = (torch.autograd.grad(x.sin().sum(), leaves) for x in (out, want))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("mask", SINGLE.values(), ids=SINGLE)
def test_the_statistic_of_a_single_call_is_that_of_the_reference(mask):
    call = Call.of(*qkv(), mask=mask)
    torch.testing.assert_close(sdpa.plan(call).run()[1], reference.plan(call).run()[1])


@pytest.mark.parametrize("mask", [R.Padding((5, 0)), R.Prefix(0), R.Causal() & R.Padding((5, 0))], ids=str)
def test_rows_that_see_nothing_have_an_lse_of_minus_infinity(mask):
    out, lse = sdpa.plan(Call.of(*qkv(20), mask=mask)).run()
    assert (lse[1] == -torch.inf).all()
    assert (out[1] == 0).all()


def test_one_query_sees_every_key_under_causal(calls):
    q, k, v = qkv(1, 40)
    torch.testing.assert_close(attend(q, k, v, mask=R.Causal(), backend="sdpa"), attend(q, k, v, backend="reference"))
    earlier = attend(q, k, v, mask=R.Causal(), offset=20, backend="sdpa")
    torch.testing.assert_close(earlier, attend(q, k[:, :, :21], v[:, :, :21], backend="reference"))
    assert calls == ["run_fused", "run_fused"]


def test_unequal_lengths_are_aligned_bottom_right_not_as_pytorch_does(calls):
    q, k, v = qkv(60, 90, d=64)
    want = attend(q, k, v, mask=R.Causal(), backend="reference")
    torch.testing.assert_close(attend(q, k, v, mask=R.Causal(), backend="sdpa"), want)
    assert calls == ["run_blocks"]


def test_small_problems_are_one_call_with_the_mask_made_whole(calls):
    q, k, v = qkv(20)
    terms = {"mask": R.Window(3) | R.Global(1), "bias": R.Alibi(4)}
    torch.testing.assert_close(attend(q, k, v, **terms), attend(q, k, v, **terms, backend="reference"))
    assert calls == ["run_fused"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("scale", "shift"), [(2.0, 30.0), (0.0, 7e4), (0.0, -1e9)])
def test_small_problems_in_half_precision_do_not_round_the_bias(scale, shift, dtype, calls):
    given = [x.to(dtype) for x in qkv()]
    bias = R.Added(scale * torch.randn(40, 40) + shift)
    exact = attend(*(x.double() for x in given), bias=bias, backend="reference")
    if shift < -1e8:  # in float32 all scores are the same
        exact = given[2].double().mean(2, keepdim=True)
    ours, theirs = (attend(*given, bias=bias, backend=name) for name in (None, "reference"))
    assert calls == ["run_fused"]
    assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max()


def test_large_masked_problems_go_block_by_block(calls):
    q, k, v = qkv(200)
    torch.testing.assert_close(
        attend(q, k, v, mask=R.Window(3)), attend(q, k, v, mask=R.Window(3), backend="reference")
    )
    assert calls == ["run_blocks"]


SHORT = {
    "square": (qkv(), None, True),
    "causal": (qkv(), R.Causal(), True),
    "grouped": (qkv(shared=2), R.Causal(), True),
    "one query": (qkv(1, 30), R.Causal(), True),
    "cross": (qkv(7, 30), None, True),
    "unequal causal": (qkv(7, 30), R.Causal(), False),
    "masked": (qkv(), R.Window(3), False),
    "padded": (qkv(), R.Padding(LENGTHS), False),
    "empty": ([x[:, :, :0] for x in qkv()], None, False),
    "three dims": ([x[0] for x in qkv()], None, False),
    "five dims": ([x[None] for x in qkv()], None, False),
    "dtypes": ((qkv()[0].double(), *qkv()[1:]), None, False),
    "integers": ([x.long() for x in qkv()], None, False),
    "batches": ((qkv()[0][:1], *qkv()[1:]), None, False),
    "widths": ((qkv()[0][..., :4], *qkv()[1:]), None, False),
    "value width": ((*qkv()[:2], qkv()[2][..., :4]), None, False),
    "heads": ((qkv(heads=3)[0], *qkv(shared=2)[1:]), None, False),
    "no tensor": ((1, 2, 3), None, False),
    "no mask": (qkv(), "causal", False),
}


@pytest.mark.parametrize(("tensors", "mask", "taken"), SHORT.values(), ids=SHORT)
def test_the_shortcut_takes_plain_and_causal_calls_of_well_made_tensors(tensors, mask, taken):
    out = sdpa.attend_directly(*tensors, mask)
    assert (out is not None) == taken
    if taken:
        torch.testing.assert_close(out, attend(*tensors, mask=mask, backend="reference"))


def test_the_shortcut_takes_the_usual_offset_and_no_other():
    q, k, v = qkv(1, 30)
    assert sdpa.attend_directly(q, k, v, R.Causal(), 29) is not None
    for offset in (28, True, 29.0, "29"):
        assert sdpa.attend_directly(q, k, v, R.Causal(), offset) is None


def test_lengths_changed_in_place_are_read_again():
    q, k, v = qkv()
    lengths = torch.tensor([40, 23])
    for _ in range(3):
        want = attend(q, k, v, mask=R.Padding(lengths.clone()), backend="reference")
        torch.testing.assert_close(attend(q, k, v, mask=R.Padding(lengths)), want)
        lengths -= 7


def test_the_shortcut_leaves_autocast_and_other_devices_alone():
    with torch.autocast("cpu", torch.bfloat16):
        assert sdpa.attend_directly(*qkv(), None) is None
    assert sdpa.attend_directly(*(x.to("meta") for x in qkv()), None) is None


@pytest.mark.parametrize(
    ("d", "dtype", "sure"),
    [
        (64, torch.bfloat16, True),
        (128, torch.float16, True),
        (8, torch.float16, True),
        (64, torch.float32, False),
        (60, torch.bfloat16, False),
        (136, torch.bfloat16, False),
    ],
)
def test_where_the_flash_kernel_is_certain_pytorch_is_not_asked(d, dtype, sure, monkeypatch):
    monkeypatch.setattr(kernels, "_has_flash", lambda device: True)
    q = torch.zeros(1, 1, 4, d, dtype=dtype)
    assert kernels.is_surely_fused(q) == sure
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert not kernels.is_surely_fused(q)
    monkeypatch.setattr(kernels, "_has_flash", lambda device: False)
    assert not kernels.is_surely_fused(q)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("d", [8, 64, 120, 128])
@pytest.mark.parametrize("n", [1, 7, 129, 4096])
def test_what_is_taken_for_certain_is_what_pytorch_answers(n, d, dtype):
    for causal in (False, True):
        for grad in (False, True):
            q, k, v = (torch.randn(2, 3, n, d, device="cuda", dtype=dtype, requires_grad=grad) for _ in range(3))
            assert kernels.is_surely_fused(q)
            assert kernels.choose_kernel(q, k, v, added=None, causal=causal, dropout=0.0).is_fused


@pytest.mark.parametrize(
    ("capability", "flash"), [((7, 5), False), ((8, 0), True), ((9, 0), True), ((12, 1), True), ((13, 0), False)]
)
def test_the_flash_kernel_is_for_certain_gpus(capability, flash, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert kernels._has_flash.__wrapped__(0) == flash


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_the_shortcut_steps_aside_when_hidden_garbage_would_leak(grad, which, bad):
    tensors = [x.requires_grad_(grad) for x in qkv()]
    clean = attend(*tensors, mask=R.Causal())
    dirty = [x.detach().clone() for x in tensors]
    dirty[which][:, :, 30] = bad
    dirty = [x.requires_grad_(grad) for x in dirty]
    out = attend(*dirty, mask=R.Causal())
    torch.testing.assert_close(out[:, :, :30], clean[:, :, :30])
    if grad:
        want, ours = (
            torch.autograd.grad(x[:, :, :30].sum(), given[0])[0] for x, given in ((clean, tensors), (out, dirty))
        )
        torch.testing.assert_close(ours[:, :, :30], want[:, :, :30])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("mask", [R.Padding(LENGTHS), R.Causal() & R.Padding(LENGTHS), R.Padding((40, 0))])
def test_garbage_in_padding_changes_nothing(mask, bad):
    tensors = [x.requires_grad_() for x in qkv()]
    dirty = [x.detach().clone() for x in tensors]
    hidden = ~mask(torch.tensor(1), torch.tensor(0), torch.tensor(39), torch.arange(40)).expand(40)
    for x in dirty[1:]:
        x[1, :, hidden] = bad
    dirty = [x.requires_grad_() for x in dirty]
    clean, out = (attend(*x, mask=mask) for x in (tensors, dirty))
    torch.testing.assert_close(out, clean)
    for want, ours in zip(*(torch.autograd.grad(x.sum(), y) for x, y in ((clean, tensors), (out, dirty))), strict=True):
        torch.testing.assert_close(ours, want)


def test_a_query_of_nan_that_sees_nothing_gives_zeros():
    q, k, v = qkv()
    q[1, :, 0] = torch.nan
    keep = torch.ones(2, 40, dtype=torch.bool)
    keep[1, 0] = False
    out = attend(q, k, v, mask=R.Causal() & R.Padding(keep))
    assert (out[1, :, 0] == 0).all()
    assert out.isfinite().all()


def test_queries_of_nan_beside_nothing_but_padding_give_zeros():
    q, k, v = qkv()
    q[1] = torch.nan
    out = attend(q, k, v, mask=R.Padding((40, 0)), backend="sdpa")
    assert (out[1] == 0).all()
    assert out.isfinite().all()


@pytest.mark.usefixtures("small_blocks")
def test_a_row_that_sees_nothing_within_a_block_has_an_lse_of_minus_infinity(calls):
    keep = torch.ones(40, 40, dtype=torch.bool)
    keep[[3, 20]] = False
    out, lse = sdpa.plan(Call.of(*qkv(), mask=R.Dense(keep))).run()
    assert calls == ["run_blocks"]
    assert torch.equal((lse == -torch.inf)[0, 0, :, 0].nonzero().flatten(), torch.tensor([3, 20]))
    assert (out[:, :, [3, 20]] == 0).all()


def test_how_it_is_cut_changes_no_gradient(monkeypatch, request):
    leaves = [x.double().requires_grad_() for x in qkv(shared=2)]
    whole = torch.autograd.grad(attend(*leaves, mask=R.Window(9), backend="sdpa").sin().sum(), leaves)
    request.getfixturevalue("small_blocks")
    parts = torch.autograd.grad(attend(*leaves, mask=R.Window(9), backend="sdpa").sin().sum(), leaves)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other)


READ_AGAIN = {
    "Dense": (torch.ones(40, 40, dtype=torch.bool).tril(), lambda x: {"mask": R.Dense(x)}),
    "Documents": (torch.arange(40) // 9, lambda x: {"mask": R.Documents(x)}),
    "Near": (torch.arange(40.0), lambda x: {"mask": R.Near(x, 5)}),
    "Added": (torch.randn(40, 40), lambda x: {"bias": R.Added(x)}),
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", READ_AGAIN)
def test_a_term_changed_before_the_backward_is_refused_by_blocks(name, calls):
    (given, terms), (q, k, v) = READ_AGAIN[name], qkv()
    v.requires_grad_()
    tensor = given.clone()
    out = attend(q, k, v, **terms(tensor), backend="sdpa")
    assert calls == ["run_blocks"]
    tensor.fill_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", READ_AGAIN)
@pytest.mark.parametrize("backend", ["sdpa", "tiled"])
def test_blocks_take_terms_made_in_inference_mode(name, backend):
    (given, terms), (q, k, v) = READ_AGAIN[name], qkv()
    v.requires_grad_()
    with torch.inference_mode():
        tensor = given.clone()
    ours, want = (attend(q, k, v, **terms(x), backend=backend).sin().sum() for x in (tensor, given))
    torch.testing.assert_close(torch.autograd.grad(ours, v), torch.autograd.grad(want, v))


OBJECTIONS = [
    ("sdpa", {"score": R.Additive(torch.ones(8))}, "Additive is no plain product"),
    ("sdpa", {"score": R.Dot(cap=3.0)}, "Dot with a cap is no plain product"),
    ("sdpa", {"normalize": R.Sparsemax()}, "the kernel is softmax, not Sparsemax"),
    ("sdpa", {"bias": R.Added(torch.randn(40, 40, requires_grad=True))}, "no gradient to a bias"),
    ("sdpa", {"dropout": 0.1}, "with dropout PyTorch stores the matrix"),
    ("flex", {}, "compiled for GPUs, and q is on cpu"),
    ("flex", {"dropout": 0.1}, "no dropout"),
    ("flex", {"score": R.Location(torch.ones(40, 8))}, "Location is no product"),
    ("flex", {"normalize": R.Hard()}, "the kernel is softmax, not Hard"),
    ("triton", {"score": R.Additive(torch.ones(8))}, "compiled for GPUs, and q is on cpu"),
    ("triton", {}, "for additive scores"),
]


@pytest.mark.parametrize(("backend", "terms", "reason"), OBJECTIONS, ids=[f"{b}-{r}" for b, _, r in OBJECTIONS])
def test_a_backend_asked_for_by_name_raises_its_objections(backend, terms, reason):
    with pytest.raises(ValueError, match=f"backend '{backend}' cannot run this call: .*{reason}"):
        attend(*qkv(), **terms, backend=backend)


def test_values_of_another_width_are_an_objection():
    q, k, v = qkv()
    with pytest.raises(ValueError, match="another width than keys PyTorch stores the matrix"):
        attend(q, k, v[..., :3], backend="sdpa")
    assert choose(Call.of(q, k, v[..., :3])).backend == "tiled"


def test_hidden_garbage_is_an_objection_where_it_would_leak():
    q, k, v = qkv()
    k[:, :, 30] = torch.nan
    with pytest.raises(ValueError, match="would leak through the kernel"):
        attend(q, k, v, mask=R.Causal(), backend="sdpa")
    assert choose(Call.of(q, k, v, mask=R.Causal())).backend == "tiled"


@pytest.mark.parametrize(
    ("terms", "backend"),
    [
        ({}, "sdpa"),
        ({"mask": R.Window(3)}, "sdpa"),
        ({"bias": R.Alibi(4)}, "sdpa"),
        ({"score": R.Cosine(0.5)}, "sdpa"),
        ({"score": R.Additive(torch.ones(8))}, "tiled"),
        ({"normalize": R.Sparsemax()}, "tiled"),
        ({"dropout": 0.5}, "tiled"),
    ],
)
def test_the_fastest_backend_without_objections_is_taken(terms, backend):
    assert choose(Call.of(*qkv(), **terms)).backend == backend


def test_the_reference_is_never_taken_unasked(monkeypatch):
    monkeypatch.setattr(tiled, "plan", lambda call: ["not today"])
    with pytest.raises(
        ValueError, match=r"no backend runs this call in linear memory: .*tiled: not today; pass backend"
    ):
        attend(*qkv(), normalize=R.Sparsemax())


def test_more_heads_than_a_grid_takes_are_an_objection_of_flex():
    x = torch.zeros(2**14, 4, 1, 16)
    assert "at most 65535 pairs of a batch row and a head" in " ".join(flex.plan(Call.of(x, x, x)))


def test_a_missing_triton_is_an_objection_that_says_what_to_install(monkeypatch):
    monkeypatch.setattr(triton, "DEVICES", ("cpu",))
    monkeypatch.setattr(triton, "is_installed", lambda: False)
    call = Call.of(*qkv(), score=R.Additive(torch.ones(8)))
    assert triton.plan(call) == ["Triton is not installed; pip install triton"]


def test_float64_is_an_objection_of_the_kernels():
    call = Call.of(*(x.double() for x in qkv()), score=R.Additive(torch.ones(8).double()))
    assert "its arithmetic is float32" in triton.plan(call)


@pytest.mark.parametrize(
    ("mask", "n", "first"),
    [(None, 4096, "sdpa"), (R.Causal(), 4096, "sdpa"), (R.Padding((9,)), 512, "sdpa"), (R.Padding((9,)), 513, "flex")],
)
def test_on_a_gpu_long_masked_calls_go_to_flex_first(mask, n, first):
    q = SimpleNamespace(device=torch.device("cuda"))
    call = SimpleNamespace(score=R.Dot(), mask=mask, shape=(1, 1, n, n), q=q)
    assert order(call)[0].name == first


def test_additive_calls_go_to_the_kernel_for_them_first():
    assert order(Call.of(*qkv(), score=R.Additive(torch.ones(8))))[0] is triton


def test_contexts_have_a_kernel_of_their_own_and_other_lengths_share_one(monkeypatch):
    monkeypatch.setattr(flex, "_compiled", lambda kind: kind)
    q = SimpleNamespace(device=torch.device("cuda"))

    def kernel(n_i, n_j, with_statistic=False):
        call = SimpleNamespace(q=q, score=R.Dot(), mask=R.Window(9), bias=None, offset=0, shape=(1, 1, n_i, n_j))
        return flex._attention(call, with_statistic)

    assert len({kernel(n, n) for n in (1024, 2048, 65536)} | {kernel(1024, 2048)}) == 4
    assert len({kernel(n, m) for n, m in ((1000, 1000), (3072, 3072), (512, 512), (1, 2048), (2048, 2000))}) == 1
    assert kernel(1024, 1024) != kernel(1024, 1024, with_statistic=True)


@pytest.mark.parametrize("normalize", [None, R.SinkSoftmax(torch.zeros(4))], ids=["softmax", "sinks"])
def test_flex_tells_the_statistic_only_where_it_is_asked_for(normalize, monkeypatch):
    asked = []
    real = flex._uncompiled
    monkeypatch.setattr(flex, "_uncompiled", lambda *given: asked.append(given[-1]) or real(*given))
    q, k, v = qkv()
    terms = {"mask": R.Causal() & R.Window(9), "normalize": normalize}
    with flex_on_the_cpu():
        call = Call.of(q, k, v, **terms)
        out, none = flex.plan(call).run()
        again, statistic = flex.plan(call.with_values(v)).run()
    want, exact = reference.plan(call).run()
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(again, want)
    torch.testing.assert_close(statistic, exact)
    assert asked == [normalize is not None, True]
    assert (none is None) is (normalize is None)


def test_flex_comes_before_tiled_where_it_runs():
    with flex_on_the_cpu():
        assert choose(Call.of(*qkv(), score=R.Dot(cap=3.0))).backend == "flex"


@pytest.mark.parametrize(
    "terms", [{"mask": R.Causal() & R.Window(5)}, {"bias": R.Alibi(4)}, {"score": R.Dot(cap=2.0)}], ids=str
)
def test_every_pair_of_backends_agrees(terms):
    q, k, v = qkv(33, 50, shared=2)
    want = attend(q, k, v, **terms, backend="reference")
    for backend in dispatch.BACKENDS.values():
        with flex_on_the_cpu():
            if isinstance(backend.plan(Call.of(q, k, v, **terms)), BackendPlan):
                torch.testing.assert_close(attend_on(backend.name, q, k, v, **terms), want)


def test_explain_names_the_choice_the_cost_and_every_objection():
    q, k, v = torch.randn(3, 1, 8, 1024, 64)
    text = explain(q, k, v, mask=R.Causal() & R.Window(128), score=R.Dot(cap=5.0))
    assert "-> tiled      chosen" in text
    assert "   sdpa       Dot with a cap is no plain product of queries and keys" in text
    assert "   flex       it is compiled for GPUs, and q is on cpu" in text
    assert "   reference  could, storing the matrix; ask for it by name" in text
    assert "cost       " in text
    assert "  summary    block by block, in PyTorch" in text
    assert "attend 1 x 8 x 1024 x 1024, d = 64, float32, cpu" in text


def test_cost_counts_the_tiles_that_are_not_empty():
    q, k, v = torch.randn(3, 1, 2, 1024, 16)
    plain, banded = cost(Call.of(q, k, v)), cost(Call.of(q, k, v, mask=R.Window(128)))
    assert plain.flops == 2 * 1024 * 1024 * (16 + 16) * 2
    assert plain.share == 1.0
    assert banded.share == (8 + 7 + 7) / 64  # of 8 x 8 tiles, the diagonal and its neighbours
    assert banded.flops == plain.flops * 22 / 64
    assert plain.moved == 4 * 2 * 1024 * 16 * 4
    assert plain.matrix == 2 * 1024 * 1024 * 4
    assert str(plain) == "134 MFLOP over 100 % of the matrix, 524 kB moved; the matrix would take 8.39 MB"


def test_the_first_product_leaves_its_statistic_for_every_later_question(monkeypatch):
    q, k, v = torch.randn(3, 1, 2, 300, 16)
    A = R.weights(q, k, mask=R.Causal())
    out = A @ v
    torch.testing.assert_close(out, attend(q, k, v, mask=R.Causal()))
    torch.testing.assert_close(A._statistic.squeeze(-1), R.weights(q, k, mask=R.Causal()).lse)
    monkeypatch.setattr(R.Softmax, "weigh", None)  # nobody needs to normalize again
    summary = A.summary()
    torch.testing.assert_close(summary.received, A.received())
    torch.testing.assert_close(A[..., 7, :].sum(-1), torch.ones(1, 2))
