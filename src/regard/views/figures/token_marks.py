"""Tokens as a reader would write them: the marks of tokenizers about spaces, Ġ, ▁ and ##, taken out.

The viewer has the same rules in `web/src/marks.ts`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

PUNCTUATION = re.compile(r"[.,;:!?)\]}'\u2019\u201d%]")  # a token that no space stands before


class ReadableToken(NamedTuple):
    """The text of a token, and whether a space stands before it."""

    text: str
    gap: bool


def readable(tokens: Sequence[str]) -> list[ReadableToken]:
    """Return tokens without the marks of WordPiece, SentencePiece and byte-level BPE; bare tokens are words.

    >>> [token.text for token in readable(["Ġthe", "Ġcaf", "Ã©", "Ċ"])]
    ['the', 'caf', 'é', '\\n']
    >>> [token.text for token in readable(["at", "##ten", "##tion", "#"])]
    ['at', 'ten', 'tion', '#']
    """
    if _have_mark(tokens, "##"):
        return [_word_piece(token) for token in tokens]
    if _have_mark(tokens, "Ġ"):
        return [_take_out(token, "Ġ", _from_byte_alphabet) for token in tokens]
    if _have_mark(tokens, "▁"):
        return [_take_out(token, "▁", lambda text: "\n" if text == "<0x0A>" else text) for token in tokens]
    if _have_mark(tokens, " "):
        return [_take_out(token, " ", str) for token in tokens]
    are_letters = all(len(token) <= 1 for token in tokens)
    return [ReadableToken(token, not are_letters) for token in tokens]


def _have_mark(tokens: Sequence[str], mark: str) -> bool:
    return any(len(token) > len(mark) and token.startswith(mark) for token in tokens)


def _word_piece(token: str) -> ReadableToken:
    goes_on = len(token) > 2 and token.startswith("##")
    return ReadableToken(token[2:] if goes_on else token, not goes_on and not PUNCTUATION.fullmatch(token))


def _take_out(token: str, mark: str, read: Callable[[str], str]) -> ReadableToken:
    gap = len(token) > 1 and token.startswith(mark)
    return ReadableToken(read(token[1:] if gap else token), gap)


def _from_byte_alphabet(text: str) -> str:
    """Return the UTF-8 text of bytes in the alphabet of byte-level BPE; a part of a character stays as it is."""
    try:
        return bytes(BYTES[char] for char in text).decode()
    except (KeyError, UnicodeDecodeError):
        return text


def _byte_alphabet() -> dict[str, int]:
    """Return the alphabet of Radford et al. 2019: printable bytes stand for themselves, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTES = _byte_alphabet()
