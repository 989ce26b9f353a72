"""Routes: each parameter of a resource once and in its form, or a refusal that says what to write."""

from __future__ import annotations

import inspect

import pytest

from regard.views.viewer.captures import ApiError, MatrixId
from regard.views.viewer.routes import RESOURCES, parse_axis, parse_head, parse_int, parse_other_matrix, parse_query

UNREADABLE = [
    ("session", "x=1", "session takes no parameters"),
    ("text", "", "text takes capture, text, each once"),
    ("text", "capture=0", "text takes capture, text, each once"),
    ("text", "capture=0&text=0&text=0", "text takes capture, text, each once"),
    ("text", "capture=0&text=0&path=/etc/passwd", "text takes capture, text, each once"),
    ("text", "capture=0&text", "the query cannot be read"),
    ("text", "&".join(f"x{n}=1" for n in range(99)), "the query cannot be read"),
    *[
        ("text", f"capture=0&text={value}", "text must be a whole number of up to nine digits")
        for value in ("", "-1", "+1", "01", "1.0", "1e3", "0x1", " 1", "9" * 10, "٣", "one", "NaN", "../0", "0%00")
    ],
    ("measures", "capture=0&layer=0&batch=0&head=median&level=0", "head must be the number of a head, mean or max"),
    ("token", "capture=0&layer=0&batch=0&head=0&axis=both&first=0&last=0&top=1", "axis must be query or key"),
    *[
        ("tile", f"capture=0&layer=0&batch=0&head=0&minus={value}&level=0&row=0&col=0", "minus must be")
        for value in ("", "0", "0.0.0", "0.0.0.0.0", "0.0.0.x", "-1.0.0.0", "None")
    ],
]


@pytest.mark.parametrize(("name", "query", "message"), UNREADABLE)
def test_a_query_that_cannot_be_read_is_answered_with_what_to_write(name, query, message):
    with pytest.raises(ApiError) as caught:
        parse_query(name, query)
    assert message in caught.value.error
    assert caught.value.status == 400
    assert caught.value.hint.startswith(f"write {name}")


def test_a_query_becomes_the_arguments_of_its_resource():
    assert parse_query("session", "") == {}
    assert parse_query("text", "text=7&capture=0") == {"capture": 0, "text": 7}
    assert parse_query("measures", "capture=1&layer=2&batch=3&head=max&level=999999999") == {
        "capture": 1, "layer": 2, "batch": 3, "head": "max", "level": 999_999_999,
    }  # fmt: skip
    tile = "capture=0&layer=0&batch=0&head=4&minus=1.2.3.mean&level=0&row=5&col=6"
    assert parse_query("tile", tile)["minus"] == MatrixId(1, 2, 3, "mean")


def test_escaped_digits_are_digits():
    assert parse_query("text", "capture=%30&text=%31%32") == {"capture": 0, "text": 12}


@pytest.mark.parametrize("separator", [";", "&amp;", ","])
def test_only_an_ampersand_separates_parameters(separator):
    with pytest.raises(ApiError):
        parse_query("text", f"capture=0{separator}text=0")


def test_sixteen_parameters_are_read_and_more_are_not():
    for count, message in ((16, "text takes capture, text, each once"), (17, "the query cannot be read")):
        with pytest.raises(ApiError) as caught:
            parse_query("text", "&".join(f"x{n}=1" for n in range(count)))
        assert caught.value.error == message


def test_the_first_value_that_is_wrong_is_named():
    with pytest.raises(ApiError) as caught:
        parse_query("measures", "level=0&head=median&batch=-1&layer=0&capture=0")
    assert caught.value.error == "head must be the number of a head, mean or max"


@pytest.mark.parametrize("name", RESOURCES)
def test_the_query_that_a_hint_says_to_write_can_be_read(name):
    with pytest.raises(ApiError) as caught:
        parse_query(name, "nothing=0")
    written = caught.value.hint.removeprefix("write ")
    resource, _, query = written.partition("?")
    assert resource == name
    assert parse_query(name, query).keys() == RESOURCES[name].parameters.keys()
    assert written.endswith("?") is False


@pytest.mark.parametrize("name", RESOURCES)
def test_the_parameters_of_a_resource_are_those_of_the_method_that_answers_it(name):
    _, *arguments = inspect.signature(RESOURCES[name].answer).parameters
    assert list(RESOURCES[name].parameters) == arguments


def test_a_resource_without_parameters_says_so():
    with pytest.raises(ApiError) as caught:
        parse_query("session", "x=1")
    assert (caught.value.error, caught.value.hint) == ("session takes no parameters", "write session")


def test_whole_numbers_have_no_sign_no_leading_zero_and_nine_digits_at_most():
    assert [parse_int(text) for text in ("0", "7", "10", "999999999")] == [0, 7, 10, 999_999_999]
    for text in ("", "-1", "+1", "00", "07", "1 ", "1\n", "1_0", "1000000000", "\u0663", "\u00b2"):
        with pytest.raises(ValueError, match=r"^a whole number of up to nine digits$"):
            parse_int(text)


def test_a_head_is_a_number_or_an_aggregate():
    assert [parse_head(text) for text in ("0", "12", "mean", "max")] == [0, 12, "mean", "max"]
    for text in ("", "MEAN", "min", "-1", "mean,max"):
        with pytest.raises(ValueError, match=r"^the number of a head, mean or max$"):
            parse_head(text)


def test_another_matrix_is_four_numbers_or_none():
    assert parse_other_matrix("none") is None
    assert parse_other_matrix("1.0.2.mean") == MatrixId(1, 0, 2, "mean")
    for text, expected in (
        ("", "^none, or capture.layer.batch.head$"),
        ("0.0.0", "^none, or capture.layer.batch.head$"),
        ("0.0.0.0.0", "^none, or capture.layer.batch.head$"),
        ("mean.0.0.0", "^a whole number of up to nine digits$"),
        ("0.0.0.median", "^the number of a head, mean or max$"),
    ):
        with pytest.raises(ValueError, match=expected):
            parse_other_matrix(text)


def test_an_axis_is_query_or_key():
    assert [parse_axis(text) for text in ("query", "key")] == ["query", "key"]
    for text in ("", "both", "Query"):
        with pytest.raises(ValueError, match=r"^query or key$"):
            parse_axis(text)
