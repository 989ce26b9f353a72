"""Unknown words and characters: check and set the token that a tokenizer uses for them."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers as hf
from tokenizers import models, pre_tokenizers

from .errors import DataError


def check_unknown_token(inner: hf.Tokenizer) -> None:
    """Raise if a model of words or word pieces has no token for unknown words."""
    model = inner.model
    if isinstance(model, models.WordLevel | models.WordPiece) and model.token_to_id(model.unk_token) is None:
        raise DataError(
            f"the vocabulary lacks {model.unk_token!r}, its token for unknown words",
            hint="add it, or name another as unk_token of the model",
        )


def set_unknown_token(inner: hf.Tokenizer, unk: int | None) -> None:
    """Let BPE without an unknown token use `unk`, or without `unk` raise at unknown characters: it would drop them."""
    model = inner.model
    if isinstance(model, models.BPE) and model.unk_token is None and not _knows_all_bytes(inner):
        model.unk_token = "<unk>" if unk is None else inner.id_to_token(unk)


def _knows_all_bytes(inner: hf.Tokenizer) -> bool:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return "ByteLevel" in repr(inner.pre_tokenizer) and all(inner.token_to_id(byte) is not None for byte in alphabet)


def read(inner: hf.Tokenizer, text: str) -> hf.Encoding:
    """Encode a text; raises with the text if it cannot be encoded.

    BPE whose `unk_token` is not in the vocabulary, and a Unigram without `unk_id`, raise only for unknown characters.
    """
    try:
        return inner.encode(text, add_special_tokens=False)
    except Exception as error:  # the library raises nothing narrower
        raise DataError(
            f"the tokenizer cannot read {text[:80]!r} ({error})",
            hint="give its model a token for unknown text: unk_token, or the unk_id of a Unigram",
        ) from error


def read_all(inner: hf.Tokenizer, texts: Sequence[str]) -> list[hf.Encoding]:
    """Encode many texts, on all cores; raises for the first that cannot be encoded."""
    try:
        return inner.encode_batch_fast(texts, add_special_tokens=False)
    except Exception:
        return [read(inner, text) for text in texts]
