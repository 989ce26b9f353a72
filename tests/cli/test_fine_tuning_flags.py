"""`regard train --from RUN`: the weights of another run, other data, a new optimizer."""

from __future__ import annotations

import json

import pytest
import torch

from regard.cli.fine_tuning_flags import FineTuningFlags
from regard.tasks.fine_tuning import FineTuning
from regard.train import checkpoint
from tests.cli.commands import SMALL, SOURCE, TARGET, run, well

pytestmark = pytest.mark.commands


@pytest.fixture
def other(tmp_path):
    """Flags of other data than that of the run."""
    (tmp_path / "b.de").write_text("".join(f"{line}\n" for line in SOURCE[::-1]))
    (tmp_path / "b.en").write_text("".join(f"{line}\n" for line in TARGET[::-1]))
    return ["--source", tmp_path / "b.de", "--target", tmp_path / "b.en", "--steps", 2, "--save-every", 2]


def weights(run, step):
    return checkpoint.read_tensors(run / f"step-{step:08d}")


def test_run_begins_with_another_and_keeps_its_model(translator, other, tmp_path):
    ended = well("train", "translation", "--from", translator, *other, "--out", tmp_path / "run")
    assert "fine-tuning " in ended.err
    base = checkpoint.read_tensors(checkpoint.find(translator))
    assert all(torch.equal(x, base[name]) for name, x in weights(tmp_path / "run", 0).items())
    plan = json.loads((tmp_path / "run" / "step-00000002" / "plan.json").read_text())
    saved = json.loads((checkpoint.find(translator) / "plan.json").read_text())
    assert (plan["model"], plan["vocabulary"]) == (saved["model"], saved["vocabulary"])
    assert plan["finetuning"] == {"run": str(translator), "freeze": None, "lora": None}
    well("translate", tmp_path / "run", stdin="ein Haus\n")
    well("train", "translation", "--resume", "--out", tmp_path / "run", "--steps", 4)


def test_parts_are_frozen_and_lora_is_added_by_flags(translator, other, tmp_path):
    base = checkpoint.read_tensors(checkpoint.find(translator))
    flags = ["--from", translator, *other]
    well("train", "translation", *flags, "--freeze", "encoder.*", "--freeze", "*.bias", "--out", tmp_path / "frozen")
    changed = {n for n, x in weights(tmp_path / "frozen", 2).items() if not torch.equal(x, base[n])}
    assert changed
    assert not [name for name in changed if name.startswith("encoder.") or name.endswith(".bias")]
    well("train", "translation", *flags, "--lora-rank", 2, "--out", tmp_path / "lora")
    changed = {n for n, x in weights(tmp_path / "lora", 2).items() if not torch.equal(x, base[n])}
    assert {name.split(".")[-2] for name in changed} <= {"query", "key", "value", "out"}
    ended = run("train", "translation", "--resume", "--out", tmp_path / "lora", "--lora-rank", 3)
    assert "error: a resumed run cannot change its finetuning: lora was 2, got 3; give --out a new folder" in ended.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--dim", 8],
            "a fine-tuned run cannot change its model: dim was 16, got 8; leave out --from to train another",
        ),
        (["--tokenizer", "char"], "a fine-tuned run cannot change its vocabulary: kind was 'word', got 'char'"),
        (["--freeze", "nothing.*"], "no parameter matches 'nothing.*'; the parts of the model are "),
        (["--lora-rank", 2, "--freeze", "encoder.*"], "lora freezes all weights of the run itself; leave out freeze"),
    ],
)
def test_what_cannot_be_changed_is_named(translator, other, tmp_path, flags, message):
    ended = run("train", "translation", "--from", translator, *other, *flags, "--out", tmp_path / "run")
    assert ended.code == 2
    assert message in ended.err
    assert not (tmp_path / "run").exists()


def test_task_of_the_run_is_named(writer, other, tmp_path):
    ended = run("train", "translation", "--from", writer, *other, "--out", tmp_path / "run")
    assert ended.code == 2
    assert "is a run of the task 'language'; fine-tune it with regard train language --from" in ended.err


def test_flags_need_a_run_to_begin_with():
    with pytest.raises(ValueError, match="--freeze and --lora-rank need --from, a run to begin with"):
        FineTuningFlags(lora=2)
    assert FineTuningFlags().tuning is None
    assert FineTuningFlags(run="a", freeze="b.*").tuning == FineTuning(run="a", freeze=("b.*",))
    assert FineTuningFlags().unless_kept(model=1) == {"model": 1}
    assert FineTuningFlags(run="a").unless_kept(model=1) == {}


def test_every_task_can_be_fine_tuned(writer, files, tmp_path):
    text = ["--text", files / "a.de", "--steps", 1, "--batch-tokens", 16]
    well("train", "language", "--from", writer, *text, "--out", tmp_path / "language")
    labelled = ["--labelled", files / "reviews.tsv", *SMALL]
    well("train", "classification", *labelled, "--out", tmp_path / "base")
    (tmp_path / "good.tsv").write_text("good\ta great film\n" * 4)
    again = ["--labelled", tmp_path / "good.tsv", "--steps", 1, "--from", tmp_path / "base"]
    ended = well("train", "classification", *again, "--out", tmp_path / "reviews")
    assert "head is new" not in ended.err
    config = json.loads((tmp_path / "reviews" / "step-00000001" / "config.json").read_text())
    assert config["classes"] == ["bad", "good"]
    squad = ["--data", files / "squad.json", *SMALL]
    well("train", "answering", *squad, "--out", tmp_path / "squad")
    well(
        "train",
        "answering",
        "--data",
        files / "squad.json",
        "--steps",
        1,
        "--from",
        tmp_path / "squad",
        "--out",
        tmp_path / "b",
    )
    captions = ["--captions", files / "captions.tsv", "--images", files / "scenes"]
    well("train", "captioning", *captions, *SMALL, "--out", tmp_path / "captions")
    well("train", "captioning", *captions, "--steps", 1, "--from", tmp_path / "captions", "--out", tmp_path / "c")
    news = ["--documents", files / "news", "--summaries", files / "headlines"]
    well("train", "summarization", *news, *SMALL, "--out", tmp_path / "news")
    well("train", "summarization", *news, "--steps", 1, "--from", tmp_path / "news", "--out", tmp_path / "d")
