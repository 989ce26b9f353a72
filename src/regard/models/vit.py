"""ViT: a Transformer encoder over the patches of an image."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ..checks import check_choice, check_eps, check_int, check_keys, check_letters, check_probability, check_submodel
from ..nn import Attention, EncoderBlock, FeedForward, PatchEmbedding
from ..nn.dropout import Dropout
from ..nn.losses import Loss, cross_entropy
from .initialization import initialize, std_for_width
from .named_choices import Activation, activation_named

Pooling = Literal["class", "mean"]


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Sizes and choices of a `ViT`; the presets are those of Dosovitskiy et al. 2021 and Touvron et al. 2021.

    >>> ViTConfig.base().grid
    (14, 14)

    `image` and `patch` are height and width in pixels, or one number for both. `pool="class"` represents the image by
    a learned token before the patches, `"mean"` by the mean of the patches. `biased` names the projections of attention
    that have a bias.
    """

    image: int | tuple[int, int] = 224
    patch: int | tuple[int, int] = 16
    channels: int = 3
    dim: int = 768
    depth: int = 12
    heads: int = 12
    hidden: int = 3072
    activation: Activation = "gelu"
    pool: Pooling = "class"
    biased: str = "qkvo"
    eps: float = 1e-12
    dropout: float = 0.0
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("channels", "dim", "depth", "heads", "hidden"):
            check_int(name, getattr(self, name), least=1)
        for name in ("image", "patch"):
            given = getattr(self, name)
            if not isinstance(given, int) and not (isinstance(given, Sequence) and len(given) == 2):
                raise ValueError(
                    f"{name} must be one number of pixels, or height and width, got {given!r}; pass (8, 12)"
                )
            for size in _pair(getattr(self, name)):
                check_int(name, size, least=1)
        for name, known in (("activation", Activation), ("pool", Pooling)):
            check_choice(name, getattr(self, name), known)
        for name in ("dropout", "attention_dropout"):
            check_probability(name, getattr(self, name))
        check_letters("biased", self.biased, "qkvo")
        check_eps(self.eps)
        if any(size % patch for size, patch in zip(_pair(self.image), _pair(self.patch), strict=True)):
            raise ValueError(f"image must divide into patches, got image={self.image} and patch={self.patch}")

    @property
    def grid(self) -> tuple[int, int]:
        """Number of patches per image, as (rows, columns)."""
        (height, width), (down, across) = _pair(self.image), _pair(self.patch)
        return height // down, width // across

    @classmethod
    def tiny(cls) -> Self:
        """12 layers of width 192, 6 million parameters."""
        return cls(dim=192, heads=3, hidden=768)

    @classmethod
    def small(cls) -> Self:
        """12 layers of width 384, 22 million parameters."""
        return cls(dim=384, heads=6, hidden=1536)

    @classmethod
    def base(cls) -> Self:
        """12 layers of width 768, 86 million parameters."""
        return cls()

    @classmethod
    def large(cls) -> Self:
        """24 layers of width 1024, 304 million parameters."""
        return cls(dim=1024, depth=24, heads=16, hidden=4096)


class ViT(nn.Module):
    """A vector for each patch of an image, which depends on all; the class token, if any, comes first.

    >>> vit = ViT(ViTConfig(image=32, patch=8, dim=64, depth=2, heads=4, hidden=128))
    >>> x = vit(torch.randn(2, 3, 32, 32))
    >>> x.shape, vit.pooled(x).shape
    (torch.Size([2, 17, 64]), torch.Size([2, 64]))
    >>> vit.resized((48, 32))(torch.randn(2, 3, 48, 32)).shape
    torch.Size([2, 25, 64])
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        leading = 1 if config.pool == "class" else 0
        down, across = config.grid
        self.patches = PatchEmbedding(config.dim, patch=_pair(config.patch), channels=config.channels)
        self.token = nn.Parameter(torch.empty(1, 1, config.dim)) if leading else None
        self.positions = nn.Parameter(torch.empty(1, leading + down * across, config.dim))
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(_block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.dim, eps=config.eps)
        initialize(self, std=std_for_width(config.dim))
        nn.init.normal_(self.patches.project.weight, std=std_for_width(self.patches.project.weight[0].numel()))
        for parameter in (self.token, self.positions):
            if parameter is not None:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, image: Float[Tensor, "b c y x"]) -> Float[Tensor, "b n dim"]:
        size = tuple(image.shape[-2:])
        if size != _pair(self.config.image):
            wanted = _pair(self.config.image)
            raise ValueError(f"image must be {wanted} pixels, got {size}; resize it, or write vit.resized({size})")
        x = self.patches(image)
        if self.token is not None:
            x = torch.cat((self.token.expand(len(x), -1, -1), x), 1)
        x = self.dropout(x + self.positions)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def pooled(self, x: Float[Tensor, "b n dim"]) -> Float[Tensor, "b dim"]:
        """Return the vector of the image: that of the class token, or the mean of all."""
        return x.mean(1) if self.token is None else x[:, 0]

    def resized(self, image: int | tuple[int, int]) -> ViT:
        """Return a copy for images of another size, with resampled positions (Dosovitskiy et al. 2021, sec. 3.2)."""
        other = copy.deepcopy(self)
        other.config = replace(self.config, image=image)
        leading = 0 if self.token is None else 1
        with torch.no_grad():
            map_ = self.positions[:, leading:].unflatten(1, self.config.grid).permute(0, 3, 1, 2)
            map_ = F.interpolate(map_, size=other.config.grid, mode="bicubic", align_corners=False)
            positions = torch.cat((self.positions[:, :leading], map_.flatten(2).mT), 1)
        other.positions = nn.Parameter(positions)
        return other


class ViTClassifier(nn.Module):
    """A class for each image.

    >>> vit = ViT(ViTConfig(image=32, patch=8, dim=64, depth=2, heads=4, hidden=128, pool="mean"))
    >>> ViTClassifier(vit, classes=10)(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, vit: ViT, *, classes: int) -> None:
        super().__init__()
        check_submodel("vit", vit, "ViT", "ViTClassifier")
        check_int("classes", classes, least=1)
        self.vit = vit
        self.classes = nn.Linear(vit.config.dim, classes)
        initialize(self.classes, std=std_for_width(vit.config.dim))

    def forward(self, image: Float[Tensor, "b c y x"]) -> Float[Tensor, "b classes"]:
        return self.classes(self.vit.pooled(self.vit(image)))

    def loss(self, batch: Mapping[str, Tensor]) -> Loss:
        """Return the cross entropy of `label` (b,), from `image` (b, c, y, x)."""
        check_keys(batch, "image", "label")
        return cross_entropy(self(batch["image"]), batch["label"])


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _block(config: ViTConfig) -> EncoderBlock:
    attention = Attention(config.dim, config.heads, biased=config.biased, dropout=config.attention_dropout)
    feedforward = FeedForward(config.dim, config.hidden, activation=activation_named(config.activation))
    return EncoderBlock(attention, feedforward, norm=partial(nn.LayerNorm, eps=config.eps), dropout=config.dropout)
