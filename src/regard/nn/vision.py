"""Attention over feature maps, dims b c y x: between positions, over channels, over kernel sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ..argument_hints import LAYERS, with_argument_hints
from ..checks import check_int
from ..ops.operator import weights
from ..ops.terms.scores import Dot, Score
from ..ops.weights import Weights
from .core import Core
from .learned_terms import fill, slot


class PatchEmbedding(nn.Module):
    """An image cut into patches, each a token: one convolution whose stride is its size (Dosovitskiy et al. 2021).

    >>> PatchEmbedding(64, patch=16)(torch.randn(2, 3, 224, 160)).shape
    torch.Size([2, 140, 64])

    Tokens are in row-major order. The model adds class tokens and positions.
    """

    def __init__(self, dim: int, *, patch: int | tuple[int, int] = 16, channels: int = 3) -> None:
        super().__init__()
        self.patch = (patch, patch) if isinstance(patch, int) else patch
        self.project = nn.Conv2d(channels, dim, self.patch, stride=self.patch)

    def forward(self, image: Float[Tensor, "b c y x"]) -> Float[Tensor, "b n dim"]:
        size = tuple(image.shape[-2:])
        if size[0] % self.patch[0] or size[1] % self.patch[1]:
            raise ValueError(f"the image must divide into patches of {self.patch}, got {size}; resize, crop or pad it")
        return self.project(image).flatten(2).mT


class SelfAttention2d(nn.Module):
    """x + gamma * W_o (A @ W_v x): each position of a map attends to all (Zhang et al. 2019, eq. 1 to 3).

    Queries, keys and values are 1x1 convolutions to `width` channels (default: an eighth of the map's), split over
    `heads`. As in the paper, scores are not scaled. gamma starts at 0, so a new layer is the identity.

    >>> layer = SelfAttention2d(32, heads=2)
    >>> x = torch.randn(1, 32, 14, 14)
    >>> layer(x).shape, layer.weights(x)
    (torch.Size([1, 32, 14, 14]), Weights(1 x 2 x 196 x 196, score=Dot(scale=1.0)))

    To attend across scales, take keys and values from another map, of any size and of `source_channels`:

    >>> SelfAttention2d(32, source_channels=64)(x, torch.randn(1, 64, 7, 7)).shape
    torch.Size([1, 32, 14, 14])
    """

    @with_argument_hints(LAYERS)
    def __init__(
        self,
        channels: int,
        *,
        heads: int = 1,
        width: int | None = None,
        source_channels: int | None = None,
        score: Score | nn.Module | None = None,
    ) -> None:
        super().__init__()
        check_int("heads", heads, least=1)
        width = max(channels // 8, 1) if width is None else width
        if width % heads:
            raise ValueError(
                f"width must be a multiple of heads, got width={width} and heads={heads}; "
                f"pass width={-(-width // heads) * heads}"
            )
        source = channels if source_channels is None else source_channels
        self.heads = heads
        self.query = nn.Conv2d(channels, width, 1, bias=False)
        self.key = nn.Conv2d(source, width, 1, bias=False)
        self.value = nn.Conv2d(source, width, 1, bias=False)
        self.out = nn.Conv2d(width, channels, 1, bias=False)
        self.gamma = nn.Parameter(torch.zeros(()))
        self.score = slot("score", Dot(scale=1.0) if score is None else score, Score)
        self.core = Core()

    def forward(
        self, x: Float[Tensor, "b c y x"], source: Float[Tensor, "b c_s y_s x_s"] | None = None
    ) -> Float[Tensor, "b c y x"]:
        """Return the map plus the attention of its positions to the source (default: the map itself)."""
        source = x if source is None else source
        q, k, v = (self._flatten_positions(side) for side in (self.query(x), self.key(source), self.value(source)))
        y = self.core(q, k, v, score=fill(self.score)).mT.flatten(1, 2)  # b heads (y x) d -> b width (y x)
        return x + self.gamma * self.out(y.unflatten(-1, x.shape[-2:]))

    def weights(self, x: Float[Tensor, "b c y x"], source: Float[Tensor, "b c_s y_s x_s"] | None = None) -> Weights:
        """Return the lazy weights of the same call: b heads (y x) (y_s x_s), positions in row-major order."""
        k = self._flatten_positions(self.key(x if source is None else source))
        return weights(self._flatten_positions(self.query(x)), k, score=fill(self.score))

    def extra_repr(self) -> str:
        return f"heads={self.heads}"

    def _flatten_positions(self, x: Tensor) -> Tensor:
        """`b (heads d) y x -> b heads (y x) d`."""
        return x.flatten(2).unflatten(1, (self.heads, -1)).mT


class SqueezeExcite(nn.Module):
    """x * sigmoid(W_2 relu(W_1 mean(x))): a gate for each channel (Hu et al. 2018, eq. 2 to 4).

    >>> SqueezeExcite(32, reduction=8)(torch.randn(2, 32, 7, 5)).shape
    torch.Size([2, 32, 7, 5])

    The hidden layer has channels / `reduction` units. `gates(x)` returns the gates alone.
    """

    def __init__(self, channels: int, *, reduction: int = 16) -> None:
        super().__init__()
        hidden = max(channels // reduction, 1)
        self.squeeze = nn.Linear(channels, hidden)
        self.excite = nn.Linear(hidden, channels)

    def forward(self, x: Float[Tensor, "b c y x"]) -> Float[Tensor, "b c y x"]:
        return x * self.gates(x)[..., None, None]

    def gates(self, x: Float[Tensor, "b c y x"]) -> Float[Tensor, "b c"]:
        """Return the share of each channel that passes, from 0 to 1."""
        _check_channels(x, self.squeeze.in_features)
        return torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3))))))


class CBAM(nn.Module):
    """A gate for each channel, then one for each position: the block attention module of Woo et al. 2018.

    channels: sigmoid(W_1 relu(W_0 mean(x)) + W_1 relu(W_0 max(x))), eq. 2;
    positions: sigmoid(conv([mean_c(x); max_c(x)])), a convolution of `kernel` x `kernel`, eq. 3.

    >>> CBAM(32)(torch.randn(2, 32, 7, 5)).shape
    torch.Size([2, 32, 7, 5])
    """

    def __init__(self, channels: int, *, reduction: int = 16, kernel: int = 7) -> None:
        super().__init__()
        if kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, to keep the size of the map, got {kernel}; pass {kernel + 1}")
        hidden = max(channels // reduction, 1)
        self.squeeze = nn.Linear(channels, hidden, bias=False)
        self.excite = nn.Linear(hidden, channels, bias=False)
        self.place = nn.Conv2d(2, 1, kernel, padding=kernel // 2, bias=False)

    def forward(self, x: Float[Tensor, "b c y x"]) -> Float[Tensor, "b c y x"]:
        x = x * self.channel_gates(x)[..., None, None]
        return x * self.place_gates(x)[:, None]

    def channel_gates(self, x: Float[Tensor, "b c y x"]) -> Float[Tensor, "b c"]:
        """Return the share of each channel that passes, from 0 to 1."""
        _check_channels(x, self.squeeze.in_features)
        mean, largest = (self.excite(F.relu(self.squeeze(pooled))) for pooled in (x.mean((2, 3)), x.amax((2, 3))))
        return torch.sigmoid(mean + largest)

    def place_gates(self, x: Float[Tensor, "b c y x"]) -> Float[Tensor, "b y x"]:
        """Return the share of each position that passes, from 0 to 1; x is the output of the channel gates."""
        return torch.sigmoid(self.place(torch.stack((x.mean(1), x.amax(1)), 1)))[:, 0]


class SelectiveKernel(nn.Module):
    """Convolutions of several sizes, mixed for each channel by a softmax over the sizes (Li et al. 2019, eq. 1 to 6).

    The query is a summary z of the map. Each channel is a head, with a learned key for each kernel size.

    >>> layer = SelectiveKernel(64, kernels=(3, 5, 7))
    >>> x = torch.randn(2, 64, 14, 14)
    >>> layer(x).shape, layer.weights(x)
    (torch.Size([2, 64, 14, 14]), Weights(2 x 64 x 1 x 3, score=Dot(scale=1.0)))

    As in the paper, a kernel of size 5 is one of 3 x 3 dilated by 2, and so on. z has max(channels / `reduction`,
    `least`) features.
    """

    def __init__(
        self,
        channels: int,
        out_channels: int | None = None,
        *,
        kernels: Sequence[int] = (3, 5),
        stride: int = 1,
        groups: int = 1,
        reduction: int = 16,
        least: int = 32,
    ) -> None:
        super().__init__()
        if len(kernels) < 2 or any(kernel < 3 or kernel % 2 == 0 for kernel in kernels):
            raise ValueError(f"kernels must be two or more odd sizes from 3 on, got {tuple(kernels)}; pass (3, 5)")
        out = channels if out_channels is None else out_channels
        hidden = max(out // reduction, least)
        self.branches = nn.ModuleList(_branch(channels, out, kernel // 2, stride, groups) for kernel in kernels)
        self.squeeze = nn.Sequential(nn.Linear(out, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU())
        self.keys = nn.Parameter(torch.empty(out, len(kernels), hidden).uniform_(-(hidden**-0.5), hidden**-0.5))
        self.core = Core(backend="reference")  # one query and few keys per head, with values as wide as a map

    def forward(self, x: Float[Tensor, "b c y x"]) -> Float[Tensor, "b c_out y_out x_out"]:
        maps = self._run_branches(x)
        q, k, terms = self._inputs(maps)
        return self.core(q, k, maps.flatten(3), **terms).unflatten(-1, maps.shape[-2:])[:, :, 0]

    def weights(self, x: Float[Tensor, "b c y x"]) -> Weights:
        """Return the lazy weights of the same call: b c_out 1 kernels."""
        q, k, terms = self._inputs(self._run_branches(x))
        return weights(q, k, **terms)

    def _run_branches(self, x: Tensor) -> Tensor:
        return torch.stack([branch(x) for branch in self.branches], 2)  # b c kernels y x

    def _inputs(self, maps: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        z = self.squeeze(maps.sum(2).mean((2, 3)))
        k = self.keys.to(z.dtype).expand(z.shape[0], -1, -1, -1)
        return z[:, None, None].expand(-1, k.shape[1], -1, -1), k, {"score": Dot(scale=1.0)}


def _check_channels(x: Tensor, channels: int) -> None:
    if x.ndim != 4 or x.shape[1] != channels:
        raise ValueError(f"x must have dims b c y x with c={channels} channels, got shape {tuple(x.shape)}")


def _branch(channels: int, out: int, dilation: int, stride: int, groups: int) -> nn.Sequential:
    convolution = nn.Conv2d(
        channels, out, 3, stride=stride, padding=dilation, dilation=dilation, groups=groups, bias=False
    )
    return nn.Sequential(convolution, nn.BatchNorm2d(out), nn.ReLU())
