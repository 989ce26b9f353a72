"""Classifiers in a few words: of texts or of images, recurrent, convolutional or Transformers."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Annotated, Literal

from torch import nn

from ..data import Tokenizer
from ..models import (
    AttentionConvNet,
    AttentionConvNetConfig,
    Bert,
    BertClassifier,
    BertConfig,
    TextClassifier,
    TextClassifierConfig,
    ViT,
    ViTClassifier,
    ViTConfig,
)
from ..models.named_choices import Activation
from ..train.dataclass_json import check_left_at_default, check_types
from .image_inputs import ImageTransform

TEXTS, IMAGES = ("rnn", "pool", "bert"), ("convnet", "vit")
TextNetwork = TextClassifierConfig | BertConfig
ImageNetwork = AttentionConvNetConfig | ViTConfig
Network = TextNetwork | ImageNetwork


@dataclass(frozen=True, kw_only=True)
class ClassificationModelSettings:
    """A classifier in a few words.

    Of texts: `rnn` reads words in order and pools them by attention (after Lin et al. 2017), `pool` does without the
    order, `bert` is a Transformer. Of images: `convnet` is a residual network with attention, `vit` a Transformer.
    """

    kind: Annotated[
        Literal["rnn", "pool", "bert", "convnet", "vit"] | None,
        "what it is made of: rnn, pool or bert for texts (rnn), convnet or vit for images (convnet)",
        "--model",
    ] = None
    dim: Annotated[int, "the width of embeddings and states; the channels of a convnet's last stage"] = 128
    hidden: Annotated[int | None, "the width of recurrent states (2 dim), or of feed-forwards (4 dim)"] = None
    depth: Annotated[int | None, "layers (rnn 1, bert and vit 4), or a convnet's blocks a stage (1)"] = None
    heads: Annotated[int, "attention heads"] = 4
    queries: Annotated[int, "how many looks an rnn or a pool takes at a text"] = 1
    spelling: Annotated[bool, "an rnn or a pool also reads the letters of each token"] = False
    attention: Annotated[
        Literal["self", "squeeze", "cbam", "selective", "none"],
        "of a convnet: between places, over channels, over both, or over kernels",
    ] = "self"
    patch: Annotated[int | None, "pixels a side of a ViT's patches (an eighth of the image)"] = None
    pooling: Annotated[
        Literal["class", "mean"], "what of a ViT speaks for the image: a class token, or the mean of its patches"
    ] = "class"
    dropout: Annotated[float, "the share of activations left out while training"] = 0.1
    smoothing: Annotated[float, "label smoothing, of an rnn, a pool or a convnet"] = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        if self.smoothing and self.kind in ("bert", "vit"):
            raise ValueError(f"smoothing is of an rnn, a pool or a convnet, got kind={self.kind!r}; leave it out")
        if self.pooling != "class" and self.kind != "vit":
            raise ValueError(f"pooling is of a vit, got kind={self.kind!r}; choose a vit, or leave it out")
        if self.spelling and self.kind not in (None, "rnn", "pool"):
            raise ValueError(f"spelling is read by an rnn or a pool, got kind={self.kind!r}; leave it out")

    def texts(self, words: Tokenizer, letters: Tokenizer | None, *, classes: int, limit: int) -> TextNetwork:
        """The config for texts of these tokens, at most `limit` of them."""
        self._check_model(TEXTS, "texts")
        check_left_at_default(self, "attention", "patch", whose="models of images", got="texts")
        if self.kind == "pool":
            check_left_at_default(self, "depth", whose="models with layers", got="kind='pool'")
        if self.kind == "bert":
            check_left_at_default(self, "queries", whose="an rnn or a pool", got="kind='bert'")
        if self.kind == "bert":
            return BertConfig(
                vocabulary=len(words),
                length=limit,
                types=0,
                dim=self.dim,
                depth=4 if self.depth is None else self.depth,
                heads=self.heads,
                hidden=self.hidden or 4 * self.dim,
                padding=words.pad,
                dropout=self.dropout,
                attention_dropout=0.0,
            )
        return TextClassifierConfig(
            classes=classes,
            vocabulary=len(words),
            characters=None if letters is None else len(letters),
            dim=self.dim,
            hidden=self.hidden or 2 * self.dim,
            layers=0 if self.kind == "pool" else 1 if self.depth is None else self.depth,
            queries=self.queries,
            apart=0.03 if self.queries > 1 else 0.0,
            padding=words.pad,
            dropout=self.dropout,
            smoothing=self.smoothing,
        )

    def images(self, sight: ImageTransform, *, classes: int) -> ImageNetwork:
        """The config for images seen so."""
        self._check_model(IMAGES, "images")
        check_left_at_default(self, "queries", "spelling", whose="models of texts", got="images")
        if self.kind == "vit":
            check_left_at_default(self, "attention", whose="a convnet", got="kind='vit'")
        else:
            check_left_at_default(self, "patch", whose="a vit", got="a convnet")
        if self.kind == "vit":
            eighth = max(1, sight.size // 8)
            patch = self.patch or max(n for n in range(1, eighth + 1) if sight.size % n == 0)
            return ViTConfig(
                image=sight.size,
                patch=patch,
                pool=self.pooling,
                channels=sight.channels,
                dim=self.dim,
                depth=4 if self.depth is None else self.depth,
                heads=self.heads,
                hidden=self.hidden or 4 * self.dim,
                dropout=self.dropout,
            )
        stages = min(3, max(1, int(log2(sight.size / 4)) + 1))  # a map is halved while it has four places a side
        return AttentionConvNetConfig(
            classes=classes,
            channels=sight.channels,
            widths=tuple(max(1, self.dim >> n) for n in reversed(range(stages))),
            depth=1 if self.depth is None else self.depth,
            attention=None if self.attention == "none" else self.attention,
            heads=self.heads,
            dropout=self.dropout,
            smoothing=self.smoothing,
        )

    def _check_model(self, kinds: tuple[str, ...], what: str) -> None:
        if self.kind is not None and self.kind not in kinds:
            raise ValueError(f"kind must be {' or '.join(kinds)} for {what}, got {self.kind!r}")


Model = ClassificationModelSettings  # short, for `classifiers.Model(...)`


def build_model(config: Network, *, classes: int, pooler: Activation | None = None) -> nn.Module:
    """The model of a config, for so many classes; `pooler` is of a BERT that has another than tanh."""
    match config:
        case TextClassifierConfig():
            return TextClassifier(config)
        case BertConfig():
            return BertClassifier(Bert(config), classes=classes, pooler=pooler)
        case AttentionConvNetConfig():
            return AttentionConvNet(config)
        case ViTConfig():
            return ViTClassifier(ViT(config), classes=classes)
