"""Tiny files, and runs that were trained on them for a moment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import HEADLINES, NEWS, SMALL, SOURCE, SQUAD, TARGET, TEXTS, well
from tests.cli.tiny_datasets import draw


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> Path:
    """A folder of tiny files."""
    folder = tmp_path_factory.mktemp("files")
    for name, lines in (("a.de", SOURCE), ("a.en", TARGET), ("news", NEWS), ("headlines", HEADLINES)):
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf8")
    both = zip(SOURCE, TARGET, strict=True)
    (folder / "a.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in both), encoding="utf8")
    (folder / "gold").write_text("0-0 1-1\n" * 4 + "0-0 1p1 2-2\n" * 2 + "0-0\n" * 2)
    told = ({"body": news, "head": headline} for news, headline in zip(NEWS, HEADLINES, strict=True))
    (folder / "news.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in told))
    (folder / "squad.json").write_text(json.dumps(SQUAD))
    (folder / "bridge.txt").write_text(TEXTS[1][0])
    draw(folder)
    return folder


@pytest.fixture(scope="session")
def translator(files, tmp_path_factory) -> Path:
    """A translator, hardly trained; by words."""
    out = tmp_path_factory.mktemp("translator") / "run"
    data = ["--source", files / "a.de", "--target", files / "a.en"]
    valid = ["--valid-source", files / "a.de", "--valid-target", files / "a.en"]
    well("train", "translation", *data, *valid, *SMALL, "--heads", 2, "--tokenizer", "word", "--out", out)
    return out


@pytest.fixture(scope="session")
def recurrent(files, tmp_path_factory) -> Path:
    """Another, over the same words."""
    out = tmp_path_factory.mktemp("recurrent") / "run"
    data = ["--pairs", files / "a.tsv", "--model", "rnn", "--tokenizer", "word"]
    well("train", "translation", *data, *SMALL, "--out", out)
    return out


@pytest.fixture(scope="session")
def writer(files, tmp_path_factory) -> Path:
    """A language model."""
    out = tmp_path_factory.mktemp("writer") / "run"
    size = ["--length", 8, "--batch-tokens", 16, "--depth", 1, "--heads", 2]
    text = ["--text", files / "a.en", "--valid-text", files / "a.en", "--tokenizer", "char"]
    well("train", "language", *text, *size, *SMALL, "--out", out)
    return out


@pytest.fixture(scope="session")
def answerer(files, tmp_path_factory) -> Path:
    """A model that answers questions, by windows of six words."""
    out = tmp_path_factory.mktemp("answerer") / "run"
    size = ["--window", 6, "--overlap", 2, "--question-limit", 9, "--batch-tokens", 40, "--heads", 2]
    data = ["--data", files / "squad.json", "--valid-data", files / "squad.json"]
    well("train", "answering", *data, *size, *SMALL, "--out", out)
    return out


@pytest.fixture(scope="session")
def summarizer(files, tmp_path_factory) -> Path:
    """A summarizer that copies; of a document it reads seven words."""
    out = tmp_path_factory.mktemp("summarizer") / "run"
    data = ["--documents", files / "news", "--summaries", files / "headlines"]
    valid = ["--valid-documents", files / "news", "--valid-summaries", files / "headlines"]
    size = ["--vocabulary", 10, "--limit", 8, "--batch-tokens", 32]
    well("train", "summarization", *data, *valid, *size, *SMALL, "--out", out)
    return out


@pytest.fixture(scope="session")
def critic(files, tmp_path_factory) -> Path:
    """A classifier of texts."""
    out = tmp_path_factory.mktemp("critic") / "run"
    data = ["--labelled", files / "reviews.tsv", "--valid-labelled", files / "reviews.tsv"]
    well("train", "classification", *data, "--limit", 9, *SMALL, "--out", out)
    return out


@pytest.fixture(scope="session")
def seer(files, tmp_path_factory) -> Path:
    """A classifier of images."""
    out = tmp_path_factory.mktemp("seer") / "run"
    data = ["--images", files / "digits.npz", "--valid-images", files / "digits.npz", "--batch", 8]
    well("train", "classification", *data, *SMALL, "--out", out)
    return out


@pytest.fixture(scope="session")
def captioner(files, tmp_path_factory) -> Path:
    """A captioner of scenes."""
    out = tmp_path_factory.mktemp("captioner") / "run"
    data = ["--captions", files / "captions.tsv", "--images", files / "scenes", "--size", 32, "--batch", 5]
    valid = ["--valid-captions", files / "captions.tsv", "--valid-images", files / "scenes"]
    well("train", "captioning", *data, *valid, "--features", 16, *SMALL, "--out", out)
    return out
