"""Folders: what a file holds twice, and a model of ours once."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.models.pretrained import load

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

BERT = {
    "vocab_size": 31,
    "hidden_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 17,
    "pad_token_id": 1,
}
GPT2 = {"vocab_size": 31, "n_embd": 12, "n_layer": 1, "n_head": 3, "n_positions": 17}
LLAMA = {**BERT, "tie_word_embeddings": True, "num_attention_heads": 2}
DISTILBERT = {"vocab_size": 31, "dim": 12, "n_layers": 1, "n_heads": 3, "hidden_dim": 20}
BART = {
    "vocab_size": 31,
    "d_model": 12,
    **{f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("attention_heads", 3))},
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20,
    "max_position_embeddings": 17,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
}
TIED = [
    ("LlamaForCausalLM", LLAMA, "lm_head.weight", "model.embed_tokens.weight"),
    ("GPT2LMHeadModel", GPT2, "lm_head.weight", "transformer.wte.weight"),
    ("BertForMaskedLM", BERT, "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ("BertForMaskedLM", BERT, "cls.predictions.decoder.bias", "cls.predictions.bias"),
    ("BertForPreTraining", BERT, "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ("RobertaForMaskedLM", BERT, "lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight"),
    ("RobertaForMaskedLM", BERT, "lm_head.decoder.bias", "lm_head.bias"),
    ("DistilBertForMaskedLM", DISTILBERT, "vocab_projector.weight", "distilbert.embeddings.word_embeddings.weight"),
    ("BartForConditionalGeneration", BART, "lm_head.weight", "model.shared.weight"),
    ("BartForConditionalGeneration", BART, "model.encoder.embed_tokens.weight", "model.shared.weight"),
    ("BartForConditionalGeneration", BART, "model.decoder.embed_tokens.weight", "model.shared.weight"),
    ("MarianMTModel", BART, "lm_head.weight", "model.shared.weight"),
]


def saved(folder, name, values):
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    kind(kind.config_class(**values)).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def rewritten(folder, tensors):
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(("name", "values", "copy", "of"), TIED)
def test_a_tensor_that_is_tied_and_holds_other_numbers_is_refused(name, values, copy, of, tmp_path):
    tensors = saved(tmp_path, name, values)
    rewritten(tmp_path, tensors | {copy: tensors[of].clone()})
    load(tmp_path)
    for other in (tensors[of] + 1, tensors[of][1:].clone()):
        rewritten(tmp_path, tensors | {copy: other})
        with pytest.raises(ValueError, match=rf"{copy} must hold what {of} does.* (write|drop) "):
            load(tmp_path)


@pytest.mark.parametrize(("name", "values", "copy", "of"), TIED[:2])
def test_two_tables_are_read_where_the_config_says_so(name, values, copy, of, tmp_path):
    tensors = saved(tmp_path, name, values)
    other = tensors[of] + 1
    rewritten(tmp_path, tensors | {copy: other})
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
    assert torch.equal(load(tmp_path).head.weight, other)


def test_what_the_model_does_not_read_may_differ(tmp_path):
    tensors = saved(tmp_path, "BertForTokenClassification", BERT)
    table = tensors["bert.embeddings.word_embeddings.weight"]
    rewritten(tmp_path, tensors | {"cls.predictions.decoder.weight": table + 1})
    load(tmp_path)


def test_a_copy_of_another_precision_is_the_same(tmp_path):
    tensors = saved(tmp_path, "LlamaForCausalLM", LLAMA)
    table = tensors["model.embed_tokens.weight"].bfloat16()
    rewritten(tmp_path, tensors | {"model.embed_tokens.weight": table, "lm_head.weight": table.float()})
    load(tmp_path)
