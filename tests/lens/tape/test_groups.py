"""Groups of tokens by the marks of each kind of tokenizer."""

import pytest
import torch

from regard.lens import Groups, lines, patches, sentences, spans, words


@pytest.mark.parametrize(
    ("tokens", "labels"),
    [
        (["[CLS]", "un", "##believ", "##able", "!", "[SEP]"], ["[CLS]", "unbelievable", "!", "[SEP]"]),
        (["▁Guten", "▁Mor", "gen", "</s>"], ["Guten", "Morgen", "</s>"]),
        (["The", "Ġcat", "Ġs", "at", "."], ["The", "cat", "sat."]),
        (["plain", "words", "stay"], ["plain", "words", "stay"]),
        (["Ġa", "Ċ", "b", "Ġc"], ["a", "Ċ", "b", "c"]),
        (["<s>", "Hel", "lo", "Ġworld", "</s>"], ["<s>", "Hello", "world", "</s>"]),
        (["<|begin_of_text|>", "A", "Ġ<", "b", ">", "c"], ["<|begin_of_text|>", "A", "<b>c"]),
        (["[CLS]", "▁a", "b", "[1]", "c"], ["[CLS]", "ab", "[1]c"]),
        (["▁a", "<0xE2>", "b"], ["a", "<0xE2>b"]),
        ([], []),
    ],
)
def test_pieces_become_words(tokens, labels):
    found = words(tokens)
    assert list(found.labels) == labels
    assert found.ids.shape == (len(tokens),)


def test_ids_of_words_name_the_word_of_each_piece():
    assert words(["a", "##b", "c", "##d", "##e"]).ids.tolist() == [0, 0, 1, 1, 1]


def test_lines_end_with_their_break():
    assert lines(["one", "two", "Ċ", "three", "\n", "four"]).ids.tolist() == [0, 0, 0, 1, 1, 2]


def test_sentences_end_with_their_mark_and_its_quotes():
    tokens = ["“", "Go", ".", "”", "▁Now", "?", "▁今", "日", "。", "▁Yes"]
    found = sentences(tokens)
    assert found.ids.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2, 3]
    assert found.labels == ("“Go.”", "Now?", "今日。", "Yes")


def test_patches_are_in_reading_order_behind_special_tokens():
    found = patches(2, 3)
    assert found.ids.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert found.labels[:3] == ("special", "0,0", "0,1")
    assert patches(3, 3, special=0, size=2).ids.tolist() == [0, 0, 1, 0, 0, 1, 2, 2, 3]
    assert len(patches(3, 3, special=0, size=2)) == 4


def test_spans_leave_the_rest_to_others():
    found = spans(5, {"b": (3, 5), "a": (0, 2)})
    assert found.ids.tolist() == [1, 1, 2, 0, 0]
    assert found.labels == ("b", "a", "other")
    assert spans(2, {"all": (0, 2)}).labels == ("all",)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: spans(4, {"a": (2, 9)}), r"span 'a' must lie within the 4 tokens, got \(2, 9\)"),
        (lambda: spans(4, {"a": (2, 2)}), "span 'a' must lie within"),
        (lambda: spans(4, {"a": (0, 3), "b": (2, 4)}), r"span 'b' \(2, 4\) overlaps an earlier span"),
        (lambda: patches(0, 3), "rows must be 1 or more"),
        (lambda: Groups(torch.tensor([0, 2]), ("a", "b")), "at least 0 and below the number of labels 2, got 0 to 2"),
        (lambda: Groups(torch.tensor([-1]), ("a",)), "got -1 to -1"),
    ],
)
def test_groups_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_group_is_the_positions_of_its_tokens():
    found = words(["the", "cat", "##s", "saw", "the"])
    assert (found["the"], found["cats"], found[2]) == ((0, 4), (1, 2), (3,))
    with pytest.raises(KeyError, match="there is no group 'dog'; the groups are 'the', 'cats', 'saw'"):
        found["dog"]
    with pytest.raises(IndexError, match="below the number of groups 4, got 4"):
        found[4]
