"""Attention of recurrent decoders against the equations of the papers, written out in float64."""

import math

import pytest
import torch

from regard import Padding, Sparsemax
from regard.nn.recurrent import (
    BahdanauAttention,
    ConcatScore,
    Coverage,
    DotScore,
    LocationScore,
    LuongAttention,
    Memory,
)

B, T, N, QUERY, STATE, DIM = 3, 5, 7, 6, 4, 9
LENGTHS = torch.tensor([7, 1, 4])
SCORES = ["dot", "general", "concat", "location"]


def bahdanau(**options):
    return BahdanauAttention(QUERY, STATE, DIM, **options).double()


def luong(score):
    return LuongAttention(QUERY, QUERY if score == "dot" else STATE, score=score).double()


LAYERS = {"bahdanau": bahdanau} | {score: lambda score=score: luong(score) for score in SCORES}


@pytest.fixture(params=LAYERS)
def layer(request):
    return LAYERS[request.param]()


def inputs(layer):
    width = QUERY if isinstance(layer.score, DotScore) else STATE
    return torch.randn(B, T, QUERY, dtype=torch.float64), torch.randn(B, N, width, dtype=torch.float64)


def softmax(scores):
    top = max(scores)
    powers = [math.exp(s - top) for s in scores]
    return [p / sum(powers) for p in powers]


def written_out(score, query, states, lengths):
    """sum_j softmax_j(score(h_t, s_j, j)) s_j, a loop over everything; the weights beside it."""
    b, t = query.shape[:2]
    context = torch.zeros(b, t, states.shape[2], dtype=torch.float64)
    A = torch.zeros(b, t, states.shape[1], dtype=torch.float64)
    for row in range(b):
        for step in range(t):
            scores = [float(score(query[row, step], states[row, j], j)) for j in range(int(lengths[row]))]
            for j, weight in enumerate(softmax(scores)):
                A[row, step, j] = weight
                context[row, step] += weight * states[row, j]
    return context, A


def equation(layer):
    """The score of a layer, as its paper writes it."""
    score = layer.score
    if isinstance(score, ConcatScore):
        W, U, v = score.query.weight.detach(), score.key.weight.detach(), score.vector.detach()
        return lambda h, s, j: v @ torch.tanh(W @ h + U @ s)
    if isinstance(score, LocationScore):
        return lambda h, s, j: (score.weight.detach() @ h)[j]
    if hasattr(score, "weight"):
        return lambda h, s, j: h @ score.weight.detach() @ s
    return lambda h, s, j: h @ s


def test_contexts_and_weights_are_those_of_the_papers(layer):
    query, states = inputs(layer)
    memory = layer.remember(states, LENGTHS)
    context, A = written_out(equation(layer), query, states, LENGTHS)
    torch.testing.assert_close(layer(query, memory), context, rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.weights(query, memory).dense()[:, 0], A, rtol=0, atol=1e-12)


def test_concat_is_one_matrix_over_both_sides_laid_end_to_end():
    layer = luong("concat")
    query, states = inputs(layer)
    W = torch.cat((layer.score.query.weight, layer.score.key.weight), 1).detach()
    v = layer.score.vector.detach()
    context, _ = written_out(lambda h, s, j: v @ torch.tanh(W @ torch.cat((h, s))), query, states, LENGTHS)
    torch.testing.assert_close(layer(query, layer.remember(states, LENGTHS)), context, rtol=0, atol=1e-12)


def test_one_step_and_all_steps_give_the_same_numbers(layer):
    query, states = inputs(layer)
    memory = layer.remember(states, LENGTHS)
    together = layer(query, memory)
    for t in range(T):
        torch.testing.assert_close(layer(query[:, t], memory), together[:, t], rtol=0, atol=1e-13)
        torch.testing.assert_close(
            layer.weights(query[:, t], memory).dense(),
            layer.weights(query, memory)[:, :, t : t + 1],
            rtol=0,
            atol=1e-13,
        )


def test_padding_changes_nothing_whatever_it_holds(layer):
    query, states = inputs(layer)
    for row, length in enumerate(LENGTHS):
        states[row, length:] = float("nan")
    context = layer(query, layer.remember(states, LENGTHS))
    for row, length in enumerate(LENGTHS):
        alone = layer(query[row : row + 1], layer.remember(states[row : row + 1, :length]))
        torch.testing.assert_close(context[row : row + 1], alone, rtol=0, atol=1e-13)


