"""Flags that drop training examples."""

from __future__ import annotations

import json

import pytest

from regard.cli.cleaning import Cleaning
from regard.data import Pair, labelled_tsv
from tests.cli.commands import SMALL, run, well

PAIRS = [Pair("a", "1"), Pair("", "2"), Pair("a", "1"), Pair("b", "3")]


class Rows(list):
    def where(self, number):
        return f"row {number}"


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        ({}, ["a", "", "a", "b"]),
        ({"drop_empty": True}, ["a", "a", "b"]),
        ({"drop_duplicates": True}, ["a", "", "b"]),
        ({"drop_overlap": True}, ["a", "", "a"]),
    ],
)
def test_each_flag_drops_its_kind_and_prints_the_number(flags, left, capsys):
    kept = Cleaning(**flags).clean(Rows(PAIRS), [Pair("b", "other")])
    assert [pair.source for pair in kept] == left
    err = capsys.readouterr().err
    assert err == (f"dropped {4 - len(left)} of 4 training examples\n" if flags else "")


def test_overlap_needs_validation_data():
    with pytest.raises(ValueError, match="--drop-overlap needs validation data; give it, or leave out the flag"):
        Cleaning(drop_overlap=True).clean(Rows(PAIRS), None)


def test_labelled_texts_keep_their_classes(tmp_path):
    (tmp_path / "a.tsv").write_text("x\tone\ny\t\nx\tone\n")
    kept = Cleaning(drop_empty=True, drop_duplicates=True).clean_labelled(labelled_tsv(tmp_path / "a.tsv"), None)
    assert ([example.text for example in kept], kept.classes) == (["one"], ("x", "y"))


def test_empty_sides_are_counted_and_dropped_by_a_flag(files, tmp_path):
    (tmp_path / "blank.de").write_text("".join(f"{line}\n" for line in ["ein Haus", "", "der Hund", "", "das Haus"]))
    (tmp_path / "blank.en").write_text("".join(f"{line}\n" for line in ["a house", "x", "the dog", "y", "the house"]))
    flags = ["--source", tmp_path / "blank.de", "--target", tmp_path / "blank.en", "--model", "rnn", *SMALL]
    assert (
        "2 of 5 training pairs have an empty text\n"
        in well("train", "translation", *flags, "--out", tmp_path / "run").err
    )
    ended = well("train", "translation", *flags, "--drop-empty", "--out", tmp_path / "clean")
    assert "dropped 2 of 5 training examples\n" in ended.err
    assert "have an empty text" not in ended.err
    plan = json.loads((tmp_path / "clean" / "step-00000004" / "plan.json").read_text())
    assert plan["cleaning"] == {"drop_empty": True, "drop_duplicates": False, "drop_overlap": False}
    ended = run("train", "translation", "--out", tmp_path / "clean", "--resume", "--no-drop-empty", "--steps", 6)
    assert "a resumed run cannot change its cleaning: drop_empty was True, got False" in ended.err


def test_images_are_not_dropped(files, tmp_path):
    ended = run(
        "train", "classification", "--images", files / "forms", "--drop-empty", "--out", tmp_path / "run", *SMALL
    )
    assert ended.code == 2
    assert "examples are dropped only from texts, got images; leave out --drop-..." in ended.err
