"""Small models of transformers with loud weights, prompts for them, and what their `generate` writes."""

from __future__ import annotations

import os

import pytest
import torch

VOCABULARY, PROMPTS, NEW = 37, 50, 12
PAD, END = 1, 0
LENGTHS = {"unpadded": [7] * PROMPTS, "padded": [2 + n % 9 for n in range(PROMPTS)]}


def gpt():
    """A GPT-2 of random weights."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    transformers.logging.disable_progress_bar()
    torch.manual_seed(7)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_head=2,
        n_layer=2,
        n_positions=64,
        initializer_range=0.4,
        bos_token_id=PAD,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    return transformers.GPT2LMHeadModel(config).eval()


def prompts(lengths, side):
    """Random ids padded to one width, and where they are not padding."""
    random, widest = torch.Generator().manual_seed(5), max(lengths)
    ids, keep = torch.full((len(lengths), widest), PAD), torch.zeros(len(lengths), widest, dtype=torch.long)
    for row, n in enumerate(lengths):
        at = slice(widest - n, widest) if side == "left" else slice(0, n)
        ids[row, at], keep[row, at] = torch.randint(2, VOCABULARY, (n,), generator=random), 1
    return ids, keep


def cut(rows):
    """What generate wrote, up to the end."""
    rows = [row.tolist() for row in rows]
    return [tuple(row[: row.index(END) + 1] if END in row else row) for row in rows]
