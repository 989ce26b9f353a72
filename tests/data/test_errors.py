"""DataError: one printable line, with its place."""

import pickle

import pytest

from regard.data import DataError, Lines


def test_control_characters_of_a_name_do_not_reach_the_terminal(tmp_path):
    with pytest.raises(DataError) as caught:
        Lines(tmp_path / "a\x1b[31m\nb")
    assert str(caught.value).isprintable()


def test_errors_survive_pickling():
    error = DataError("bad", file="a.txt", line=3, hint="mend it")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.file, again.line) == (str(error), "a.txt", 3)


def test_place_problem_and_next_step_make_one_line():
    assert str(DataError("bad")) == "bad"
    assert str(DataError("bad", file="a.txt")) == "a.txt: bad"
    assert str(DataError("bad", file="a.txt", line=3, hint="mend it")) == "a.txt line 3: bad; mend it"
