"""AttentionPool against its equation, written out in float64."""

import math

import pytest
import torch

from regard import Dot, Sigmoid
from regard.nn.pooling import AttentionPool

B, N, DIM, HIDDEN = 3, 7, 6, 4
LENGTHS = torch.tensor([7, 1, 4])
SHAPES = {
    "linear": {},
    "hidden": {"hidden": HIDDEN},
    "queries": {"queries": 3, "hidden": HIDDEN},
    "heads": {"queries": 3, "heads": 2, "hidden": HIDDEN},
    "linear heads": {"heads": 3},
}


@pytest.fixture(params=SHAPES)
def pool(request):
    return AttentionPool(DIM, **SHAPES[request.param]).double()


def tokens():
    return torch.randn(B, N, DIM, dtype=torch.float64)


def written_out(pool, x, lengths):
    queries, heads = pool.query.detach(), pool.heads
    out = torch.zeros(len(x), len(queries), DIM, dtype=torch.float64)
    for b in range(len(x)):
        for r, u in enumerate(queries):
            for h in range(heads):
                own, part = (slice(h * n // heads, (h + 1) * n // heads) for n in (len(u), DIM))
                keys = [pool.key(x[b, j]).detach()[own] for j in range(int(lengths[b]))]
                powers = [math.exp(float(u[own] @ key)) for key in keys]
                for j, power in enumerate(powers):
                    out[b, r, part] += power / sum(powers) * x[b, j, part]
    return out


def test_pooled_vectors_are_those_of_the_equation(pool):
    x = tokens()
    expected = written_out(pool, x, LENGTHS)
    expected = expected[:, 0] if pool.queries is None else expected
    torch.testing.assert_close(pool(x, LENGTHS), expected, rtol=0, atol=1e-12)


def test_the_hidden_layer_is_a_tanh():
    pool = AttentionPool(DIM, hidden=HIDDEN).double()
    x = tokens()
    layer = pool.key[0]
    torch.testing.assert_close(pool.key(x), torch.tanh(x @ layer.weight.T + layer.bias))


def test_a_learned_query_and_a_linear_score_are_the_same():
    pool = AttentionPool(DIM).double()
    linear = torch.nn.Linear(DIM, 1).double()
    pool.query.data.copy_(linear.weight)
    x = tokens()
    expected = (linear(x).softmax(1) * x).sum(1)
    torch.testing.assert_close(pool(x), expected, rtol=0, atol=1e-13)


def test_weights_times_tokens_is_the_pooled_vector(pool):
    x = tokens()
    A = pool.weights(x, LENGTHS)
    assert A.shape == (B, pool.heads, pool.queries or 1, N)
    values = x.unflatten(-1, (pool.heads, -1)).transpose(1, 2)
    pooled = (A @ values).transpose(1, 2).flatten(2)
    torch.testing.assert_close(pool(x, LENGTHS), pooled[:, 0] if pool.queries is None else pooled)


def test_padding_changes_nothing_whatever_it_holds(pool):
    x = tokens()
    for row, length in enumerate(LENGTHS):
        x[row, length:] = float("nan")
    pooled = pool(x, LENGTHS)
    assert torch.equal(pool(x, torch.arange(N) < LENGTHS[:, None]), pooled)
    assert torch.equal(pool(x, LENGTHS.tolist()), pooled)
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(pooled[row], pool(x[row : row + 1, :length])[0], rtol=0, atol=1e-13)


def test_nothing_but_padding_gives_zeros(pool):
    assert pool(tokens(), torch.tensor([0, 0, 0])).count_nonzero() == 0


def test_the_order_of_tokens_does_not_matter(pool):
    x = tokens()
    torch.testing.assert_close(pool(x[:, torch.randperm(N)]), pool(x), rtol=0, atol=1e-13)


def test_gradients_reach_every_parameter_and_are_right(pool):
    x = tokens()[:2, :4].clone().requires_grad_()
    pool(x).square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in pool.parameters())
    assert torch.autograd.gradcheck(lambda x: pool(x, torch.tensor([4, 2])), (x,))


def test_state_dict_makes_the_round_trip(pool, request):
    other = AttentionPool(DIM, **SHAPES[request.node.callspec.params["pool"]]).double()
    other.load_state_dict(pool.state_dict())
    x = tokens()
    assert torch.equal(other(x), pool(x))


def test_autocast_stays_near_float32(pool):
    pool, x = pool.float(), tokens().float()
    with torch.autocast("cpu", torch.bfloat16):
        half = pool(x, LENGTHS)
    torch.testing.assert_close(half.float(), pool(x, LENGTHS), rtol=0.05, atol=0.05)


def test_it_attends_through_its_core(pool):
    seen = []
    pool.core.register_forward_hook(lambda core, args, out: seen.append(args[0].shape[:3]))
    pool(tokens())
    assert seen == [(B, pool.heads, pool.queries or 1)]


def test_other_scores_and_normalizers_fit():
    x = tokens()
    pool = AttentionPool(DIM, score=Dot(), normalize=Sigmoid()).double()
    A = torch.sigmoid(x @ pool.query[0] / math.sqrt(DIM))
    torch.testing.assert_close(pool(x), (A[..., None] * x).sum(1), rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["heads", "queries"])
def test_there_is_at_least_one_head_and_one_query(name):
    with pytest.raises(ValueError, match=f"{name} must be 1 or more, got 0"):
        AttentionPool(DIM, **{name: 0})


def test_the_repr_says_how_it_is_cut():
    assert "queries=3, heads=2" in repr(AttentionPool(DIM, queries=3, heads=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"heads": 4}, "dim must be a multiple of heads, got dim=6 and heads=4"), ({"heads": 3, "hidden": 4}, "hidden=4")],
)
def test_widths_with_no_even_split_raise(options, message):
    with pytest.raises(ValueError, match=message):
        AttentionPool(DIM, **options)


@pytest.mark.parametrize("queries", [None, 2])
def test_it_is_exported_with_batch_and_length_left_open(queries):
    pool = AttentionPool(DIM, queries=queries, heads=2).double()
    b, n = torch.export.Dim("b"), torch.export.Dim("n")
    program = torch.export.export(pool, (tokens(), LENGTHS), dynamic_shapes=({0: b, 1: n}, {0: b})).module()
    x, lengths = torch.randn(2, 11, DIM, dtype=torch.float64), torch.tensor([11, 5])
    torch.testing.assert_close(program(x, lengths), pool(x, lengths))
