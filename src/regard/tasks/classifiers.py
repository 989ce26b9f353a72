"""Settings of classifiers of texts and images: recurrent, convolutional or Transformers."""

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
    """Settings of a classifier.

    For texts, `rnn` reads words in order and pools them by attention (after Lin et al. 2017), `pool` ignores the order,
    and `bert` is a Transformer. For images, `convnet` is a residual network with attention and `vit` a Transformer.
    """

    kind: Annotated[
        Literal["rnn", "pool", "bert", "convnet", "vit"] | None,
        "Architecture: rnn (default), pool or bert for texts; convnet (default) or vit for images.",
        "--model",
    ] = None
    dim: Annotated[int, "Width of embeddings and hidden states, or channels of the last stage (convnet)."] = 128
    hidden: Annotated[
        int | None,
        "Width of recurrent states (default: 2 x --dim) or of feed-forward layers (bert, vit; default: 4 x --dim).",
    ] = None
    depth: Annotated[
        int | None,
        "Number of layers (default: 1 for rnn, 4 for bert and vit) or of blocks per stage (convnet; default: 1).",
    ] = None
    heads: Annotated[int, "Number of attention heads."] = 4
    queries: Annotated[int, "Number of queries that pool a text by attention (rnn and pool only)."] = 1
    spelling: Annotated[bool, "Also read the characters of each token (rnn and pool only)."] = False
    attention: Annotated[
        Literal["self", "squeeze", "cbam", "selective", "none"],
        "Attention of a convnet: self (between positions), squeeze (over channels), cbam (over channels and "
        "positions), selective (over kernel sizes), or none.",
    ] = "self"
    patch: Annotated[
        int | None,
        "Side of a patch in pixels (vit only). Default: the largest divisor of the image's side up to an eighth of it.",
    ] = None
    pooling: Annotated[
        Literal["class", "mean"],
        "Image representation to classify: the class token, or the mean of all patches (vit only).",
    ] = "class"
    dropout: Annotated[float, "Dropout probability in training."] = 0.1
    smoothing: Annotated[float, "Label smoothing; 0 for none (rnn, pool and convnet only)."] = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        if self.smoothing and self.kind in ("bert", "vit"):
            raise ValueError(f"smoothing is only for rnn, pool and convnet, got kind={self.kind!r}; leave it out")
        if self.pooling != "class" and self.kind != "vit":
            raise ValueError(f"pooling is only for vit, got kind={self.kind!r}; leave it out, or choose kind='vit'")
        if self.spelling and self.kind not in (None, "rnn", "pool"):
            raise ValueError(f"spelling is only for rnn and pool, got kind={self.kind!r}; leave it out")

    def texts(self, words: Tokenizer, letters: Tokenizer | None, *, classes: int, limit: int) -> TextNetwork:
        """Return the config of a text model: `words` tokenizes texts, `letters`, if given, the spelling of each word.

        `limit` is the maximum number of tokens; only a BERT has a parameter for each position.
        """
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
        """Return the config of an image model; `sight` holds the size and channels of the images."""
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
        # Each stage but the first halves the feature map; at least 4 positions per side remain.
        stages = min(3, max(1, int(log2(sight.size / 4)) + 1))
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
    """Build the model of a config; `pooler` is the activation of a BERT's pooler if it is not tanh."""
    match config:
        case TextClassifierConfig():
            return TextClassifier(config)
        case BertConfig():
            return BertClassifier(Bert(config), classes=classes, pooler=pooler)
        case AttentionConvNetConfig():
            return AttentionConvNet(config)
        case ViTConfig():
            return ViTClassifier(ViT(config), classes=classes)
