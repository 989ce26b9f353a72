"""AttentionConvNet: a residual convolutional network with attention over channels, positions or kernels."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ..checks import check_choice, check_int, check_keys, check_probability
from ..nn import CBAM, SelectiveKernel, SelfAttention2d, SqueezeExcite
from ..nn.dropout import Dropout
from ..nn.losses import Loss, cross_entropy
from ..ops.terms.scores import Dot

Looking = Literal["self", "squeeze", "cbam", "selective"]


@dataclass(frozen=True, kw_only=True)
class AttentionConvNetConfig:
    """Sizes of an `AttentionConvNet`; without attention the presets are those of Zagoruyko & Komodakis 2016.

    >>> AttentionConvNetConfig.small(classes=10).widths
    (64, 128, 256)

    The image passes a convolution to `stem` channels, then a stage for each of `widths`, of `depth` residual blocks
    with two convolutions each. Every stage but the first halves the sides of the map.

    `attention` is `"squeeze"` (a gate for each channel) or `"cbam"` (for each channel, then for each position) at the
    end of every block, both with a `reduction`; `"selective"`, which mixes kernels of 3 and 5 in place of the first
    convolution of a block; `"self"`, self-attention between positions, with `heads`, between the convolutions of the
    last block of every stage but the first; or None. `dropout` acts between the convolutions of a block, `smoothing`
    in training only.
    """

    classes: int
    channels: int = 3
    stem: int = 16
    widths: tuple[int, ...] = (64, 128, 256)
    depth: int = 2
    attention: Looking | None = "squeeze"
    heads: int = 4
    reduction: int = 16
    dropout: float = 0.0
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        for name in ("classes", "channels", "stem", "depth", "heads", "reduction"):
            check_int(name, getattr(self, name), least=1)
        for width in self.widths:
            check_int("widths", width, least=1)
        for name in ("dropout", "smoothing"):
            check_probability(name, getattr(self, name))
        if not self.widths:
            raise ValueError("widths must name the channels of at least one stage, got none; pass (64, 128, 256)")
        if self.attention is not None:
            check_choice("attention", self.attention, Looking)
        if self.attention == "self" and len(self.widths) == 1:
            raise ValueError(
                f"attention='self' needs a stage that halves the map, got widths={self.widths}; pass two or more widths"
            )

    @classmethod
    def tiny(cls, *, classes: int, channels: int = 3, attention: Looking | None = "squeeze") -> Self:
        """WRN-10-2, 0.3 million parameters: quick on a CPU."""
        return cls(classes=classes, channels=channels, attention=attention, widths=(32, 64, 128), depth=1)

    @classmethod
    def small(cls, *, classes: int, channels: int = 3, attention: Looking | None = "squeeze") -> Self:
        """WRN-16-4, 2.7 million parameters."""
        return cls(classes=classes, channels=channels, attention=attention)

    @classmethod
    def base(cls, *, classes: int, channels: int = 3, attention: Looking | None = "squeeze") -> Self:
        """WRN-16-8, 11 million parameters."""
        return cls(classes=classes, channels=channels, attention=attention, widths=(128, 256, 512))

    @classmethod
    def large(cls, *, classes: int, channels: int = 3, attention: Looking | None = "squeeze") -> Self:
        """WRN-28-10, 36.5 million parameters."""
        return cls(classes=classes, channels=channels, attention=attention, widths=(160, 320, 640), depth=4)


class AttentionConvNet(nn.Module):
    """A class for each image, by residual convolutions and attention.

    >>> import torch
    >>> model = AttentionConvNet(AttentionConvNetConfig.tiny(classes=10, channels=1, attention="self")).eval()
    >>> image = torch.rand(2, 1, 28, 28)
    >>> model(image).shape, model.features(image).shape
    (torch.Size([2, 10]), torch.Size([2, 128, 7, 7]))

    Images may have any size. To see the attention between positions:

    >>> from regard.lens import capture
    >>> with capture(model) as tape:
    ...     logits = model(image)
    >>> tape
    Tape(2 layers)
    features.stage2.0.attention  Weights(2 x 4 x 196 x 196)
    features.stage3.0.attention  Weights(2 x 4 x 49 x 49)

    Without its head it gives features to another model: `Captioner(config, features=model.features)`.
    """

    def __init__(self, config: AttentionConvNetConfig) -> None:
        super().__init__()
        self.config = config
        widths = (config.stem, *config.widths)
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        parts["stem"] = _convolution(config.channels, config.stem)
        for n, (before, after) in enumerate(pairwise(widths)):
            parts[f"stage{n + 1}"] = ResidualStage(config, before, after, first=n == 0)
        parts["norm"], parts["relu"] = nn.BatchNorm2d(widths[-1]), nn.ReLU()
        self.features = nn.Sequential(parts)
        self.classes = nn.Linear(widths[-1], config.classes)

    def forward(self, image: Float[Tensor, "b c y x"]) -> Float[Tensor, "b classes"]:
        if image.ndim != 4 or image.shape[1] != self.config.channels:
            raise ValueError(
                f"image must have dims b c y x with c={self.config.channels} channels, got shape {tuple(image.shape)}"
            )
        return self.classes(self.features(image).mean((2, 3)))

    def loss(self, batch: Mapping[str, Tensor]) -> Loss:
        """Return the cross entropy of `label` (b,), from `image` (b, c, y, x)."""
        smoothing = self.config.smoothing if self.training else 0.0
        check_keys(batch, "image", "label")
        return cross_entropy(self(batch["image"]), batch["label"], smoothing=smoothing)


class ResidualStage(nn.Sequential):
    """Residual blocks of one width; the first may halve the map, the last may have self-attention."""

    def __init__(self, config: AttentionConvNetConfig, before: int, after: int, *, first: bool) -> None:
        attends = config.attention == "self" and not first
        last = config.depth - 1
        super().__init__(
            *(
                ResidualBlock(
                    config,
                    after if n else before,
                    after,
                    stride=1 if first or n else 2,
                    attends=attends and n == last,
                )
                for n in range(config.depth)
            )
        )

    def forward(self, x: Float[Tensor, "b c y x"]) -> Float[Tensor, "b c_out y_out x_out"]:
        if x.is_cuda:  # on a GPU convolutions are fastest if the channels of a position are contiguous
            x = x.contiguous(memory_format=torch.channels_last)
        return super().forward(x)


class ResidualBlock(nn.Module):
    """x + gate(conv(attention(relu(norm(conv(relu(norm(x)))))))): pre-norm (Zagoruyko & Komodakis 2016, fig. 1d).

    If the number of channels or the size changes, a 1 x 1 convolution of relu(norm(x)) replaces the first x.
    """

    def __init__(
        self, config: AttentionConvNetConfig, before: int, after: int, *, stride: int = 1, attends: bool = False
    ) -> None:
        super().__init__()
        selective = config.attention == "selective"
        self.norm = nn.BatchNorm2d(before)
        self.first = SelectiveKernel(before, after, stride=stride) if selective else _convolution(before, after, stride)
        self.second_norm = nn.BatchNorm2d(after)
        self.attention = _self_attention(after, config.heads) if attends else nn.Identity()
        self.dropout = Dropout(config.dropout)
        self.second = _convolution(after, after)
        self.gate = _gate(config, after)
        is_same_shape = before == after and stride == 1
        self.shortcut = None if is_same_shape else nn.Conv2d(before, after, 1, stride=stride, bias=False)

    def forward(self, x: Float[Tensor, "b c y x"]) -> Float[Tensor, "b c_out y_out x_out"]:
        normed = F.relu(self.norm(x))
        changed = self.attention(F.relu(self.second_norm(self.first(normed))))
        changed = self.gate(self.second(self.dropout(changed)))
        return (x if self.shortcut is None else self.shortcut(normed)) + changed


def _gate(config: AttentionConvNetConfig, channels: int) -> nn.Module:
    match config.attention:
        case "squeeze":
            return SqueezeExcite(channels, reduction=config.reduction)
        case "cbam":
            return CBAM(channels, reduction=config.reduction)
        case _:
            return nn.Identity()


def _self_attention(channels: int, heads: int) -> SelfAttention2d:
    """Build self-attention with 1/8 of the channels, as published, rounded up to a multiple of heads."""
    return SelfAttention2d(channels, heads=heads, width=-(-channels // (8 * heads)) * heads, score=Dot())


def _convolution(before: int, after: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
