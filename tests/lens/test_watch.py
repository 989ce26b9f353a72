"""Watch: which layer calls an attention, whatever else happens while it does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from regard.lens import ablate, capture
from regard.nn import Attention

D, H = 16, 2


def refuse(*_: object) -> None:
    raise LookupError("a hook of the user's own")


class Careful(nn.Module):
    """Goes on with a second layer where the first fails."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(D, H), Attention(D, H)

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.first(x)
        except LookupError:
            return self.second(x)


def look(model):
    return capture(model)


def silence(model):
    return ablate(model, {"second": [0]})


@pytest.mark.parametrize("watch", [look, silence])
def test_a_hook_that_raises_says_so_itself(watch):
    model = Careful()
    model.second.register_forward_pre_hook(refuse)
    model.first.register_forward_pre_hook(refuse)
    with pytest.raises(LookupError, match="of the user's own"), watch(model):
        model(torch.randn(1, 5, D))


def test_a_layer_that_failed_before_it_began_ends_no_other():
    model = Careful()
    model.first.register_forward_pre_hook(refuse)
    with capture(model) as tape:
        model(torch.randn(1, 5, D))
    assert tape.layers == ["second"]
    with ablate(model, {"second": [0, 1]}):
        assert torch.equal(model(torch.zeros(1, 5, D)), model.second.out.bias.expand(1, 5, D))
