"""Tokens, groups and images of layers: by patterns, and checked against the lengths of their axes."""

import pytest
import torch
from torch import nn

from regard import weights
from regard.lens import Tape, capture, words

B, N = 2, 7
TEXT = ["A", "que", "##ry", "look", "##s", "at", "keys"]


@pytest.fixture
def tape():
    sizes = {("a", 0): N, ("b.0", 0): N, ("b.1", 0): N, ("a", 1): 5}
    tape = Tape({key: weights(*torch.randn(2, B, 4, n, 4)) for key, n in sizes.items()})
    tape.tokens = TEXT
    return tape


class TestTokens:
    def seen(self, tokens, batch=1):
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2).eval()
        with capture(model, tokens) as tape, torch.no_grad():
            model(torch.randn(batch, 5, 8))
        return tape

    def test_those_that_fit_no_layer_are_warned_of_when_the_block_ends(self):
        with pytest.warns(UserWarning, match=r"2 tokens were given, but 'layers.0.self_attn' has 5 queries and 5 keys"):
            tape = self.seen(["a", "b"])
        assert tape.tokens_of(0) == (None, None)  # and not again

    def test_a_pattern_that_matches_no_layer_is_warned_of(self):
        with pytest.warns(UserWarning, match=r"given for 'layer.0\*', which matches no layer; there are layers.0"):
            self.seen({"layer.0*": list("abcde")})

    def test_those_that_are_set_later_are_warned_of_at_once(self):
        tape = self.seen(list("abcde"), batch=2)
        assert tape.tokens_of(0) == (list("abcde"), list("abcde"))
        with pytest.warns(UserWarning, match="3 to 4 tokens were given, but"):
            tape.tokens = [list("abc"), list("abcd")]

    def test_texts_of_another_number_than_the_batch_are_warned_of(self):
        told = "tokens of 3 texts were given, but 'layers.0.self_attn' has 2 batch rows; set tape.tokens to one"
        with pytest.warns(UserWarning, match=told):
            self.seen([list("abcde")] * 3, batch=2)

    def test_a_batch_row_whose_tokens_do_not_fit_is_named(self):
        told = r"3 tokens were given for batch row 1, but 'layers.0.self_attn' has 5 queries .*including padding"
        with pytest.warns(UserWarning, match=told):
            tape = self.seen([list("abcde"), list("abc")], batch=2)
        assert tape.tokens_of(0)[0] == list("abcde")
        assert tape.tokens_of(0, batch=1) == (None, None)

    @pytest.mark.parametrize(
        ("tokens", "message"), [("abcde", "got the string 'abcde'"), (range(5), "must be strings")]
    )
    def test_what_is_no_list_of_strings_is_refused(self, tokens, message):
        with pytest.raises(TypeError, match=message):
            self.seen(tokens)

    def test_layers_are_given_by_patterns(self):
        with pytest.raises(TypeError, match=r"layers must be name patterns such as 'encoder.\*', got \[1\]"):
            capture(nn.Linear(2, 2), layers=[1]).__enter__()


def test_tokens_label_axes_of_their_length(tape):
    assert tape.tokens_of(0) == (TEXT, TEXT)
    assert tape.tokens_of(("a", 1)) == (None, None)
    tape.tokens = {"*": TEXT, "b.1": (TEXT, [*TEXT[:-1], "values"]), "a": [["x"] * 7, ["y"] * 7]}
    assert tape.tokens_of("b.1")[1][-1] == "values"
    assert tape.tokens_of(("a", 0), batch=1) == (["y"] * 7, ["y"] * 7)
    assert len(tape.tokens) == 3
    tape.tokens = {"b.*": TEXT}
    assert tape.tokens_of(("a", 0)) == (None, None)


def test_the_last_token_may_have_no_row(tape):
    tape.tokens = [*TEXT, "."]
    assert tape.tokens_of(0) == (TEXT, TEXT)


def test_a_tuple_of_two_tokens_is_one_text():
    A = weights(torch.randn(1, 1, 2, 4), torch.randn(1, 1, 2, 4))
    tape = Tape({("x", 0): A})
    tape.tokens = ("a", "b")
    assert tape.tokens_of("x") == (["a", "b"], ["a", "b"])
    tape.tokens = {"x": ("a", "b")}
    assert tape.tokens_of("x") == (["a", "b"], ["a", "b"])


def test_tokens_must_be_strings(tape):
    with pytest.raises(TypeError, match="tokens must be strings"):
        tape.tokens = [[1, 2], [3, 4]]


def test_groups_that_are_missing_or_do_not_fit_are_named(tape):
    with pytest.raises(KeyError, match=r"'b.0' has no groups 'lines'; add them with tape.group"):
        tape.mass("b.0", "lines")
    tape.group("words", words(TEXT))
    with pytest.raises(ValueError, match="groups 'words' have 7 tokens, but 'a' has 5 queries"):
        tape.groups_of(("a", 1), "words")


def test_batch_rows_past_the_texts_and_pictures_have_none(tape):
    rows = [TEXT, TEXT[::-1]]
    tape.tokens = rows
    assert tape.tokens_of("b.0", batch=1) == (rows[1], rows[1])
    assert tape.tokens_of("b.0", batch=2) == (None, None)
    pixels = torch.zeros(4, 4, 3, dtype=torch.uint8)
    tape.picture([pixels, pixels], patches=(2, 3), special=1)
    assert None not in tape.pictures_of("b.0", batch=1)
    assert tape.pictures_of("b.0", batch=2) == (None, None)


def test_two_batch_rows_are_not_a_pair_of_queries_and_keys(tape):
    first, second = [f"{n}" for n in range(N)], [f"w{n}" for n in range(N)]
    tape.tokens = (first, second)
    assert tape.tokens_of("b.0", batch=1) == (second, second)
    tape.tokens = {"*": (first, second)}
    assert tape.tokens_of("b.0", batch=1) == (first, second)
    tape.tokens = None
    assert tape.tokens_of("b.0") == (None, None)


def test_a_list_instead_of_groups_raises(tape):
    with pytest.raises(TypeError, match=r"Groups, got list; write tape.group\('words', words\(tokens\)\)"):
        tape.group("words", TEXT)


def test_groups_that_fit_no_layer_warn(tape):
    few = words(TEXT[:3])
    message = r"groups 'few' cover 3 queries and 3 keys, but 'b.0' has 7 queries and 7 keys; pass groups of all tokens"
    with pytest.warns(UserWarning, match=message):
        tape.group("few", few, layers="b.*")
    with pytest.warns(UserWarning, match=r"groups were given for 'c\*', which matches no layer; there are a, b.0, b.1"):
        tape.group("words", words(TEXT), layers="c*")


def test_another_number_of_pictures_than_batch_rows_warns(tape):
    pixels = torch.zeros(4, 4, 3, dtype=torch.uint8)
    with pytest.warns(UserWarning, match=f"3 pictures were given, but 'a' has {B} batch rows; pass one for all"):
        tape.picture([pixels] * 3, patches=(2, 3), special=1)
    with pytest.warns(UserWarning, match="pictures were given for 'c', which matches no layer; there are a, b.0, b.1"):
        tape.picture(pixels, patches=(2, 3), special=1, layers="c")
