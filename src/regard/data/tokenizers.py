"""Tokenizer: text to numbers and back, by words, characters, byte pairs or word pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers as hf
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from ..atomic_files import atomic_path, check_parent_folder
from .errors import DataError
from .text import check_not_a_string, check_text
from .unknown_tokens import check_unknown_token, read, read_all, set_unknown_token

SPECIALS = ("<pad>", "<unk>", "<bos>", "<eos>")
# Usual names of the special tokens, the most likely first.
KNOWN = {
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|endoftext|>"),
    "unk": ("<unk>", "[UNK]"),
    "bos": ("<bos>", "<s>", "[CLS]", "<|begin_of_text|>", "<|endoftext|>"),
    "eos": ("<eos>", "</s>", "[SEP]", "<|end_of_text|>", "<|endoftext|>"),
}
MAX_FILE_BYTES = 2**28
MAX_VOCABULARY = 2**24  # the trainers allocate memory for the whole vocabulary
ROLES = "roles"  # key in the "model" section of tokenizer.json for unusual names; other libraries ignore it


class TokenSpan(NamedTuple):
    """A token id and its characters `text[start:end]`."""

    id: int
    start: int
    end: int


class Tokenizer:
    """Text to ids and back; `pad`, `unk`, `bos` and `eos` are the ids of the special tokens.

    >>> tokenizer = Tokenizer.bpe(["ein kleines Haus", "ein kleiner Hund"], size=300)
    >>> ids = tokenizer.encode("Ein Häuschen", eos=True)
    >>> tokenizer.decode(ids), ids[-1] == tokenizer.eos
    ('Ein Häuschen', True)

    Text that spells a special token is encoded as the text it is. Trained ones number the specials `pad`, `unk`,
    `bos`, `eos` from 0, then `specials`, then the rest.
    """

    def __init__(
        self,
        inner: hf.Tokenizer,
        *,
        pad: str | None = None,
        unk: str | None = None,
        bos: str | None = None,
        eos: str | None = None,
    ) -> None:
        self._inner = _plain(inner)
        check_unknown_token(inner)
        self.pad, self.bos, self.eos = (
            self._required_id("pad", pad),
            self._required_id("bos", bos),
            self._required_id("eos", eos),
        )
        self.unk = self._find_id("unk", unk)
        set_unknown_token(inner, self.unk)

    @classmethod
    def words(
        cls, texts: Iterable[str], *, size: int = 30_000, split: str = "punctuation", specials: Sequence[str] = ()
    ) -> Tokenizer:
        """Train on whole words, the `size` most frequent; any other is `unk`.

        `split="punctuation"` separates punctuation and marks spaces, so that `decode` returns the text, with one space
        for any run of white space. `split="space"` is for tokenized text; there the word `<unk>` is encoded as `unk`,
        as such corpora mean it, and likewise the other specials.
        """
        inner = hf.Tokenizer(models.WordLevel(unk_token="<unk>"))
        if split == "punctuation":
            inner.normalizer = normalizers.Sequence([normalizers.Replace(hf.Regex(r"\s+"), " "), normalizers.Strip()])
            inner.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Metaspace(prepend_scheme="always", split=False),
                    pre_tokenizers.Split(hf.Regex(r"▁?(?:[\w\p{M}'’-]+|[^\w\s▁])"), "isolated"),
                ]
            )
            inner.decoder = decoders.Metaspace(prepend_scheme="always")
        elif split == "space":
            inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        else:
            raise ValueError(f"split must be 'punctuation' or 'space', got {split!r}")
        return cls._train(inner, trainers.WordLevelTrainer, texts, size, specials)

    @classmethod
    def characters(cls, texts: Iterable[str], *, size: int = 30_000, specials: Sequence[str] = ()) -> Tokenizer:
        """Train on single characters, white space included; unknown ones are `unk`."""
        inner = hf.Tokenizer(models.WordLevel(unk_token="<unk>"))
        inner.pre_tokenizer = pre_tokenizers.Split(hf.Regex(r"[\s\S]"), "isolated")
        inner.decoder = decoders.Fuse()
        return cls._train(inner, trainers.WordLevelTrainer, texts, size, specials)

    @classmethod
    def bpe(cls, texts: Iterable[str], *, size: int = 8000, specials: Sequence[str] = ()) -> Tokenizer:
        """Train byte-level BPE (Sennrich et al. 2016): encodes any text, and `decode` restores it exactly."""
        inner = hf.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        _check_size(size)
        if size < len(alphabet) + len(SPECIALS) + len(specials):
            least = len(alphabet) + len(SPECIALS) + len(specials)
            raise ValueError(f"size must leave room for the 256 bytes and the specials, at least {least}, got {size}")
        return cls._train(inner, trainers.BpeTrainer, texts, size, specials, initial_alphabet=alphabet)

    @classmethod
    def wordpiece(
        cls, texts: Iterable[str], *, size: int = 8000, lower: bool = False, specials: Sequence[str] = ()
    ) -> Tokenizer:
        """Train word pieces as in BERT (Schuster & Nakajima 2012); `lower` also removes accents.

        `decode` places spaces by rules, so its spaces may differ from the text's.
        """
        inner = hf.Tokenizer(models.WordPiece(unk_token="<unk>"))
        inner.normalizer = normalizers.BertNormalizer(lowercase=lower)
        inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        inner.decoder = decoders.WordPiece(prefix="##")
        texts = list(texts) if iter(texts) is texts else texts
        # The trainer meets the letters inside words in the order of a hash table. Named beforehand, they have
        # the same numbers each time, and training twice gives the same pieces.
        inside = dict.fromkeys(f"##{letter}" for letter in _letters_inside(inner, texts))
        trained = cls._train(inner, trainers.WordPieceTrainer, texts, size, [*specials, *inside])
        tree = json.loads(trained.to_json())
        tree["added_tokens"] = [token for token in tree["added_tokens"] if token["content"] not in inside]
        return cls.from_json(json.dumps(tree))

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        pad: str | None = None,
        unk: str | None = None,
        bos: str | None = None,
        eos: str | None = None,
    ) -> Tokenizer:
        """Load any `tokenizer.json`; pass the special tokens if their names are unusual."""
        path = Path(path)
        if not path.is_file():
            raise DataError("no such file", file=path, hint="expected a tokenizer.json")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise DataError(f"is larger than {MAX_FILE_BYTES:,} bytes", file=path, hint="expected a tokenizer.json")
        try:
            return cls.from_json(path.read_text(encoding="utf-8"), pad=pad, unk=unk, bos=bos, eos=eos)
        except UnicodeDecodeError as error:
            raise DataError("is not valid UTF-8", file=path, hint="expected a tokenizer.json") from error
        except DataError as error:
            raise DataError(str(error), file=path) from error

    @classmethod
    def from_json(
        cls,
        text: str,
        *,
        pad: str | None = None,
        unk: str | None = None,
        bos: str | None = None,
        eos: str | None = None,
    ) -> Tokenizer:
        """Build a tokenizer from the text of a `tokenizer.json`."""
        try:
            inner = hf.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise DataError(f"is not a tokenizer ({error})", hint="expected the JSON of a tokenizer") from error
        given = {"pad": pad, "unk": unk, "bos": bos, "eos": eos}
        return cls(inner, **_stored_roles(text) | {role: name for role, name in given.items() if name is not None})

    def to_json(self) -> str:
        """Return the tokenizer as the text of `tokenizer.json`, with special tokens of unusual names recorded."""
        text = self._inner.to_str()
        roles = self._roles().items()
        chosen = {role: id for role, id in roles if id is not None and id != self._find_id(role, None)}
        if not chosen:
            return text
        tree = json.loads(text)
        tree["model"][ROLES] = {role: self._inner.id_to_token(id) for role, id in chosen.items()}
        return json.dumps(tree, indent=2, ensure_ascii=False)

    def save(self, path: str | Path) -> None:
        """Write `tokenizer.json`, atomically."""
        path = Path(path)
        check_parent_folder(path)
        with atomic_path(path) as temporary:
            temporary.write_text(self.to_json(), encoding="utf-8")

    @property
    def unwritten(self) -> tuple[int, ...]:
        """Tokens that never occur in text: `pad` and `bos`, unless one of them is also `eos`."""
        return tuple(sorted({self.pad, self.bos} - {self.eos}))

    def __len__(self) -> int:
        return self._inner.get_vocab_size()

    def __repr__(self) -> str:
        return f"Tokenizer({type(self._inner.model).__name__}, {len(self):,} tokens)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.to_json() == other.to_json() and self._roles() == other._roles()

    def __hash__(self) -> int:
        return hash(self.to_json())

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Encode a text, with `bos` and `eos` if requested."""
        ids = self._read(text).ids
        return [self.bos] * bos + ids + [self.eos] * eos

    def encode_all(self, texts: Sequence[str], *, bos: bool = False, eos: bool = False) -> list[list[int]]:
        """Encode many texts, on all cores."""
        check_not_a_string(texts)
        for text in (texts := list(texts)):
            check_text(text)
        return [[self.bos] * bos + one.ids + [self.eos] * eos for one in read_all(self._inner, texts)]

    def spans(self, text: str) -> list[TokenSpan]:
        """Encode a text; return each id with its range of characters."""
        found = self._read(text)
        return [TokenSpan(id, *ends) for id, ends in zip(found.ids, found.offsets, strict=True)]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to text; `pad`, `bos` and `eos` are left out; `unk` is shown, among words as a separate word.

        >>> tokenizer = Tokenizer.words(["ein Haus"])
        >>> tokenizer.decode(tokenizer.encode("ein altes Haus"))
        'ein <unk> Haus'
        """
        silent = {self.pad, self.bos, self.eos}
        named = (self._token_name(id) for id in ids if int(id) not in silent)
        return self.join([token for token in named if token is not None])

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return the token of each id: `['ein', 'ĠgrÃ¼n', '<eos>']`, bytes as byte-level BPE spells them."""
        found = [self._token_name(id) for id in ids]
        return ["<none>" if token is None else token for token in found]

    def labels(self, ids: Iterable[int]) -> list[str]:
        """Return readable text for each id: `['ein', ' grün', '<eos>']`."""
        return readable_pieces(self.tokens(ids), self._inner.decoder)

    def pieces(self, text: str) -> list[str]:
        """Return the tokens of a text as in `tokens`, but for `unk` the text itself.

        >>> Tokenizer.words(["ein Haus"]).pieces("ein Hund!")
        ['▁ein', '▁Hund', '!']
        """
        found, inner = self._read(text), self._inner
        if self.unk not in found.ids:
            return found.tokens
        whole = text if inner.normalizer is None else inner.normalizer.normalize_str(text)
        words = [whole] if inner.pre_tokenizer is None else [w for w, _ in inner.pre_tokenizer.pre_tokenize_str(whole)]
        named = zip(found.ids, found.tokens, found.word_ids, strict=True)
        return [words[word or 0] if id == self.unk else token for id, token, word in named]

    def join(self, pieces: Sequence[str]) -> str:
        """Join tokens or `pieces` to text; for pieces, the result of `decode` with unknown words spelled out."""
        decoder, unknown = self._inner.decoder, self._unknown_word()
        if decoder is None:
            return " ".join(pieces)
        return decoder.decode([f"▁{piece}" if piece == unknown else piece for piece in pieces])

    def id(self, token: str) -> int | None:
        """Return the id of a token by its exact name, such as `"<mask>"`, or None."""
        return self._inner.token_to_id(token)

    def __getstate__(self) -> dict[str, Any]:
        return {"json": self.to_json(), **self._roles()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        roles = dict(state)
        self._inner = _plain(hf.Tokenizer.from_str(roles.pop("json")))
        self.__dict__.update(roles)

    @classmethod
    def _train(
        cls, inner: hf.Tokenizer, trainer: Any, texts: Iterable[str], size: int, specials: Sequence[str], **options: Any
    ) -> Tokenizer:
        everything = [*SPECIALS, *specials]
        if len(set(everything)) != len(everything):
            raise ValueError(f"specials must differ from each other and from {', '.join(SPECIALS)}, got {specials}")
        _check_size(size)
        if size <= len(everything):
            raise ValueError(f"size must be more than the {len(everything)} special tokens, got {size}")
        check_not_a_string(texts)
        trainer = trainer(vocab_size=size, special_tokens=everything, show_progress=False, **options)
        inner.train_from_iterator(_check_texts(texts), trainer)
        return cls(_renumber(inner, everything) if isinstance(inner.model, models.WordLevel) else inner)

    def _required_id(self, role: str, name: str | None) -> int:
        id = self._find_id(role, name)
        if id is None:
            problem = f"the tokenizer has no {role} token under a known name"
            raise DataError(problem, hint=f"name it: Tokenizer.load(path, {role}='...')")
        return id

    def _find_id(self, role: str, name: str | None) -> int | None:
        if name is not None:
            id = self._inner.token_to_id(name)
            if id is None:
                raise DataError(f"the tokenizer has no token {name!r} for {role}", hint="name an existing token")
            return id
        ids = (self._inner.token_to_id(known) for known in KNOWN[role])
        return next((id for id in ids if id is not None), None)

    def _read(self, text: str) -> hf.Encoding:
        check_text(text)
        return read(self._inner, text)

    def _token_name(self, id: int) -> str | None:
        return (
            self._inner.id_to_token(int(id)) if id >= 0 else None
        )  # negative ids, such as the ignored -100 of a loss, have no token

    def _unknown_word(self) -> str | None:
        """Return the unknown token if words carry a mark for the space before them, which this token lacks."""
        marked = isinstance(self._inner.model, models.WordLevel) and isinstance(self._inner.decoder, decoders.Metaspace)
        return self._inner.id_to_token(self.unk) if marked and self.unk is not None else None

    def _roles(self) -> dict[str, int | None]:
        return {role: getattr(self, role) for role in KNOWN}


def _check_size(size: object) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size > MAX_VOCABULARY:
        raise ValueError(f"size must be a whole number, at most {MAX_VOCABULARY:,}, got {size!r}")


def _stored_roles(text: str) -> dict[str, str]:
    """Return the special tokens recorded in the JSON of a tokenizer."""
    told = json.loads(text)["model"].get(ROLES, {}) if f'"{ROLES}"' in text else {}
    if not isinstance(told, dict) or not all(role in KNOWN and isinstance(name, str) for role, name in told.items()):
        raise DataError(
            f"the special tokens must be an object of names by role, got {told!r}",
            hint=f"the roles are {', '.join(KNOWN)}",
        )
    return told


def _check_texts(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts; raises at the end if all of them are blank."""
    empty = True
    for text in texts:
        check_text(text)
        empty = empty and not text.strip()
        yield text
    if empty:
        raise DataError(
            "no texts, or only blank ones: there is nothing to learn a vocabulary from", hint="pass texts with words"
        )


def _letters_inside(inner: hf.Tokenizer, texts: Iterable[str]) -> list[str]:
    """Return all letters that occur in words after the first letter."""
    found: set[str] = set()
    for text in texts:
        check_text(text)
        for word, _ in inner.pre_tokenizer.pre_tokenize_str(inner.normalizer.normalize_str(text)):
            found.update(word[1:])
    return sorted(found)


def _plain(inner: hf.Tokenizer) -> hf.Tokenizer:
    """Turn off padding and truncation, and encode the names of special tokens in a text as plain text."""
    inner.no_padding()
    inner.no_truncation()
    inner.encode_special_tokens = True
    return inner


def _renumber(trained: hf.Tokenizer, specials: Sequence[str]) -> hf.Tokenizer:
    """Renumber the words, specials first and without gaps: training counts a special that a text spells out twice."""
    words = sorted(trained.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
    named = [*specials, *(word for word, _ in words if word not in specials)]
    inner = hf.Tokenizer(models.WordLevel({word: id for id, word in enumerate(named)}, unk_token="<unk>"))
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if getattr(trained, part) is not None:
            setattr(inner, part, getattr(trained, part))
    inner.add_special_tokens(list(specials))
    return inner


def readable_pieces(pieces: Sequence[str], decoder: object) -> list[str]:
    """Return readable pieces: byte-level BPE writes ' schön' as 'ĠschÃ¶n'; incomplete characters are kept.

    >>> readable_pieces(["ĠschÃ¶n", "Ã"], decoders.ByteLevel())
    [' schön', 'Ã']
    """
    if "ByteLevel" not in repr(decoder):
        return list(pieces)
    texts = [decoders.ByteLevel().decode([piece]) for piece in pieces]
    return [piece if "\ufffd" in text else text for piece, text in zip(pieces, texts, strict=True)]
