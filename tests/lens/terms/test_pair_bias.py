"""A number for the pairs of some queries and some keys."""

import pytest
import torch

from regard import Added, weights
from regard.lens import Boost, Tape, capture, edit
from regard.lens.terms.pair_bias import PairBias
from regard.nn import Attention


@pytest.mark.parametrize("sizes", [((2, 5), (2, 7), (3,)), ((1, 1), (2, 7), (1,)), ((2, 5), (1, 1), (3,))], ids=str)
def test_it_adds_the_product_of_its_tensors(sizes):
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 5, 4, dtype=torch.float64), torch.randn(2, 3, 7, 4, dtype=torch.float64)
    queries, keys, heads = (torch.randn(size, dtype=torch.float64) for size in sizes)
    dense = queries[:, None, :, None] * keys[:, None, None] * heads[:, None, None]
    found = weights(q, k, bias=PairBias(queries, keys, heads))
    torch.testing.assert_close(found.dense(), weights(q, k, bias=Added(dense)).dense())


def test_a_tensor_of_another_size_is_refused():
    q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="PairBias keys must broadcast"):
        weights(q, k, bias=PairBias(one, torch.ones(2, 6), torch.ones(3)))
    with pytest.raises(TypeError, match="PairBias heads"):
        PairBias(one, one, 1.0)


def test_a_tape_of_an_edited_model_is_saved_and_loaded(tmp_path):
    model = Attention(16, heads=4)
    with edit(model, {"(model)": Boost(0, 2.0)}), capture(model) as tape:
        model(torch.randn(1, 5, 16))
    tape.save(tmp_path / "edited.safetensors")
    assert torch.equal(Tape.load(tmp_path / "edited.safetensors")[0].dense(), tape[0].dense())
