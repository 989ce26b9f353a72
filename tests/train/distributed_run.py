"""What `torchrun` starts for the tests: the same runs in every process, with what they saw written to a folder."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from regard.train import Constant, NonFiniteError, Recipe, Shuffled, Silence, Stopped, fit, process_group
from tests.train.small_run import Small, data

RECIPE = Recipe(steps=11, rate=Constant(0.05), weight_decay=0.01, log_every=1, save_every=4, evaluate_every=5)


class Layered(Small):
    """Without draws, and with layers for FSDP2 to share out one by one."""

    def __init__(self):
        super().__init__(torch.float64)
        self.dropout = nn.Identity()
        generator = torch.Generator().manual_seed(8)
        self.layers = nn.ModuleList(nn.Linear(6, 6).double() for _ in range(2))
        for parameter in self.layers.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)

    def forward(self, tokens):
        x = self.hidden(self.embedding(tokens))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.out(x)

    def loss(self, tokens, forcing=None):
        was, self.training = self.training, False
        loss = super().loss(tokens)
        self.training = was
        return loss


def evaluate(model):
    return {"loss": float(sum(x.numel() for x in model.parameters()))}


class Losses(Silence):
    def __init__(self):
        self.losses = []

    def advance(self, report):
        self.losses.append(report.loss)


def train(folder, recipe, *, rank, world, resume=False, model=None, count=9):
    shown = Losses()
    batches = Shuffled(data(count), seed=4, rank=rank, world=world)
    fit(model or Layered(), batches, recipe, folder=folder, evaluate=evaluate, resume=resume, show=shown)
    return shown.losses


def main(out):
    torch.set_num_threads(1)
    with process_group(torch.device("cpu")) as group:
        place = {"rank": group.rank, "world": group.size}
        record = {}

        def skewed():
            """All start from the weights of the first."""
            model = Layered()
            if group.rank == 1:
                nn.init.zeros_(model.out.weight)
            return model

        record["ddp"] = train(out / "ddp", RECIPE, model=skewed(), **place)
        record["accumulate"] = train(out / "accumulate", replace(RECIPE, accumulate=2), **place)
        record["fsdp"] = train(out / "fsdp", replace(RECIPE, shard=True), model=skewed(), **place)

        for name, shard in (("ddp", False), ("fsdp", True)):
            short = replace(RECIPE, steps=6, shard=shard)
            train(out / f"{name}-half", short, **place)
            train(out / f"{name}-cut", short, **place)
            record[f"{name}-cut"] = train(out / f"{name}-cut", replace(short, steps=11), resume=True, **place)

        class Signalled(Layered):
            calls = 0

            def loss(self, tokens, forcing=None):
                self.calls += 1
                if group.rank == 1 and self.calls == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                return super().loss(tokens)

        try:
            train(out / "signalled", RECIPE, model=Signalled(), **place)
        except Stopped as stopped:
            record["stopped"] = [stopped.code, str(stopped).partition(";")[0]]

        class Broken(Layered):
            def loss(self, tokens, forcing=None):
                loss = super().loss(tokens)
                return replace(loss, sum=loss.sum * float("nan")) if group.rank == 1 else loss

        try:
            train(out / "broken", RECIPE, model=Broken(), **place)
        except NonFiniteError as error:
            record["broken"] = str(error)
        (out / f"rank-{group.rank}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
