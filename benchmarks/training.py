"""Training beside JoeyNMT and beside a plain loop over transformers: the same pairs and sizes, tokens a second.

`python -m benchmarks.training PEER KIND` trains one of them for a moment, in a process of its own, and prints how many
target tokens a second it went through once it was warm. JoeyNMT comes from PyPI into a folder of its own, beside the
PyTorch that is here.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.data import Dates, Generated, Pair
from regard.models import Seq2Seq, Seq2SeqConfig, Transformer, TransformerConfig
from regard.tasks import Batching, PairVocabulary
from regard.tasks.pairs import Tokenizers
from regard.train import Constant, Epochs, Group, Recipe, Report, Silence, fit

PAIRS, TOKENS = 10_000, 2048  # dates by letters, and the most tokens of a batch on its longer side, padding included
WARM, MEASURED = 5, 25  # updates
DIM, HIDDEN, DEPTH, HEADS, DROPOUT, RATE = 128, 256, 2, 4, 0.1, 1e-3
INNER = 4 * DIM  # of a Transformer's feed-forward
REPOSITORY = Path(__file__).parents[1]
JOEY = REPOSITORY / "output" / "joeynmt"
NEEDS = [
    *("joeynmt==2.3.0", "subword-nmt==0.3.8", "sentencepiece==0.2.2", "plotly==7.1.0", "tensorboard==2.21.0"),
    *("protobuf==7.36.2", "importlib_metadata==8.5.0", "zipp==3.20.2"),
]


def training(peer: str, kind: str) -> Callable[[], dict[str, Callable[[], float]]]:
    """Calls that train and say how fast: ours, and the other's; `kind` is rnn, transformer or joint."""

    def build() -> dict[str, Callable[[], float]]:
        if peer == "JoeyNMT":
            install()
        return {name: partial(alone, name, kind) for name in ("regard", peer)}

    return build


def install() -> None:
    """JoeyNMT and what it imports, without touching what is installed here."""
    if not JOEY.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(JOEY), *NEEDS]
        subprocess.run(command, check=True)


def alone(name: str, kind: str) -> float:
    """The speed of one training in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.training", name, kind]
    run = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env={**os.environ, **THREADS})
    if run.returncode:
        raise SystemExit(f"error: {' '.join(command)}: {run.stderr[-2000:]}")
    return float(run.stdout.splitlines()[-1])


def regard(kind: str) -> float:
    """Our own loop, logs and checkpoints included."""
    batches, tokenizers = data(joint=kind == "joint")
    clock, recipe = Clock(), Recipe(steps=WARM + MEASURED, rate=Constant(RATE), save_every=WARM + MEASURED)
    with tempfile.TemporaryDirectory() as folder:
        fit(model(kind, tokenizers), Counted(batches, clock), recipe, folder=folder, show=clock)
    return clock.speed()


def transformers(kind: str) -> float:
    """A Marian of the same size in a loop as one writes it."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import MarianConfig, MarianMTModel

    batches, tokenizers = data(joint=True)
    words = tokenizers.target
    config = MarianConfig(
        vocab_size=len(words),
        d_model=DIM,
        encoder_layers=DEPTH,
        decoder_layers=DEPTH,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=INNER,
        decoder_ffn_dim=INNER,
        dropout=DROPOUT,
        attention_dropout=0.0,
        activation_dropout=0.0,
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=words.pad,
        eos_token_id=words.eos,
        decoder_start_token_id=words.bos,
    )
    torch.manual_seed(0)
    model, clock = MarianMTModel(config).train(), Clock()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), eps=1e-9, fused=True)
    for batch in Counted(batches, clock):
        if len(clock.times) == WARM + MEASURED:
            break
        lengths = batch["source_lengths"]
        model(
            batch["source"],
            attention_mask=(torch.arange(batch["source"].shape[1]) < lengths[:, None]).long(),
            labels=batch["target"].masked_fill(batch["target"] == words.pad, -100),
        ).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()
    return clock.speed()


def joeynmt(kind: str) -> float:
    """`python -m joeynmt train`, by the speed its log tells."""
    with tempfile.TemporaryDirectory() as folder:
        for side, lines in zip(("source", "target"), zip(*pairs(), strict=True), strict=True):
            for part in ("train", "dev"):
                text = "".join(f"{line}\n" for line in (lines if part == "train" else lines[:10]))
                (Path(folder) / f"{part}.{side}").write_text(text, encoding="utf8")
        config = Path(folder) / "config.yaml"
        config.write_text(json.dumps(joey_config(kind, Path(folder))))  # JSON is YAML
        env = {**os.environ, "PYTHONPATH": str(JOEY)}
        command = [sys.executable, "-m", "joeynmt", "train", str(config), "--skip-test"]
        run = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env)
        speeds = [float(speed) for speed in re.findall(r"Tokens per Sec:\s+(\d+)", run.stdout + run.stderr)]
        if run.returncode or len(speeds) != 1 + MEASURED // WARM:
            raise SystemExit(f"error: JoeyNMT did not train: {run.stderr[-2000:]}")
    return statistics.harmonic_mean(speeds[1:])  # of stretches of about as many tokens


