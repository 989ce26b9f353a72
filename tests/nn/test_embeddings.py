"""Embeddings: what each vector is made of, what padding does, and what learns."""

import pytest
import torch
from torch import nn

from regard.nn.embeddings import (
    CharacterEmbedding,
    ConcatEmbedding,
    ContextualEmbedding,
    Frozen,
    Highway,
    LayerMix,
    SubwordEmbedding,
    SumEmbedding,
    TokenEmbedding,
)

SIZE, DIM = 11, 6
FILTERS = {1: 3, 2: 4, 5: 2}

LAYERS = {
    "tokens": (lambda: TokenEmbedding(SIZE, DIM, padding=0), torch.tensor([[5, 7, 0], [1, 1, 10]])),
    "pieces": (lambda: SubwordEmbedding(SIZE, DIM), torch.tensor([[[5, 7], [3, 0]], [[1, 0], [0, 0]]])),
    "characters": (lambda: CharacterEmbedding(SIZE, DIM, filters=FILTERS), torch.tensor([[[5, 7, 1], [3, 0, 0]]])),
    "contextual": (lambda: ContextualEmbedding(Reader(), layers=2), torch.tensor([[5, 7, 1]])),
}


class Reader(nn.Module):
    """From ids to the states of two layers, as an encoder of words in context has them."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(SIZE, DIM)
        self.layer = nn.Linear(DIM, DIM)
        self.dropout = nn.Dropout(0.5)

    def forward(self, ids):
        low = self.table(ids)
        return low, self.dropout(self.layer(low))


class Last(Reader):
    def forward(self, ids):
        return super().forward(ids)[-1]


@pytest.mark.parametrize("name", LAYERS)
def test_state_dict_makes_the_round_trip(name):
    make, ids = LAYERS[name]
    layer, other = make().eval(), make().eval()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(ids), layer(ids))


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_reach_every_parameter(name):
    make, ids = LAYERS[name]
    layer = make()
    layer(ids).square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in layer.parameters())


@pytest.mark.parametrize("name", LAYERS)
def test_every_embedding_runs_under_autocast(name):
    make, ids = LAYERS[name]
    layer = make().eval()
    with torch.autocast("cpu", torch.bfloat16):
        half = layer(ids)
    torch.testing.assert_close(half.float(), layer(ids), rtol=0.05, atol=0.05)


# Tables


def test_tokens_are_rows_of_the_table_times_the_scale():
    layer = TokenEmbedding(SIZE, DIM, scale=DIM**0.5)
    ids = torch.tensor([[3, 4]])
    torch.testing.assert_close(layer(ids)[0, 1], layer.table.weight[4] * DIM**0.5)


def test_padding_is_zero_and_does_not_learn():
    layer = TokenEmbedding(SIZE, DIM, padding=2)
    ids = torch.tensor([[2, 3]])
    assert layer(ids)[0, 0].count_nonzero() == 0
    layer(ids).sum().backward()
    assert layer.table.weight.grad[2].count_nonzero() == 0
    assert layer.table.weight.grad[3].count_nonzero() == DIM


def test_logits_read_the_same_table():
    layer = TokenEmbedding(SIZE, DIM, scale=3.0)
    h = torch.randn(2, 5, DIM)
    torch.testing.assert_close(layer.logits(h), torch.einsum("b n d, v d -> b n v", h, layer.table.weight))


def test_vectors_from_elsewhere_keep_their_dtype_and_lose_their_padding():
    vectors = torch.randn(SIZE, DIM, dtype=torch.float64)
    layer = TokenEmbedding.of(vectors, padding=2)
    assert layer.table.weight.dtype == torch.float64
    assert layer(torch.tensor([2])).count_nonzero() == 0
    assert vectors[2].count_nonzero() == DIM


def test_vectors_from_elsewhere_are_kept_and_learn():
    vectors = torch.randn(SIZE, DIM)
    layer = TokenEmbedding.of(vectors)
    assert torch.equal(layer(torch.arange(SIZE)), vectors)
    layer(torch.arange(SIZE)).sum().backward()
    with torch.no_grad():
        layer.table.weight.add_(1)
    assert not torch.equal(layer.table.weight, vectors)
    assert layer.table.weight.grad is not None


# Words from their parts


def test_a_word_is_the_mean_of_its_pieces():
    layer = SubwordEmbedding(SIZE, DIM)
    words = layer(torch.tensor([[[5, 7, 0], [3, 0, 0], [0, 0, 0]]]))[0]
    table = layer.table.weight
    torch.testing.assert_close(words[0], (table[5] + table[7]) / 2)
    torch.testing.assert_close(words[1], table[3])
    assert words[2].count_nonzero() == 0


def test_characters_follow_the_equations_of_the_paper():
    layer = CharacterEmbedding(SIZE, DIM, character_dim=4, filters=FILTERS).double()
    word = [5, 7, 1, 1]
    C = layer.characters.weight
    y = []
    for (width, count), conv in zip(FILTERS.items(), layer.convolutions, strict=True):
        for f in range(count):
            hits = []
            for start in range(len(word)):
                window = [(c, word[start + c]) for c in range(width) if start + c < len(word)]
                total = sum(conv.weight[f, :, c] @ C[letter] for c, letter in window) + conv.bias[f]
                hits.append(torch.tanh(total))
            y.append(max(hits))
    y = torch.stack(y)
    highway = layer.highway
    t = torch.sigmoid(highway.gate.weight @ y + highway.gate.bias)
    z = t * (highway.change.weight @ y + highway.change.bias).clamp(min=0) + (1 - t) * y
    expected = layer.project.weight @ z + layer.project.bias
    torch.testing.assert_close(layer(torch.tensor([[word]]))[0, 0], expected, rtol=0, atol=1e-12)


def test_more_padding_changes_no_word():
    layer = CharacterEmbedding(SIZE, DIM, filters=FILTERS).double()
    words = torch.tensor([[[5, 7, 1, 1], [3, 0, 0, 0]]])
    more = nn.functional.pad(words, (0, 9))
    torch.testing.assert_close(layer(more), layer(words), rtol=0, atol=1e-14)
    torch.testing.assert_close(layer(words[:, 1:, :1]), layer(words)[:, 1:], rtol=0, atol=1e-14)


def test_a_word_of_padding_is_zero():
    layer = CharacterEmbedding(SIZE, DIM, filters=FILTERS)
    assert layer(torch.tensor([[[0, 0, 0], [4, 0, 0]]]))[0, 0].count_nonzero() == 0


def test_the_filters_are_those_of_the_paper_unless_given():
    layer = CharacterEmbedding(SIZE, DIM)
    assert layer.project.in_features == 25 + 50 + 75 + 100 + 125 + 150


def test_a_new_highway_carries_most_of_its_input():
    x = torch.randn(50, DIM)
    assert (Highway(DIM)(x) - x).norm() < 0.5 * x.norm()


# Contextual


def test_states_of_another_model_are_handed_on():
    model = Last().eval()
    ids = torch.tensor([[5, 7]])
    assert torch.equal(ContextualEmbedding(model)(ids), model(ids))


class Padded(nn.Module):
    def forward(self, ids, *, padding=None):
        return (ids * padding)[..., None].double()


def test_a_model_that_takes_padding_is_told_of_it():
    ids, keep = torch.tensor([[5, 7]]), torch.tensor([[True, False]])
    for model in (Padded(), Frozen(Padded())):
        assert ContextualEmbedding(model)(ids, keep=keep).tolist() == [[[5.0], [0.0]]]


@pytest.mark.parametrize("wrap", [nn.Identity(), Frozen], ids=["tuned", "frozen"])
def test_padding_reaches_the_model(wrap):
    class Reading(nn.Module):
        def forward(self, ids, types, *, keep=None):
            return (ids + types + keep[:, None]).float()[..., None]

    layer = ContextualEmbedding(wrap(Reading()))
    states = layer(torch.tensor([[1, 2]]), torch.tensor([[10, 10]]), keep=torch.tensor([100]))
    assert states.flatten().tolist() == [111, 112]


def test_a_tuned_model_learns_and_drops_out():
    layer = ContextualEmbedding(Last()).train()
    ids = torch.tensor([[5, 7, 3, 4]])
    layer(ids).sum().backward()
    assert layer.model.table.weight.grad is not None
    assert not torch.equal(layer(ids), layer(ids))


def test_a_frozen_model_neither_learns_nor_drops_out():
    outer = nn.ModuleList([ContextualEmbedding(Frozen(Last()))]).train()
    ids = torch.tensor([[5, 7, 3, 4]])
    states = outer[0](ids)
    assert not states.requires_grad
    assert torch.equal(outer[0](ids), states)
    assert not any(p.requires_grad for p in outer.parameters())
    assert outer[0].model.training
    assert not outer[0].model.module.training


def test_layers_are_mixed_in_learned_shares():
    model = Frozen(Reader())
    layer = ContextualEmbedding(model, layers=2)
    with torch.no_grad():
        layer.mix.shares.copy_(torch.tensor([0.3, -1.1]))
        layer.mix.gamma.fill_(1.7)
    ids = torch.tensor([[5, 7]])
    low, high = model(ids)
    a, b = torch.tensor([0.3, -1.1]).exp()
    torch.testing.assert_close(layer(ids), 1.7 * (a * low + b * high) / (a + b))
    layer(ids).sum().backward()
    assert layer.mix.shares.grad.abs().max() > 0


def test_a_frozen_mix_still_learns_its_shares():
    layer = ContextualEmbedding(Frozen(Reader()), layers=2)
    assert [name for name, p in layer.named_parameters() if p.requires_grad] == ["mix.shares", "mix.gamma"]


@pytest.mark.parametrize("id", [5, -1])
def test_ids_are_rows_of_the_table(id):
    with pytest.raises(ValueError, match=f"ids must be from 0 to 4, the rows of this table, got {id}; encode with the"):
        TokenEmbedding(5, 4)(torch.tensor([[1, id, 4]]))


def test_a_table_is_compiled_in_one_piece():
    embedding = TokenEmbedding(5, 4)
    compiled = torch.compile(embedding, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.tensor([[1, 4]])), embedding(torch.tensor([[1, 4]])))


def test_states_of_several_layers_need_their_number():
    with pytest.raises(TypeError, match=r"got tuple; for the states of several layers pass layers="):
        ContextualEmbedding(Reader())(torch.tensor([[5]]))
    with pytest.raises(ValueError, match="states must be those of 3 layers, got 2; pass layers=2"):
        LayerMix(3)(Reader()(torch.tensor([[5]])))


# Together


def test_a_sum_is_normed_and_dropped_out():
    words, types, norm = TokenEmbedding(SIZE, DIM), TokenEmbedding(2, DIM), nn.LayerNorm(DIM)
    layer = SumEmbedding(words, types, norm=norm, dropout=0.5)
    ids, kinds = torch.tensor([[5, 7, 1]]), torch.tensor([[0, 0, 1]])
    torch.testing.assert_close(layer.eval()(ids, kinds), norm(words(ids) + types(kinds)))
    assert (layer.train()(ids, kinds) == 0).any()


def test_types_tell_equal_words_apart():
    layer = SumEmbedding(TokenEmbedding(SIZE, DIM), TokenEmbedding(2, DIM))
    first, second = layer(torch.tensor([[5, 5]]), torch.tensor([[0, 1]]))[0]
    assert not torch.equal(first, second)


def test_embeddings_stand_side_by_side():
    words, characters = TokenEmbedding(SIZE, DIM), CharacterEmbedding(SIZE, 4, filters=FILTERS)
    ids, letters = torch.tensor([[5, 7]]), torch.tensor([[[1, 2, 3], [4, 0, 0]]])
    both = ConcatEmbedding(words, characters)(ids, letters)
    assert torch.equal(both, torch.cat((words(ids), characters(letters)), -1))


@pytest.mark.parametrize("kind", [SumEmbedding, ConcatEmbedding])
def test_each_embedding_needs_its_ids(kind):
    with pytest.raises(ValueError, match="one tensor of ids for each of the 2 embeddings, got 1"):
        kind(TokenEmbedding(SIZE, DIM), TokenEmbedding(2, DIM))(torch.tensor([[1]]))
