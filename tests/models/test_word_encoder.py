"""Words: a table, a spelling, the states of an encoder, each in its place of one vector."""

import pytest
import torch
from torch import nn

from regard.models.word_encoder import WordEncoder, characters_per_word


class Encoder(nn.Module):
    """States that show their mode and the padding they were told of."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, ids, *, keep=None):
        self.told = keep
        return self.dropout(self.table(ids))


IDS = torch.tensor([[5, 7, 0], [2, 2, 9]])
CHARACTERS = torch.randint(1, 11, (2, 3, 4))


def test_what_stands_for_a_word_stands_side_by_side():
    words = WordEncoder(20, 4, characters=11, character_dim=6, encoder=Encoder(), encoder_dim=3).eval()
    out = words(IDS, CHARACTERS)
    assert out.shape == (2, 3, words.width)
    parts = words.table(IDS), words.spelling(CHARACTERS), words.encoder(IDS)
    assert torch.equal(out, torch.cat(parts, -1))
    assert [x.shape[-1] for x in parts] == [4, 6, 3]


def test_each_may_stand_alone():
    assert torch.equal(WordEncoder(20, 4)(IDS)[0, 2], torch.zeros(4))
    assert WordEncoder(None, 4, characters=11, character_dim=6)(IDS, CHARACTERS).shape == (2, 3, 6)
    assert WordEncoder(None, 4, encoder=Encoder(), encoder_dim=3)(IDS).shape == (2, 3, 3)


def test_characters_in_one_row_are_those_of_each_word():
    assert torch.equal(characters_per_word(CHARACTERS.flatten(1), IDS), CHARACTERS)
    assert torch.equal(characters_per_word(CHARACTERS, IDS), CHARACTERS)


def test_an_encoder_that_is_not_tuned_neither_learns_nor_drops():
    words = WordEncoder(20, 4, encoder=Encoder(), encoder_dim=3, tuned=False)
    assert words.training
    assert not words.train().encoder.training
    assert torch.equal(words(IDS), words(IDS))
    words(IDS).sum().backward()
    assert words.encoder.table.weight.grad is None
    assert words.table.table.weight.grad is not None


def test_an_encoder_that_is_tuned_learns_and_knows_of_padding():
    words, lengths = WordEncoder(None, 4, encoder=Encoder(), encoder_dim=3), torch.tensor([2, 3])
    words(IDS, lengths=lengths).sum().backward()
    assert words.encoder.training
    assert words.encoder.table.weight.grad is not None
    assert words.encoder.told is lengths


@pytest.mark.parametrize(
    ("options", "characters", "message"),
    [
        ({"characters": 11}, None, "characters must be given because this model reads the spelling"),
        ({}, CHARACTERS, "characters must be None because this model was built without characters="),
        ({"characters": 11}, CHARACTERS[:1], r"characters must be .* for ids \(2, 3\), got shape \(1, 3, 4\)"),
        ({"characters": 11}, CHARACTERS.mT, r"characters must be .* for ids \(2, 3\), got shape \(2, 4, 3\)"),
        ({"characters": 11}, CHARACTERS.flatten(1)[:, 1:], r"characters must be .* got shape \(2, 11\)"),
        ({"characters": 11}, CHARACTERS[0, 0], r"characters must be .* got shape \(4,\)"),
    ],
)
def test_characters_are_those_of_the_words(options, characters, message):
    with pytest.raises(ValueError, match=message):
        WordEncoder(20, 4, **options)(IDS, characters)


@pytest.mark.parametrize(
    ("options", "got"),
    [({"encoder": Encoder()}, "encoder_dim=None and Encoder"), ({"encoder_dim": 3}, "encoder_dim=3 and no encoder")],
    ids=["encoder", "encoder_dim"],
)
def test_an_encoder_comes_with_its_width(options, got):
    with pytest.raises(ValueError, match=f"an encoder and encoder_dim, .* come together, got {got}"):
        WordEncoder(20, 4, **options)
