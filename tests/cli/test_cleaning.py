"""Flags that drop training examples."""

from __future__ import annotations

import json

import pytest

from regard.cli.cleaning import Cleaning
from regard.data import Pair, labelled_tsv, pairs_tsv, parallel
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
    assert {name for name, dropped in plan["cleaning"].items() if dropped} == {"drop_empty"}
    ended = run("train", "translation", "--out", tmp_path / "clean", "--resume", "--no-drop-empty", "--steps", 6)
    assert "a resumed run cannot change its cleaning: drop_empty was True, got False" in ended.err


def test_images_are_not_dropped(files, tmp_path):
    ended = run(
        "train", "classification", "--images", files / "forms", "--drop-empty", "--out", tmp_path / "run", *SMALL
    )
    assert ended.code == 2
    assert "examples are dropped only from texts, got images; leave out --drop-..." in ended.err


@pytest.mark.filterwarnings("ignore::regard.data.DataWarning")
def test_lines_with_more_columns_than_most_are_dropped(tmp_path, capsys):
    path, other = tmp_path / "a.tsv", tmp_path / "b.tsv"
    path.write_text("a\t1\nb\tcut\there\nc\t3\n")
    other.write_text("d\t4\textra\ne\t5\textra\n")  # every line has three columns
    cleaning = Cleaning(drop_extra_columns=True)
    rows = pairs_tsv([path, other])
    assert [pair.source for pair in cleaning.clean(rows, None)] == ["a", "c", "d", "e"]
    texts = labelled_tsv(path, text=0, label=1, header=False)
    assert [one.text for one in cleaning.clean_labelled(texts, None)] == ["a", "c"]
    assert capsys.readouterr().err == "dropped 1 of 5 training examples\ndropped 1 of 3 training examples\n"


def test_extra_columns_are_those_of_a_table(tmp_path):
    (tmp_path / "a").write_text("x\n")
    with pytest.raises(ValueError, match="is not a table, so its lines have no columns to count"):
        Cleaning(drop_extra_columns=True).clean(parallel(tmp_path / "a", tmp_path / "a"), None)
    with pytest.raises(ValueError, match="--drop-extra-columns needs a table of columns; leave out the flag"):
        Cleaning(drop_extra_columns=True).clean(Rows(PAIRS), None)
