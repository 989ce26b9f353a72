"""Core: attend as a module, on which hooks see every attention."""

from __future__ import annotations

import pytest
import torch

from regard import (
    Alibi,
    Causal,
    SinkSoftmax,
    Window,
    attend,
)
from regard.nn import (
    Attention,
    Core,
)

D = torch.float64


def close(x, y):
    assert not x.isnan().any()
    torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_a_hook_on_the_core_sees_what_is_attended():
    layer = Attention(12, 3, kv_heads=1, mask=Causal()).to(D)
    x = torch.randn(2, 7, 12, dtype=D)
    seen = []
    core = next(module for module in layer.modules() if isinstance(module, Core))
    assert not list(core.parameters())
    core.register_forward_hook(lambda _, args, kwargs, out: seen.append((args, kwargs, out)), with_kwargs=True)
    expected = layer(x)
    (((q, k, v), terms, out),) = seen
    assert q.shape == (2, 3, 7, 4)
    assert k.shape == v.shape == (2, 1, 7, 4)
    assert terms["mask"] == Causal()
    close(layer.out(out.transpose(1, 2).reshape(2, 7, 12)), expected)


def test_a_core_is_attend_with_every_term_it_is_given():
    q, k, v = torch.randn(3, 2, 4, 7, 8, dtype=D)
    terms = {"mask": Causal() & Window(3), "bias": Alibi(4), "normalize": SinkSoftmax(0.0), "offset": 1}
    close(Core()(q, k, v, **terms), attend(q, k, v, **terms))


def test_dropout_acts_on_the_weights_in_training_only():
    core, (q, k, v) = Core(dropout=0.5), torch.randn(3, 1, 2, 40, 8)
    assert not torch.equal(core(q, k, v), core(q, k, v))
    torch.testing.assert_close(core.eval()(q, k, v), attend(q, k, v))


def test_a_core_calls_the_backend_it_was_made_with():
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    with pytest.raises(ValueError, match="got 'fast'"):
        Core(backend="fast")(q, k, v)
    with pytest.raises(ValueError, match="backend 'triton' cannot run this call"):
        Core(backend="triton")(q, k, v)


@pytest.mark.parametrize("dropout", [-0.1, 1.0])
def test_dropout_is_a_share_below_one(dropout):
    with pytest.raises(ValueError, match="dropout must be at least 0 and below 1"):
        Core(dropout=dropout)


def test_the_repr_names_a_backend_only_if_there_is_one():
    assert repr(Core(dropout=0.1)) == "Core(dropout=0.1)"
    assert repr(Core(backend="tiled")) == "Core(dropout=0.0, backend='tiled')"
