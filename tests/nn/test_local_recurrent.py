"""Local attention against Luong's equations 9 and 10, written out in float64."""

import math

import pytest
import torch

from regard.nn.local_recurrent import LocalAttention
from regard.nn.recurrent import DotScore

B, T, N, DIM, D = 3, 6, 11, 4, 2
LENGTHS = torch.tensor([11, 2, 7])
CENTERS = ["monotonic", "predictive"]


def local(center, radius=D, **options):
    return LocalAttention(DIM, radius=radius, center=center, **options).double()


def inputs():
    return torch.randn(B, T, DIM, dtype=torch.float64), torch.randn(B, N, DIM, dtype=torch.float64)


def written_out(layer, center, query, states, lengths, radius=D):
    W = layer.score.weight.detach()
    context = torch.zeros(B, T, DIM, dtype=torch.float64)
    A = torch.zeros(B, T, N, dtype=torch.float64)
    for b in range(B):
        S = int(lengths[b])
        for t in range(T):
            h = query[b, t]
            if center == "predictive":
                W_p, v_p = layer.center.hidden.weight.detach(), layer.center.vector.weight.detach()[0]
                p = S / (1 + math.exp(-float(v_p @ torch.tanh(W_p @ h))))  # eq. 9
            else:
                p = t
            window = [s for s in range(S) if p - radius <= s <= p + radius]
            powers = [math.exp(float(h @ W @ states[b, s])) for s in window]
            for s, power in zip(window, powers, strict=True):
                a = power / sum(powers)
                if center == "predictive":
                    a *= math.exp(-((s - p) ** 2) / (2 * (radius / 2) ** 2))  # eq. 10
                A[b, t, s] = a
                context[b, t] += a * states[b, s]
    return context, A


@pytest.mark.parametrize("radius", [0.5, 2, 3.75, 20])
@pytest.mark.parametrize("center", CENTERS)
def test_contexts_and_weights_are_those_of_the_paper(center, radius):
    layer = local(center, radius)
    query, states = inputs()
    memory = layer.remember(states, LENGTHS)
    context, A = written_out(layer, center, query * 3, states, LENGTHS, radius)
    torch.testing.assert_close(layer(query * 3, memory), context, rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.weights(query * 3, memory).dense()[:, 0], A, rtol=0, atol=1e-12)


def test_without_lengths_every_source_is_full():
    layer = local("predictive")
    query, states = inputs()
    context, _ = written_out(layer, "predictive", query, states, [N] * B)
    torch.testing.assert_close(layer(query, layer.remember(states)), context, rtol=0, atol=1e-12)


def test_predictive_weights_are_not_normalized_again():
    layer = local("predictive")
    query, states = inputs()
    total = layer.weights(query, layer.remember(states)).dense().sum(-1)
    assert (total < 1).all()
    assert (total > 0).all()


@pytest.mark.parametrize("center", CENTERS)
def test_one_step_and_all_steps_give_the_same_numbers(center):
    layer = local(center)
    query, states = inputs()
    memory = layer.remember(states, LENGTHS)
    together = layer(query, memory)
    for t in range(T):
        torch.testing.assert_close(layer(query[:, t], memory, step=t), together[:, t], rtol=0, atol=1e-13)
    torch.testing.assert_close(layer(query[:, 2:5], memory, step=2), together[:, 2:5], rtol=0, atol=1e-13)


@pytest.mark.parametrize("center", CENTERS)
def test_padding_changes_nothing_whatever_it_holds(center):
    layer = local(center)
    query, states = inputs()
    for row, length in enumerate(LENGTHS):
        states[row, length:] = float("nan")
    context = layer(query, layer.remember(states, LENGTHS))
    for row, length in enumerate(LENGTHS):
        alone = layer(query[row : row + 1], layer.remember(states[row : row + 1, :length]))
        torch.testing.assert_close(context[row : row + 1], alone, rtol=0, atol=1e-13)


