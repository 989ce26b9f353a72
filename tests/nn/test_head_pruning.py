"""A layer without some of its heads computes what the others do, and loads where it was saved."""

import copy

import pytest
import torch
from torch import nn

from regard import Alibi, Causal, Window
from regard.nn import Attention, KVCache, RMSNorm, Rotary, T5Bias
from regard.nn.head_pruning import RepeatedHeads, feature_index
from regard.train import checkpoint


def without(layer, heads, x, **given):
    """The output of a layer whose output projection ignores some heads."""
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.out.weight[:, feature_index(heads, layer.value_dim, x.device)] = 0
    return other(x, **given)


@pytest.mark.parametrize("kv_heads", [6, 3, 2, 1])
@pytest.mark.parametrize("removed", [[0], [1, 2], [0, 3, 4], [0, 1, 2, 3], [0, 1, 2, 3, 4]])
@torch.no_grad()
def test_the_other_heads_compute_as_before(kv_heads, removed):
    torch.manual_seed(0)
    layer = Attention(
        18, 6, kv_heads=kv_heads, head_dim=4, value_dim=5, mask=Causal() & Window(5), rotary=Rotary(4), qk_norm=RMSNorm
    ).double()
    x = torch.randn(2, 7, 18, dtype=torch.float64)
    want, before = without(layer, removed, x), sum(p.numel() for p in layer.parameters())
    layer.keep_heads([head for head in range(6) if head not in removed])
    torch.testing.assert_close(layer(x), want, atol=1e-12, rtol=1e-12)
    assert layer.heads == layer.weights(x).shape[1] == 6 - len(removed)
    assert before - sum(p.numel() for p in layer.parameters()) >= len(removed) * (4 + 5) * 18
    cache = KVCache()
    steps = torch.cat([layer(x[:, n : n + 1], cache=cache) for n in range(7)], 1)
    torch.testing.assert_close(steps, want, atol=1e-12, rtol=1e-12)


def test_heads_that_share_a_key_head_unevenly_get_copies_of_it():
    layer = Attention(16, 4, kv_heads=2)
    layer.keep_heads([0, 2, 3])
    assert isinstance(layer.key, RepeatedHeads)
    assert "heads=[0, 1, 1]" in repr(layer.key)
    assert (layer.key.weight.shape, layer.kv_heads) == ((8, 16), 3)
    layer.keep_heads([1, 2])  # both of the second group
    assert type(layer.key) is nn.Linear
    assert (layer.key.weight.shape, layer.kv_heads) == ((4, 16), 1)
    assert layer.kept_heads.tolist() == [2, 3]


@pytest.mark.parametrize("how", ["state_dict", "checkpoint"])
def test_a_pruned_model_loads_into_one_with_all_heads(tmp_path, how):
    torch.manual_seed(0)
    model = nn.ModuleDict({"first": Attention(16, 4, kv_heads=2), "second": Attention(16, 4)})
    fresh = copy.deepcopy(model)
    model["first"].keep_heads([0, 2, 3])
    model["first"].keep_heads([1, 2])
    x = torch.randn(1, 5, 16)
    if how == "state_dict":
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        state = torch.load(tmp_path / "weights.pt")
        fresh.load_state_dict(state)
        fresh.load_state_dict(state)
    else:
        checkpoint.put(checkpoint.tensors(model), fresh, source="the model")
        checkpoint.put(checkpoint.tensors(model), fresh, source="the model")
    assert torch.equal(fresh["first"](x), model["first"](x))
    assert fresh["first"].kept_heads.tolist() == [2, 3]
    assert "second.kept_heads" not in fresh.state_dict()


def test_parameters_learn_as_before():
    layer = Attention(16, 4)
    layer.key.weight.requires_grad_(False)
    layer.eval().keep_heads([0, 3])
    assert not layer.key.weight.requires_grad
    assert layer.query.weight.requires_grad
    layer(torch.randn(1, 3, 16)).sum().backward()
    assert layer.out.weight.grad.shape == (16, 8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bias": T5Bias(4)}, "bias=T5Bias.* may have numbers for each head; switch them off with"),
        ({"bias": Alibi(4)}, "bias=Alibi"),
        ({"slots": 2}, "slots=MemorySlots"),
        ({"mask": Window((1, 2, 3, 4))}, "mask=Window.* may differ between heads"),
    ],
)
def test_a_layer_whose_terms_may_know_its_heads_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Attention(16, 4, **given).keep_heads([0])
    with pytest.raises(ValueError, match=r"heads must be one or more from 0 to 3, got \[4\]"):
        Attention(16, 4).keep_heads([4])
