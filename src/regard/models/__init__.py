"""Models: encoders, decoders and both, each with its config and a `loss(batch)` to train it by."""

from .bert import Bert, BertClassifier, BertConfig, BertPretraining, BertReader, BertTagger
from .captioner import Captioner, CaptionerConfig
from .gpt import Gpt, GptConfig, Stretch
from .masking import mask_words
from .pretrained import load, save
from .seq2seq import Seq2Seq, Seq2SeqConfig
from .spans import best_spans
from .transformer import Transformer, TransformerConfig
from .vit import ViT, ViTClassifier, ViTConfig

__all__ = [
    "Bert",
    "BertClassifier",
    "BertConfig",
    "BertPretraining",
    "BertReader",
    "BertTagger",
    "Captioner",
    "CaptionerConfig",
    "Gpt",
    "GptConfig",
    "Seq2Seq",
    "Seq2SeqConfig",
    "Stretch",
    "Transformer",
    "TransformerConfig",
    "ViT",
    "ViTClassifier",
    "ViTConfig",
    "best_spans",
    "load",
    "mask_words",
    "save",
]
