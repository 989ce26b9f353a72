"""Captioner: three ways to look at an image, what each pays for looking, and draws whose gradient is the right one."""

import itertools

import pytest
import torch
from torch import nn

from regard.decode import greedy
from regard.models import captioner
from regard.models.captioner import Captioner, CaptionerConfig
from tests.models.generator_checks import (
    END,
    START,
    D,
    accuracy,
    any_chunking_gives_what_the_whole_pass_gives,
    begun,
    by_hand,
    decoded_attention_is_that_of_the_hypotheses,
    targets,
    trained,
    wrong_batches_are_refused,
)

VOCABULARY, B, M, SIDE = 19, 4, 6, 13
KINDS = {
    "soft": {},
    "gru": {"cell": "gru", "layers": 2, "tied": True},
    "hard": {"attention": "hard"},
    "transformer": {"attention": "transformer", "heads": 2, "layers": 2},
}
RECURRENT = ["soft", "gru", "hard"]


def config(**options):
    sizes = {"vocabulary": VOCABULARY, "start": START, "widths": (4, 6), "dim": 8, "hidden": 12}
    return CaptionerConfig(**{**sizes, "dropout": 0.0, **options})


def model_of(kind):
    model = Captioner(config(**KINDS[kind])).to(D).eval()
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            parameter.mul_(2)  # so that attention is not flat
    return model


@pytest.fixture(params=KINDS)
def model(request):
    return model_of(request.param)


def batch_of():
    image = torch.rand(B, 3, SIDE, SIDE + 4, generator=torch.Generator().manual_seed(0), dtype=D)
    return {"image": image, **targets(B, M, VOCABULARY)}


@torch.no_grad()
def test_any_chunking_gives_what_the_whole_pass_gives(model):
    batch = batch_of()
    whole = model(batch["image"], begun(batch["target"]))
    any_chunking_gives_what_the_whole_pass_gives(model, batch, whole, ways=2 ** (M - 1))


@torch.no_grad()
def test_each_image_alone_and_in_another_order_gives_the_same(model):
    batch, order = batch_of(), torch.tensor([2, 0, 3, 1])
    inputs = begun(batch["target"])
    together = model(batch["image"], inputs)
    torch.testing.assert_close(model(batch["image"][order], inputs[order]), together[order])
    for n in range(B):
        torch.testing.assert_close(model(batch["image"][n : n + 1], inputs[n : n + 1])[0], together[n])


@torch.no_grad()
def test_the_state_of_selected_rows_is_that_of_their_images(model):
    batch, rows = batch_of(), torch.tensor([3, 3, 0, 1, 1, 1])
    inputs = begun(batch["target"])
    _, state = model.step(inputs[:, :3], model.start(batch))
    logits, _ = model.step(inputs[rows, 3], state.select(rows))
    torch.testing.assert_close(logits, model(batch["image"][rows], inputs[rows, :4])[:, 3])


@pytest.mark.parametrize("kind", RECURRENT)
def test_attention_over_places_follows_the_hypotheses_of_a_beam(kind):
    model, batch = model_of(kind), batch_of()
    decoded_attention_is_that_of_the_hypotheses(model, batch, "source", B)
    assert model.watched() is model
    _, state = model.step(torch.full((B,), START), model.start(batch))
    assert state.attention["source"].shape == (B, 1, 4 * 5)  # 13 x 17 halved twice


def test_attention_of_the_transformer_follows_the_hypotheses_of_a_beam():
    decoded_attention_is_that_of_the_hypotheses(model_of("transformer").watched(), batch_of(), "cross.1", B)


def test_places_differ_by_row_and_column():
    places = captioner.GridTokens(6, 8)(torch.zeros(1, 6, 3, 4))
    assert torch.unique(places[0], dim=0).shape == (12, 8)
    grid = places.unflatten(1, (3, 4))[0]
    torch.testing.assert_close(grid[:, 0, :4], grid[:, 3, :4])
    torch.testing.assert_close(grid[0, :, 4:], grid[2, :, 4:])


def test_features_of_another_network():
    model = Captioner(config(), features=nn.Identity()).to(D).eval()
    grid = torch.rand(2, 6, 3, 5, dtype=D)
    assert model.start({"image": grid}).memory.values.shape == (2, 15, 8)


