"""Language models of transformers and ours: equal numbers and gradients, and every format of rotary fields."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from regard.models import DynamicStretch, Gpt, GptConfig
from regard.models.pretrained import load, save
from tests.models.pretrained.peers import (
    GPT2,
    LANGUAGE,
    LLAMA,
    STRETCHED,
    V,
    close,
    peer,
    reconfigure,
    rewrite,
    rope,
    same_gradients,
    saved,
    transformers,
)


@pytest.mark.parametrize("kind", LANGUAGE)
def test_language_models_equal_transformers(kind, tmp_path):
    name, values = LANGUAGE[kind]
    theirs = peer(name, values)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    ids = torch.randint(0, V, (3, 11))
    out, expected = ours(ids), theirs(ids).logits
    close(out, expected)
    same_gradients(ours.tokens.table.weight, theirs.get_input_embeddings().weight, out, expected)

    save(ours, tmp_path / "ours")
    again = getattr(transformers, name).from_pretrained(tmp_path / "ours").eval()
    close(again(ids).logits, expected)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", LANGUAGE)
def test_padded_language_equals_transformers(kind, side, tmp_path):
    theirs = peer(*LANGUAGE[kind])
    theirs.save_pretrained(tmp_path)
    keep = torch.arange(11) < torch.tensor([11, 4, 7])[:, None]
    keep = keep.flip(1) if side == "left" else keep
    ids = torch.randint(0, V, (3, 11))
    places = (keep.long().cumsum(1) - 1).clamp(min=0)
    expected = theirs(ids, attention_mask=keep.long(), position_ids=places).logits
    close(load(tmp_path)(ids, keep=keep)[keep], expected[keep])


def test_a_model_without_prefix_and_with_buffers_is_read(tmp_path):
    """As the first GPT-2 files are."""
    saved(tmp_path, "GPT2LMHeadModel", GPT2)
    expected = load(tmp_path).state_dict()
    rewrite(
        tmp_path,
        lambda tensors: (
            {name.removeprefix("transformer."): x for name, x in tensors.items()}
            | {"h.0.attn.bias": torch.ones(1, 1, 17, 17), "h.0.attn.masked_bias": torch.tensor(-1e4)}
        ),
    )
    for name, x in load(tmp_path).state_dict().items():
        assert torch.equal(x, expected[name])


def test_dynamic_scaling_equals_transformers_below_and_above_its_length(tmp_path):
    values = {**LLAMA, "max_position_embeddings": 8, "rope_parameters": rope("dynamic", factor=2.0)}
    theirs = peer("LlamaForCausalLM", values)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    for n in (6, 8, 11, 20):
        ids = torch.randint(0, V, (2, n))
        close(ours(ids), theirs(ids).logits)
    save(ours, tmp_path / "ours")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours").eval()
    close(again(ids).logits, theirs(ids).logits)


def test_a_dynamic_scaling_from_another_length_cannot_be_saved(tmp_path):
    config = GptConfig.llama(vocabulary=V, dim=16, depth=1, heads=4, length=8)
    model = Gpt(replace(config, stretch=DynamicStretch(factor=2.0, original=4)))
    with pytest.raises(ValueError, match="of transformers"):
        save(model, tmp_path)


def test_older_rotary_fields_are_read(tmp_path):
    saved(tmp_path, "LlamaForCausalLM", {**LLAMA, "rope_parameters": STRETCHED})
    expected = load(tmp_path).config
    data = json.loads((tmp_path / "config.json").read_text())
    older = data.pop("rope_parameters")
    data |= {"rope_theta": older.pop("rope_theta"), "rope_scaling": older}
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert load(tmp_path).config == expected
    assert expected.stretch is not None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"rope_type": "longrope", "factor": 2.0},
            "rope_parameters must be of rope_type 'default', or 'linear' with f",
        ),
        ({"rope_type": "llama3", "factor": 2.0}, "'llama3' with factor, high_freq_factor"),
        ({"rope_type": "yarn"}, "'yarn' with factor"),
        ({"rope_type": "dynamic", "factor": 2.0, "turns": 1}, "'dynamic' with factor"),
        ({"rope_type": "dynamic", "factor": 0.5}, "factor must be 1 or more, got 0.5"),
        ({**STRETCHED, "factor": "2"}, "factor must be a number"),
        ({**STRETCHED, "low_freq_factor": 9.0}, "low and high must be 0 < low < high"),
        ([1], "rope_parameters must be an object"),
    ],
)
def test_rotary_fields_that_are_not_known_are_refused(given, message, tmp_path):
    reconfigure(saved(tmp_path, "LlamaForCausalLM", LLAMA), rope_parameters=given)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)
