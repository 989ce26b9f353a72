"""Averages by a softmax that are no attention of queries over keys: left off the tape, and named."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.lens import capture
from regard.lens.eager.dim_origins import FEATURES, LEARNED, ROWS, STACKED, Factor, Piece
from regard.lens.eager.not_attention import CHANNELS, FACTORS, GATE, SLOTS, AverageOrigin, kind_of_average
from regard.nn import Attention

from .mixers import DIM, B, D, H, Mixer, N, attention, left_out, split


def efficient_in_one_projection(m, x):
    """Channels first, with memory keys before the tokens."""
    q, k, v = m.pixels(x.mT).chunk(3, dim=1)
    q, k, v = (t.reshape(B, H, D, N) for t in (q, k, v))
    memory_k, memory_v = (t.expand(B, -1, -1, -1) for t in m.memory)
    k, v = torch.cat((memory_k, k), -1), torch.cat((memory_v, v), -1)
    q, k = q.softmax(-2) * D**-0.5, k.softmax(-1)
    context = torch.einsum("bhdn,bhen->bhde", k, v)
    return torch.einsum("bhde,bhdn->bhen", context, q).reshape(B, DIM, N).mT


def efficient_in_two(m, x):
    q, k, v = (split(t) for t in (m.to_q(x), m.to_k(x), m.to_v(x)))
    q, k = q.softmax(-1) * D**-0.5, k.softmax(-2)
    context = torch.einsum("bhnd,bhne->bhde", k, v)
    return torch.einsum("bhnd,bhde->bhne", q, context).transpose(1, 2).flatten(2)


def efficient_of_one_head(m, x):
    q, k, v = m.to_q(x).softmax(-1), m.to_k(x).softmax(1), m.to_v(x)
    return q @ (k.mT @ v)


def factorized(m, x):
    """Keys softmaxed over the tokens, queries as they are."""
    q, k, v = m.qkv(x).reshape(B, N, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
    return (q @ (k.softmax(2).transpose(-2, -1) @ v)).transpose(1, 2).flatten(2)


def factorized_after_a_class_token(m, x):
    """The class token is cut off, the others pass a convolution over positions, and both are joined again."""
    tokens = F.conv1d(x[:, 1:].mT, m.pixels.weight[:DIM]).mT + x[:, 1:]
    return factorized(m, torch.cat((x[:, :1], tokens), 1))


def loop_over_channels(m, x):
    q, k, v = m.to_q(x).mT, m.to_k(x).mT, m.to_v(x).mT
    parts = []
    for n in range(H):
        key = F.softmax(k[:, n * D : (n + 1) * D], dim=2)
        query = F.softmax(q[:, n * D : (n + 1) * D], dim=1)
        context = key @ v[:, n * D : (n + 1) * D].transpose(1, 2)
        parts.append(context.transpose(1, 2) @ query)
    return torch.cat(parts, 1).mT


def lambdas(m, x):
    q, k, v = torch.split(m.pixels(x.mT), [DIM, DIM, DIM], dim=1)
    content = F.softmax(k, dim=-1) @ v.transpose(-1, -2)
    return q.mT @ content


@pytest.mark.parametrize(
    "mix",
    [
        efficient_in_one_projection,
        efficient_in_two,
        efficient_of_one_head,
        factorized,
        factorized_after_a_class_token,
        loop_over_channels,
        lambdas,
    ],
    ids=lambda f: f.__name__,
)
def test_feature_channels_are_no_queries(mix):
    assert left_out(mix) == {"linear attention"}


def random_features(m, x):
    """The kernel of Performer: features by a fixed matrix, here a buffer, cut off at 0."""
    q, k, v = (split(t) for t in (m.to_q(x), m.to_k(x), m.to_v(x)))
    q, k = (F.relu(torch.einsum("...id,...jd->...ij", t, m.grid[:5, :1].expand(B, H, 5, D))) + 1e-3 for t in (q, k))
    scale = 1 / torch.einsum("...nd,...d->...n", q, k.sum(dim=-2))
    context = torch.einsum("...nd,...ne->...de", k, v)
    return torch.einsum("...de,...nd,...n->...ne", context, q, scale).transpose(1, 2).flatten(2)


def test_features_of_a_fixed_kernel_are_no_keys():
    model = nn.Sequential(Mixer(random_features), Attention(DIM, H))
    with capture(model) as tape:
        model(torch.randn(B, N, DIM))
    assert tape.layers == ["1"]


def landmarks(m, x):
    """The three factors of a Nystrom approximation, the middle one inverted by iteration."""
    q, k, v = map(split, m.qkv(x).chunk(3, -1))
    near_q, near_k = (t.reshape(B, H, N // 2, 2, -1).mean(3) for t in (q, k))
    first, middle, last = (s.softmax(-1) for s in (q @ near_k.mT, near_q @ near_k.mT, near_q @ k.mT))
    inverse = middle.mT / middle.abs().sum(-1).max()
    unit = torch.eye(N // 2)
    for _ in range(2):
        product = middle @ inverse
        inverse = 0.25 * inverse @ (13 * unit - product @ (15 * unit - product @ (7 * unit - product)))
    return ((first @ inverse) @ (last @ v)).transpose(1, 2).flatten(2)


def test_factors_of_an_attention_are_not_shown_as_attention():
    assert left_out(landmarks) == {"factored attention"}


def apart(m, x):
    return torch.stack([expert(x) for expert in m.experts], -2)


def gate_with_temperature(m, x):
    return (F.softmax(m.gate(x) / 0.7, dim=-1).unsqueeze(-2) @ apart(m, x)).squeeze(-2)


def gate_with_noise(m, x):
    logits = m.gate(x) + torch.randn(B, N, 4)
    return torch.einsum("bne,bned->bnd", logits.softmax(-1), apart(m, x))


def gate_by_parameter(m, x):
    return ((x @ m.kernel).softmax(-1).unsqueeze(-1) * apart(m, x)).sum(-2)


def gate_of_texts(m, x):
    return torch.bmm((m.gate(x[:, 0]) / 0.7).softmax(-1)[:, None], apart(m, x[:, 0])).squeeze(1)


def gate_by_constants(m, x):
    gates = (m.to_q(x) @ torch.linspace(-1, 1, 4 * DIM).view(DIM, 4)).softmax(-1)
    return torch.einsum("bne,bned->bnd", gates, apart(m, x))


def plain_gate(m, x):
    return (m.gate(x).softmax(-1).unsqueeze(-1) * apart(m, x)).sum(-2)


@pytest.mark.parametrize(
    "mix",
    [gate_with_temperature, gate_with_noise, gate_by_parameter, gate_by_constants, gate_of_texts, plain_gate],
    ids=lambda f: f.__name__,
)
def test_experts_are_no_keys(mix):
    assert left_out(mix) == {"expert gate"}


def soft_experts(m, x, slots):
    """Slots of experts take averages of the tokens, and the tokens take averages of what the experts return."""
    logits = torch.einsum("bnd,esd->bnes", x, slots)
    dispatch, combine = logits.softmax(1), logits.flatten(2).softmax(-1)
    parts = torch.einsum("bnd,bnes->besd", x, dispatch).unbind(1)
    out = torch.stack([expert(part) for expert, part in zip(m.experts, parts, strict=True)], 1)
    return torch.einsum("bsd,bns->bnd", out.flatten(1, 2), combine)


def soft_experts_of_normed_slots(m, x):
    return soft_experts(m, F.normalize(x, dim=-1), F.normalize(m.slots, dim=-1) * 2)


def soft_experts_of_parameters(m, x):
    return soft_experts(m, x, m.slots)


def soft_experts_of_one_slot(m, x):
    return soft_experts(m, x, F.normalize(m.slots, dim=-1)[:, :1])


def soft_experts_by_matmul(m, x):
    logits = x @ F.normalize(m.words, dim=-1).T
    dispatch, combine = logits.softmax(1), logits.softmax(-1)
    return combine @ F.gelu(m.to_v(dispatch.mT @ x))


@pytest.mark.parametrize(
    "mix",
    [soft_experts_of_normed_slots, soft_experts_of_parameters, soft_experts_of_one_slot, soft_experts_by_matmul],
    ids=lambda f: f.__name__,
)
def test_slots_of_experts_are_no_queries(mix):
    assert left_out(mix) == {"soft mixture of experts"}


def coordinates_of_a_buffer(m, x):
    return m.to_k(x).mT.softmax(-1) @ m.grid


def coordinates_made_in_the_call(m, x):
    place = torch.stack(torch.meshgrid(torch.arange(N, dtype=torch.float32), torch.ones(1), indexing="ij"), -1)
    return m.to_k(x).mT.softmax(-1) @ (place.reshape(N, 2) / N)


def matched_coordinates(m, x):
    return (m.to_q(x) @ m.to_k(x).mT).softmax(-1) @ m.grid.expand(B, N, 2)


@pytest.mark.parametrize(
    "mix",
    [coordinates_of_a_buffer, coordinates_made_in_the_call, matched_coordinates],
    ids=lambda f: f.__name__,
)
def test_coordinates_are_no_values(mix):
    assert left_out(mix) == {"soft-argmax"}


def test_an_average_of_parameters_is_not_on_the_tape():
    model = nn.Sequential(Mixer(attention), Mixer(lambda m, x: (x @ m.words.T).softmax(-1) @ m.words))
    with capture(model) as tape, torch.no_grad():  # where a warning would be an error: it mixes no positions
        model[1](model[0](torch.randn(B, N, DIM)))
    assert tape.layers == ["0"]


def capsules(m, x):
    guesses = split(m.to_v(x)).unsqueeze(2)  # b capsules 1 inputs d
    logits = torch.zeros(B, H, 1, N, 1)
    for _ in range(3):
        out = (logits.softmax(3) * guesses).sum(3, keepdim=True)
        logits = logits + (guesses * out).sum(-1, keepdim=True)
    return out


def capsules_by_products(m, x):
    guesses = split(m.to_v(x))  # b capsules inputs d
    logits = torch.zeros(B, H, 1, N)
    for _ in range(3):
        out = logits.softmax(-1) @ guesses
        logits = logits + out @ guesses.mT
    return out


@pytest.mark.parametrize("mix", [capsules, capsules_by_products], ids=lambda f: f.__name__)
def test_routing_by_agreement_is_no_attention(mix):
    assert left_out(mix) == {"fixed weights", "routing"}


def pooled_by_seeds(m, x):
    """A softmax over tokens of five learned queries, whose keys and values are the tokens."""
    return torch.einsum("bnq,bnd->bqd", torch.tanh(m.seeds(x)).softmax(1), m.to_v(x))


def by_place(m, x):
    """Weights over positions that a linear map gives, as in the first recurrent models with attention."""
    return torch.bmm(nn.functional.linear(x[:, 0], m.pixels.weight[:N, :, 0]).softmax(-1)[:, None], x)


def cross_covariance(m, x):
    q, k, v = (split(t).mT for t in m.qkv(x).chunk(3, -1))
    return (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT).softmax(-1) @ v


def cached(m, x):
    m.cache[:] = m.to_k(x)
    return (m.to_q(x) @ m.cache.mT).softmax(-1) @ m.cache


def feedback(m, x):
    """One query over a memory, whose scores are added to those of learned embeddings of the places."""
    q, k, v = m.to_q(x[:, 0]), m.to_k(x), m.to_v(x)
    scores = torch.einsum("bhd,bjhd->bhj", q.unflatten(-1, (H, D)), k.unflatten(-1, (H, D)))
    places = torch.einsum("bhd,jhd->bhj", q.unflatten(-1, (H, D)), m.places[-N:])
    return torch.einsum("bhj,bjhd->bhd", (scores + places).softmax(-1), v.unflatten(-1, (H, D)))


def both_ways(m, x):
    """Two texts that attend to each other, by two softmaxes of the same scores."""
    scores = m.to_q(x) @ m.to_k(x.flip(1)).mT
    there, back = scores.softmax(-1), scores.softmax(-2)
    return there @ x + back.mT @ m.to_v(x)


def both_ways_with_learned_words(m, x):
    words = m.words.expand(B, -1, -1)
    scores = m.to_q(x) @ m.to_k(words).mT
    there, back = scores.softmax(-1), scores.softmax(-2)
    return there @ m.to_v(words) + (back.mT @ x).mean(1, keepdim=True)


def slots(m, x):
    """Three rounds of queries over the same keys and values."""
    k, v, state = m.to_k(x), m.to_v(x), torch.randn(B, 5, DIM)
    for _ in range(3):
        state = state + (m.to_q(state) @ k.mT * DIM**-0.5).softmax(-1) @ v
    return state


@pytest.mark.parametrize(
    "mix",
    [
        attention,
        pooled_by_seeds,
        by_place,
        cross_covariance,
        cached,
        feedback,
        both_ways,
        both_ways_with_learned_words,
        slots,
    ],
    ids=lambda f: f.__name__,
)
def test_attention_of_unusual_form_stays_on_the_tape(mix):
    model = Mixer(mix)
    with capture(model) as tape, torch.no_grad():  # where a warning would be an error
        model(torch.randn(B, N, DIM))
    assert tape.layers == [""]
    assert not tape.unseen


def dims(*kinds):
    return [() if kind is None else (Factor(kind, 3),) for kind in kinds]


PIECE = Piece((0, 1), 0, FEATURES)


@pytest.mark.parametrize(
    ("weights", "values", "facts", "kind"),
    [
        (dims(ROWS, ROWS, ROWS), dims(ROWS, ROWS, FEATURES), {"from_product": True}, None),
        (dims(ROWS, ROWS, ROWS), dims(ROWS, ROWS, ROWS), {"from_product": True}, FACTORS),
        (dims(ROWS, FEATURES, FEATURES), dims(ROWS, FEATURES, ROWS), {"from_product": True}, None),
        (dims(ROWS, FEATURES, ROWS), dims(ROWS, ROWS, FEATURES), {}, None),
        (dims(ROWS, FEATURES, ROWS), dims(ROWS, ROWS, FEATURES), {"is_shared": True}, SLOTS),
        (dims(LEARNED, None, ROWS), dims(ROWS, ROWS, FEATURES), {"is_shared": True}, SLOTS),
        (dims(ROWS, ROWS, ROWS), dims(ROWS, ROWS, FEATURES), {"is_shared": True}, None),
        (dims(ROWS, FEATURES, ROWS), dims(ROWS, ROWS, FEATURES), {"piece": PIECE}, CHANNELS),
        (dims(ROWS, FEATURES, ROWS), dims(ROWS, ROWS, FEATURES), {"has_feature_softmax": True}, CHANNELS),
        (dims(FEATURES, FEATURES, ROWS), dims(FEATURES, ROWS, FEATURES), {}, CHANNELS),
        (dims(ROWS, ROWS, FEATURES), dims(ROWS, FEATURES, FEATURES), {}, CHANNELS),
        (dims(ROWS, ROWS, FEATURES), dims(ROWS, ROWS, FEATURES), {}, None),
        (dims(ROWS, ROWS, FEATURES), dims(ROWS, STACKED, FEATURES), {}, GATE),
        (dims(ROWS, None, FEATURES), None, {}, None),
        (dims(ROWS, None, FEATURES), None, {"is_summed": True}, GATE),
        (dims(ROWS, ROWS, None, FEATURES), None, {}, GATE),
        (dims(ROWS, ROWS, None, FEATURES), dims(ROWS, ROWS, ROWS, FEATURES), {}, None),
        (None, None, {}, None),
    ],
)
def test_the_kind_is_told_by_the_origins_of_the_dims(weights, values, facts, kind):
    facts = {"piece": None} | facts
    defaults = dict.fromkeys(("from_product", "is_summed", "is_shared", "has_feature_softmax"), False)
    assert kind_of_average(AverageOrigin(weights, values, **(defaults | facts))) == kind