@pytest.mark.parametrize("kind", ["hard", "transformer"])
def test_the_loss_is_the_cross_entropy_of_targets_shifted_once(kind):
    model, batch = model_of(kind), batch_of()
    logits = model(batch["image"], begun(batch["target"])).detach()
    loss = model.loss(batch)
    assert loss.sum.item() == pytest.approx(by_hand(logits, batch["target"], batch["target_lengths"]), abs=1e-8)
    assert int(loss.count) == int(batch["target_lengths"].sum())


def test_soft_attention_pays_for_places_looked_at_more_or_less_than_once():
    model, batch = Captioner(config(doubly=0.3)).to(D).eval(), batch_of()
    inputs, lengths = begun(batch["target"]), batch["target_lengths"]
    _, state = model.decoder(inputs, model.start(batch))
    A = state.weights()[:, 0].detach()
    price = 0.0
    for row, n in enumerate(lengths.tolist()):
        for place in range(A.shape[2]):
            price += (1 - float(A[row, :n, place].sum())) ** 2
    plain = by_hand(model(batch["image"], inputs).detach(), batch["target"], lengths)
    assert model.loss(batch).sum.item() == pytest.approx(plain + 0.3 * price, abs=1e-8)


def test_what_stands_in_the_padding_changes_nothing(model):
    batch = batch_of()
    beyond = torch.arange(M + 2) >= batch["target_lengths"][:, None]
    longer = nn.functional.pad(batch["target"], (0, 2)).masked_fill(beyond, 9)
    torch.testing.assert_close(model.loss({**batch, "target": longer}).sum, model.loss(batch).sum)


def test_places_are_drawn_by_their_chances():
    torch.manual_seed(0)
    chances = torch.tensor([0.5, 0.0, 0.3, 0.2])
    shares = captioner.draw_positions(chances.expand(20_000, 4)).bincount(minlength=4) / 20_000
    torch.testing.assert_close(shares, chances, atol=0.015, rtol=0)
    assert shares[1] == 0


def test_hard_attention_looks_at_the_mean_and_in_training_also_at_one_place():
    model, batch = model_of("hard"), batch_of()
    asked = []
    model.decoder.modulate.register_forward_pre_hook(lambda _, args: asked.append(args[1].detach()))
    model.eval().loss(batch)
    by_mean = torch.cat(asked, 1)
    values = model.places(model.features(batch["image"])).detach()
    assert torch.cdist(by_mean, values).amin(-1).min() > 1e-6
    asked.clear()
    model.train().loss(batch)
    first, second = torch.cat(asked, 1).chunk(2)
    torch.testing.assert_close(first, by_mean)
    assert torch.cdist(second, values).amin(-1).max() < 1e-6


def test_no_mean_is_computed_for_the_side_that_draws():
    model, rows = model_of("hard").train(), []
    model.decoder.attention.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    model.loss(batch_of())
    assert rows == [B] * M


def test_hard_attention_learns_by_the_gradient_of_the_expected_likelihood():
    """Thousands of draws for one image, against the sum over all places of both words."""
    model = Captioner(config(attention="hard", widths=(2,), hidden=4, dim=4, vocabulary=6, entropy=0.0)).to(D).train()
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            parameter.mul_(3)
    image, target = torch.rand(1, 3, 4, 2, dtype=D), torch.tensor([[4, END]])
    weights = [model.decoder.attention.score.query.weight, model.decoder.attention.score.vector]
    by_mean, draws = model.eval().loss({"image": image, "target": target}).sum, 20_000
    exact = torch.autograd.grad((by_mean + _expected(model.train(), image, target)) / 2, weights)
    batch = {"image": image.expand(draws, -1, -1, -1), "target": target.expand(draws, -1)}
    drawn = torch.autograd.grad(model.loss(batch).sum / draws, weights)
    for x, y in zip(drawn, exact, strict=True):
        assert (x - y).abs().max() < 0.03 * y.abs().max()


def _expected(model, image, target):
    """-sum over places s_1, s_2 of p(s_1) p(s_2 | s_1) log p(words | s): what hard attention minimizes."""
    states = model.start({"image": image})
    inputs = begun(target)
    n = states.memory.values.shape[1]
    total = 0.0
    for route in itertools.product(range(n), repeat=2):
        state, chance, cost = states, 1.0, 0.0
        for t, place in enumerate(route):
            h, state = model.decoder.read(inputs[:, t : t + 1], state)
            chance = chance * model.decoder.look(h, state)[1][0, 0, 0, place]
            logits, state = model.decoder.write(h, state.memory.values[:, None, place], state)
            cost = cost - logits[0, 0].log_softmax(-1)[target[0, t]]
        total = total + chance * cost
    return total