def test_lengths_a_list_and_keep_say_the_same(layer):
    query, states = inputs(layer)
    keep = torch.arange(N) < LENGTHS[:, None]
    context = layer(query, layer.remember(states, LENGTHS))
    assert torch.equal(layer(query, layer.remember(states, keep)), context)
    assert torch.equal(layer(query, layer.remember(states, LENGTHS.tolist())), context)


def test_an_empty_source_gives_zeros(layer):
    query, states = inputs(layer)
    context = layer(query, layer.remember(states, torch.tensor([0, 3, 0])))
    assert context[0].count_nonzero() == context[2].count_nonzero() == 0
    assert context[1].count_nonzero() > 0


@pytest.mark.parametrize("rows", [[2, 0, 1], [1, 1, 1, 0, 2, 2], [2]])
@pytest.mark.parametrize("keep", [False, True])
def test_selected_memory_is_the_memory_of_the_selected_rows(layer, rows, keep):
    query, states = inputs(layer)
    padding = torch.arange(N) < LENGTHS[:, None] if keep else LENGTHS
    rows = torch.tensor(rows)
    selected = layer.remember(states, padding).select(rows)
    expected = layer(query[rows], layer.remember(states[rows], padding[rows]))
    torch.testing.assert_close(layer(query[rows], selected), expected, rtol=0, atol=1e-13)


def test_memory_without_padding_can_be_selected():
    memory = Memory.of(torch.arange(3.0)[:, None, None], torch.arange(3.0)[:, None, None], None)
    assert memory.select(torch.tensor([2, 0])).values.flatten().tolist() == [2, 0]


def test_keys_are_projected_once_a_sentence():
    layer = bahdanau()
    calls = []
    layer.score.key.register_forward_hook(lambda *_: calls.append(1))
    query, states = inputs(layer)
    memory = layer.remember(states, LENGTHS)
    for t in range(T):
        layer(query[:, t], memory)
    assert len(calls) == 1


def test_gradients_are_right_in_queries_states_and_parameters(layer):
    query, states = (x[:2, :3].clone().requires_grad_() for x in inputs(layer))
    asking = Asking(layer)
    parameters = dict(asking.named_parameters())

    def run(query, states, *values):
        return torch.func.functional_call(asking, dict(zip(parameters, values, strict=True)), (query, states))

    assert torch.autograd.gradcheck(run, (query, states, *parameters.values()), fast_mode=True)


