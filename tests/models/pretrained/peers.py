"""Small models of transformers with random weights, the folders they save, and comparisons with ours."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

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


def rope(kind, **fields):
    return {"rope_theta": 5000.0, "rope_type": kind, **fields}


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
    "llama linear": ("LlamaForCausalLM", {**LLAMA, "rope_parameters": rope("linear", factor=3.0)}),
    "llama yarn": (
        "LlamaForCausalLM",
        {**LLAMA, "head_dim": 12, "rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=8)},
    ),
    "helium": ("HeliumForCausalLM", {**LLAMA, "head_dim": 4}),
    "mistral": ("MistralForCausalLM", {**LLAMA, "sliding_window": 4, "head_dim": 6}),
    "qwen2": ("Qwen2ForCausalLM", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "head_dim": 6}),
}


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


def same_gradients(ours, theirs, out, expected):
    """The gradients of the same random direction, norm by norm, for the embedding of words."""
    direction = torch.randn_like(expected)
    (mine,) = torch.autograd.grad(out, [ours], direction)
    (peers,) = torch.autograd.grad(expected, [theirs], direction)
    assert peers.abs().max() > 1e-3
    torch.testing.assert_close(mine, peers, rtol=1e-3, atol=1e-4 * peers.abs().max().item())


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


def saved(folder, name="BertModel", values=BERT):
    peer(name, values).save_pretrained(folder)
    return folder


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})


def reconfigure(folder, **values):
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, **values}))


SMALL = {"dim": 12, "depth": 1, "heads": 3}
