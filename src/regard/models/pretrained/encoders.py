"""BERT, RoBERTa, DistilBERT and ViT: tensor names and config fields of Hugging Face and ours."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ..bert import Bert, BertConfig, BertPretraining
from ..bert_heads import BertClassifier, BertReader, BertTagger
from ..named_choices import Activation
from ..vit import ViT, ViTClassifier, ViTConfig
from .architecture import Architecture, ModelHead, TensorLocation, layers
from .fields import ConfigFields


def _bert_names(prefix: str) -> dict[str, str | TensorLocation]:
    return {
        "bert.words.table": f"{prefix}.embeddings.word_embeddings",
        "bert.positions": f"{prefix}.embeddings.position_embeddings",
        "bert.types.table": f"{prefix}.embeddings.token_type_embeddings",
        "bert.norm": f"{prefix}.embeddings.LayerNorm",
        "bert.pool.dense": f"{prefix}.pooler.dense",
        **layers("bert.blocks.{n}", f"{prefix}.encoder.layer.{{n}}", BERT_LAYER),
        "tags": "classifier",
        "span": "qa_outputs",
    }


def _bert_heads(pooler: Activation | None, ties: Mapping[str, str]) -> dict[str, ModelHead]:
    return {
        "Model": ModelHead(kind=Bert, build=lambda config, _: Bert(config)),
        "ForMaskedLM": ModelHead(
            kind=BertPretraining,
            build=lambda config, _: BertPretraining(Bert(config), next_sentence=False),
            wanted={"next": None},
            ties=ties,
        ),
        "ForSequenceClassification": ModelHead(
            kind=BertClassifier,
            build=lambda config, n: BertClassifier(Bert(config), classes=n, pooler=pooler),
            counted="classes",
            wanted={"pooler": pooler or "tanh"},
        ),
        "ForTokenClassification": ModelHead(
            kind=BertTagger, build=lambda config, n: BertTagger(Bert(config), tags=n), counted="tags"
        ),
        "ForQuestionAnswering": ModelHead(kind=BertReader, build=lambda config, _: BertReader(Bert(config))),
    }


BERT_LAYER = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.out": "attention.output.dense",
    "around_attention.norm": "attention.output.LayerNorm",
    "feedforward.up": "intermediate.dense",
    "feedforward.down": "output.dense",
    "around_feedforward.norm": "output.LayerNorm",
}
DISTILBERT_LAYER = {
    "attention.query": "attention.q_lin",
    "attention.key": "attention.k_lin",
    "attention.value": "attention.v_lin",
    "attention.out": "attention.out_lin",
    "around_attention.norm": "sa_layer_norm",
    "feedforward.up": "ffn.lin1",
    "feedforward.down": "ffn.lin2",
    "around_feedforward.norm": "output_layer_norm",
}
BERT_TIES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
ROBERTA_TIES = {
    "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
    "lm_head.decoder.bias": "lm_head.bias",
}
DISTILBERT_TIES = {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"}
BERT_FIELDS: Mapping[str, str | tuple[str, Any]] = {
    "vocab_size": "vocabulary",
    "max_position_embeddings": "length",
    "type_vocab_size": "types",
    "hidden_size": "dim",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "intermediate_size": "hidden",
    "hidden_act": ("activation", "gelu"),
    "layer_norm_eps": ("eps", 1e-12),
    "pad_token_id": "padding",
    "hidden_dropout_prob": ("dropout", 0.1),
    "attention_probs_dropout_prob": ("attention_dropout", 0.1),
}


def _read_bert(fields: ConfigFields, ours: dict[str, Any], held: Collection[str]) -> dict[str, Any]:
    if not ours["types"]:
        raise fields.error("type_vocab_size", "a whole number from 1", 0)
    return {"first": 0, "pooler": "bert.pooler.dense.weight" in held}


def _read_roberta(fields: ConfigFields, ours: dict[str, Any], held: Collection[str]) -> dict[str, Any]:
    """Read the fields of RoBERTa, whose positions begin after the id of padding."""
    if ours["padding"] is None:
        raise fields.error("pad_token_id", "a whole number from 0", None)
    more = _read_bert(fields, ours, held)
    return more | {"first": ours["padding"] + 1, "pooler": "roberta.pooler.dense.weight" in held}


BERT = Architecture(
    title="Bert",
    config=BertConfig,
    prefix="bert",
    root="bert",
    fields=BERT_FIELDS,
    fixed={"position_embedding_type": ("absolute",), "tie_word_embeddings": (True,)},
    silent=(
        "directionality",
        "pooler_fc_size",
        "pooler_num_attention_heads",
        "pooler_num_fc_layers",
        "pooler_size_per_head",
        "pooler_type",
    ),
    alone=("pooler",),  # the tensors say whether there is one
    read=_read_bert,
    names=_bert_names("bert")
    | {
        "dense": "cls.predictions.transform.dense",
        "norm": "cls.predictions.transform.LayerNorm",
        "bias": "cls.predictions.bias",
        "next": "cls.seq_relationship",
        "pool.dense": "bert.pooler.dense",
        "classes": "classifier",
    },
    heads=_bert_heads(None, BERT_TIES)
    | {
        "ForPreTraining": ModelHead(
            kind=BertPretraining, build=lambda config, _: BertPretraining(Bert(config)), ties=BERT_TIES
        )
    },
    spare=("cls.predictions.decoder",),
)
ROBERTA = replace(
    BERT,
    title="Roberta",
    prefix="roberta",
    read=_read_roberta,
    names=_bert_names("roberta")
    | {
        "dense": "lm_head.dense",
        "norm": "lm_head.layer_norm",
        "bias": "lm_head.bias",
        "pool.dense": "classifier.dense",
        "classes": "classifier.out_proj",
    },
    heads=_bert_heads(None, ROBERTA_TIES),
    spare=("lm_head.decoder",),
)
DISTILBERT = Architecture(
    title="DistilBert",
    config=BertConfig,
    prefix="distilbert",
    root="bert",
    fields={
        "vocab_size": "vocabulary",
        "max_position_embeddings": "length",
        "dim": "dim",
        "n_layers": "depth",
        "n_heads": "heads",
        "hidden_dim": "hidden",
        "activation": ("activation", "gelu"),
        "pad_token_id": "padding",
        "dropout": ("dropout", 0.1),
        "attention_dropout": ("attention_dropout", 0.1),
    },
    given={"types": 0, "first": 0, "pooler": False, "eps": 1e-12},
    fixed={"tie_word_embeddings": (True,), "tie_weights_": (True,)},
    silent=("qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds"),  # the table is in the file either way
    names={
        name: theirs
        for name, theirs in _bert_names("distilbert").items()
        if "blocks" not in name and "pool" not in name
    }
    | layers("bert.blocks.{n}", "distilbert.transformer.layer.{n}", DISTILBERT_LAYER)
    | {
        "dense": "vocab_transform",
        "norm": "vocab_layer_norm",
        "bias": "vocab_projector.bias",
        "pool.dense": "pre_classifier",
        "classes": "classifier",
    },
    heads=_bert_heads("relu", DISTILBERT_TIES),
    spare=("vocab_projector",),
)
VIT_LAYER = {
    "attention.query": "attention.attention.query",
    "attention.key": "attention.attention.key",
    "attention.value": "attention.attention.value",
    "attention.out": "attention.output.dense",
    "around_attention.norm": "layernorm_before",
    "feedforward.up": "intermediate.dense",
    "feedforward.down": "output.dense",
    "around_feedforward.norm": "layernorm_after",
}


def _read_vit(fields: ConfigFields, ours: dict[str, Any], held: Collection[str]) -> dict[str, Any]:
    biased = "qkvo" if fields.flag("qkv_bias", default=True) else "o"
    return {"image": fields.size("image_size"), "patch": fields.size("patch_size"), "biased": biased}


def _as_json_size(size: int | tuple[int, int]) -> int | list[int]:
    return size if isinstance(size, int) else list(size)


VIT = Architecture(
    title="ViT",
    config=ViTConfig,
    prefix="vit",
    root="vit",
    fields={
        "num_channels": ("channels", 3),
        "hidden_size": "dim",
        "num_hidden_layers": "depth",
        "num_attention_heads": "heads",
        "intermediate_size": "hidden",
        "hidden_act": ("activation", "gelu"),
        "layer_norm_eps": ("eps", 1e-12),
        "hidden_dropout_prob": ("dropout", 0.0),
        "attention_probs_dropout_prob": ("attention_dropout", 0.0),
    },
    given={"pool": "class"},
    silent=("encoder_stride", "pooler_act", "pooler_output_size"),
    read=_read_vit,
    write=lambda config: {
        "image_size": _as_json_size(config.image),
        "patch_size": _as_json_size(config.patch),
        "qkv_bias": config.biased == "qkvo",
    },
    names={
        "vit.token": "vit.embeddings.cls_token",
        "vit.positions": "vit.embeddings.position_embeddings",
        "vit.patches.project": "vit.embeddings.patch_embeddings.projection",
        "vit.norm": "vit.layernorm",
        **layers("vit.blocks.{n}", "vit.encoder.layer.{n}", VIT_LAYER),
        "classes": "classifier",
    },
    heads={
        "Model": ModelHead(kind=ViT, build=lambda config, _: ViT(config)),
        "ForImageClassification": ModelHead(
            kind=ViTClassifier, build=lambda config, n: ViTClassifier(ViT(config), classes=n), counted="classes"
        ),
    },
    spare=("vit.pooler.dense",),
)
