"""A run of a second that depends on everything a checkpoint must hold, and a nursery of processes to kill it in."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import nn

from regard.nn import cross_entropy
from regard.train import Failure, Linear, Plateau, Recipe, Shuffled, Silence, Stopped, fit, training_state

RECIPE = Recipe(
    steps=24,
    seed=3,
    rate=Plateau(0.05, warmup=4, patience=0, factor=0.7),
    weight_decay=0.01,
    accumulate=2,
    forcing=Linear(steps=20),
    evaluate_every=3,
    metric="wobble",
    save_every=2,
    log_every=2,
)
FILES = {"config.json": '{"width": 6}\n', "tokenizer.json": "{}\n"}
VOCABULARY = 11


class Small(nn.Module):
    """Guesses the next of a few tokens. Draws from the generators of Python, NumPy and PyTorch."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.hidden = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.2)
        self.out = nn.Linear(6, VOCABULARY)
        self.to(dtype)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=dtype) / 2

    def forward(self, tokens):
        return self.out(self.dropout(torch.tanh(self.hidden(self.embedding(tokens)))))

    def loss(self, tokens, forcing=1.0):
        logits = self(tokens[:, :-1])
        noise = 1 + 0.1 * (random.random() + np.random.rand() + forcing) if self.training else 1.0
        return cross_entropy(logits * noise, tokens[:, 1:], counted=tokens[:, 1:] != 0, smoothing=0.1)


def data(count=9, seed=2):
    """Batches of different sizes and lengths, padded with 0."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for n in range(count):
        tokens = torch.randint(1, VOCABULARY, (1 + n % 4, 4 + n % 3), generator=generator)
        tokens[0, 3:] = 0
        batches.append(tokens)
    return batches


def evaluate(model):
    """A number that jumps about with the weights, and draws that training must not notice."""
    random.random(), np.random.rand(), torch.rand(3)
    loss = model.loss(data(1, seed=9)[0]).mean.item()
    return {"loss": loss, "wobble": (loss * 1e3) % 1.0}


def small(folder, *, resume=False, recipe=RECIPE, show=None):
    model = Small()
    batches = Shuffled(data(), seed=recipe.seed)
    return fit(
        model,
        batches,
        recipe,
        folder=folder,
        evaluate=evaluate,
        files=FILES,
        resume=resume,
        show=show or Silence(),
    )


def remains(folder):
    """All that a finished run leaves and that must not depend on how often it was killed."""
    folder = Path(folder)
    *_, last = sorted(folder.glob("step-*"))
    kept = {last, (folder / "best").resolve()}  # one saved at a signal may stand in the place of another
    files = {f"{path.name}/{file.name}": file.read_bytes() for path in kept for file in path.iterdir()}
    rows = [line.rpartition(",")[0] for line in (folder / "log.csv").read_text().splitlines()]
    return {
        **files,
        "log": rows,
        "evaluations": (folder / "evaluations.csv").read_text(),
        "best": os.readlink(folder / "best"),
        "recipe": (folder / "recipe.json").read_text(),
        "left over": sorted(path.name for path in folder.iterdir() if path.name.startswith(".")),
    }


def forgetful_read(path):
    """A checkpoint read without the scores its schedule goes by."""
    state, place, recipe = READ(path)
    return replace(state, evaluated=(), scores=()), place, recipe


# What a faulty resume would forget; each must show in the final weights.
READ = training_state.read
DROPS = {
    "nothing": ("regard.train.training_state.read", READ),
    "python": ("regard.train.rng.random.setstate", lambda state: None),
    "numpy": ("regard.train.rng.np.random.set_state", lambda state: None),
    "torch": ("regard.train.rng.torch.set_rng_state", lambda state: None),
    "optimizer": ("regard.train.training_state.put_moments", lambda *given, **named: None),
    "position": ("regard.train.batches.Shuffled.restore", lambda self, state: None),
    "schedule": ("regard.train.training_state.read", forgetful_read),
}


class Nursery:
    """A process that has imported everything and forks a child for each run: cheap enough to kill by the dozen."""

    def __enter__(self):
        command = [sys.executable, __file__]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *error):
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()

    def run(self, folder, **order):
        """Run in a child; the answer has its exit `code` (negative: the signal), what it `said`, its `seconds`."""
        self.process.stdin.write(json.dumps({"folder": str(folder), **order}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def child(order, said):
    """Do one order and return the exit code a command line would."""

    class Said(Silence):
        def say(self, line):
            os.write(said, (line + "\n").encode())

        def advance(self, report):
            if report.step == order.get("kill_at_step"):
                os.kill(os.getpid(), order["signal"])

    with ExitStack() as stack:
        if name := order.get("drop"):
            target, replacement = DROPS[name]
            stack.enter_context(mock.patch(target, replacement))
        if "event" in order:
            stack.callback(count_events(order, said))
        try:
            small(order["folder"], resume=order.get("resume", False), show=Said())
        except Stopped as stopped:
            return stopped.code
        except Failure as failure:
            Said().say(f"error: {failure}")
            return failure.exit_code
    return 0


def count_events(order, said):
    """Send the signal at the n-th call or return within the library, or the n-th within its saves."""
    seen, saving = 0, False

    def watch(frame, event, argument):
        nonlocal seen, saving
        if not any(part in frame.f_code.co_filename for part in ("regard/train", "regard/atomic_files")):
            return
        if frame.f_code.co_name == "write" and event in ("call", "return"):
            saving = event == "call"
        seen += saving or not order.get("saving")
        if seen == order["event"]:
            os.write(said, f"signal while {'saving' if saving else 'training'}\n".encode())
            os.kill(os.getpid(), order["signal"])

    sys.setprofile(watch)
    return lambda: sys.setprofile(None)


def nurse():
    torch.set_num_threads(1)
    for line in sys.stdin:
        order = json.loads(line)
        read, write = os.pipe()
        began = time.monotonic()
        if (pid := os.fork()) == 0:
            os.close(read)
            os._exit(child(order, write))
        os.close(write)
        if "seconds" in order:
            time.sleep(order["seconds"])
            os.kill(pid, order["signal"])
        with os.fdopen(read) as pipe:
            said = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps({"code": code, "said": said, "seconds": time.monotonic() - began}), flush=True)


if __name__ == "__main__":
    nurse()
