"""Captioner: a convolutional network that sees, and a decoder that tells while it looks at places of the image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.distributions import Categorical

from ..checks import check_choice, check_flag, check_int, check_keys, check_number, check_probability, check_token_id
from ..nn import BahdanauAttention, Sinusoidal
from ..nn.losses import Loss, cross_entropy_per_target, shift_right
from .decoder_state import Watched
from .padding import counted_targets
from .recurrent_decoder import Cell, RecurrentDecoder, RecurrentState
from .transformer import TransformerConfig, decoder_of

Looking = Literal["soft", "hard", "transformer"]


@dataclass(frozen=True, kw_only=True)
class CaptionerConfig:
    """What a `Captioner` is made of.

    `start` is what the decoder reads before the first word it writes. The image passes stages of `widths` channels,
    each halving its sides. `attention` is `"soft"`, the mean of all places, `"hard"`, one place drawn at each word,
    both with a recurrent decoder of `cell`, or `"transformer"`, with `heads` and a feed-forward of `hidden`.

    `doubly` is the price of places looked at more or less than once in all (Xu et al. 2015, eq. 14), for soft
    attention. For hard attention, `reinforce` weighs the reward of a place, how much likelier it makes what is written
    than the mean of all places does, and `entropy` keeps the draws apart (eq. 12). `smoothing` acts in training only.
    """

    vocabulary: int
    start: int
    channels: int = 3
    widths: tuple[int, ...] = (32, 64, 128)
    dim: int = 256
    hidden: int = 512
    layers: int = 1
    attention: Looking = "soft"
    cell: Cell = "lstm"
    heads: int = 8
    tied: bool = False
    doubly: float = 1.0
    reinforce: float = 1.0
    entropy: float = 0.002
    dropout: float = 0.1
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocabulary", "channels", "dim", "hidden", "layers", "heads"):
            check_int(name, getattr(self, name), least=1)
        for name, known in (("attention", Looking), ("cell", Cell)):
            check_choice(name, getattr(self, name), known)
        for name in ("doubly", "reinforce", "entropy"):
            check_number(name, getattr(self, name))
        for name in ("dropout", "smoothing"):
            check_probability(name, getattr(self, name))
        check_token_id("start", self.start, self.vocabulary)
        check_flag("tied", self.tied)
        if not isinstance(self.widths, Sequence):
            raise TypeError(f"widths must name the channels of each stage, got {self.widths!r}; pass (32, 64, 128)")
        if not self.widths:
            raise ValueError("widths must name the channels of at least one stage, got none; pass (32, 64, 128)")
        for width in self.widths:
            check_int("widths", width, least=1)
        if self.dim % 2:
            raise ValueError(f"dim must be even, half for the row and half for the column of a place, got {self.dim}")


class Captioner(nn.Module):
    """p(caption | image), each word written while looking at places of the image (Xu et al. 2015).

    >>> model = Captioner(CaptionerConfig(vocabulary=70, start=2, dim=16, hidden=32)).eval()
    >>> image = torch.rand(2, 3, 32, 32)
    >>> model(image, torch.tensor([[2, 5, 7]] * 2)).shape
    torch.Size([2, 3, 70])

    It decodes as a stepper, the batch its source, and shows where it looked, places row by row:

    >>> from regard.decode import greedy
    >>> caption = greedy(model, {"image": image}, [[2], [2]], end=3, max_length=8)[0]
    >>> caption.attention["source"].shape == (1, len(caption.tokens), 4 * 4)
    True

    Features of another network: `Captioner(config, features=network)`, from images to a grid of `widths[-1]` channels.
    """

    def __init__(self, config: CaptionerConfig, *, features: nn.Module | None = None) -> None:
        super().__init__()
        self.config = config
        self.features = grid_features(config.channels, config.widths) if features is None else features
        self.places = GridTokens(config.widths[-1], config.dim)
        self.decoder: Any = _decoder(config)
        kinds = 0 if config.attention == "transformer" else 2 if config.cell == "lstm" else 1
        self.first = nn.ModuleList(nn.Linear(config.dim, config.layers * config.hidden) for _ in range(kinds))

    def forward(self, image: Float[Tensor, "b c y x"], inputs: Int[Tensor, "b m"]) -> Float[Tensor, "b m vocabulary"]:
        """The logits of what follows each of the inputs, which begin with the start; hard attention by its mean."""
        return self._told(inputs, self.places(self.features(image)))[0]

    def loss(self, batch: Mapping[str, Tensor]) -> Loss:
        """The cross entropy of `target` (the end included, the start not), given `image`, and what attention pays.

        `target_lengths` say how many words of each row are real; all, where they are absent. In training, hard
        attention tells each caption twice, looking at the mean of all places and at places it draws. The loss is the
        mean of both, and draws are rewarded for what they gain over the first; rewards have a gradient and leave the
        number as it is.
        """
        check_keys(batch, "image", "target")
        target, counted = counted_targets(batch)
        inputs = shift_right(target, start=self.config.start)
        places = self.places(self.features(batch["image"]))
        cost = partial(cross_entropy_per_target, targets=target, counted=counted)
        smoothing = self.config.smoothing if self.training else 0.0
        if self.config.attention == "hard" and self.training:
            (by_mean, by_draw), draws = self._twice(inputs, places)
            price = self._reinforced(draws, cost(by_mean.detach()) - cost(by_draw.detach()), counted)
            both = cost(by_mean, smoothing=smoothing) + cost(by_draw, smoothing=smoothing)
            return Loss(both.sum() / 2 + price, counted.sum())
        logits, A = self._told(inputs, places)
        total = cost(logits, smoothing=smoothing).sum()
        if self.config.attention == "soft":
            assert A is not None
            total = total + self.config.doubly * unevenness(A, counted).sum()
        return Loss(total, counted.sum())

    def start(self, batch: Mapping[str, Tensor]) -> Any:
        """The state before the first word, from `image`."""
        check_keys(batch, "image")
        places = self.places(self.features(batch["image"]))
        return self.decoder.start(places) if self.config.attention == "transformer" else self._start(places)

    def step(self, tokens: Int[Tensor, " rows *n"], state: Any) -> tuple[Float[Tensor, " rows *n vocabulary"], Any]:
        """Read tokens `(rows,)` or `(rows, n)`; the logits of what follows each, and the state after the last."""
        return self.decoder.step(tokens, state)

    def watched(self, *names: str) -> Captioner | Watched:
        """The model as a stepper that shows attention: of a Transformer as there, `"source"` of the others anyway."""
        return self.decoder.watched(self, names) if self.config.attention == "transformer" else self

    def _told(self, inputs: Tensor, places: Tensor) -> tuple[Tensor, Tensor | None]:
        """The logits, and by what weights a recurrent decoder looked, b m n."""
        if self.config.attention == "transformer":
            return self.decoder(inputs, places), None
        logits, state = self.decoder(inputs, self._start(places))
        return logits, state.weights()[:, 0]

    def _start(self, places: Float[Tensor, "b n dim"]) -> RecurrentState:
        """The cell begins with what the image is on the whole (Xu et al. 2015, section 3.1.2)."""
        whole = places.mean(1)
        shape = (self.config.layers, self.config.hidden)
        hidden = [torch.tanh(linear(whole)).unflatten(-1, shape).transpose(0, 1) for linear in self.first]
        return self.decoder.start(tuple(x.contiguous() for x in hidden), places)

    def _twice(self, inputs: Tensor, places: Tensor) -> tuple[tuple[Tensor, Tensor], list[Draw]]:
        """The logits where each word looks at the mean of all places, and where it looks at one, drawn by its weight.

        Xu et al. (2015, section 4.1) toss a coin for each caption; this is both of its sides.
        """
        begun, attention = self._start(places), self.decoder.attention
        memory, beside = begun.memory, begun.beside
        assert memory is not None
        assert beside is not None
        # Both sides look at one memory; what they have read so far is their own.
        hidden = tuple(torch.cat((x, x), 1) for x in begun.hidden)
        state = replace(begun, hidden=hidden, beside=torch.cat((beside, beside)))
        logits, draws, rows = [], [], torch.arange(len(places), device=places.device)
        for tokens in torch.cat((inputs, inputs)).split(1, 1):
            h, state = self.decoder.read(tokens, state)
            first, second = h.chunk(2)
            chances = Categorical(probs=attention.weights(second, memory)[:, 0, 0], validate_args=False)
            place = draw_positions(chances.probs)
            contexts = torch.cat((attention(first, memory), memory.values[rows, place][:, None]))
            some, state = self.decoder.write(h, contexts, state)
            logits.append(some)
            draws.append(Draw(chances.log_prob(place), chances.entropy()))
        by_mean, by_draw = torch.cat(logits, 1).chunk(2)
        return (by_mean, by_draw), draws

    def _reinforced(self, draws: list[Draw], gains: Tensor, counted: Tensor) -> Tensor:
        """0, with the gradient of eq. 12 in Xu et al. 2015: the reward of a place is what is gained from there on.

        Rewards count half, as what is told by draws does.
        """
        reward = gains.flip(1).cumsum(1).flip(1)
        chance, entropy = (torch.stack(x, 1) for x in zip(*draws, strict=True))
        gain = self.config.reinforce * reward * chance / 2 + self.config.entropy * entropy
        price = -(gain * counted).sum()
        return price - price.detach()


def draw_positions(chances: Float[Tensor, "b n"]) -> Int[Tensor, " b"]:
    """One of n by its chance: the first to come, if each comes at that rate.

    `torch.multinomial` waits for the device, to see that chances are chances.
    """
    chances = chances.detach().float()
    return (chances / torch.empty_like(chances).exponential_()).argmax(-1)


class Draw(NamedTuple):
    """What was drawn for one word of each caption."""

    chance: Float[Tensor, " b"]  # the log-probability of the place
    entropy: Float[Tensor, " b"]  # of the weights it was drawn by


class GridTokens(nn.Module):
    """A grid as a sequence of places, row by row: features and, in sines and cosines, the row and the column."""

    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        self.project = nn.Linear(channels, dim)
        self.axis = Sinusoidal(dim // 2)

    def forward(self, grid: Float[Tensor, "b c y x"]) -> Float[Tensor, "b n dim"]:
        rows, columns = (self.axis(torch.arange(n, device=grid.device)) for n in grid.shape[2:])
        y, x = len(rows), len(columns)
        where = torch.cat((rows[:, None].expand(-1, x, -1), columns[None].expand(y, -1, -1)), -1).flatten(0, 1)
        return self.project(grid.flatten(2).mT) + where.to(grid.dtype)


def grid_features(channels: int, widths: tuple[int, ...]) -> nn.Sequential:
    """A small residual network: one stage for each width, each halving the sides of its map."""
    return nn.Sequential(
        *(HalvingStage(before, after) for before, after in zip((channels, *widths), widths, strict=False))
    )


class HalvingStage(nn.Module):
    """A convolution of stride 2, and one around which its result passes."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.halve = nn.Sequential(nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(1, after), nn.ReLU())
        self.refine = nn.Sequential(nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(1, after))

    def forward(self, x: Float[Tensor, "b c y x"]) -> Float[Tensor, "b d y_half x_half"]:
        x = self.halve(x)
        return F.relu(x + self.refine(x))


def unevenness(A: Float[Tensor, "b t n"], counted: Bool[Tensor, "b t"]) -> Float[Tensor, " b"]:
    """sum_j (1 - sum_t A_tj)^2: how far each caption is from looking everywhere equally (Xu et al. 2015, eq. 14)."""
    return (1 - (A * counted[..., None]).sum(1)).square().sum(-1)


def _decoder(config: CaptionerConfig) -> nn.Module:
    if config.attention == "transformer":
        return decoder_of(
            TransformerConfig(
                source_vocabulary=config.vocabulary,
                target_vocabulary=config.vocabulary,
                start=config.start,
                dim=config.dim,
                heads=config.heads,
                hidden=config.hidden,
                decoder_layers=config.layers,
                tied="output" if config.tied else "none",
                dropout=config.dropout,
            )
        )
    return RecurrentDecoder(
        config.vocabulary,
        dim=config.dim,
        hidden=config.hidden,
        state_dim=config.dim,
        layers=config.layers,
        cell=config.cell,
        attention=BahdanauAttention(config.hidden, config.dim, config.hidden),
        feed=True,
        tied=config.tied,
        dropout=config.dropout,
    )
