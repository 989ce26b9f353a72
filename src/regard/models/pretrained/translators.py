"""Marian and BART: tensor names and config fields of Hugging Face and ours."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ..transformer import Transformer, TransformerConfig
from .architecture import Architecture, ModelHead, TensorLocation, layers
from .fields import ConfigFields

LAYER = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.out_proj",
    "around_attention.norm": "self_attn_layer_norm",
    "feedforward.up": "fc1",
    "feedforward.down": "fc2",
    "around_feedforward.norm": "final_layer_norm",
}
CROSS = {
    "cross.query": "encoder_attn.q_proj",
    "cross.key": "encoder_attn.k_proj",
    "cross.value": "encoder_attn.v_proj",
    "cross.out": "encoder_attn.out_proj",
    "around_cross.norm": "encoder_attn_layer_norm",
}
NAMES: Mapping[str, str | TensorLocation] = {
    "encoder.input.embedding.table": "model.shared",
    "decoder.bias": TensorLocation("final_logits_bias", lead=True),
    **layers("encoder.blocks.{n}", "model.encoder.layers.{n}", LAYER),
    **layers("decoder.blocks.{n}", "model.decoder.layers.{n}", LAYER | CROSS),
}

TIES = {
    f"{name}.weight": "model.shared.weight"
    for name in ("lm_head", "model.encoder.embed_tokens", "model.decoder.embed_tokens")
}
_TRANSFORMER = ModelHead(kind=Transformer, build=lambda config, _: Transformer(config), ties=TIES)


def _read(fields: ConfigFields, ours: dict[str, Any], held: Collection[str]) -> dict[str, Any]:
    fields.must("decoder_vocab_size", None, ours["source_vocabulary"])
    return {
        "target_vocabulary": ours["source_vocabulary"],
        "embedding_scale": None if fields.flag("scale_embedding", default=False) else 1.0,
    }


MARIAN = Architecture(
    title="Marian",
    config=TransformerConfig,
    prefix="model",
    root="",
    fields={
        "vocab_size": "source_vocabulary",
        "decoder_start_token_id": "start",
        "d_model": "dim",
        "encoder_attention_heads": "heads",
        "decoder_attention_heads": "heads",
        "encoder_ffn_dim": "hidden",
        "decoder_ffn_dim": "hidden",
        "encoder_layers": "encoder_layers",
        "decoder_layers": "decoder_layers",
        "max_position_embeddings": "longest",
        "activation_function": ("activation", "gelu"),
        "dropout": ("dropout", 0.1),
        "attention_dropout": ("attention_dropout", 0.0),
    },
    given={"norm": "post", "positions": "sinusoidal_halves", "tied": "all", "output_bias": True},
    fixed={
        "is_encoder_decoder": (True,),
        "add_bias_logits": (False,),
        "add_final_layer_norm": (False,),
        "normalize_before": (False,),
        "normalize_embedding": (False,),
        "share_encoder_decoder_embeddings": (True,),
        "static_position_embeddings": (True,),
        "tie_word_embeddings": (True,),
    },
    # Dropout that only theirs has, which acts in training, and duplicate fields of older files.
    silent=(
        "activation_dropout",
        "classif_dropout",
        "decoder_layerdrop",
        "encoder_layerdrop",
        "extra_pos_embeddings",
        "force_bos_token_to_be_generated",
        "init_std",
        "num_hidden_layers",
    ),
    alone=("smoothing", "reach"),
    read=_read,
    write=lambda config: {
        "scale_embedding": config.embedding_scale is None,
        "is_encoder_decoder": True,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "forced_eos_token_id": None,
    },
    names=NAMES,
    heads={"MTModel": _TRANSFORMER},
    spare=(
        "lm_head",
        "model.encoder.embed_tokens",
        "model.decoder.embed_tokens",
        "model.encoder.embed_positions",
        "model.decoder.embed_positions",
    ),
)
BART = replace(
    MARIAN,
    title="Bart",
    given={**MARIAN.given, "positions": "learned", "embedding_norm": True},
    fixed={**MARIAN.fixed, "normalize_embedding": (True,), "static_position_embeddings": (False,)},
    names={
        **NAMES,
        # The positions of theirs begin after two unused rows.
        "encoder.input.positions": TensorLocation("model.encoder.embed_positions", skip=2),
        "decoder.input.positions": TensorLocation("model.decoder.embed_positions", skip=2),
        "encoder.input.norm": "model.encoder.layernorm_embedding",
        "decoder.input.norm": "model.decoder.layernorm_embedding",
    },
    heads={"ForConditionalGeneration": _TRANSFORMER},
    spare=("lm_head", "model.encoder.embed_tokens", "model.decoder.embed_tokens"),
)
