"""Marks of tokenizers are taken out of tokens, by the rules of the viewer."""

import pytest

from regard.views.figures.token_marks import readable


@pytest.mark.parametrize(
    ("tokens", "texts", "gaps"),
    [
        (["at", "##ten", "##tion", ",", "#", "##"], ["at", "ten", "tion", ",", "#", "##"], [1, 0, 0, 0, 1, 1]),
        (["The", "Ġcaf", "Ã©", "Ċ", "Ġ"], ["The", "caf", "é", "\n", " "], [0, 1, 0, 0, 0]),
        (["ĠÃ", "Â©x"], ["Ã", "©x"], [1, 0]),
        (["▁The", "▁", "cat", "<0x0A>"], ["The", "▁", "cat", "\n"], [1, 0, 0, 0]),
        ([" the", "cat", " "], ["the", "cat", " "], [1, 0, 0]),
        (["a", "b", ""], ["a", "b", ""], [0, 0, 0]),
        (["the", "cat"], ["the", "cat"], [1, 1]),
        ([], [], []),
    ],
)
def test_tokens_read_as_a_reader_would_write_them(tokens, texts, gaps):
    assert [token.text for token in readable(tokens)] == texts
    assert [int(token.gap) for token in readable(tokens)] == gaps