def test_rewards_leave_the_number_of_the_loss_as_it_is():
    batch, losses = batch_of(), []
    for reinforce in (0.0, 5.0):
        model = Captioner(config(attention="hard", reinforce=reinforce)).to(D)
        for n, parameter in enumerate(model.parameters()):
            nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(n))
        torch.manual_seed(1)
        losses.append(model.loss(batch).sum.item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)


def test_a_draw_is_rewarded_by_what_it_gains_from_there_on():
    model, gains = model_of("hard"), torch.tensor([[1.0, -2.0, 0.5, 0.0]], dtype=D)
    chance = [torch.tensor([-1.0], dtype=D, requires_grad=True) for _ in range(4)]
    draws = [captioner.Draw(one, torch.zeros_like(one)) for one in chance]
    price = model._reward_draws(draws, gains, torch.tensor([[True, True, True, False]]))
    assert price.item() == 0
    assert [one.item() for one in torch.autograd.grad(price, chance)] == [0.25, 0.75, -0.25, 0.0]


@pytest.mark.learning
@pytest.mark.parametrize(
    ("kind", "steps"), [("soft", 100), ("transformer", 100), pytest.param("hard", 300, marks=pytest.mark.slow)]
)
def test_it_learns_a_handful_of_captions_by_heart(kind, steps):
    options = {**KINDS[kind], "channels": 1, "widths": (8, 16), "dim": 32, "hidden": 48, "doubly": 0.0}
    batch = {"image": lights(B, seed=5)["image"], **targets(B, 3, VOCABULARY)}
    assert len({tuple(x.flatten().gt(0.9).tolist()) for x in batch["image"]}) == B
    model = trained(Captioner(config(**options)), lambda step: batch, steps=steps, rate=0.01)
    assert model.loss(batch).mean.item() < 0.05
    assert accuracy(model, batch) == 1.0


@pytest.mark.learning
@pytest.mark.parametrize("kind", ["transformer", pytest.param("soft", marks=pytest.mark.slow)])
def test_it_learns_to_say_where_a_light_is(kind):
    options = {**KINDS[kind], "vocabulary": 12, "channels": 1, "widths": (8, 16), "dim": 32, "hidden": 48}
    model = Captioner(config(**options, doubly=0.0))
    trained(model, lambda step: lights(48, step), steps=100, rate=0.01)
    assert accuracy(model, lights(200, seed=10_000)) >= 0.99


def lights(b, seed):
    """A bright spot somewhere, and the words for its row and its column."""
    random = torch.Generator().manual_seed(seed)
    row, column = torch.randint(4, (2, b), generator=random)
    image = torch.rand(b, 1, 16, 16, generator=random) * 0.2
    for n in range(b):
        image[n, :, 4 * row[n] : 4 * row[n] + 4, 4 * column[n] : 4 * column[n] + 4] += 1
    target = torch.stack((4 + row, 8 + column, torch.full((b,), END)), 1)
    return {"image": image, "target": target, "target_lengths": torch.full((b,), 3)}


def test_captions_are_written_by_greedy_search(model):
    found = greedy(model, batch_of(), [[START]] * B, end=END, max_length=5)
    assert all(1 <= len(one.tokens) <= 5 for one in found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "both"}, "attention must be one of 'soft', 'hard', 'transformer', got 'both'"),
        ({"widths": ()}, "widths must name the channels of at least one stage, got none"),
        ({"widths": 4}, r"widths must name the channels of each stage, got 4; pass \(32, 64, 128\)"),
        ({"widths": (8, 0)}, "widths must be 1 or more, got 0"),
        ({"widths": (4.5,)}, "widths must be a whole number, got 4.5"),
        ({"tied": "no"}, "tied must be True or False, got 'no'"),
        ({"dim": 7}, "dim must be even, half for the row and half for the column of a position, got 7"),
        ({"start": 19}, "start must be a token of the vocabulary of 19, got 19"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_configs_that_cannot_be(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        config(**options)


def test_wrong_batches_are_refused(model):
    wrong_batches_are_refused(model, batch_of())
