"""LoRA: only a low-rank change is trained, and the merged model computes the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regard.models import Gpt, GptConfig, Transformer, TransformerConfig
from regard.nn import Attention
from regard.train import Constant, Recipe, Shuffled, checkpoint, fit
from regard.train.lora import SCALE, LoraLinear, add_lora, join_lora, lora_layers, merge_lora, split_lora

CONFIG = GptConfig(vocabulary=11, length=8, dim=16, depth=2, heads=2, dropout=0.0)
RECIPE = Recipe(steps=6, rate=Constant(0.01), save_every=3, log_every=3, keep=9)


def gpt(seed=0):
    torch.manual_seed(seed)
    return Gpt(CONFIG)


def batches():
    generator = torch.Generator().manual_seed(1)
    return Shuffled([{"ids": torch.randint(1, 11, (2, 9), generator=generator)} for _ in range(4)])


def randomized(model):
    """The model with changes that are not 0."""
    for layer in lora_layers(model).values():
        nn.init.normal_(layer.lora_up)
    return model


def test_projections_of_attention_get_it_and_all_else_is_frozen():
    model = gpt()
    names = add_lora(model, rank=3)
    assert len(names) == 4 * CONFIG.depth
    assert {name.rpartition(".")[2] for name in names} == {"query", "key", "value", "out"}
    trained = {name for name, x in model.named_parameters() if x.requires_grad}
    assert trained == {f"{name}.{part}" for name in names for part in ("lora_down", "lora_up")}


def test_model_computes_the_same_until_it_is_trained():
    ids = torch.randint(1, 11, (2, 8))
    before = gpt().eval()(ids)
    model = gpt().eval()
    add_lora(model, rank=3)
    assert torch.equal(model(ids), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_merged_model_equals_the_one_with_lora(dtype):
    model, ids = gpt().to(dtype).eval(), torch.randint(1, 11, (3, 8))
    add_lora(model, rank=2)
    apart = randomized(model)(ids)
    merge_lora(model)
    assert lora_layers(model) == {}
    assert model.state_dict().keys() == gpt().state_dict().keys()
    assert (model(ids) - apart).abs().max() <= (1e-6 if dtype == torch.float32 else 1e-14)


def test_a_layer_is_the_formula_of_the_paper():
    layer, x = Attention(8, heads=2).double(), torch.randn(5, 8).double()
    add_lora(layer, rank=2)
    query = randomized(layer).query
    expected = x @ (query.weight + SCALE * query.lora_up @ query.lora_down).T + query.bias
    assert isinstance(query, LoraLinear)
    assert torch.allclose(query(x), expected, rtol=1e-12)


def test_cached_decoding_sees_it():
    from regard.decode import greedy

    model = randomized_translator()
    found = greedy(model, None, torch.tensor([[1, 2, 3]]), end=0, max_length=5)
    merge_lora(model)
    assert found[0].tokens == greedy(model, None, torch.tensor([[1, 2, 3]]), end=0, max_length=5)[0].tokens


def randomized_translator():
    model = gpt().eval()
    add_lora(model, rank=2)
    return randomized(model)


def test_parts_are_saved_beside_the_merged_weights_and_come_back():
    model = gpt()
    add_lora(model, rank=2)
    weights = checkpoint.tensors(randomized(model))
    merged, parts = split_lora(weights, model)
    assert merged.keys() == checkpoint.tensors(gpt()).keys()
    assert all(name.startswith("lora.") for name in parts)
    back = join_lora(merged, parts)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], x) for name, x in weights.items())
    merge_lora(model)
    assert all(torch.equal(merged[name], x) for name, x in checkpoint.tensors(model).items())


def test_run_that_is_resumed_ends_as_the_unbroken_one_and_its_checkpoints_are_merged(tmp_path):
    def train(folder, steps, resume=False):
        model = gpt()
        add_lora(model, rank=2)
        recipe = Recipe(**{**{f: getattr(RECIPE, f) for f in RECIPE.__dataclass_fields__}, "steps": steps})
        fit(model, batches(), recipe, folder=folder, resume=resume)
        return model

    unbroken = train(tmp_path / "a", 6)
    train(tmp_path / "b", 3)
    resumed = train(tmp_path / "b", 6, resume=True)
    for name, x in checkpoint.tensors(unbroken).items():
        assert torch.equal(x, checkpoint.tensors(resumed)[name]), name
    plain = gpt(seed=5)
    checkpoint.load(tmp_path / "a" / "step-00000006", plain)
    ids = torch.randint(1, 11, (2, 8))
    assert torch.allclose(plain.eval()(ids), unbroken.eval()(ids), atol=1e-6)
    assert torch.equal(plain.tokens.table.weight, gpt().tokens.table.weight)


def test_translators_have_it_in_every_attention():
    config = TransformerConfig(
        source_vocabulary=9, target_vocabulary=9, start=1, dim=8, heads=2, hidden=8, encoder_layers=1, decoder_layers=2
    )
    assert len(add_lora(Transformer(config), rank=1)) == 4 * (1 + 2 * 2)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        add_lora(gpt(), rank=0)
    with pytest.raises(ValueError, match="Sequential has no attention projections, linear layers named query and key"):
        add_lora(nn.Sequential(nn.Linear(2, 2)), rank=1)