class Asking(torch.nn.Module):
    """Remember and ask, as one module."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, query, states):
        return self.layer(query, self.layer.remember(states, torch.tensor([3, 2])))


def test_state_dict_makes_the_round_trip(layer, request):
    other = LAYERS[request.node.callspec.params["layer"]]()
    query, states = inputs(layer)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(query, other.remember(states)), layer(query, layer.remember(states)))


def test_autocast_stays_near_float32(layer):
    layer = layer.float()
    query, states = (x.float() for x in inputs(layer))
    exact = layer(query, layer.remember(states, LENGTHS))
    with torch.autocast("cpu", torch.bfloat16):
        half = layer(query, layer.remember(states, LENGTHS))
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), exact, rtol=0.05, atol=0.05)


def test_every_layer_attends_through_its_core(layer):
    seen = []
    layer.core.register_forward_hook(
        lambda core, args, terms, out: seen.append((args[0].shape, terms["mask"])), with_kwargs=True
    )
    query, states = inputs(layer)
    layer(query, layer.remember(states, LENGTHS))
    ((shape, mask),) = seen
    assert shape[:3] == (B, 1, T)
    assert isinstance(mask, Padding)


def test_other_normalizers_fit():
    layer = bahdanau(normalize=Sparsemax())
    query, states = inputs(layer)
    A = layer.weights(query * 20, layer.remember(states * 20)).dense()
    torch.testing.assert_close(A.sum(-1), torch.ones_like(A[..., 0]))
    assert (A == 0).any()


def test_location_needs_a_place_for_each_state():
    layer = LuongAttention(QUERY, STATE, score=LocationScore(QUERY, places=5))
    with pytest.raises(ValueError, match="5 rows but there are 7 keys"):
        layer(torch.randn(B, QUERY), layer.remember(torch.randn(B, N, STATE)))


def test_the_state_width_is_that_of_the_query_unless_given():
    layer = LuongAttention(QUERY)
    assert layer(torch.randn(B, QUERY), layer.remember(torch.randn(B, N, QUERY))).shape == (B, QUERY)


# Coverage


@torch.no_grad()
def test_coverage_follows_the_equations():
    layer = bahdanau(coverage=Coverage(DIM))
    torch.nn.init.normal_(layer.coverage.bias)
    query, states = inputs(layer)
    W, U, v = layer.score.query.weight, layer.score.key.weight, layer.score.vector
    w, bias = layer.coverage.weight, layer.coverage.bias
    memory = layer.remember(states, LENGTHS)
    covered = torch.zeros(B, N, dtype=torch.float64)
    for t in range(T):
        A = layer.weights(query[:, t], memory)
        context = layer(query[:, t], memory)
        overlap = memory.overlap(A)
        memory = memory.cover(A)
        for row in range(B):
            n = int(LENGTHS[row])
            scores = [
                float(v @ torch.tanh(U @ states[row, j] + W @ query[row, t] + w * covered[row, j] + bias))
                for j in range(n)
            ]
            a = torch.zeros(N, dtype=torch.float64)
            a[:n] = torch.tensor(softmax(scores), dtype=torch.float64)
            torch.testing.assert_close(context[row], a @ states[row], rtol=0, atol=1e-12)
            torch.testing.assert_close(overlap[row], torch.minimum(a, covered[row]).sum(), rtol=0, atol=1e-12)
            covered[row] += a
        torch.testing.assert_close(memory.coverage, covered, rtol=0, atol=1e-12)


def test_coverage_travels_with_selected_rows():
    layer = bahdanau(coverage=Coverage(DIM))
    query, states = inputs(layer)
    memory = layer.remember(states, LENGTHS)
    memory = memory.cover(layer.weights(query[:, 0], memory))
    rows = torch.tensor([2, 2, 0])
    context = layer(query[:, 1], memory)
    torch.testing.assert_close(layer(query[rows, 1], memory.select(rows)), context[rows], rtol=0, atol=1e-13)


def test_gradients_flow_through_coverage_to_earlier_steps():
    layer = bahdanau(coverage=Coverage(DIM))
    query, states = inputs(layer)
    query.requires_grad_()
    memory = layer.remember(states, LENGTHS)
    memory = memory.cover(layer.weights(query[:, 0], memory))
    layer(query[:, 1], memory).sum().backward()
    assert query.grad[0, 0].abs().max() > 0
    assert layer.coverage.weight.grad.abs().max() > 0


def test_coverage_works_in_half_precision():
    layer = bahdanau(coverage=Coverage(DIM)).bfloat16()
    query, states = (x.bfloat16() for x in inputs(layer))
    memory = layer.remember(states, LENGTHS)
    memory = memory.cover(layer.weights(query[:, 0], memory))
    assert layer(query[:, 1], memory).dtype == torch.bfloat16


# Errors


def test_coverage_refuses_all_steps_at_once():
    layer = bahdanau(coverage=Coverage(DIM))
    query, states = inputs(layer)
    with pytest.raises(ValueError, match=r"one step .* got shape \(3, 5, 6\); loop over the steps"):
        layer(query, layer.remember(states))
    layer(query[:, :1], layer.remember(states))


def test_coverage_needs_a_memory_that_holds_one():
    layer = bahdanau(coverage=Coverage(DIM))
    query, states = inputs(layer)
    plain = bahdanau()
    with pytest.raises(ValueError, match="memory must hold a coverage"):
        layer(query[:, 0], plain.remember(states))
    memory = plain.remember(states)
    with pytest.raises(ValueError, match="memory has no coverage; build the layer with coverage="):
        memory.cover(plain.weights(query[:, 0], memory))


def test_a_score_without_a_name_we_know_raises():
    with pytest.raises(ValueError, match=r"score must be one of dot, general, concat, location.*'cosine'"):
        LuongAttention(QUERY, score="cosine")


def test_dot_needs_one_width():
    with pytest.raises(ValueError, match="query_dim=6 and state_dim=4; use score='general'"):
        LuongAttention(QUERY, STATE, score="dot")


@pytest.mark.parametrize("padding", [torch.tensor([3, 4]), torch.ones(3, 6, dtype=torch.bool), torch.tensor(3)])
def test_padding_of_another_shape_raises(padding):
    with pytest.raises(ValueError, match=r"lengths of shape \(3,\) or keep of shape \(3, 7\)"):
        bahdanau().remember(torch.randn(B, N, STATE, dtype=torch.float64), padding)


def test_a_query_of_other_dims_raises(layer):
    query, states = inputs(layer)
    with pytest.raises(ValueError, match=r"one step, or \(b, t, query_dim\), got shape \(3, 1, 5, 6\)"):
        layer(query[:, None], layer.remember(states))
