"""Folders: what a config and its tensors must agree on, and what is not saved because transformers lacks it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from regard.models import Bert, BertClassifier, BertConfig, Gpt, GptConfig, ViT, ViTClassifier, ViTConfig
from regard.models.pretrained import load, save
from tests.models.pretrained.peers import BERT, SMALL, peer, reconfigure, rewrite, saved


def test_old_names_of_norms_are_read(tmp_path):
    saved(tmp_path)
    expected = load(tmp_path).state_dict()
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def change(tensors):
        for new, name in old.items():
            tensors = {key.replace(new, name): x for key, x in tensors.items()}
        return {**tensors, "embeddings.position_ids": torch.arange(17)[None]}

    rewrite(tmp_path, change)
    for name, x in load(tmp_path).state_dict().items():
        assert torch.equal(x, expected[name])


def test_half_precision_files_load_in_the_dtype_asked_for(tmp_path):
    peer("BertModel", BERT).half().save_pretrained(tmp_path)
    assert next(load(tmp_path).parameters()).dtype == torch.float32
    assert next(load(tmp_path, dtype=torch.bfloat16).parameters()).dtype == torch.bfloat16


def test_loading_computes_in_evaluation_mode_and_trains(tmp_path):
    model = load(saved(tmp_path))
    assert not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


CONFIGS = {
    "model_type": ({"model_type": "bloom"}, "model_type must be one of 'bert', .*, got \"bloom\""),
    "no type": ({"model_type": None}, "model_type must be one of"),
    "head": ({"architectures": ["BertForNothing"]}, "architectures must be .*BertModel.* got"),
    "unknown": ({"hidden_sizes": 3}, "unknown key 'hidden_sizes'; .*; did you mean 'hidden_size'\\?"),
    "code": ({"auto_map": {"AutoModel": "evil.Model"}}, "unknown key 'auto_map'"),
    "decoder": ({"is_decoder": True}, "is_decoder must be false, got true"),
    "positions": ({"position_embedding_type": "relative_key"}, 'position_embedding_type must be "absolute"'),
    "text": ({"hidden_size": "12"}, "hidden_size must be a whole number"),
    "truth": ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number"),
    "negative": ({"vocab_size": -5}, "vocab_size must be a whole number"),
    "nothing": ({"vocab_size": None}, "vocab_size must be a whole number from 0, got null"),
    "huge": ({"num_hidden_layers": 10**9}, "the config has 1000000000 layers"),
    "heads": ({"num_attention_heads": 5}, "dim must be a multiple of heads"),
    "activation": ({"hidden_act": "__import__('os')"}, "hidden_act must be one of 'gelu'"),
    "dropout": ({"hidden_dropout_prob": 1.5}, "dropout must be at least 0 and below 1"),
    "eps": ({"layer_norm_eps": "small"}, "layer_norm_eps must be a number from 0"),
    "padding": ({"pad_token_id": 99}, "padding must be a token of the vocabulary of 31"),
    "shape": (
        {"vocab_size": 40},
        "word_embeddings.weight must have shape \\(40, 12\\) by config.json, got \\(31, 12\\)",
    ),
    "fewer layers": ({"num_hidden_layers": 1}, "holds 'encoder.layer.1.*does not have"),
    "more layers": ({"num_hidden_layers": 3}, "holds no tensor 'bert.encoder.layer.2"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_that_lie_are_refused(case, tmp_path):
    values, message = CONFIGS[case]
    reconfigure(saved(tmp_path), **values)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_labels_must_be_as_many_as_the_classes(tmp_path):
    reconfigure(saved(tmp_path, "BertForSequenceClassification"), id2label={"0": "yes"})
    with pytest.raises(ValueError, match="id2label must be 2 labels"):
        load(tmp_path)


def test_a_folder_without_config_or_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config.json cannot be read: .*; expected a Hugging Face folder"):
        load(tmp_path / "nowhere")
    (saved(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"must hold model.safetensors or model.safetensors.index.json"):
        load(tmp_path)


def test_tensors_that_are_missing_extra_or_of_another_kind_are_refused(tmp_path):
    saved(tmp_path)
    original = load_file(tmp_path / "model.safetensors")
    name = "encoder.layer.0.output.dense.weight"
    cases = {
        f"holds no tensor 'bert.{name}'": {key: x for key, x in original.items() if key != name},
        "holds 'backdoor.weight', which the model of its config.json does not have": original
        | {"backdoor.weight": torch.ones(3)},
        f": {name} must have dtype F64, F32, F16, BF16, got I8": original | {name: original[name].to(torch.int8)},
        f": {name} must have shape": original | {name: original[name].T.contiguous()},
    }
    for message, tensors in cases.items():
        rewrite(tmp_path, lambda _, tensors=tensors: tensors)
        with pytest.raises(ValueError, match=message):
            load(tmp_path)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: torch.nn.Linear(2, 2),
            "transformers has no counterpart of Linear; pass a model of one of the classes Bert, ",
        ),
        (lambda: ViT(ViTConfig(image=8, patch=4, hidden=8, pool="mean", **SMALL)), "ViTModel .* has no pool='mean'"),
        (lambda: Gpt(GptConfig(vocabulary=9, window=3, **SMALL)), "GPT2LMHeadModel of transformers has no window=3"),
        (
            lambda: BertClassifier(
                Bert(BertConfig(vocabulary=9, hidden=8, pooler=False, **SMALL)), classes=2, pooler="relu"
            ),
            "has no pooler='relu'",
        ),
        (lambda: Bert(BertConfig(vocabulary=9, hidden=8, first=5, **SMALL)), "has no first=5"),
        (
            lambda: Gpt(GptConfig(vocabulary=9, qk_norm=True, **SMALL)),
            "GPT2LMHeadModel of transformers cannot hold .*: it has no tensor for blocks.0.attention.query",
        ),
        (
            lambda: BertClassifier(Bert(BertConfig(vocabulary=9, hidden=8, **SMALL)), classes=2, pooler="tanh"),
            "it has one tensor for both bert.pool.dense.weight and pool.dense.weight",
        ),
    ],
    ids=["other", "mean", "window", "pooler", "first", "norms", "pools"],
)
def test_what_transformers_cannot_express_is_not_saved(model, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        save(model(), tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_saving_over_a_model_replaces_it_and_leaves_nothing_else(tmp_path):
    for _ in range(2):
        model = ViTClassifier(ViT(ViTConfig(image=8, patch=4, hidden=8, **SMALL)), classes=3)
        save(model, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    for name, x in load(tmp_path).state_dict().items():
        assert torch.equal(x, model.state_dict()[name])


def test_training_alone_does_not_stand_in_the_way_of_saving(tmp_path):
    config = GptConfig.llama(vocabulary=9, dim=12, depth=1, heads=3)
    save(Gpt(config), tmp_path)
    assert load(tmp_path).config == config.with_sizes()
