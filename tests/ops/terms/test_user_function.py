"""Functions as terms: their tensors are found however they are reached, and get gradients."""

import pytest
import torch
from torch import nn

from regard import Alibi, Bias, Causal, Dot, Score, attend, weights
from regard.ops.terms.user_function import UserFunction
from tests.ops.inputs import qkv

TABLE = torch.randn(4, 50)


class Distance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 4)

    def bias(self, b, h, i, j):
        return self.table((i - j).abs()).gather(-1, h.expand((i - j).shape)[..., None]).squeeze(-1)


def find(fn):
    return UserFunction("Bias.of", fn, "b, h, i, j").tensors


def test_tensors_of_closures_globals_defaults_and_modules_are_found():
    local, module = torch.randn(4), Distance()
    assert find(lambda b, h, i, j: local[h] * i)[0] is local
    assert find(lambda b, h, i, j: TABLE[h, j])[0] is TABLE
    assert find(lambda b, h, i, j, x=local: x[h])[0] is local
    assert find(module.bias)[0] is module.table.weight
    found = find(lambda b, h, i, j: torch.stack([TABLE[:, 0], local]).sum())
    assert found[0] is TABLE
    assert found[1] is local
    assert find(lambda b, h, i, j: (i - j) * torch.tensor(2.0)) == ()


def test_a_tensor_that_the_function_returns_as_it_is_is_found():
    x = torch.zeros((), requires_grad=True)
    assert find(lambda b, h, i, j: x)[0] is x
    q, k, v = qkv()
    slopes = torch.zeros((), requires_grad=True)
    score = Score.of(lambda score, b, h, i, j: slopes, Dot())
    out = attend(q, k, v, score=score, mask=Causal(), backend="tiled")
    assert torch.autograd.grad(out.sum(), slopes)[0].abs() < 1e-4


@pytest.mark.usefixtures("small_blocks")
def test_a_module_in_a_closure_learns_on_the_blockwise_backend():
    q, k, v = qkv()
    module = Distance()

    def bias(b, h, i, j):
        gap = (i - j).abs().expand(1, 4, q.shape[2], -1) if i.ndim else (i - j).abs()
        return module.table(gap).gather(-1, h.expand(gap.shape)[..., None]).squeeze(-1)

    def gradient(backend):
        out = attend(q, k, v, bias=Bias.of(lambda b, h, i, j: module.table.weight[(i - j).abs(), h]), backend=backend)
        return torch.autograd.grad(out.square().sum(), module.table.weight)[0]

    assert torch.allclose(gradient("tiled"), gradient("reference"), atol=1e-4)
    assert Bias.of(bias).tensors()[0] is module.table.weight


@pytest.mark.usefixtures("small_blocks")
def test_the_gradient_of_a_captured_tensor_is_that_of_a_term():
    q, k, v = qkv()
    slopes = torch.rand(4, requires_grad=True)
    both = Bias.of(lambda b, h, i, j: -slopes[h] * (i - j).abs()), Alibi(slopes=slopes)
    grads = [torch.autograd.grad(attend(q, k, v, bias=x, backend="tiled").square().sum(), slopes)[0] for x in both]
    assert torch.allclose(*grads, atol=1e-4)


def test_a_function_of_flex_attention_is_a_score_as_it_stands():
    q, k, v = qkv()

    def score_mod(score, b, h, q_idx, kv_idx):
        return score - 0.25 * (q_idx - kv_idx).abs()

    want = attend(q, k, v, bias=Alibi(slopes=torch.full((4,), 0.25)))
    assert torch.allclose(attend(q, k, v, score=Score.of(score_mod)), want, atol=1e-5)


def test_what_a_function_saves_for_its_backward_survives_the_mask():
    q, k, v = (x.requires_grad_() for x in qkv())
    score = Score.of(lambda score, b, h, i, j: torch.tanh(score))
    grads = [
        torch.autograd.grad(attend(q, k, v, score=score, mask=Causal(), backend=backend).sum(), q)[0]
        for backend in ("tiled", "reference")
    ]
    assert torch.allclose(*grads, atol=1e-5)


def test_weights_notice_a_captured_tensor_that_changed():
    q, k, _ = qkv()
    slopes = torch.rand(4)
    A = weights(q, k, bias=Bias.of(lambda b, h, i, j: slopes[h] * j))
    slopes.add_(1)
    with pytest.raises(RuntimeError, match="was changed in place"):
        A.entropy()


def test_a_function_that_reads_another_tensor_by_now_is_refused():
    q, k, v = qkv()
    slopes = torch.rand(4, requires_grad=True)
    bias = Bias.of(lambda b, h, i, j: slopes[h] * j)
    slopes = torch.rand(4, requires_grad=True)
    with pytest.raises(ValueError, match=r"Bias.of\(<lambda>\) closes over other tensors .* call Bias.of\(...\) again"):
        attend(q, k, v, bias=bias)


def test_a_tensor_that_hides_from_pytorch_functions_is_refused():
    hidden = torch.ones(1, requires_grad=True)

    def fn(b, h, i, j):
        with torch._C.DisableTorchFunction():
            return hidden * i

    with pytest.raises(ValueError, match="reads a tensor that regard cannot see"):
        Bias.of(fn)


FAILURES = [
    (lambda: Bias.of(3), TypeError, r"Bias.of takes a function of \(b, h, i, j\), got int"),
    (lambda: Bias.of(lambda i, j: i), TypeError, r"the function gets \(b, h, i, j\), .*, and takes \(i, j\); write"),
    (lambda: Score.of(lambda b, h, i, j: i), TypeError, r"gets \(score, b, h, i, j\), .* after the score, and takes"),
    (lambda: Bias.of(lambda b, h, i, j: i > j), TypeError, r"tensor of numbers, got torch.bool; .* write mask=Rule"),
    (lambda: Bias.of(lambda b, h, i, j: 1.0), TypeError, r"must return a tensor of numbers, got float"),
    (
        lambda: Score.of(lambda score, b, h, i, j: score, Causal()),
        TypeError,
        r"Score.of takes a score to change that is a product, .* got",
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), FAILURES, ids=lambda x: None)
def test_a_function_that_cannot_be_a_term_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_function_of_numbers_is_explained_when_it_runs_on_many():
    q, k, v = qkv()
    with pytest.raises(TypeError, match="and, or, not and if do not work"):
        attend(q, k, v, bias=Bias.of(lambda b, h, i, j: i if i > j else j), backend="tiled")


def test_a_closure_made_anew_has_the_code_of_the_one_before():
    made = [UserFunction("Bias.of", lambda b, h, i, j, n=n: i * n, "b, h, i, j") for n in range(2)]
    assert made[0].code == made[1].code
