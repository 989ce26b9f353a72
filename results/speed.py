"""Tokens a second of training a GPT-2 shaped model: ours, by CUDA graphs, and that of transformers, in turn.

python -m results.speed --dim 384 --depth 6 --rows 64

All see the same batches, in bfloat16 autocast on a GPU, with fused AdamW; medians over all steps but the first few.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from regard.models import Gpt, GptConfig
from regard.train import Group, own_device
from regard.train.cuda_graphs import Replayed

WARM = 5
LENGTH, VOCABULARY = 256, 8000


def main() -> None:
    """Measure, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("dim", 384), ("depth", 6), ("rows", 64), ("steps", 40)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    heads, device = given.dim // 64 or 1, own_device()
    shape = {"dim": given.dim, "depth": given.depth, "heads": heads}
    ours = Gpt(GptConfig(vocabulary=VOCABULARY, length=LENGTH, attention_dropout=0.0, **shape)).to(device)
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=given.dim,
            n_layer=given.depth,
            n_head=heads,
            attn_pdrop=0.0,
        )
    ).to(device)
    steps = {
        "regard": stepping(ours, lambda ids: ours.loss({"ids": ids}).mean),
        "transformers": stepping(theirs, lambda ids: theirs(ids[:, :-1], labels=ids[:, :-1]).loss),
    }
    if device.type == "cuda":
        steps["graphs"] = replaying(copy.deepcopy(ours), Group(device=device))
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(given.steps + WARM):
        ids = torch.randint(VOCABULARY, (given.rows, LENGTH + 1), device=device)
        for name, step in steps.items():
            began = time.perf_counter()
            step(ids)
            taken[name].append(time.perf_counter() - began)
    for name, seconds in taken.items():
        print(name, f"{given.rows * LENGTH / statistics.median(seconds[WARM:]):.0f}")


def stepping(model: nn.Module, loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], float]:
    """One update of the weights, until it is done."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(ids: Tensor) -> float:
        with torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext():
            value = loss(ids)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.item()

    return step


def replaying(model: Gpt, group: Group) -> Callable[[Tensor], float]:
    """The same, its pass replayed as a CUDA graph."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run(batch: dict[str, Tensor], _: float) -> tuple[Tensor, Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            value = model.loss(batch).mean
        value.backward()
        return value.detach(), torch.ones_like(value)

    replayed = Replayed(run, group)

    def step(ids: Tensor) -> float:
        value, _ = replayed({"ids": ids}, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return value.item()

    return step


if __name__ == "__main__":
    main()
