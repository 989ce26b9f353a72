"""attend under torch.compile, torch.export, torch.func and autocast."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import regard as R
from regard import attend, weights
from regard.models import Gpt, GptConfig
from regard.ops.call import Call
from regard.ops.dispatch import BACKENDS
from regard.ops.fused import kernel_reductions as fused

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of PyTorch's own decompositions
LENGTHS = (16, 17, 33, 64, 100, 129, 7, 250, 31, 300)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def plain(q, k, v, lengths):
    return attend(q, k, v)


def causal(q, k, v, lengths):
    return attend(q, k, v, mask=R.Causal())


def padded(q, k, v, lengths):
    return attend(q, k, v, mask=R.Padding(lengths))


def kept(q, k, v, lengths):
    return attend(q, k, v, mask=R.Padding(torch.arange(k.shape[2]) < lengths[:, None]))


def causal_and_padded(q, k, v, lengths):
    return attend(q, k, v, mask=R.Causal() & R.Padding(lengths))


TRACEABLE = [plain, causal, padded, kept, causal_and_padded]


def tensors(n, grad=False):
    q, k, v = (torch.randn(2, h, n, 16).requires_grad_(grad) for h in (4, 2, 2))
    return q, k, v, torch.tensor([n, n // 2])


@pytest.mark.parametrize("fn", TRACEABLE)
def test_compiles_without_a_graph_break_and_at_most_twice_over_ten_lengths(fn):
    counter = CompileCounter()
    compiled = torch.compile(fn, fullgraph=True, backend=counter)
    for n in LENGTHS:
        given = tensors(n)
        torch.testing.assert_close(compiled(*given), fn(*given))
    assert counter.frame_count <= 2


@pytest.mark.compiled
@pytest.mark.parametrize("fn", TRACEABLE)
def test_compiles_without_a_graph_break_where_every_number_is_open(fn):
    given = tensors(17)
    compiled = torch.compile(fn, fullgraph=True, backend="eager", dynamic=True)
    torch.testing.assert_close(compiled(*given), fn(*given))


@pytest.mark.parametrize("fn", [causal, causal_and_padded])
def test_compiled_gradients_are_the_eager_ones(fn):
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    for n in (20, 33):
        given = tensors(n, grad=True)
        pairs = (torch.autograd.grad(f(*given).sin().sum(), given[:3]) for f in (compiled, fn))
        for ours, want in zip(*pairs, strict=True):
            torch.testing.assert_close(ours, want)


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_compiles_a_causal_call():
    given = tensors(40)
    torch.testing.assert_close(torch.compile(causal, fullgraph=True)(*given), causal(*given))


@pytest.mark.compiled
@pytest.mark.parametrize(
    "terms",
    [
        {"mask": R.Window(5)},
        {"mask": R.Causal() & R.Documents(torch.arange(40) // 9)},
        {"score": R.Additive(torch.ones(16))},
        {"normalize": R.Sparsemax()},
        {"dropout": 0.0, "bias": R.Alibi(4)},
    ],
    ids=str,
)
def test_other_calls_break_the_graph_and_stay_right(terms):
    def fn(q, k, v):
        return attend(q * 2, k, v, **terms) + 1

    q, k, v, _ = tensors(40)
    torch.testing.assert_close(torch.compile(fn, backend="eager")(q, k, v), fn(q, k, v))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="the tiles its mask leaves empty"):
        torch.compile(fn, backend="eager", fullgraph=True)(q, k, v)


@pytest.mark.compiled
@pytest.mark.parametrize(
    "measured",
    [lambda A: A.entropy(), lambda A: A.topk(2).values, lambda A: A.pool(3, 3), lambda A: A.summary().received],
    ids=["entropy", "topk", "pool", "summary"],
)
def test_measures_are_taken_outside_the_graph_where_hidden_garbage_is_seen(measured):
    q, k = torch.randn(2, 1, 2, 9, 4)
    k[:, :, -1] = torch.nan
    counter = CompileCounter()
    compiled = torch.compile(lambda q: measured(weights(q * 2, k, mask=R.Causal())), backend=counter)
    torch.testing.assert_close(compiled(q), measured(weights(q * 2, k, mask=R.Causal())), equal_nan=True)
    assert counter.frame_count <= 2


def test_dropout_breaks_the_graph_on_the_cpu():
    q, k, v, _ = tensors(40)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="the tiles its mask leaves empty"):
        torch.compile(lambda: attend(q, k, v, dropout=0.5), backend="eager", fullgraph=True)()


class Module(torch.nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, q, k, v, lengths):
        return self.fn(q, k, v, lengths)


@pytest.mark.compiled
@pytest.mark.parametrize("fn", TRACEABLE)
@pytest.mark.parametrize("strict", [False, True])
def test_exports_with_the_length_left_open(fn, strict):
    n = torch.export.Dim("n", min=2, max=4096)
    program = torch.export.export(Module(fn), tensors(50), dynamic_shapes=({2: n}, {2: n}, {2: n}, None), strict=strict)
    given = tensors(77)
    torch.testing.assert_close(program.module()(*given), fn(*given))


@pytest.mark.parametrize("fn", TRACEABLE)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_a_loop_and_functional_gradients_are_autograd_s(fn):
    given = [torch.stack([x, x.flip(0)]) for x in tensors(20)]
    out = torch.func.vmap(fn)(*given)
    torch.testing.assert_close(out, torch.stack([fn(*(x[n] for x in given)) for n in range(2)]))
    q, k, v, lengths = tensors(20)
    grad = torch.func.grad(lambda q: fn(q, k, v, lengths).sin().sum())(q)
    q.requires_grad_()
    torch.testing.assert_close(grad, torch.autograd.grad(fn(q, k, v, lengths).sin().sum(), q)[0])


def test_what_torch_func_cannot_follow_is_refused():
    q, k, v, _ = tensors(100)

    def fn(q):
        return attend(q, k, v, mask=R.Window(5)).sum()

    for transformed, given in ((torch.func.vmap(fn), q[None]), (torch.func.grad(fn), q)):
        with pytest.raises(ValueError, match=r"torch.func cannot follow.*pass backend='reference'"):
            transformed(given)


@pytest.mark.parametrize("terms", [{"mask": R.Window(5)}, {"normalize": R.Sparsemax()}], ids=str)
def test_a_batch_of_gradients_is_refused_by_blocks_and_served_by_the_reference(terms):
    q, k, v, _ = tensors(100, grad=True)
    many = torch.randn(3, *q.shape)
    for fn in (lambda: attend(q, k, v, **terms), lambda: weights(q, k, **terms) @ v):
        with pytest.raises(RuntimeError, match=r"one gradient at a time.*is_grads_batched.*backend='reference'"):
            torch.autograd.grad(fn(), q, many, is_grads_batched=True)
    out = attend(q, k, v, **terms, backend="reference")
    (got,) = torch.autograd.grad(out, q, many, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(out, q, one, retain_graph=True)[0] for one in many]
    torch.testing.assert_close(got, torch.stack(each))


@pytest.mark.compiled
@pytest.mark.parametrize("fn", TRACEABLE)
def test_autocast_inside_a_compiled_function(fn):
    given = tensors(40)
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        ours, want = compiled(*given), fn(*given)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, want)


@pytest.mark.parametrize("measure", ["entropy", "received", "distance"])
def test_measures_say_that_torch_func_cannot_follow_them(measure):
    q, k = torch.randn(2, 1, 2, 5, 4)
    for transform, given in ((torch.func.vmap, q[None]), (torch.func.grad, q)):
        with pytest.raises(ValueError, match=r"torch.func cannot follow.*backend='reference'"):
            transform(lambda q: getattr(weights(q, k), measure)().sum())(given)


@pytest.mark.parametrize("backend", [None, "tiled", "reference"])
@pytest.mark.parametrize(
    "gathered",
    [
        lambda A: A.topk(2).values,
        lambda A: A.pool(2, 3),
        lambda A: A.pool(2, 3, how="max"),
        lambda A: A.mass(torch.arange(5) // 2, torch.arange(5) // 3),
        lambda A: A.summary().map,
    ],
    ids=["topk", "pool", "maxima", "mass", "summary"],
)
def test_what_is_gathered_says_that_torch_func_cannot_follow_it(gathered, backend):
    q, k = torch.randn(2, 1, 2, 5, 4)
    for transform, given in ((torch.func.vmap, q[None]), (torch.func.grad, q)):
        with pytest.raises(ValueError, match=r"torch.func cannot follow.*backend='reference'\)\.dense\(\)"):
            transform(lambda q: gathered(weights(q, k, mask=R.Causal(), backend=backend)).sum())(given)


@pytest.mark.parametrize("name", ["lse", "statistic"])
def test_the_statistic_follows_torch_func_on_the_reference_alone(name):
    q, k = torch.randn(2, 3, 1, 2, 5, 4)

    def statistic(q, k, backend=None):
        return getattr(weights(q, k, mask=R.Causal(), backend=backend), name)

    got = torch.vmap(lambda q, k: statistic(q, k, "reference"))(q, k)
    torch.testing.assert_close(got, torch.stack([statistic(*one) for one in zip(q, k, strict=True)]))
    with pytest.raises(ValueError, match=r"torch.func cannot follow.*backend='reference'"):
        torch.vmap(statistic)(q, k)


def test_forward_mode_is_refused_by_kernels_and_served_by_the_reference():
    q, k, v, tangent = torch.randn(4, 1, 2, 6, 4, dtype=torch.float64)

    def out(q, backend="reference"):
        return attend(q, k, v, mask=R.Causal(), backend=backend)

    def lse(q):
        return weights(q, k, mask=R.Causal(), backend="reference").lse

    with pytest.raises(ValueError, match=r"no derivative in forward mode.*pass backend='reference'"):
        torch.func.jvp(lambda q: out(q, None), (q,), (tangent,))
    _, got = torch.func.jvp(out, (q,), (tangent,))
    torch.testing.assert_close(got, (out(q + 1e-6 * tangent) - out(q - 1e-6 * tangent)) / 2e-6, atol=1e-7, rtol=1e-6)
    for fn in (out, lse):
        torch.testing.assert_close(torch.func.jacfwd(fn)(q), torch.func.jacrev(fn)(q))


def test_hard_passes_straight_through_in_forward_mode_too():
    q, k, v = torch.randn(3, 1, 2, 6, 4, dtype=torch.float64)

    def out(q):
        return attend(q, k, v, normalize=R.Hard(), backend="reference")

    forward, backward = torch.func.jacfwd(out)(q), torch.func.jacrev(out)(q)
    assert backward.abs().max() > 0
    torch.testing.assert_close(forward, backward)


def pushed(fn, q, tangent):
    """The tangent of fn(q), outside of torch.func."""
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(fn(forward_ad.make_dual(q, tangent))).tangent


@pytest.mark.parametrize(
    "terms",
    [{}, {"mask": R.Causal()}, {"mask": R.Window(5)}, {"mask": R.Padding(torch.tensor([5]))}, {"bias": R.Alibi(4)}],
    ids=str,
)
@pytest.mark.parametrize("n", [6, 100])
def test_forward_mode_outside_of_torch_func_gives_the_tangents_of_the_definition(terms, n):
    q, k, v, tangent = torch.randn(4, 1, 4, n, 4, dtype=torch.float64)
    _, want = torch.func.jvp(lambda q: attend(q, k, v, **terms, backend="reference"), (q,), (tangent,))
    torch.testing.assert_close(pushed(lambda q: attend(q, k, v, **terms), q, tangent), want)
    torch.testing.assert_close(pushed(lambda q: weights(q, k, **terms) @ v, q, tangent), want)


@pytest.mark.parametrize(
    "measured",
    [lambda A: A.lse, lambda A: A.entropy(), lambda A: A[0, 1, :3], lambda A: A.received(), lambda A: A.max()],
    ids=["lse", "entropy", "tile", "received", "max"],
)
def test_what_a_product_kept_takes_no_part_in_forward_mode(measured):
    q, k, v, tangent = torch.randn(4, 1, 2, 6, 4, dtype=torch.float64)

    def after_a_product(q):
        A = weights(q, k, mask=R.Causal())
        A @ v
        return measured(A)

    _, want = torch.func.jvp(lambda q: measured(weights(q, k, mask=R.Causal(), backend="reference")), (q,), (tangent,))
    torch.testing.assert_close(pushed(after_a_product, q, tangent), want)


def test_every_kernel_objects_to_forward_mode():
    call = Call.of(*torch.randn(3, 1, 2, 6, 4))
    with forward_ad.dual_level():
        for objections in (fused.objections, *(BACKENDS[name].plan for name in ("sdpa", "flex", "triton"))):
            assert any("forward mode" in found for found in objections(call))


@pytest.mark.parametrize("terms", [{}, {"score": R.Additive(torch.ones(4))}], ids=["gradients too", "additive"])
def test_forward_mode_that_blocks_cannot_follow_is_refused(terms):
    q, k, v, tangent = torch.randn(4, 1, 2, 6, 4)
    q.requires_grad_(not terms)
    for fn in (lambda q: attend(q, k, v, **terms), lambda q: weights(q, k, **terms).entropy()):
        with pytest.raises(NotImplementedError, match=r"no derivative in forward mode.*backend='reference'"):
            pushed(fn, q, tangent)


@pytest.mark.compiled
@pytest.mark.parametrize("normalize", [R.Sparsemax(), R.Entmax(1.3), R.Entmax(1.5)], ids=repr)
def test_sparse_normalizers_serve_every_transform_on_the_reference(normalize):
    q, k, v = torch.randn(3, 3, 1, 2, 6, 4, dtype=torch.float64)

    def out(q, k=k[0], v=v[0]):
        return attend(q, k, v, mask=R.Causal(), normalize=normalize, backend="reference")

    loop = torch.stack([out(*one) for one in zip(q, k, v, strict=True)])
    torch.testing.assert_close(torch.func.vmap(out)(q, k, v), loop)
    torch.testing.assert_close(torch.func.vmap(out, in_dims=(1, 1, 1))(*(x.transpose(0, 1) for x in (q, k, v))), loop)
    forward, backward = torch.func.jacfwd(out)(q[0]), torch.func.jacrev(out)(q[0])
    assert backward.abs().max() > 0
    torch.testing.assert_close(forward, backward)

    def scalar(q):
        return out(q).sin().sum()

    torch.testing.assert_close(
        torch.func.hessian(scalar)(q[0]), torch.func.jacrev(torch.func.jacrev(scalar))(q[0]), atol=1e-9, rtol=1e-6
    )
    each = torch.stack([torch.func.grad(scalar)(one) for one in q])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(scalar))(q), each)
    assert torch.autograd.gradcheck(out, q[0].requires_grad_(), check_forward_ad=True)


@pytest.mark.compiled
@pytest.mark.parametrize("mask", [R.Window(3), R.Causal() & R.Dilated(2, step=2)])
def test_what_has_to_be_planned_is_exported_by_the_reference_alone(mask):
    given = tensors(9)
    planned = Module(lambda q, k, v, lengths: attend(q, k, v, mask=mask))
    with pytest.raises(ValueError, match=r"cannot be exported: .* by backend='reference', of a layer by layer.core"):
        torch.export.export(planned, given)
    stored = Module(lambda q, k, v, lengths: attend(q, k, v, mask=mask, backend="reference"))
    torch.testing.assert_close(torch.export.export(stored, given).module()(*given), planned(*given))


@pytest.mark.compiled
@pytest.mark.parametrize(
    "terms",
    [
        {"normalize": R.Sparsemax()},
        {"normalize": R.Entmax(1.3)},
        {"score": R.Additive(torch.linspace(-1, 1, 16))},
        {"bias": R.Alibi(4)},
    ],
    ids=str,
)
def test_the_reference_exports_every_term_with_the_length_left_open(terms):
    def fn(q, k, v, lengths):
        return attend(q, k, v, mask=R.Causal() & R.Padding(lengths), **terms, backend="reference")

    n = torch.export.Dim("n", min=2, max=4096)
    program = torch.export.export(Module(fn), tensors(9), dynamic_shapes=({2: n}, {2: n}, {2: n}, None))
    given = tensors(33)
    torch.testing.assert_close(program.module()(*given), fn(*given))


def rectangular(q, k, v, lengths):
    return attend(q[:, :, -5:], k, v, mask=R.Causal())


def rectangular_and_padded(q, k, v, lengths):
    return attend(q[:, :, -5:], k, v, mask=R.Causal() & R.Padding(lengths))


def more_queries_than_keys(q, k, v, lengths):
    return attend(q, k[:, :, -5:], v[:, :, -5:], mask=R.Causal())


RECTANGULAR = [rectangular, rectangular_and_padded, more_queries_than_keys]


@pytest.mark.parametrize("fn", RECTANGULAR)
def test_a_rectangular_causal_call_compiles_without_a_graph_break(fn):
    counter = CompileCounter()
    compiled = torch.compile(fn, fullgraph=True, backend=counter)
    for n in (7, 9, 20, 11, 33):
        given = *tensors(n)[:3], torch.tensor([5, 2])
        torch.testing.assert_close(compiled(*given), fn(*given))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("fn", RECTANGULAR)
def test_compiled_gradients_of_a_rectangular_causal_call_are_the_eager_ones(fn):
    given = tensors(17, grad=True)
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    pairs = (torch.autograd.grad(f(*given).sin().sum(), given[:3]) for f in (compiled, fn))
    for ours, want in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, want)


@pytest.mark.compiled
def test_a_rectangular_causal_call_is_exported_with_both_lengths_left_open():
    q, k, v, _ = tensors(9)
    n, m = torch.export.Dim("n", min=2, max=512), torch.export.Dim("m", min=2, max=512)
    module, lengths = Module(causal), torch.tensor([9, 4])
    given = q[:, :, :5].clone(), k, v, lengths
    program = torch.export.export(module, given, dynamic_shapes=({2: n}, {2: m}, {2: m}, None))
    for i, j in ((3, 7), (7, 7), (7, 3), (5, 33)):
        given = torch.randn(2, 4, i, 16), torch.randn(2, 2, j, 16), torch.randn(2, 2, j, 16), lengths
        torch.testing.assert_close(program.module()(*given), module(*given))


def test_padded_keys_of_a_compiled_rectangular_call_may_hold_nan():
    q, k, v, _ = tensors(9)
    lengths, spoiled = torch.tensor([9, 4]), [x.clone() for x in (k, v)]
    for x in spoiled:
        x[1, :, 4:] = torch.nan
    compiled = torch.compile(rectangular_and_padded, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, *spoiled, lengths), rectangular_and_padded(q, k, v, lengths))


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated")  # by PyTorch's own compiler
@pytest.mark.parametrize("normalize", [R.Softmax(), R.Sparsemax(), R.Entmax(1.5), R.Sigmoid()], ids=str)
def test_the_reference_trains_in_one_graph(normalize):
    def fn(q, k, v, lengths):
        return attend(q, k, v, mask=R.Window(3), bias=R.Alibi(4), normalize=normalize, backend="reference")

    given = tensors(9, grad=True)
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    pairs = (torch.autograd.grad(f(*given).sin().sum(), given[:3]) for f in (compiled, fn))
    for ours, want in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, want)


TRACED = {
    "plain": {},
    "causal": {"mask": R.Causal()},
    "padded": {"mask": R.Padding((9, 4))},
    "causal, padded": {"mask": R.Causal() & R.Padding((9, 4))},
    "window": {"mask": R.Causal() & R.Window(3)},
    "documents": {"mask": R.Documents(torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2]))},
    "bias": {"bias": R.Alibi(4)},
    "sink": {"normalize": R.SinkSoftmax(0.0)},
    "sparse": {"normalize": R.Sparsemax()},
}
SINGLE_CALLS = ("plain", "causal", "padded", "causal, padded")


SYMBOLIC = [pytest.param("symbolic", rows, marks=pytest.mark.compiled) for rows in (9, 5)]


@pytest.mark.parametrize(("mode", "rows"), [("real", 9), ("fake", 5), *SYMBOLIC])
@pytest.mark.parametrize("terms", TRACED.values(), ids=TRACED)
def test_make_fx_records_a_graph_that_holds_for_other_numbers(terms, mode, rows):
    q, k, v, _ = tensors(9)
    if "mask" in terms and isinstance(terms["mask"], R.Documents) and rows != 9:
        pytest.skip("documents of as many queries as keys")

    def fn(q, k, v):
        return attend(q, k, v, **terms)

    graph = make_fx(fn, tracing_mode=mode, _allow_non_fake_inputs=True)(q[:, :, :rows].clone(), k, v)
    q, k, v, _ = tensors(9)
    torch.testing.assert_close(graph(q[:, :, :rows].clone(), k, v), fn(q[:, :, :rows].clone(), k, v))


@pytest.mark.parametrize("terms", TRACED.values(), ids=TRACED)
def test_tensors_without_numbers_give_their_shape_and_gradients(terms):
    given = [x.detach() for x in tensors(9)[:3]]
    expected = attend(*given, **terms)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(x).requires_grad_() for x in given]
    for inside in (mode, nullcontext()):
        with inside:
            out = attend(*fakes, **terms)
            assert isinstance(out, FakeTensor)
            assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
            assert [g.shape for g in torch.autograd.grad(out.sum(), fakes)] == [x.shape for x in given]
    if not any(term.tensors() for term in terms.values()):  # tensors of terms are on the device of q
        metas = [x.to("meta").requires_grad_() for x in given]
        out = attend(*metas, **terms)
        assert out.is_meta
        assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
        assert [g.shape for g in torch.autograd.grad(out.sum(), metas)] == [x.shape for x in given]


def test_a_model_on_the_device_meta_counts_its_operations():
    with torch.device("meta"):
        model = Gpt(GptConfig.llama(vocabulary=50, dim=32, depth=2, heads=4, kv_heads=2))
        ids = torch.zeros(2, 7, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        assert model(ids).shape == (2, 7, 50)
    assert counter.get_total_flops() > 0


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace.* is deprecated")
@pytest.mark.parametrize("rows", [9, 5])
@pytest.mark.parametrize("name", TRACED)
def test_jit_tracing_records_the_call_or_says_what_to_write(name, rows):
    if name == "documents" and rows != 9:
        pytest.skip("documents of as many queries as keys")
    q, k, v, _ = tensors(9)

    def fn(q, k, v, backend=None):
        return attend(q, k, v, **TRACED[name], backend=backend)

    given = q[:, :, :rows].clone(), k, v
    if name not in SINGLE_CALLS:
        with pytest.raises(ValueError, match=r"torch.jit.trace cannot record this attention: .*backend='reference'"):
            torch.jit.trace(fn, given)
        return
    others = [torch.randn_like(x) for x in given]
    torch.testing.assert_close(torch.jit.trace(fn, given)(*others), fn(*others))


@pytest.mark.parametrize(
    "terms",
    [*TRACED.values(), {"score": R.Dot(scale=0.3)}, {"score": R.Cosine(3.0)}, {"mask": R.Padding((9, 0))}],
    ids=str,
)
@pytest.mark.parametrize("heads", [4, 2])
def test_sdpa_kernel_forbids_pytorchs_fused_kernel(terms, heads):
    """On the CPU its flash kernel is the only fused one; what is left is PyTorch's math, or our blocks."""
    q, k, v, _ = tensors(9, grad=True)
    given = q[:, :heads], k, v
    if heads == 2 and "bias" in terms:
        terms = {"bias": R.Alibi(2)}
    expected = attend(*given, **terms).sin().sum()
    expected_grads = torch.autograd.grad(expected, (q, k, v))
    with sdpa_kernel(SDPBackend.MATH), Operators() as operators:
        found = attend(*given, **terms).sin().sum()
        grads = torch.autograd.grad(found, (q, k, v))
    assert not [name for name in operators.names if "flash" in name]
    torch.testing.assert_close(found, expected)
    for ours, want in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(ours, want, atol=2e-5, rtol=1e-4)