def joey_config(kind: str, folder: Path) -> dict[str, Any]:
    """The same model, batches and optimizer in its words."""
    side = {"level": "char", "max_length": 256, "lowercase": False}
    embeddings = {"embedding_dim": DIM, "scale": kind == "transformer", "dropout": DROPOUT}
    if kind == "rnn":
        half = {"type": "recurrent", "rnn_type": "gru", "num_layers": 1, "embeddings": embeddings, "dropout": DROPOUT}
        encoder = {**half, "hidden_size": HIDDEN // 2, "bidirectional": True}
        looks = {"attention": "bahdanau", "input_feeding": False, "init_hidden": "bridge", "hidden_dropout": DROPOUT}
        decoder = {**half, "hidden_size": HIDDEN, **looks}
    else:
        shape = {"num_layers": DEPTH, "num_heads": HEADS, "hidden_size": DIM, "ff_size": INNER, "layer_norm": "pre"}
        encoder = decoder = {"type": "transformer", "embeddings": embeddings, "dropout": DROPOUT, **shape}
    return {
        "name": "benchmark",
        "joeynmt_version": "2.3.0",
        "model_dir": str(folder / "model"),
        "use_cuda": False,
        "random_seed": 1,
        "data": {
            "train": str(folder / "train"),
            "dev": str(folder / "dev"),
            "dataset_type": "plain",
            "src": {"lang": "source", **side},
            "trg": {"lang": "target", **side},
        },
        "testing": {"beam_size": 1, "batch_size": 10, "batch_type": "sentence", "eval_metrics": ["chrf"]},
        "training": {
            "optimizer": "adamw",
            "adam_betas": [0.9, 0.98],
            "learning_rate": RATE,
            "scheduling": "exponential",
            "decrease_factor": 1.0,
            "clip_grad_norm": 1.0,
            "batch_size": TOKENS,
            "batch_type": "token",
            "normalization": "tokens",
            "loss": "crossentropy",
            "label_smoothing": 0.0,
            "epochs": 100,
            "updates": WARM + MEASURED,
            "validation_freq": 10_000,
            "logging_freq": WARM,
            "early_stopping_metric": "loss",
            "overwrite": True,
            "shuffle": True,
        },
        "model": {"tied_softmax": kind == "transformer", "encoder": encoder, "decoder": decoder},
    }


def data(*, joint: bool) -> tuple[Epochs, Tokenizers]:
    """The pairs in batches, and the tokenizers that made them."""
    some = [Pair(*pair) for pair in pairs()]
    tokenizers = PairVocabulary(kind="char", joint=joint).learn_both(some)
    batching = Batching(tokens=TOKENS, limit=256)
    examples = tokenizers.encode(some)
    return batching.over(examples, pad=tokenizers.pad, seed=1, group=Group(), say=print), tokenizers


def pairs() -> list[tuple[str, str]]:
    return [(date.source, date.target) for date in Generated(Dates(), size=PAIRS, seed=1)]


def model(kind: str, tokenizers: Tokenizers) -> nn.Module:
    sizes: dict[str, Any] = {
        "source_vocabulary": len(tokenizers.source),
        "target_vocabulary": len(tokenizers.target),
        "start": tokenizers.target.bos,
        "dim": DIM,
        "dropout": DROPOUT,
        "smoothing": 0.0,
    }
    torch.manual_seed(0)
    if kind == "rnn":
        return Seq2Seq(Seq2SeqConfig(**sizes, hidden=HIDDEN, attention="bahdanau", tied="none"))
    sizes |= {"heads": HEADS, "hidden": INNER, "encoder_layers": DEPTH, "decoder_layers": DEPTH}
    if kind == "joint":  # as Marian, norms after each sublayer
        return Transformer(TransformerConfig(**sizes, tied="all", norm="post"))
    return Transformer(TransformerConfig(**sizes, tied="output", norm="pre"))


class Clock(Silence):
    """When each update was made, and the tokens handed out until then."""

    def __init__(self) -> None:
        self.tokens = 0
        self.times: list[tuple[float, int]] = []

    def advance(self, report: Report) -> None:
        self.tick()

    def tick(self) -> None:
        self.times.append((time.perf_counter(), self.tokens))

    def speed(self) -> float:
        (start, before), (end, after) = self.times[WARM - 1], self.times[WARM + MEASURED - 1]
        return (after - before) / (end - start)


class Counted:
    """Batches whose target tokens a clock counts."""

    def __init__(self, batches: Epochs, clock: Clock) -> None:
        self.batches, self.clock = batches, clock

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.clock.tokens += int(batch["target_lengths"].sum())
            yield batch

    def state(self) -> dict[str, Any]:
        return self.batches.state()

    def restore(self, state: Mapping[str, Any], /) -> None:
        self.batches.restore(state)


PEERS = {"regard": regard, "transformers": transformers, "JoeyNMT": joeynmt}
THREADS = {"OMP_NUM_THREADS": "2"}

if __name__ == "__main__":
    print(PEERS[sys.argv[1]](sys.argv[2]))
