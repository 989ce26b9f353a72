"""Attention through the layers against the published definitions, on dense stacks in float64."""

import itertools

import pytest
import torch

from regard import Causal, Diagonal, Prefix, Sigmoid, Window, weights
from regard.lens.analysis import head_measures as measures
from regard.lens.analysis.flow import (
    attention_flow,
    gradient_attention,
    norm_attention,
    relevance,
    rollout,
    rollout_matrix,
    value_norms,
)

B, H, G, N, D, E = 2, 4, 2, 11, 6, 5
close = torch.testing.assert_close


def stack_of(layers=3, n=N, heads=H, **terms):
    q = torch.randn(layers, B, heads, n, D, dtype=torch.float64) * 2
    k = torch.randn(layers, B, min(heads, G), n, D, dtype=torch.float64)
    return [weights(q[layer], k[layer], **terms) for layer in range(layers)]


STACKS = {
    "plain": {},
    "causal": {"mask": Causal()},
    "rows that do not sum to one": {"normalize": Sigmoid(-1.0), "mask": Causal()},
    "empty rows": {"mask": Causal() & ~Prefix(2)},
}
every_stack = pytest.mark.parametrize("terms", STACKS.values(), ids=STACKS)


def mixed(A, residual=0.5):
    """Heads averaged, the residual added, rows divided by their sums: `b n n`."""
    W = residual * torch.eye(N, dtype=torch.float64) + (1 - residual) * A.dense().mean(1)
    return W / W.sum(-1, keepdim=True)


def rolled(stack, residual=0.5):
    joint = torch.eye(N, dtype=torch.float64).expand(B, N, N)
    for A in stack:
        joint = mixed(A, residual) @ joint
    return joint


@every_stack
@pytest.mark.parametrize("residual", [0.5, 0.2])
def test_rollout_of_a_token_is_its_row_of_the_product(terms, residual, small_blocks):
    stack = stack_of(**terms)
    joint = rolled(stack, residual)
    real = (torch.stack([A.dense() for A in stack]) > 0).any(0).any(1).any(1)  # tokens that some query sees
    close(rollout_matrix(stack, residual=residual), joint * real[..., None])
    for token in (0, 4, N - 1):
        close(rollout(stack, token=token, residual=residual), joint[:, token])
    close(rollout(stack, token=torch.tensor([3, 7]), residual=residual), torch.stack([joint[0, 3], joint[1, 7]]))
    close(rollout(stack, token=None, residual=residual), (joint * real[..., None]).sum(1) / real.sum(1)[:, None])


def test_the_default_is_the_last_token_and_any_iterable_is_a_stack():
    stack = stack_of(mask=Causal())
    close(rollout(iter(stack)), rolled(stack)[:, -1])
    close(rollout(dict(enumerate(stack)).values(), token=-2), rolled(stack)[:, -2])


def test_rollout_without_residual_leaves_rows_without_keys_empty():
    stack = stack_of(1, mask=Causal() & ~Prefix(2))
    close(rollout(stack, token=1, residual=0.0), torch.zeros(B, N, dtype=torch.float64))
    close(rollout(stack, token=5, residual=0.0), stack[0].dense().mean(1)[:, 5])


def test_rollout_sums_to_one_at_lengths_where_the_matrix_does_not_fit():
    q, k = torch.randn(2, 1, 1, 2, 12_000, 4)
    stack = [weights(q[0], k[0], mask=Causal() & Window(64)) for _ in range(2)]
    r = rollout(stack, token=9_000)
    close(r.sum(-1), torch.ones(1))
    assert r[0, 9_001:].abs().max() == 0
    assert r[0, : 9_000 - 2 * 63].abs().max() == 0
    with pytest.raises(ValueError, match="the dense matrix takes"):
        rollout_matrix(stack)


