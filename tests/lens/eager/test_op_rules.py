"""Rules of torch functions: the symbolic value of a result is the tensor that the function returned."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.lens.eager.matmul import MatrixProduct
from regard.lens.eager.op_rules import OP_RULES, OpCall, SymbolicTensors
from regard.lens.eager.symbolic_scores import Scores, ScoresWithSink, SoftmaxOutput
from regard.lens.eager.unnormalized import Exponentials

B, H, I, J, D = 2, 3, 5, 7, 4
LOW = -1e30
AT = SimpleNamespace(dtype=torch.float32, device=torch.device("cpu"))  # coordinates, of which a map reads these
BIAS = torch.linspace(-1, 1, I * J).view(I, J)
HIDDEN = torch.ones(I, J, dtype=torch.bool).triu(2)

# By name: how to call the function on scores of shape (B, H, I, J).
ON_SCORES = {
    **dict.fromkeys(("mul", "mul_", "multiply", "div", "div_", "divide", "true_divide"), lambda f, x: (f, x, 0.5)),
    **dict.fromkeys(("add", "add_", "sub", "sub_", "subtract"), lambda f, x: (f, x, BIAS)),
    **dict.fromkeys(("masked_fill", "masked_fill_"), lambda f, x: (f, x, HIDDEN, -torch.inf)),
    "__setitem__": lambda f, x: (f, x, HIDDEN.expand(x.shape), LOW),
    "where": lambda f, x: (torch.where, ~HIDDEN, x, torch.tensor(LOW)),
    **dict.fromkeys(("max", "maximum"), lambda f, x: (f, x, torch.tensor(LOW))),
    **dict.fromkeys(("clamp", "clamp_", "clip"), lambda f, x: (f, x, LOW, -LOW)),
    **dict.fromkeys(("float", "double", "contiguous", "clone", "detach"), lambda f, x: (f, x)),
    **dict.fromkeys(("to", "type"), lambda f, x: (f, x, torch.float64)),
    "type_as": lambda f, x: (f, x, x.double()),
    **dict.fromkeys(("half", "bfloat16"), lambda f, x: (f, x)),
    **dict.fromkeys(("view", "reshape"), lambda f, x: (f, x, B, 1, H, I, J)),
    "flatten": lambda f, x: (f, x, 0, 1),
    "unflatten": lambda f, x: (f, x, 0, (B, 1)),
    "squeeze": lambda f, x: (f, x, 0),
    "unsqueeze": lambda f, x: (f, x, 0),
    "__getitem__": lambda f, x: (f, x, (None, ..., slice(None))),
    "permute": lambda f, x: (f, x, 1, 0, 2, 3),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), lambda f, x: (f, x, 0, 1)),
}


def scores_of(q, k):
    """A tensor of scores, and the symbolic tensors that know it."""
    symbolic, x = SymbolicTensors(), q @ k.mT
    symbolic.add(x, Scores.of(MatrixProduct(q, k)))
    return symbolic, x


def apply_rule(symbolic, name, func, *args):
    out = func(*args)
    return OP_RULES[name](OpCall(symbolic, name, args, {}, out)), out if out is not None else args[0]


def dense(scores: Scores) -> Tensor:
    x = scores.q @ scores.k.mT * scores.scale
    for added in scores.added:
        x = x + added
    for hidden in scores.hidden:
        x = x.masked_fill(hidden, -torch.inf)
    return x


@pytest.mark.parametrize("name", ON_SCORES)
def test_scores_after_a_function_have_the_softmax_of_its_result(name):
    symbolic, x = scores_of(torch.randn(B, H, I, D), torch.randn(B, H, J, D))
    value, out = apply_rule(symbolic, name, *ON_SCORES[name](getattr(Tensor, name), x))
    assert isinstance(value, Scores)
    tolerance = 0.05 if out.dtype.itemsize == 2 else 1e-5
    difference = dense(value).softmax(-1).flatten(0, -3) - out.float().softmax(-1).flatten(0, -3)
    assert difference.abs().max() < tolerance


@pytest.mark.parametrize("name", ["mT", "T", "t"])
def test_a_transposed_matrix_of_scores_swaps_queries_and_keys(name):
    q, k = torch.randn(I, D), torch.randn(J, D)
    symbolic, x = scores_of(q, k)
    out = x.T
    value = OP_RULES[name](OpCall(symbolic, name, (x,), {}, out))
    assert value.q is k
    assert value.k is q


@pytest.mark.parametrize("name", ["cat", "concat", "concatenate", "pad"])
def test_one_more_column_is_a_sink(name):
    symbolic, x = scores_of(torch.randn(B, H, I, D), torch.randn(B, H, J, D))
    args = (F.pad, x, (0, 1)) if name == "pad" else (torch.cat, [x, torch.ones(B, H, I, 1)], -1)
    value, out = apply_rule(symbolic, name, *args)
    assert isinstance(value, ScoresWithSink)
    assert torch.equal(value.keys(out), x)
    assert torch.equal(value.column, out[..., -1:])


@pytest.mark.parametrize(
    ("name", "func"),
    [("softmax", F.softmax), ("special_softmax", torch.special.softmax), ("gumbel_softmax", F.gumbel_softmax)],
)
def test_a_softmax_is_that_of_its_scores_unless_noise_was_added(name, func):
    symbolic, x = scores_of(torch.randn(B, H, I, D), torch.randn(B, H, J, D))
    out = func(x, dim=-1)
    args = (x, -1) if name != "gumbel_softmax" else (x, 1.0, False, 1e-10, -1)
    value = OP_RULES[name](OpCall(symbolic, name, args, {}, out))
    assert isinstance(value, SoftmaxOutput)
    assert value.logits is x
    assert value.changes == (("drawn at random",) if name == "gumbel_softmax" else ())


@pytest.mark.parametrize("name", ["dropout", "dropout_", "nan_to_num", "nan_to_num_", "expand", "expand_as"])
def test_weights_stay_weights(name):
    symbolic, x = scores_of(torch.randn(B, H, I, D), torch.randn(B, H, J, D))
    weights = x.softmax(-1)
    behind = name.startswith("expand")
    weights = weights.unsqueeze(-1) if behind else weights
    symbolic.add(weights, SoftmaxOutput(None, x, int(behind)))
    out = weights.expand(B, H, I, J, D) if behind else weights.clone()
    value = OP_RULES[name](OpCall(symbolic, name, (weights,), {}, out))
    assert isinstance(value, SoftmaxOutput)
    assert torch.equal(value.weights_in(out).reshape(x.shape), x.softmax(-1))


# By name: how to call the function on exp(scores), and the product of a softmax with these numbers that it returns.
ON_EXPONENTIALS = {
    "mul": lambda e: (torch.mul, e, 1 / e.sum(-1, keepdim=True)),
    "div": lambda e: (torch.div, e, e.sum(-1, keepdim=True)),
    "div_": lambda e: (Tensor.div_, e, e.sum(-1, keepdim=True)),
    "normalize": lambda e: (F.normalize, e, 1, -1),
}


@pytest.mark.parametrize("name", ON_EXPONENTIALS)
@pytest.mark.parametrize("exp", ["exp", "exp_"])
def test_exponentials_divided_by_their_sums_are_a_softmax(name, exp):
    symbolic, x = scores_of(torch.randn(B, H, I, D), torch.randn(B, H, J, D))
    softmax = x.softmax(-1)
    exponentials, e = apply_rule(symbolic, exp, getattr(Tensor, exp), x)
    assert isinstance(exponentials, Exponentials)
    symbolic.add(e, exponentials)
    value, out = apply_rule(symbolic, name, *ON_EXPONENTIALS[name](e))
    assert isinstance(value, SoftmaxOutput)
    assert value.scores is exponentials.scores
    torch.testing.assert_close(out, softmax)
    torch.testing.assert_close(value.logits.softmax(-1), softmax)


@pytest.mark.parametrize("name", ["log_softmax", "special_log_softmax"])
def test_exponentials_of_a_log_softmax_are_a_softmax(name):
    symbolic, x = scores_of(torch.randn(B, H, I, D), torch.randn(B, H, J, D))
    value, out = apply_rule(symbolic, name, F.log_softmax, x, -1)
    symbolic.add(out, value)
    weights, _ = apply_rule(symbolic, "exp", torch.exp, out)
    assert isinstance(weights, SoftmaxOutput)
    torch.testing.assert_close(dense(weights.scores).softmax(-1), x.softmax(-1))


ELEMENTWISE = {
    **dict.fromkeys(("sigmoid", "special_expit"), (torch.sigmoid, ())),
    "sigmoid_": (Tensor.sigmoid_, ()),
    "relu": (F.relu, ()),
    "relu_": (Tensor.relu_, ()),
    "clamp_min": (torch.clamp_min, (0,)),
    "clamp_min_": (Tensor.clamp_min_, (0,)),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_weights_of_single_scores_have_a_normalizer(name):
    func, args = ELEMENTWISE[name]
    symbolic, x = scores_of(torch.randn(B, H, I, D), torch.randn(B, H, J, D))
    before = x.clone()
    value, out = apply_rule(symbolic, name, func, x, *args)
    assert isinstance(value, SoftmaxOutput)
    torch.testing.assert_close(value.normalize.map(before, None, AT), out)
    torch.testing.assert_close(value.normalize.map(value.logits, None, AT), out)


@pytest.mark.parametrize(("name", "args"), [("pow", (2,)), ("pow_", (2,)), ("square", ()), ("square_", ())])
def test_a_power_of_relu_weights_is_part_of_the_normalizer(name, args):
    symbolic, x = scores_of(torch.randn(B, H, I, D), torch.randn(B, H, J, D))
    value, out = apply_rule(symbolic, "relu", F.relu, x)
    symbolic.add(out, value)
    value, out = apply_rule(symbolic, name, getattr(Tensor, name), out, *args)
    torch.testing.assert_close(value.normalize.map(x, None, AT), out)


@pytest.mark.parametrize("name", ["neg", "neg_", "negative", "negative_"])
def test_the_sign_of_scores_is_part_of_their_scale(name):
    symbolic, x = scores_of(torch.randn(B, H, I, D), torch.randn(B, H, J, D))
    value, out = apply_rule(symbolic, name, getattr(Tensor, name), x)
    torch.testing.assert_close(dense(value), out)


@pytest.mark.parametrize("name", ["tril", "tril_", "triu", "triu_"])
def test_a_triangle_of_exponentials_hides_keys(name):
    symbolic, x = scores_of(torch.randn(B, H, I, D), torch.randn(B, H, J, D))
    value, e = apply_rule(symbolic, "exp", torch.exp, x)
    symbolic.add(e, value)
    value, out = apply_rule(symbolic, name, getattr(Tensor, name), e, 0)
    assert isinstance(value, Exponentials)
    torch.testing.assert_close(dense(value.scores).exp(), out)


def test_a_softmin_is_the_softmax_of_the_negative_scores():
    symbolic, x = scores_of(torch.randn(B, H, I, D), torch.randn(B, H, J, D))
    value, out = apply_rule(symbolic, "softmin", F.softmin, x, -1)
    torch.testing.assert_close(dense(value.scores).softmax(-1), out)
    torch.testing.assert_close(value.logits.softmax(-1), out)


def test_a_write_that_no_rule_followed_ends_the_tracking():
    symbolic, x = scores_of(torch.randn(B, H, I, D), torch.randn(B, H, J, D))
    assert symbolic.get(x) is not None
    x.exp_()
    assert symbolic.get(x) is None


def test_every_rule_has_a_test():
    others = {"mT", "T", "t", "cat", "concat", "concatenate", "pad", "softmax", "gumbel_softmax"}
    others |= {"special_softmax", "softmin", "log_softmax", "special_log_softmax", "exp", "exp_", "normalize"}
    others |= {"pow", "pow_", "square", "square_", "neg", "neg_", "negative", "negative_"}
    others |= {"tril", "tril_", "triu", "triu_", *ELEMENTWISE}
    weights = {"dropout", "dropout_", "nan_to_num", "nan_to_num_", "expand", "expand_as"}
    assert ON_SCORES.keys() | others | weights == OP_RULES.keys()
