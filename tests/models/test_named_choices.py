"""Positions by name: each is added or compared, with the sizes its config gives."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from regard.models import Transformer, TransformerConfig
from regard.models.named_choices import Positions, added_positions, relative_positions
from regard.nn import LearnedPositions, Rotary, ShawBias, Sinusoidal, T5Bias
from regard.ops.terms.biases import Alibi

ADDED = {"sinusoidal": Sinusoidal, "sinusoidal_halves": Sinusoidal, "learned": LearnedPositions}
COMPARED = {"rotary": Rotary, "t5": T5Bias, "shaw": ShawBias, "alibi": Alibi}


@pytest.mark.parametrize("name", get_args(Positions))
def test_every_name_is_added_or_compared_but_none(name):
    added = added_positions(name, 12, longest=7)
    (compared,) = relative_positions(name, 3, 4, reach=5, base=1e4, bidirectional=True).values() or [None]
    assert type(added) is ADDED.get(name, type(None))
    assert type(compared) is COMPARED.get(name, type(None))
    assert (added is None and compared is None) == (name == "none")


def test_layouts_of_sinusoids_hold_the_same_numbers_in_another_order():
    places = torch.arange(5)
    mixed, halves = (added_positions(name, 12, longest=7)(places) for name in ("sinusoidal", "sinusoidal_halves"))
    assert torch.equal(torch.cat((mixed[:, ::2], mixed[:, 1::2]), 1), halves)
    assert not torch.equal(mixed, halves)


def model_of(positions):
    sizes = {"dim": 12, "heads": 3, "hidden": 8, "encoder_layers": 1, "decoder_layers": 1}
    sizes |= {"longest": 7, "reach": 5, "rotary_base": 500.0}
    vocabularies = {"source_vocabulary": 9, "target_vocabulary": 9, "start": 2}
    return Transformer(TransformerConfig(**vocabularies, **sizes, positions=positions))


def test_a_decoder_tells_more_distances_behind_it_apart():
    model = model_of("t5")
    assert model.encoder.blocks[0].attention.bias.bidirectional
    assert not model.decoder.blocks[0].attention.bias.bidirectional


def test_sizes_are_those_of_the_config():
    shaw = model_of("shaw")
    for block in (shaw.encoder.blocks[0], shaw.decoder.blocks[0]):
        assert block.attention.bias.keys.shape == (11, 4)
    rotary = model_of("rotary")
    for block in (rotary.encoder.blocks[0], rotary.decoder.blocks[0]):
        assert block.attention.rotary.base == 500.0
    with pytest.raises(ValueError, match="positions must be from 0 to 6, got 7"):
        model_of("learned")(torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 2, dtype=torch.long))