def gradients_of(stack):
    """Values, gradients of the outputs and of the matrices, of a loss that reads every output."""
    values = [torch.randn(B, G, N, E, dtype=torch.float64) for _ in stack]
    dense = [A.dense().requires_grad_() for A in stack]
    outs = [A @ v.repeat_interleave(H // G, 1) for A, v in zip(dense, values, strict=True)]
    for out in outs:
        out.retain_grad()
    sum(out.sin().sum() for out in outs).backward()
    return values, [out.grad for out in outs], dense


@every_stack
@pytest.mark.parametrize("entries", [2**21, 200])
def test_relevance_is_the_rule_of_chefer_and_others(terms, entries, monkeypatch):
    monkeypatch.setattr(measures, "CHUNK_ENTRIES", entries)
    stack = stack_of(**terms)
    values, gradients, dense = gradients_of(stack)
    R = torch.eye(N, dtype=torch.float64).expand(B, N, N)
    for A in dense:
        R = R + (A * A.grad).clamp(min=0).mean(1) @ R
    for token in (0, 5, -1):
        close(relevance(stack, values, gradients, token=token), R[:, token].detach())


def test_gradient_attention_is_the_sum_of_attention_times_gradient():
    stack = stack_of(mask=Causal())
    for A, v, grad, dense in zip(stack, *gradients_of(stack), strict=True):
        close(gradient_attention(A, v, grad), (dense * dense.grad).sum(-2).detach())


@pytest.mark.parametrize("g", [1, 2, 4])
def test_value_norms_are_lengths_of_transformed_values(g):
    v, output = torch.randn(B, g, N, E, dtype=torch.float64), torch.randn(7, H * E, dtype=torch.float64)
    found = value_norms(v, output)
    for b, h, j in itertools.product(range(B), range(H), range(N)):
        transformed = output[:, h * E : (h + 1) * E] @ v[b, h // (H // g), j]
        close(found[b, h, j], transformed.norm())


@pytest.mark.parametrize("g", [1, 2, 4])
def test_norm_attention_is_the_length_of_the_weighted_sum_over_heads(g):
    (A,) = stack_of(1, mask=Causal())
    v, output = torch.randn(B, g, N, E, dtype=torch.float64), torch.randn(7, H * E, dtype=torch.float64)
    transformed = torch.einsum("c h e, b h j e -> b h j c", output.view(7, H, E), v.repeat_interleave(H // g, 1))
    expected = torch.einsum("b h i j, b h j c -> b i j c", A.dense(), transformed).norm(dim=-1)
    for token in (0, 6, -1):
        close(norm_attention(A, v, output, token=token), expected[:, token])
    close(norm_attention(A, v, output, token=torch.tensor([2, 9]))[1], expected[1, 9])


def pushed(capacity, source, sink):
    """Maximum flow by breadth-first augmenting paths, over a dense matrix of capacities."""
    residual, total = capacity.clone(), 0.0
    while True:
        before, queue = {source: None}, [source]
        for node in queue:
            for other in (residual[node] > 1e-12).nonzero().flatten().tolist():
                if other not in before:
                    before[other] = node
                    queue.append(other)
        if sink not in before:
            return total
        path = [sink]
        while before[path[-1]] is not None:
            path.append(before[path[-1]])
        edges = list(zip(path[1:], path, strict=False))
        amount = min(residual[edge].item() for edge in edges)
        for a, b in edges:
            residual[a, b] -= amount
            residual[b, a] += amount
        total += amount


@pytest.mark.parametrize("terms", [{}, {"mask": Causal()}], ids=["plain", "causal"])
def test_attention_flow_is_the_maximum_flow_to_each_token(terms):
    n, depth, token = 5, 3, 3
    stack = stack_of(depth, n, **terms)
    found = attention_flow(stack, token=token)
    for b in range(B):
        capacity = torch.zeros((depth + 1) * n, (depth + 1) * n, dtype=torch.float64)
        for level, A in enumerate(stack):
            W = 0.5 * A.dense()[b].mean(0) + 0.5 * torch.eye(n, dtype=torch.float64)
            capacity[(level + 1) * n : (level + 2) * n, level * n : (level + 1) * n] = W
        expected = [pushed(capacity, depth * n + token, source) for source in range(n)]
        close(found[b], torch.tensor(expected, dtype=torch.float64), atol=1e-7, rtol=0)


def test_attention_flow_of_one_layer_is_the_layer_itself():
    stack = stack_of(1)
    close(attention_flow(stack, token=4), mixed(stack[0])[:, 4], atol=1e-8, rtol=0)
    each = attention_flow(stack, token=torch.tensor([4, 0]))
    close(each[1], mixed(stack[0])[1, 0], atol=1e-8, rtol=0)


def test_attention_flow_refuses_too_many_weights_above_zero():
    stack = stack_of(2, mask=Causal())
    assert attention_flow(stack, edges=N * (N + 1)).shape == (B, N)
    looking_back = stack_of(2, mask=Causal() & ~Diagonal())  # itself a token reaches through the residual alone
    assert attention_flow(looking_back, edges=N * (N + 1)).shape == (B, N)
    with pytest.raises(ValueError, match="got 132 or more"):
        attention_flow(looking_back, edges=N * (N + 1) - 1)
    with pytest.raises(ValueError, match=r"at most edges=131 weights above 0, got 132 or more of 242.*use rollout"):
        attention_flow(stack, edges=N * (N + 1) - 1)


def test_bad_arguments_are_named():
    stack = stack_of(2)
    A = stack[0]
    v, grad, output = torch.randn(B, G, N, E), torch.randn(B, H, N, E), torch.randn(7, H * E)
    with pytest.raises(ValueError, match="the stack holds no layers"):
        rollout([])
    with pytest.raises(ValueError, match="a stack must be self-attention over the same tokens"):
        rollout([A, stack_of(1, N + 1)[0]])
    with pytest.raises(ValueError, match="a stack must be self-attention"):
        rollout([weights(torch.randn(1, 1, 3, 4), torch.randn(1, 1, 5, 4))])
    with pytest.raises(ValueError, match=r"weights must have dims b h i j here.*A.select"):
        rollout([weights(torch.randn(2, 1, 1, 3, 4), torch.randn(2, 1, 1, 3, 4))])
    for token in (N, -N - 1, torch.tensor([0, N])):
        with pytest.raises(ValueError, match="token must be"):
            rollout(stack, token=token)
    with pytest.raises(TypeError, match="token must be a whole number"):
        rollout(stack, token=1.5)
    with pytest.raises(TypeError, match="token must hold whole numbers"):
        rollout(stack, token=torch.tensor([0.5, 1.0]))
    with pytest.raises(ValueError, match="token must hold one position for each of the 2 batch rows, got 3"):
        rollout(stack, token=torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match="residual must be from 0 to 1"):
        rollout(stack, residual=1.5)
    with pytest.raises(ValueError, match="edges must be 1 or more"):
        attention_flow(stack, edges=0)
    with pytest.raises(ValueError, match="values must have dims b=2, heads that divide 4"):
        relevance(stack, [v[:, :, 1:]] * 2, [grad] * 2)
    with pytest.raises(ValueError, match="gradients must have dims b=2, h=4"):
        relevance(stack, [v] * 2, [grad[:, 1:]] * 2)
    with pytest.raises(ValueError, match="gradient must have dims"):
        gradient_attention(A, v, grad[:, :, 1:])
    with pytest.raises(TypeError, match="v must be a tensor"):
        gradient_attention(A, None, grad)
    with pytest.raises(ValueError, match="v must have 4 dims"):
        value_norms(v[0], output)
    with pytest.raises(ValueError, match="output must have 2 dims"):
        value_norms(v, output[0])
    with pytest.raises(ValueError, match="output must have a multiple of 2 heads x 5 columns"):
        value_norms(v, output[:, 1:])
    with pytest.raises(ValueError, match="v and output must have the 4 heads and 11 keys of A"):
        norm_attention(A, v, output[:, : 2 * E])


def test_a_stack_is_of_weights():
    with pytest.raises(TypeError, match=r"a stack is a list of Weights.*got tuple.*tape.values\(\)"):
        rollout({("a", 0): weights(*torch.randn(2, 1, 1, 3, 4))})


def test_flow_through_nan_is_nan():
    q, k = torch.randn(2, 2, 1, 5, D)
    q[1, 0, 2] = torch.nan
    found = attention_flow([weights(q, k)], token=2)
    assert found.isnan().all(1).tolist() == [False, True]
    assert not found[0].isnan().any()


@pytest.mark.parametrize("entries", [2**21, 200])
def test_nan_in_unreached_rows_is_ignored(entries, monkeypatch):
    monkeypatch.setattr(measures, "CHUNK_ENTRIES", entries)
    stack = stack_of(mask=Causal())
    values, gradients, _ = gradients_of(stack)
    q = stack[1].call.q.clone()
    q[0, 2, 7] = torch.nan
    spoilt = [stack[0], weights(q, stack[1].call.k, mask=Causal()), stack[2]]
    for follow in (
        lambda stack, token: rollout(stack, token=token),
        lambda stack, token: rollout_matrix(stack)[:, token],
        lambda stack, token: relevance(stack, values, gradients, token=token),
        lambda stack, token: attention_flow(stack, token=token),
    ):
        close(follow(spoilt, 6), follow(stack, 6))
        found = follow(spoilt, 7)
        assert found[0].isnan().any()  # it comes through that row itself
        close(found[1], follow(stack, 7)[1])
