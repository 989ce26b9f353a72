"""Captioner: a convolutional network encodes an image, and a decoder writes a caption while attending to the map."""

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
    """Sizes and choices of a `Captioner`.

    `start` is the token the decoder reads before the first word it writes. The image passes stages of `widths`
    channels, each of which halves height and width. `attention` is `"soft"` (the weighted mean of all positions) or
    `"hard"` (one position sampled for each word), both with a recurrent decoder of `cell`; or `"transformer"`, with
    `heads` and a feed-forward of `hidden`.

    For soft attention, `doubly` weights the penalty on positions whose weights do not sum to 1 over the caption (Xu et
    al. 2015, eq. 14). For hard attention, `reinforce` weights the reward of a sampled position, the log-probability of
    the caption with it less that with the mean of all positions, and `entropy` the entropy of the weights (eq. 12).
    `smoothing` acts in training only.
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
            raise ValueError(
                f"dim must be even, half for the row and half for the column of a position, got {self.dim}"
            )


class Captioner(nn.Module):
    """p(caption | image) with attention to positions of the image at each word (Xu et al. 2015).

    >>> model = Captioner(CaptionerConfig(vocabulary=70, start=2, dim=16, hidden=32)).eval()
    >>> image = torch.rand(2, 3, 32, 32)
    >>> model(image, torch.tensor([[2, 5, 7]] * 2)).shape
    torch.Size([2, 3, 70])

    It is a stepper for `regard.decode`, with a batch as the source. Its attention is over positions in row-major order:

    >>> from regard.decode import greedy
    >>> caption = greedy(model, {"image": image}, [[2], [2]], end=3, max_length=8)[0]
    >>> caption.attention["source"].shape == (1, len(caption.tokens), 4 * 4)
    True

    For other features write `Captioner(config, features=network)`, from images to a grid of `widths[-1]` channels.
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
        """Return the logits after each of the inputs, which begin with the start; hard attention uses the mean."""
        return self._decode(inputs, self.places(self.features(image)))[0]

    def loss(self, batch: Mapping[str, Tensor]) -> Loss:
        """Return the cross entropy of `target` (with the end, without the start) given `image`, plus attention losses.

        `target_lengths` are the numbers of real words per row (default: all). In training, hard attention decodes each
        caption twice, with the mean of all positions and with sampled positions. The loss is the mean of both. Samples
        are rewarded for their gain over the mean; rewards have a gradient, but do not change the value of the loss.
        """
        check_keys(batch, "image", "target")
        target, counted = counted_targets(batch)
        inputs = shift_right(target, start=self.config.start)
        places = self.places(self.features(batch["image"]))
        cost = partial(cross_entropy_per_target, targets=target, counted=counted)
        smoothing = self.config.smoothing if self.training else 0.0
        if self.config.attention == "hard" and self.training:
            (by_mean, by_draw), draws = self._decode_twice(inputs, places)
            price = self._reward_draws(draws, cost(by_mean.detach()) - cost(by_draw.detach()), counted)
            both = cost(by_mean, smoothing=smoothing) + cost(by_draw, smoothing=smoothing)
            return Loss(both.sum() / 2 + price, counted.sum())
        logits, A = self._decode(inputs, places)
        total = cost(logits, smoothing=smoothing).sum()
        if self.config.attention == "soft":
            assert A is not None
            total = total + self.config.doubly * unevenness(A, counted).sum()
        return Loss(total, counted.sum())

    def start(self, batch: Mapping[str, Tensor]) -> Any:
        """Return the state before the first word, from `image`."""
        check_keys(batch, "image")
        places = self.places(self.features(batch["image"]))
        return self.decoder.start(places) if self.config.attention == "transformer" else self._start(places)

    def step(self, tokens: Int[Tensor, " rows *n"], state: Any) -> tuple[Float[Tensor, " rows *n vocabulary"], Any]:
        """Read tokens `(rows,)` or `(rows, n)`; return the logits of each next token, and the state after the last."""
        return self.decoder.step(tokens, state)

    def replay_steps(self, state: Any, steps: int) -> Any:
        """Return a state whose next steps are CUDA graphs, for a search that uses no state twice; or as it is."""
        return self.decoder.replay_steps(state, steps) if self.config.attention == "transformer" else state

    def replay_objection(self) -> str | None:
        """Return why steps of a search are no CUDA graphs, None if they are."""
        if self.config.attention == "transformer":
            return self.decoder.replay_objection()
        return "a recurrent decoder is not recorded"

    def watched(self, *names: str) -> Captioner | Watched:
        """Return a stepper that records attention: that of `Transformer.watched`; `"source"` is always recorded."""
        return self.decoder.watch_attention(self, names) if self.config.attention == "transformer" else self

    def _decode(self, inputs: Tensor, places: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the logits, and the attention weights b m n of a recurrent decoder."""
        if self.config.attention == "transformer":
            return self.decoder(inputs, places), None
        logits, state = self.decoder(inputs, self._start(places))
        return logits, state.weights()[:, 0]

    def _start(self, places: Float[Tensor, "b n dim"]) -> RecurrentState:
        """Return the first state of the cell, from the mean of the image (Xu et al. 2015, section 3.1.2)."""
        whole = places.mean(1)
        shape = (self.config.layers, self.config.hidden)
        hidden = [torch.tanh(linear(whole)).unflatten(-1, shape).transpose(0, 1) for linear in self.first]
        return self.decoder.start(tuple(x.contiguous() for x in hidden), places)

    def _decode_twice(self, inputs: Tensor, places: Tensor) -> tuple[tuple[Tensor, Tensor], list[Draw]]:
        """Return the logits with the mean of all positions and with one sampled position per word, and the samples.

        Xu et al. (2015, section 4.1) choose one of the two at random for each caption; this computes both.
        """
        begun, attention = self._start(places), self.decoder.attention
        memory, beside = begun.memory, begun.beside
        assert memory is not None
        assert beside is not None
        # Both versions attend to one memory; each has its own state of what it read.
        hidden = tuple(torch.cat((x, x), 1) for x in begun.hidden)
        state = replace(begun, hidden=hidden, beside=torch.cat((beside, beside)))
        logits, draws, rows = [], [], torch.arange(len(places), device=places.device)
        for tokens in torch.cat((inputs, inputs)).split(1, 1):
            h, state = self.decoder.read(tokens, state)
            first, second = h.chunk(2)
            chances = Categorical(probs=attention.weights(second, memory)[:, 0, 0], validate_args=False)
            position = draw_positions(chances.probs)
            contexts = torch.cat((attention(first, memory), memory.values[rows, position][:, None]))
            step_logits, state = self.decoder.write(h, contexts, state)
            logits.append(step_logits)
            draws.append(Draw(chances.log_prob(position), chances.entropy()))
        by_mean, by_draw = torch.cat(logits, 1).chunk(2)
        return (by_mean, by_draw), draws

    def _reward_draws(self, draws: list[Draw], gains: Tensor, counted: Tensor) -> Tensor:
        """Return 0 with the gradient of eq. 12 in Xu et al. 2015; a sample is rewarded for the gain from its word on.

        Rewards count half, as the loss of the sampled version does.
        """
        reward = gains.flip(1).cumsum(1).flip(1)
        chance, entropy = (torch.stack(x, 1) for x in zip(*draws, strict=True))
        gain = self.config.reinforce * reward * chance / 2 + self.config.entropy * entropy
        price = -(gain * counted).sum()
        return price - price.detach()


def draw_positions(chances: Float[Tensor, "b n"]) -> Int[Tensor, " b"]:
    """Sample one of n positions by its probability: the first arrival if each arrives at that rate.

    `torch.multinomial` would wait for the device, to check the probabilities.
    """
    chances = chances.detach().float()
    return (chances / torch.empty_like(chances).exponential_()).argmax(-1)


class Draw(NamedTuple):
    """The sampled positions for one word of each caption."""

    chance: Float[Tensor, " b"]  # the log-probability of the sampled position
    entropy: Float[Tensor, " b"]  # the entropy of the attention weights


class GridTokens(nn.Module):
    """A grid as a sequence of tokens in row-major order: projected features plus sinusoids of row and column."""

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
    """Build a small residual network with one stage per width. Each stage halves height and width."""
    return nn.Sequential(
        *(HalvingStage(before, after) for before, after in zip((channels, *widths), widths, strict=False))
    )


class HalvingStage(nn.Module):
    """A convolution of stride 2, then a residual one."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.halve = nn.Sequential(nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(1, after), nn.ReLU())
        self.refine = nn.Sequential(nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(1, after))

    def forward(self, x: Float[Tensor, "b c y x"]) -> Float[Tensor, "b d y_half x_half"]:
        x = self.halve(x)
        return F.relu(x + self.refine(x))


def unevenness(A: Float[Tensor, "b t n"], counted: Bool[Tensor, "b t"]) -> Float[Tensor, " b"]:
    """sum_j (1 - sum_t A_tj)^2: how far the weights of each position are from a sum of 1 (Xu et al. 2015, eq. 14)."""
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
