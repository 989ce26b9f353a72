"""Tokens at the rows that they are of: with padding or without, and not in another order."""

import pytest
import torch
from torch import nn

from regard import Padding, weights
from regard.lens import CaptureWarning, Tape, capture, words
from regard.lens.tape.token_fit import count_tokens, fit_tokens

RIGHT = torch.tensor([[True] * 5, [True, True, True, False, False]])
LEFT = RIGHT.flip(1)
ALL = torch.ones(2, 5, dtype=torch.bool)
LONG, SHORT = list("abcde"), list("xyz")


def padded(text, label="[PAD]", side="right", n=5):
    room = [label] * (n - len(text))
    return [*text, *room] if side == "right" else [*room, *text]


class TestFit:
    @pytest.mark.parametrize("label", ["[PAD]", "<pad>", "<|padding|>", "PAD", "</s>", "<|endoftext|>", "", "-", "w"])
    def test_tokens_with_padding_stand_as_they_are(self, label):
        for real, side in ((RIGHT, "right"), (LEFT, "left")):
            texts = [LONG, padded(SHORT, label, side)]
            assert fit_tokens(texts, real) == texts

    def test_tokens_of_the_real_positions_are_padded(self):
        assert fit_tokens([LONG, SHORT], RIGHT) == [LONG, padded(SHORT)]
        assert fit_tokens([LONG, SHORT], LEFT) == [LONG, padded(SHORT, side="left")]

    def test_the_last_token_that_a_model_generated_is_cut(self):
        assert fit_tokens([[*LONG, "."]], ALL) == [LONG, LONG]
        assert fit_tokens([[*LONG, "."], [*padded(SHORT, side="left"), "."]], LEFT) == [
            LONG,
            padded(SHORT, side="left"),
        ]

    def test_tokens_of_another_length_do_not_fit(self):
        assert fit_tokens([LONG, ["x", "y"]], RIGHT) == [LONG, None]
        assert fit_tokens([["x"] * 9], ALL) == [None, None]
        assert fit_tokens([LONG, LONG, LONG], ALL) == [LONG, LONG]
        assert fit_tokens([LONG, LONG], torch.cat((ALL, ALL))) == [LONG, LONG, None, None]

    def test_words_at_padding_do_not_fit(self):
        assert fit_tokens([LONG, list("vwxyz")], RIGHT) == [None, None]  # the second may be that of the first row
        assert fit_tokens([LONG], RIGHT) == [LONG, None]
        assert fit_tokens([LONG, [*SHORT, "</s>", "[PAD]"]], RIGHT) == [LONG, None]

    @pytest.mark.parametrize("label", ["[PAD]", "<pad>", "</s>", "-", "w"])
    def test_texts_in_another_order_label_no_row(self, label):
        for side, real in (("right", RIGHT), ("left", LEFT)):
            assert fit_tokens([padded(SHORT, label, side), LONG], real) == [None, None]
        assert fit_tokens([SHORT, LONG], RIGHT) == [None, None]

    def test_a_text_that_is_merely_wrong_leaves_the_others(self):
        assert fit_tokens([LONG, ["x"]], RIGHT) == [LONG, None]

    def test_one_token_of_padding_is_known_by_its_name(self):
        real = torch.tensor([[True] * 3, [True, True, False]])
        swapped = [["x", "y", "[PAD]"], ["a", "b", "c"]]
        assert fit_tokens(swapped, real) == [None, None]
        assert fit_tokens(swapped[::-1], real) == swapped[::-1]

    def test_padding_that_no_mask_shows_is_a_token(self):
        texts = [LONG, padded(SHORT)]
        assert fit_tokens(texts, ALL) == texts

    def test_tokens_are_counted_without_padding(self):
        assert count_tokens(padded(SHORT), 5) == 3
        assert count_tokens(padded(SHORT, side="left"), 5) == 3
        assert count_tokens(padded(SHORT, "w"), 5, {"w"}) == 3
        assert count_tokens(["[PAD]"] * 2, 5) == 0


