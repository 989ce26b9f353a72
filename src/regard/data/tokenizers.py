"""Tokenizer: text to numbers and back, by words, characters, byte pairs or word pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers as hf
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from ..atomic_files import atomic_path
from .errors import DataError, check_parent_folder
from .text import check_not_a_string, check_text
from .unknown_tokens import check_unknown_token, read, read_all, set_unknown_token

SPECIALS = ("<pad>", "<unk>", "<bos>", "<eos>")
# What others call them, the likeliest first.
KNOWN = {
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|endoftext|>"),
    "unk": ("<unk>", "[UNK]"),
    "bos": ("<bos>", "<s>", "[CLS]", "<|begin_of_text|>", "<|endoftext|>"),
    "eos": ("<eos>", "</s>", "[SEP]", "<|end_of_text|>", "<|endoftext|>"),
}
MAX_FILE_BYTES = 2**28
MAX_VOCABULARY = 2**24  # tokens of a vocabulary: the trainers set room aside for all of them at once
ROLES = "roles"  # where a file tells which tokens they are: in its model, where the library of others passes it over


class TokenSpan(NamedTuple):
    """A token and the characters `text[start:end]` it stands for."""

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
        """Whole words, the `size` most frequent; any other is `unk`.

        `split="punctuation"` sets punctuation apart and marks where a space stood, so `decode` gives back the text,
        with one space for any run of them. `split="space"` is for text that comes tokenized; there the word `<unk>` is
        `unk`, as such corpora mean it, and so with the other specials.
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
        """Single characters, white space included; those never seen are `unk`."""
        inner = hf.Tokenizer(models.WordLevel(unk_token="<unk>"))
        inner.pre_tokenizer = pre_tokenizers.Split(hf.Regex(r"[\s\S]"), "isolated")
        inner.decoder = decoders.Fuse()
        return cls._train(inner, trainers.WordLevelTrainer, texts, size, specials)

    @classmethod
    def bpe(cls, texts: Iterable[str], *, size: int = 8000, specials: Sequence[str] = ()) -> Tokenizer:
        """Byte pairs (Sennrich et al. 2016, over bytes): any text at all, and `decode` gives it back exactly."""
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
        """Word pieces as in BERT (Schuster & Nakajima 2012); `lower` also takes off accents.

        `decode` sets words and punctuation by rule, so it may differ from the text in spaces.
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
        """A `tokenizer.json`, ours or anyone's; name the special tokens where they are called something unusual."""
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
        """The tokenizer that `to_json` wrote."""
        try:
            inner = hf.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise DataError(f"is not a tokenizer ({error})", hint="expected the JSON of a tokenizer") from error
        given = {"pad": pad, "unk": unk, "bos": bos, "eos": eos}
        return cls(inner, **_stored_roles(text) | {role: name for role, name in given.items() if name is not None})

    def to_json(self) -> str:
        """The whole tokenizer as text, as in `tokenizer.json`; it tells the special tokens that no name would."""
        text = self._inner.to_str()
        roles = self._roles().items()
        chosen = {role: id for role, id in roles if id is not None and id != self._find_id(role, None)}
        if not chosen:
            return text
        tree = json.loads(text)
        tree["model"][ROLES] = {role: self._inner.id_to_token(id) for role, id in chosen.items()}
        return json.dumps(tree, indent=2, ensure_ascii=False)

    def save(self, path: str | Path) -> None:
        """Write `tokenizer.json`, whole or not at all."""
        path = Path(path)
        check_parent_folder(path)
        with atomic_path(path) as temporary:
            temporary.write_text(self.to_json(), encoding="utf-8")

    @property
    def unwritten(self) -> tuple[int, ...]:
        """The tokens that no text holds: `pad` and `bos`, unless texts end with one of them."""
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
        """The ids of a text, between `bos` and `eos` where asked."""
        ids = self._read(text).ids
        return [self.bos] * bos + ids + [self.eos] * eos

    def encode_all(self, texts: Sequence[str], *, bos: bool = False, eos: bool = False) -> list[list[int]]:
        """The ids of many texts at once, on all cores."""
        check_not_a_string(texts)
        for text in (texts := list(texts)):
            check_text(text)
        return [[self.bos] * bos + one.ids + [self.eos] * eos for one in read_all(self._inner, texts)]

    def spans(self, text: str) -> list[TokenSpan]:
        """The ids of a text, each with the characters it stands for."""
        found = self._read(text)
        return [TokenSpan(id, *ends) for id, ends in zip(found.ids, found.offsets, strict=True)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; `pad`, `bos` and `eos` say nothing; `unk` shows, among words as a word of its own.

        >>> tokenizer = Tokenizer.words(["ein Haus"])
        >>> tokenizer.decode(tokenizer.encode("ein altes Haus"))
        'ein <unk> Haus'
        """
        silent = {self.pad, self.bos, self.eos}
        named = (self._token_name(id) for id in ids if int(id) not in silent)
        return self.join([token for token in named if token is not None])

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """What each id is called: `['ein', 'ĠgrÃ¼n', '<eos>']`, bytes as byte-level BPE spells them."""
        found = [self._token_name(id) for id in ids]
        return ["<none>" if token is None else token for token in found]

    def labels(self, ids: Iterable[int]) -> list[str]:
        """What each id reads as, for showing: `['ein', ' grün', '<eos>']`."""
        return readable_pieces(self.tokens(ids), self._inner.decoder)

    def pieces(self, text: str) -> list[str]:
        """What each token of a text is called, as `tokens` has it, but one that is `unk` by the text it stands for.

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
        """The text of tokens by what they are called: of `pieces`, what `decode` gives, with nothing unknown."""
        decoder, unknown = self._inner.decoder, self._unknown_word()
        if decoder is None:
            return " ".join(pieces)
        return decoder.decode([f"▁{piece}" if piece == unknown else piece for piece in pieces])

    def id(self, token: str) -> int | None:
        """The id of a token by its exact name, such as `"<mask>"`."""
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
            raise ValueError(f"size must be more than {len(everything)}, the tokens it begins with, got {size}")
        check_not_a_string(texts)
        trainer = trainer(vocab_size=size, special_tokens=everything, show_progress=False, **options)
        inner.train_from_iterator(_check_texts(texts), trainer)
        return cls(_renumber(inner, everything) if isinstance(inner.model, models.WordLevel) else inner)

    def _required_id(self, role: str, name: str | None) -> int:
        id = self._find_id(role, name)
        if id is None:
            problem = f"the tokenizer has no {role} token by any name known here"
            raise DataError(problem, hint=f"name it: Tokenizer.load(path, {role}='...')")
        return id

    def _find_id(self, role: str, name: str | None) -> int | None:
        if name is not None:
            id = self._inner.token_to_id(name)
            if id is None:
                raise DataError(f"the tokenizer has no token {name!r} for {role}", hint="name one that it has")
            return id
        ids = (self._inner.token_to_id(known) for known in KNOWN[role])
        return next((id for id in ids if id is not None), None)

    def _read(self, text: str) -> hf.Encoding:
        check_text(text)
        return read(self._inner, text)

    def _token_name(self, id: int) -> str | None:
        return self._inner.id_to_token(int(id)) if id >= 0 else None  # as of -100, what a loss passes over

    def _unknown_word(self) -> str | None:
        """What an unknown word is called where words carry the mark of the space before them, which it has lost."""
        marked = isinstance(self._inner.model, models.WordLevel) and isinstance(self._inner.decoder, decoders.Metaspace)
        return self._inner.id_to_token(self.unk) if marked and self.unk is not None else None

    def _roles(self) -> dict[str, int | None]:
        return {role: getattr(self, role) for role in KNOWN}


def _check_size(size: object) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size > MAX_VOCABULARY:
        raise ValueError(f"size must be a whole number, at most {MAX_VOCABULARY:,}, got {size!r}")


def _stored_roles(text: str) -> dict[str, str]:
    """The special tokens that the JSON of a tokenizer tells of."""
    told = json.loads(text)["model"].get(ROLES, {}) if f'"{ROLES}"' in text else {}
    if not isinstance(told, dict) or not all(role in KNOWN and isinstance(name, str) for role, name in told.items()):
        raise DataError(f"tells special tokens by {told!r}", hint=f"expected names for some of {', '.join(KNOWN)}")
    return told


def _check_texts(texts: Iterable[str]) -> Iterator[str]:
    """The texts as they are; an error at the end if they say nothing."""
    empty = True
    for text in texts:
        check_text(text)
        empty = empty and not text.strip()
        yield text
    if empty:
        raise DataError("there is no text to learn a vocabulary from", hint="pass texts that are not all empty")


def _letters_inside(inner: hf.Tokenizer, texts: Iterable[str]) -> list[str]:
    """Every letter that stands in a word other than first."""
    found: set[str] = set()
    for text in texts:
        check_text(text)
        for word, _ in inner.pre_tokenizer.pre_tokenize_str(inner.normalizer.normalize_str(text)):
            found.update(word[1:])
    return sorted(found)


def _plain(inner: hf.Tokenizer) -> hf.Tokenizer:
    """Without padding and truncation of its own, and with the names of special tokens in a text taken as text."""
    inner.no_padding()
    inner.no_truncation()
    inner.encode_special_tokens = True
    return inner


def _renumber(trained: hf.Tokenizer, specials: Sequence[str]) -> hf.Tokenizer:
    """The same words, specials first and no id left out: one that a text spells out is counted twice in training."""
    words = sorted(trained.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
    named = [*specials, *(word for word, _ in words if word not in specials)]
    inner = hf.Tokenizer(models.WordLevel({word: id for id, word in enumerate(named)}, unk_token="<unk>"))
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if getattr(trained, part) is not None:
            setattr(inner, part, getattr(trained, part))
    inner.add_special_tokens(list(specials))
    return inner


def readable_pieces(pieces: Sequence[str], decoder: object) -> list[str]:
    """Pieces as people read them: byte-level BPE spells bytes, and 'ĠschÃ¶n' is ' schön'; half a character stays.

    >>> spelled(["ĠschÃ¶n", "Ã"], decoders.ByteLevel())
    [' schön', 'Ã']
    """
    if "ByteLevel" not in repr(decoder):
        return list(pieces)
    texts = [decoders.ByteLevel().decode([piece]) for piece in pieces]
    return [piece if "\ufffd" in text else text for piece, text in zip(pieces, texts, strict=True)]
