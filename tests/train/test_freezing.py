"""Parameters are frozen by patterns of their names."""

import pytest
import torch
from torch import nn

from regard.train import Constant, Recipe, Shuffled, fit
from regard.train.freezing import freeze


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder, self.scale = nn.Linear(2, 2), nn.Linear(2, 1), nn.Parameter(torch.ones(()))

    def loss(self, x):
        return (self.scale * self.decoder(self.encoder(x))).square().mean()


def test_frozen_parameters_stay_and_the_others_learn(tmp_path):
    model, before = Two(), dict(Two().named_parameters())
    assert freeze(model, ["encoder.*", "*.bias"]) == ["encoder.weight", "encoder.bias", "decoder.bias"]
    fit(model, Shuffled([torch.ones(1, 2)]), Recipe(steps=3, rate=Constant(0.1)), folder=tmp_path)
    same = {name for name, x in model.named_parameters() if torch.equal(x, before[name])}
    assert same == {"encoder.weight", "encoder.bias", "decoder.bias"}


def test_pattern_that_matches_nothing_is_refused_with_the_parts_there_are():
    with pytest.raises(
        ValueError, match=r"no parameter matches 'encode\.\*'; the parts .* decoder\.\*, encoder\.\*, sc"
    ):
        freeze(Two(), ["encode.*"])


def test_something_must_be_left_to_train():
    with pytest.raises(ValueError, match=r"freezing '\*' leaves nothing to train; leave a pattern out"):
        freeze(Two(), ["*"])
