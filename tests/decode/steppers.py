"""Stand-ins for models: one whose every answer can be worked out by hand, one recurrent, one with a cache."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor, nn

D = torch.float64


def flat(lists):
    """The hypotheses of all rows in one list."""
    return list(chain.from_iterable(lists))


@dataclass(frozen=True)
class History:
    """Codes of everything read so far, one a row; `attention` shows them."""

    code: Tensor
    attention: dict[str, Tensor]

    def select(self, rows):
        return History(self.code[rows], {name: x[rows] for name, x in self.attention.items()})


class Table:
    """Random logits for each history: the source is a code `(b,)`, every token read changes it.

    Attention "code" has two heads that hold the code and its square root: which history a row comes from shows.
    """

    size = 1021

    def __init__(self, vocabulary, seed, sharpness=2.0, dtype=D):
        random = torch.Generator().manual_seed(seed)
        self.logits = (torch.randn(self.size, vocabulary, generator=random, dtype=D) * sharpness).to(dtype)
        self.rows = []

    @cached_property
    def costs(self):
        return self.logits.double().log_softmax(-1).tolist()

    def start(self, source):
        return History(source, {})

    def step(self, tokens, state):
        if tokens.ndim == 2:
            logits, codes = [], []
            for column in tokens.unbind(1):
                one, state = self.step(column, state)
                logits.append(one)
                codes.append(state.attention["code"])
            return torch.stack(logits, 1), History(state.code, {"code": torch.stack(codes, 2)})
        self.rows.append(len(tokens))
        code = self.follow(state.code, tokens)
        seen = torch.stack([code.to(D), code.to(D).sqrt()], 1)[..., None]
        return self.logits[code], History(code, {"code": seen})

    def follow(self, code, token):
        return (code * 31 + token + 1) % self.size

    def codes(self, source, prefix, tokens):
        """The code of the history each of the tokens was chosen with."""
        code, found = source, []
        for token in (*prefix, *tokens)[:-1]:
            code = self.follow(code, token)
            found.append(code)
        return found[len(prefix) - 1 :] if tokens else []

    def log_probabilities(self, source, prefix, tokens):
        """By hand: what each of the tokens costs."""
        codes = self.codes(source, prefix, tokens)
        return [self.costs[code][y] for code, y in zip(codes, tokens, strict=True)]


class Recurrent(nn.Module):
    """A GRU that attends to its source, padded ids `(b, n)` with 0 behind; attention "source" has one head."""

    @dataclass(frozen=True)
    class State:
        hidden: Tensor
        memory: Tensor
        keep: Tensor
        attention: dict[str, Tensor]

        def select(self, rows):
            return replace(self, hidden=self.hidden[rows], memory=self.memory[rows], keep=self.keep[rows])

    def __init__(self, vocabulary=11, dim=8, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(vocabulary, dim)
        self.cell = nn.GRUCell(2 * dim, dim)
        self.out = nn.Linear(2 * dim, vocabulary)
        self.double()
        with torch.no_grad():
            self.out.weight *= 6

    def start(self, source):
        memory = self.embed(source)
        keep = source != 0
        hidden = (memory * keep[..., None]).sum(1) / keep.sum(1, keepdim=True)
        return self.State(hidden, memory, keep, {})

    def step(self, tokens, state):
        if tokens.ndim == 2:
            logits, seen = [], []
            for column in tokens.unbind(1):
                one, state = self.step(column, state)
                logits.append(one)
                seen.append(state.attention["source"])
            return torch.stack(logits, 1), replace(state, attention={"source": torch.stack(seen, 2)})
        s = (state.memory @ state.hidden[..., None])[..., 0].masked_fill(~state.keep, -math.inf)
        weights = s.softmax(-1)
        context = (weights[:, None] @ state.memory)[:, 0]
        hidden = self.cell(torch.cat([self.embed(tokens), context], 1), state.hidden)
        logits = self.out(torch.cat([hidden, context], 1))
        return logits, replace(state, hidden=hidden, attention={"source": weights[:, None]})


class Cached(nn.Module):
    """A causal transformer of two layers with a cache of keys and values; the source is the number of rows."""

    @dataclass(frozen=True)
    class State:
        keys: tuple[Tensor, ...]
        values: tuple[Tensor, ...]
        attention: dict[str, Tensor]

        def select(self, rows):
            cut = [tuple(x[rows] for x in cache) for cache in (self.keys, self.values)]
            return replace(self, keys=cut[0], values=cut[1])

    def __init__(self, vocabulary=13, dim=12, heads=3, layers=2, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.heads, self.layers = heads, layers
        self.embed, self.place = nn.Embedding(vocabulary, dim), nn.Embedding(64, dim)
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(layers))
        self.mix = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.out = nn.Linear(dim, vocabulary)
        self.double()
        with torch.no_grad():
            self.out.weight *= 6

    def start(self, source):
        empty = torch.empty(source, self.heads, 0, self.embed.embedding_dim // self.heads, dtype=D)
        return self.State((empty,) * self.layers, (empty,) * self.layers, {})

    def step(self, tokens, state):
        if tokens.ndim == 1:
            logits, state = self.step(tokens[:, None], state)
            return logits[:, 0], replace(state, attention={name: x[:, :, 0] for name, x in state.attention.items()})
        past = state.keys[0].shape[2]
        n = tokens.shape[1]
        x = self.embed(tokens) + self.place(torch.arange(past, past + n))
        keys, values, seen = [], [], {}
        for layer in range(self.layers):
            q, k, v = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in self.qkv[layer](x).chunk(3, -1))
            keys.append(torch.cat([state.keys[layer], k], 2))
            values.append(torch.cat([state.values[layer], v], 2))
            s = q @ keys[-1].mT
            s = s.masked_fill(torch.ones(n, past + n).triu(past + 1) > 0, -math.inf)
            seen[f"{layer}.self"] = s.softmax(-1)
            x = x + self.mix[layer]((s.softmax(-1) @ values[-1]).transpose(1, 2).flatten(2)).tanh()
        return self.out(x), self.State(tuple(keys), tuple(values), seen)