class Encoder(nn.Module):
    """Attention over tokens, with an `encode` that sorts texts by length, as that of sentence-transformers does."""

    def __init__(self):
        super().__init__()
        self.embed, self.attn = nn.Embedding(30, 8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, ids, mask):
        x = self.embed(ids)
        return self.attn(x, x, x, key_padding_mask=~mask, need_weights=False)[0]

    @torch.no_grad()
    def encode(self, texts):
        order = sorted(range(len(texts)), key=lambda n: -len(texts[n]))
        texts = [texts[n] for n in order]
        n = len(texts[0])
        mask = torch.arange(n) < torch.tensor([[len(text)] for text in texts])
        ids = torch.tensor([[ord(c) - 97 for c in text] + [0] * (n - len(text)) for text in texts])
        out = (self(ids, mask) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return out[torch.tensor(order).argsort()]


@pytest.mark.parametrize("given", [["abc", "abcdefg", "abcde"], ["abcde", "abcd", "abcdefg"]])
@pytest.mark.parametrize("with_padding", [False, True])
def test_a_caller_that_sorts_texts_labels_no_row_of_another_text(given, with_padding):
    model = Encoder().eval()
    tokens = [padded(list(text), n=7) if with_padding else list(text) for text in given]
    wrong = r"the tokens of batch rows 0, .* do not fit 'attn': .* in the order of the batch \(some callers sort texts"
    with pytest.warns(CaptureWarning, match=wrong), capture(model, tokens) as tape:
        model.encode(given)
    assert [tape.tokens_of(0, batch=row) for row in range(3)] == [(None, None)] * 3
    tape.tokens = sorted(tokens, key=lambda text: -len([x for x in text if x != "[PAD]"]))
    for row, text in enumerate(sorted(given, key=len, reverse=True)):
        assert tape.tokens_of(0, batch=row)[0] == padded(list(text), n=7)


def test_a_caller_that_keeps_their_order_is_labelled(recwarn):
    model, given = Encoder().eval(), ["abcdefg", "abcde", "abc"]
    with capture(model, [list(text) for text in given]) as tape:
        model.encode(given)
    assert tape.tokens_of(0, batch=2) == (padded(list("abc"), n=7),) * 2
    assert not [warning for warning in recwarn if issubclass(warning.category, CaptureWarning)]


def padded_tape():
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 2, 5, 4, dtype=torch.float64)
    return Tape({("x", 0): weights(q, k, mask=Padding(RIGHT))})


def test_a_warning_names_the_rows_and_their_lengths():
    tape = padded_tape()
    with pytest.warns(
        CaptureWarning, match="batch row 1 do not fit 'x': 5 tokens were given for 3 real ones. They are"
    ):
        tape.tokens = LONG
    assert tape.tokens_of(0) == (LONG, LONG)
    assert tape.tokens_of(0, batch=1) == (None, None)


class TestGroupsByRow:
    TEXTS = ["a", "##b", "c", "d", "##e"], ["x", "##y", "z"]

    def mass(self, groups, **more):
        tape = padded_tape()
        tape.group("words", groups, **more)
        return tape, tape.mass("x", "words")

    def test_each_row_has_its_own(self):
        own = [words(text) for text in self.TEXTS]
        tape, mass = self.mass(own)
        assert mass.shape == (2, 2, 3, 3)
        for row, (groups, real) in enumerate(zip(own, RIGHT, strict=True)):
            one_hot = nn.functional.one_hot(groups.ids, len(groups)).double()
            A, g = tape["x"].dense()[row][:, real][:, :, real], len(groups)
            truth = (one_hot.T @ A @ one_hot) / one_hot.sum(0)[:, None]
            assert (mass[row, :, :g, :g] - truth).abs().max() < 1e-12
        assert mass[1, :, 2:].abs().sum() == 0
        assert tape.groups_of("x", "words", batch=1)[0].labels == ("xy", "z", "[PAD]")
        assert tape.groups_of("x", "words")[0].labels == ("ab", "c", "de")

    def test_groups_with_padding_and_numbers_are_the_same(self):
        _, truth = self.mass([words(text) for text in self.TEXTS])
        _, found = self.mass(torch.tensor([[0, 0, 1, 2, 2], [0, 0, 1, 1, 1]]))
        assert torch.equal(found, truth)  # padding in a group of words does not count in its mean

    def test_one_grouping_of_different_texts_is_warned_of(self):
        tape = padded_tape()
        told = r"one grouping 'words' was given for 2 different texts in 'x'; pass one for each batch row"
        with pytest.warns(CaptureWarning, match=told):
            tape.group("words", words(self.TEXTS[0]))
        with pytest.warns(CaptureWarning, match=told):
            tape.mass("x", "words")

    def test_texts_differ_if_their_tokens_do(self, recwarn):
        q, k = torch.randn(2, 2, 2, 5, 4)
        tape = Tape({("x", 0): weights(q, k)})
        tape.group("words", words(self.TEXTS[0]))
        tape.tokens = [self.TEXTS[0]] * 2
        tape.mass("x", "words")
        assert not len(recwarn)
        tape.tokens = [LONG, self.TEXTS[0]]
        with pytest.warns(CaptureWarning, match="one grouping 'words'"):
            tape.mass("x", "words")

    def test_another_number_of_texts_or_tokens_raises(self):
        with pytest.raises(ValueError, match="groups 'words' were given for 3 texts, but 'x' has 2 batch rows"):
            self.mass([words(LONG)] * 3)
        with pytest.raises(
            ValueError, match="'words' of batch row 1 have 2 tokens, but 'x' has 5 queries, 3 of them real"
        ):
            self.mass([words(LONG), words(["a", "b"])])
        with pytest.raises(ValueError, match="must have 2 dims, got shape"):
            self.mass(torch.zeros(5, dtype=torch.long))
        with pytest.raises(TypeError, match=r"got list; write tape.group\('words', words\(tokens\)\)"):
            self.mass(list(self.TEXTS))

    def test_files_keep_them(self, tmp_path):
        tape, mass = self.mass([words(text) for text in self.TEXTS])
        tape.save(tmp_path / "tape.safetensors")
        again = Tape.load(tmp_path / "tape.safetensors")
        assert torch.equal(again.mass("x", "words"), mass)
        assert again.groups_of("x", "words", batch=1)[0].labels == ("xy", "z", "[PAD]")
