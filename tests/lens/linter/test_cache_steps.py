"""Caches are used in the way in which the module keeps one."""

import pytest
import torch
from torch import nn

from regard import Causal
from regard.lens.linter.cache_steps import full_positions, has_cache, positions_of_pass, run_cached
from regard.lens.linter.call_adapter import CallAdapter
from regard.nn import Attention

from .seeded_bugs import Buffers, Decoder
from .seeded_bugs import Causal as NoCache


@pytest.mark.parametrize("make", [Decoder, Buffers, lambda: Attention(24, 4, mask=Causal())])
def test_steps_through_a_cache_equal_one_pass(make):
    torch.manual_seed(0)
    adapter = CallAdapter(make())
    x = adapter.tokens(7)
    assert has_cache(adapter)
    torch.testing.assert_close(run_cached(adapter, x, [4, 1, 1, 1]).outputs, adapter.run(x))


def test_positions_are_recorded():
    adapter = CallAdapter(Decoder())
    x = adapter.tokens(7)
    assert positions_of_pass(full_positions(adapter, x)) == {"places": list(range(7))}
    assert positions_of_pass(run_cached(adapter, x, [4, 1, 1, 1]).positions) == {"places": list(range(7))}


def test_a_cache_that_cannot_be_used_is_no_cache():
    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x, past=None):
            return self.linear(x)

    adapter = CallAdapter(Returns())
    assert "returns no cache" in run_cached(adapter, adapter.tokens(7), [4, 3])
    assert not has_cache(CallAdapter(NoCache()))
