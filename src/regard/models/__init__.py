"""Models: encoders, decoders and encoder-decoders, each with a config and a `loss(batch)` for training."""

from .bert import Bert, BertConfig, BertPretraining
from .bert_heads import BertClassifier, BertReader, BertTagger
from .captioner import Captioner, CaptionerConfig
from .classifier import TextClassifier, TextClassifierConfig
from .convnet import AttentionConvNet, AttentionConvNetConfig
from .gpt import Gpt, GptConfig
from .masked_lm import mask_words
from .pointer import Pointer, PointerConfig
from .pretrained import load, save
from .reader import Reader, ReaderConfig
from .rope_scaling import DynamicStretch, LinearStretch, Stretch, YarnStretch
from .seq2seq import Seq2Seq, Seq2SeqConfig
from .span_scores import best_spans, top_spans
from .transformer import Transformer, TransformerConfig
from .vit import ViT, ViTClassifier, ViTConfig

__all__ = [
    "AttentionConvNet",
    "AttentionConvNetConfig",
    "Bert",
    "BertClassifier",
    "BertConfig",
    "BertPretraining",
    "BertReader",
    "BertTagger",
    "Captioner",
    "CaptionerConfig",
    "DynamicStretch",
    "Gpt",
    "GptConfig",
    "LinearStretch",
    "Pointer",
    "PointerConfig",
    "Reader",
    "ReaderConfig",
    "Seq2Seq",
    "Seq2SeqConfig",
    "Stretch",
    "TextClassifier",
    "TextClassifierConfig",
    "Transformer",
    "TransformerConfig",
    "ViT",
    "ViTClassifier",
    "ViTConfig",
    "YarnStretch",
    "best_spans",
    "load",
    "mask_words",
    "save",
    "top_spans",
]
