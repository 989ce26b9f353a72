"""A config.json of Hugging Face: each field is read by its type, and an unknown one is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from regard.models.pretrained import load
from regard.models.pretrained.fields import ConfigFields
from tests.models.pretrained.peers import saved


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "must hold an object"),
        ("{", "cannot be read as a config"),
        ("[" * 10**5, "cannot be read as a config"),
        (" " * 2 * 10**6, "at most"),
    ],
    ids=["list", "cut", "deep", "long"],
)
def test_a_config_that_is_none_is_refused(text, message, tmp_path):
    (saved(tmp_path) / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def fields(**data):
    return ConfigFields(data, Path("config.json"))


def test_absent_and_null_fields_have_their_defaults():
    found = fields(gone=None)
    assert (found.count("gone", default=3), found.count("absent", default=4)) == (3, 4)
    assert (found.maybe_count("gone"), found.within("gone"), found.any("absent")) == (None, None, None)
    assert (found.number("gone", default=0.5), found.flag("gone", default=True)) == (0.5, True)
    assert found.one_of("gone", {"a": 1}, default="a") == 1


def test_fields_are_read_by_their_type():
    found = fields(n=7, x=0, on=False, kind="b", square=8, wide=[8, 12], rope={"factor": 2})
    assert (found.count("n"), found.maybe_count("n"), found.number("x"), found.flag("on", default=True)) == (7, 7, 0, 0)
    assert (found.one_of("kind", {"a": 1, "b": 2}), found.within("rope"), found.any("wide")) == (
        2,
        {"factor": 2},
        [8, 12],
    )
    assert (found.size("square"), found.size("wide")) == (8, (8, 12))
    assert isinstance(found.number("x"), float)


@pytest.mark.parametrize(
    ("read", "value", "expected"),
    [
        (lambda f: f.count("a"), True, "a whole number from 1, got true"),
        (lambda f: f.count("a"), 0, "a whole number from 1, got 0"),
        (lambda f: f.count("a"), 2**31, "a whole number from 1, got 2147483648"),
        (lambda f: f.count("a"), None, "a whole number from 1, got null"),
        (lambda f: f.maybe_count("a", least=0), -1, "a whole number from 0, got -1"),
        (lambda f: f.number("a"), "1", 'a number from 0, got "1"'),
        (lambda f: f.number("a", below=1.0), 1, "a number from 0, below 1, got 1"),
        (lambda f: f.flag("a", default=True), 1, "true or false, got 1"),
        (lambda f: f.one_of("a", {"x": 1, "y": 2}), ["x"], "one of 'x', 'y', got [\"x\"]"),
        (lambda f: f.size("a"), [8], "a whole number, or two, got [8]"),
        (lambda f: f.size("a"), [8, True], "a whole number, or two, got [8, true]"),
        (lambda f: f.within("a"), [1], "an object of keys and values, got [1]"),
        (lambda f: f.must("a", 1, None), 2, "1 or null, got 2"),
        (lambda f: f.count("a"), "x" * 999, 'a whole number from 1, got "' + "x" * 99),
    ],
)
def test_a_field_of_another_type_is_refused_with_the_path(read, value, expected):
    with pytest.raises(ValueError, match=f"^{re.escape(f'config.json: a must be {expected}')}$"):
        read(fields(a=value))


def test_a_field_that_was_never_read_is_refused_with_the_nearest():
    found = fields(hidden_size=3, hiden_size=3, note="x", bos_token_id=1)
    assert found.count("hidden_size") == 3
    found.close("hiden_size", "note")
    with pytest.raises(
        ValueError, match=r"config.json: unknown key 'hiden_size'; remove it if .*; did you mean 'hidden_size'\?$"
    ):
        found.close("note")
    with pytest.raises(ValueError, match=r"unknown key 'note'; remove it if .*; known: 'hidden_size', '_attn_"):
        found.close("hiden_size")


def test_an_error_within_the_block_begins_with_the_path():
    with pytest.raises(ValueError, match=r"^config.json: dim must be even$"), fields().path_in_errors():
        raise TypeError("dim must be even")


def test_what_no_model_of_ours_does_is_refused_at_once():
    with pytest.raises(ValueError, match=r"config.json: is_decoder must be false, got true"):
        fields(is_decoder=True)