def test_a_monotonic_window_past_the_source_gives_zeros():
    layer = local("monotonic", 1)
    query, states = inputs()
    context = layer(query, layer.remember(states, LENGTHS))
    assert context[1, :3].abs().amin() > 0
    assert context[1, 3:].count_nonzero() == 0


@pytest.mark.parametrize("center", CENTERS)
def test_selected_memory_is_the_memory_of_the_selected_rows(center):
    layer = local(center)
    query, states = inputs()
    rows = torch.tensor([2, 0, 0, 1])
    selected = layer(query[rows], layer.remember(states, LENGTHS).select(rows))
    torch.testing.assert_close(selected, layer(query, layer.remember(states, LENGTHS))[rows], rtol=0, atol=1e-13)


def test_gradients_reach_the_predicted_centre():
    layer = local("predictive")
    query, states = inputs()
    layer(query, layer.remember(states, LENGTHS)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("center", CENTERS)
def test_gradients_are_right(center):
    layer = local(center)
    query, states = (x[:2, :4].clone().requires_grad_() for x in inputs())
    assert torch.autograd.gradcheck(
        lambda q, s: layer(q, layer.remember(s, torch.tensor([4, 2]))), (query, states), fast_mode=True
    )


@pytest.mark.parametrize("center", CENTERS)
def test_state_dict_makes_the_round_trip(center):
    layer, other = local(center), local(center)
    query, states = inputs()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(query, other.remember(states)), layer(query, layer.remember(states)))


@pytest.mark.parametrize("center", CENTERS)
def test_autocast_stays_near_float32(center):
    layer = local(center).float()
    query, states = (x.float() for x in inputs())
    exact = layer(query, layer.remember(states, LENGTHS))
    with torch.autocast("cpu", torch.bfloat16):
        half = layer(query, layer.remember(states, LENGTHS))
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), exact, rtol=0.1, atol=0.1)


def test_centres_keep_their_places_in_half_precision():
    layer = local("predictive").bfloat16()
    memory = layer.remember(torch.zeros(1, 1000, DIM, dtype=torch.bfloat16))
    center = layer.center(torch.randn(1, T, DIM, dtype=torch.bfloat16), memory, None)
    assert center.dtype == torch.float32


def test_it_attends_through_its_core():
    layer = local("predictive")
    seen = []
    layer.core.register_forward_hook(lambda core, args, terms, out: seen.append(repr(terms["mask"])), with_kwargs=True)
    query, states = inputs()
    layer(query, layer.remember(states, LENGTHS))
    assert seen == ["Near(float64[3, 1, 6], 2) & Padding(int64[3])"]


def test_other_scores_and_widths_fit():
    layer = LocalAttention(DIM, 5, radius=2, score="concat")
    assert layer(torch.randn(B, T, DIM), layer.remember(torch.randn(B, N, 5))).shape == (B, T, 5)
    assert isinstance(LocalAttention(DIM, radius=2, score="dot").score, DotScore)


def test_the_repr_says_how_far_it_looks():
    assert "radius=2.5" in repr(local("monotonic", 2.5))


def test_a_single_monotonic_query_must_say_its_step():
    layer = local("monotonic")
    query, states = inputs()
    with pytest.raises(ValueError, match="needs the number of the target step, from 0; write layer"):
        layer(query[:, 0], layer.remember(states))


def test_a_centre_without_a_name_we_know_raises():
    with pytest.raises(ValueError, match=r"center must be one of monotonic, predictive.*'uniform'"):
        local("uniform")


@pytest.mark.parametrize("radius", [0, -1])
def test_a_radius_must_be_above_zero(radius):
    with pytest.raises(ValueError, match="radius must be above 0"):
        local("monotonic", radius)


def test_a_keep_mask_is_refused():
    with pytest.raises(TypeError, match=r"got a bool mask: .*; pass keep\.sum\(1\)"):
        local("predictive").remember(inputs()[1], torch.ones(B, N, dtype=torch.bool))