class Operators(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


ONCE = "differentiable once; pass backend='reference' for second derivatives"
FUSED = {
    **{name: TRACED[name] for name in ("plain", "causal", "padded", "causal, padded", "window", "bias", "sink")},
    "scaled": {"score": R.Dot(scale=0.3)},
    "long window": {"mask": R.Causal() & R.Window(20)},
}


@pytest.mark.parametrize("name", FUSED)
def test_a_second_derivative_is_refused_in_our_words(name):
    q, k, v, _ = tensors(300 if name == "long window" else 9)
    q.requires_grad_()

    def loss(q):
        return attend(q, k, v, **FUSED[name]).sin().sum()

    (once,) = torch.autograd.grad(loss(q), q, create_graph=True)
    (plain,) = torch.autograd.grad(loss(q), q)
    torch.testing.assert_close(once, plain)
    with pytest.raises(RuntimeError, match=ONCE):
        once.sum().backward()


@pytest.mark.parametrize("terms", [{}, {"mask": R.Causal()}, {"mask": R.Padding((9, 4))}], ids=str)
def test_a_second_derivative_is_refused_in_our_words_within_torch_func(terms):
    q, k, v, _ = tensors(9)

    def loss(q):
        return attend(q, k, v, **terms).sin().sum()

    torch.testing.assert_close(torch.func.grad(loss)(q), torch.autograd.grad(loss(q.requires_grad_()), q)[0])
    with pytest.raises(RuntimeError, match=ONCE):
        torch.func.jacrev(torch.func.grad(loss))(q.detach())


def test_pytorchs_math_has_second_derivatives():
    q, k, v, _ = tensors(5)
    q.requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        (once,) = torch.autograd.grad(attend(q, k, v, mask=R.Causal()).sin().sum(), q, create_graph=True)
    (stored,) = torch.autograd.grad(
        attend(q, k, v, mask=R.Causal(), backend="reference").sin().sum(), q, create_graph=True
    )
    twice, want = (torch.autograd.grad(x.square().sum(), q)[0] for x in (once, stored))
    torch.testing.assert_close(twice, want)
