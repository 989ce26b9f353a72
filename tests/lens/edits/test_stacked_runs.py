"""Copies of the inputs in one batch are edited each by its own set."""

import pytest
import torch
from torch import nn

from regard import Causal, Padding
from regard.lens import Boost, Cut, Scale, Temperature, edit
from regard.lens.edits.edit import check_edits
from regard.lens.edits.stacked_runs import NotStackable, edit_copies, stack, unstack
from regard.nn import Attention

SETS = [
    {"0": Cut(keys=1, queries=slice(2, None))},
    {},
    {"*": [Boost(2, 1.5, heads=1), Temperature(0, 0.5)]},
    {"1": Scale([0, 2], 0)},
    {"1": Cut(keys=[0, -1], heads=2)},
]


@torch.no_grad()
def test_each_copy_is_edited_as_if_it_were_alone():
    torch.manual_seed(0)
    model = nn.Sequential(*(Attention(12, 3, mask=Causal() & Padding((7, 4))) for _ in range(2))).double()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    sets = [check_edits(model, each) for each in SETS]
    masked = nn.Sequential(*(Attention(12, 3, mask=Causal()) for _ in range(2))).double()
    masked.load_state_dict(model.state_dict())
    plain = masked(x)
    with edit_copies(masked, sets, None, None):
        outs = unstack(masked(stack(x, 2, 5)), plain, 5)
    for out, each in zip(outs, SETS, strict=True):
        with edit(masked, each):
            torch.testing.assert_close(out, masked(x), atol=1e-12, rtol=1e-12)
    with pytest.raises(ValueError, match="one length per batch row"), edit_copies(model, sets, None, None):
        model(stack(x, 2, 5))  # lengths that are no tensor are not those of the copies


def test_other_tensors_than_those_of_the_batch_stay_as_they_are():
    given = {"x": torch.arange(6).view(2, 3), "table": torch.ones(4), "flag": True}
    stacked = stack(given, 2, 2)
    assert stacked["x"].tolist() == [[0, 1, 2], [3, 4, 5]] * 2
    assert stacked["table"] is given["table"]
    first, second = unstack((stacked["x"] + 1, None), (given["x"], None), 2)
    assert torch.equal(first[0], given["x"] + 1)
    assert second[1] is None
    for whole, plain in [(torch.zeros(4, 3), torch.zeros(3, 3)), (torch.zeros(()), torch.zeros(())), ({1}, {1})]:
        with pytest.raises(NotStackable):
            unstack(whole, plain, 2)


@torch.no_grad()
def test_a_batch_as_large_as_another_dim_is_not_cut():
    model, x = nn.Sequential(Attention(12, 6)), torch.randn(2, 7, 12)
    with pytest.raises(NotStackable), edit_copies(model, [{"0": (Cut(keys=1),)}] * 3, None, None):
        model(stack(x, 2, 3))
