"""A GPT in one file: the model, 150 steps of training on characters, and sampling.

Everything is written with PyTorch alone. The last part asserts that `regard.models.Gpt` with the same weights gives the
same logits. Letters: b batch, n tokens, dim the width of the stream, h heads, d the width of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models import Gpt, GptConfig

TEXT = """Shall I compare thee to a summer's day?
Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date;
Sometime too hot the eye of heaven shines,
And often is his gold complexion dimm'd;
And every fair from fair sometime declines,
By chance or nature's changing course untrimm'd;
But thy eternal summer shall not fade,
Nor lose possession of that fair thou ow'st;
Nor shall death brag thou wander'st in his shade,
When in eternal lines to time thou grow'st:
So long as men can breathe or eyes can see,
So long lives this, and this gives life to thee.
"""


@dataclass(frozen=True)
class Config:
    """Sizes of a model."""

    vocabulary: int
    length: int = 32  # tokens the model sees at once
    dim: int = 64
    depth: int = 2
    heads: int = 4


class Attention(nn.Module):
    """Causal self-attention: each token collects values from itself and the tokens before it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.query, self.key, self.value, self.out = (nn.Linear(config.dim, config.dim) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        """Give each head its own d = dim / h channels: b n (h d) -> b h n d."""
        b, n, dim = x.shape
        return x.view(b, n, self.heads, dim // self.heads).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))  # b h n d
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # b h n n
        later = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)  # True above the diagonal: the future
        weights = scores.masked_fill(later, -math.inf).softmax(-1)  # b h n n, each row sums to 1
        heads = weights @ v  # b h n d
        return self.out(heads.transpose(1, 2).flatten(2))  # b h n d -> b n (h d)


class FeedForward(nn.Module):
    """Two linear layers with a nonlinearity between them, for each token alone."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(config.dim, 4 * config.dim), nn.Linear(4 * config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Attention exchanges information between tokens, the feed-forward acts on each alone; both add to the stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(config.dim), Attention(config)
        self.feedforward_norm, self.feedforward = nn.LayerNorm(config.dim), FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))  # b n dim
        return x + self.feedforward(self.feedforward_norm(x))  # b n dim


class GPT(nn.Module):
    """Embeddings, blocks, a final norm, and logits by the transposed token embedding."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.dim)
        self.positions = nn.Embedding(config.length, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.dim)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                # Each block adds twice to the stream: those projections begin smaller (Radford et al. 2019).
                shrink = math.sqrt(2 * config.depth) if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 / shrink)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the token that follows each position: b n -> b n vocabulary."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))  # b n dim
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T  # (b n dim) @ (dim vocabulary)

    @torch.no_grad()
    def sample(self, ids: Tensor, steps: int, temperature: float = 1.0) -> Tensor:
        """Append `steps` tokens, each drawn from the distribution that the model predicts."""
        for _ in range(steps):
            logits = self(ids[:, -self.config.length :])[:, -1]  # b vocabulary: after the last token
            following = torch.multinomial((logits / temperature).softmax(-1), 1)  # b 1
            ids = torch.cat([ids, following], 1)  # b n+1
        return ids


def batch(data: Tensor, size: int, length: int) -> tuple[Tensor, Tensor]:
    """Random windows of the text, and the same windows one character later: what to predict."""
    starts = torch.randint(len(data) - length, (size,)).tolist()
    inputs = torch.stack([data[start : start + length] for start in starts])  # b n
    targets = torch.stack([data[start + 1 : start + 1 + length] for start in starts])  # b n
    return inputs, targets


def train(model: GPT, data: Tensor, steps: int) -> None:
    """Minimize the cross-entropy of the next character."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps + 1):
        inputs, targets = batch(data, 16, model.config.length)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())  # (b n) vocabulary, (b n)
        if step % 50 == 0:
            print(f"step {step:3}  loss {loss.item():.2f}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def library_weights(model: GPT) -> dict[str, Tensor]:
    """The weights of this file's model by the names of `regard.models.Gpt`."""
    renamed = {
        "tokens.weight": "tokens.table.weight",
        "attention_norm": "around_attention.norm",
        "feedforward_norm": "around_feedforward.norm",
    }
    weights = {}
    for name, tensor in model.state_dict().items():
        for mine, library in renamed.items():
            name = name.replace(mine, library)
        weights[name] = tensor
    return weights


def main() -> None:
    """Train, sample, and compare with the library."""
    torch.manual_seed(0)
    characters = sorted(set(TEXT))
    number = {character: n for n, character in enumerate(characters)}
    data = torch.tensor([number[character] for character in TEXT])  # n
    model = GPT(Config(vocabulary=len(characters)))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(characters)} characters")
    train(model, data, steps=150)

    ids = model.sample(data[None, :20], steps=100, temperature=0.7)
    print("".join(characters[n] for n in ids[0].tolist()))

    sizes = {"length": model.config.length, "dim": model.config.dim, "depth": model.config.depth}
    config = GptConfig(vocabulary=len(characters), heads=model.config.heads, **sizes)
    library = Gpt(config).eval()
    library.load_state_dict(library_weights(model))
    inputs, _ = batch(data, 4, model.config.length)
    torch.testing.assert_close(model(inputs), library(inputs), atol=1e-5, rtol=1e-5)
    print("regard.models.Gpt with these weights gives the same logits")


if __name__ == "__main__":
    main()
